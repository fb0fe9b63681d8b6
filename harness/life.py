"""One streamed optimizer's life on storage that fails, and the judgement of all that happens in it.

Every operation of a `Life` is one that a user makes: construct, step, change hyperparameters, reload, save,
load, sleep, wake up, close, and the ends that no program chooses: SIGKILL, and a power cut. Beside the
streamed optimizer lives a plain AdamW in memory. After each operation one of these holds, or the `Verdict`
says what does not:

- it succeeded, and parameters, main params, moments and step counts are the plain AdamW's to the last bit;
- it raised a typed error, and a fault was injected that explains it. The optimizer then refuses to go on
  until it is restored, and is what the checkpoint says once it is. Asleep it refuses all that needs the
  parameters, and is what it was once it is awake.

What was injected is counted as detected (an error followed) or tolerated (the right bits followed).
"""

from __future__ import annotations

import copy
import functools
import gc
import os
import random
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from optstream.backends.errors import ClaimedError, OptstreamError
from optstream.backends.fake_system import FakeSystem
from optstream.backends.interface import Backend
from optstream.backends.nvme import NvmeBackend
from optstream.backends.reader import DirectoryReader
from optstream.backends.system import System
from optstream.core.config import StreamConfig
from optstream.core.device_memory import ReleasedStorages
from optstream.core.errors import AsleepError, PoisonedError
from optstream.core.optimizer import StreamingAdamW
from optstream.core.parking import DiskParking
from optstream.core.publish import CheckpointDirectory
from optstream.core.sleeper import Sleeper
from optstream.harness.fault_plan import FaultPlan, Injected, Injector, Kind, Layer, Operation
from optstream.harness.faults import FaultyBackend, SimulatedCrash
from optstream.harness.faulty_system import FaultySystem
from optstream.harness.reference import ReferenceAdamW, same_bits
from optstream.harness.verdict import Verdict

SCRATCH, CHECKPOINT = "scratch", "checkpoint"
# As short as isolation allows: fake filesystems take their time over every component of a path.
SUBDIRECTORY, TRAINER = "optstream/life", "optstream/trainer"
PARKING_BYTES = 1 << 16
SIZES = (100, 60)
DTYPES = (torch.float32, torch.bfloat16)
SILENT = frozenset({Kind.LOST, Kind.TORN, Kind.MISDIRECTED, Kind.BIT_FLIP})
# A load that meets a fault is tried again: the plan's next one may strike it too.
LOADS_MAX = 5


@dataclass(frozen=True)
class Storage:
    """Where lives are lived: `base`, on the real system or on a fake one."""

    base: str
    system: System

    @property
    def fake(self) -> FakeSystem | None:
        return self.system if isinstance(self.system, FakeSystem) else None

    def files(self, below: str) -> list[str]:
        """Paths of the files below a directory of `base`."""
        root = os.path.join(self.base, below)
        if self.fake is not None:
            return [path for path in self.fake.files() if path.startswith(root + os.sep)]
        return sorted(os.path.join(path, name) for path, _, names in os.walk(root) for name in names)

    def descriptors(self) -> int:
        return self.fake.open_descriptors() if self.fake is not None else len(os.listdir("/dev/fd"))


class Life:
    """A life on `storage` with the faults of `plan`. Operations may come in any order; each does nothing
    where it makes no sense, and says whether it succeeded.

    streaming: fields of the StreamConfig.
    """

    def __init__(
        self,
        storage: Storage,
        plan: FaultPlan,
        layer: Layer = Layer.AROUND,
        *,
        staged: bool = False,
        **streaming: Any,
    ) -> None:
        self.storage, self.layer = storage, layer
        self.injector = Injector(plan)
        self.verdict = Verdict()
        self.optimizer: StreamingAdamW | None = None
        self.reference: ReferenceAdamW | None = None
        self._sleeper: Sleeper | None = None
        self._staged = staged
        self._config = StreamConfig(True, (storage.base,), **{"bucket_numel": 128, "depth": 2, **streaming})
        self._params: list[torch.nn.Parameter] = []
        # What a load may find: several where a save failed, None where there may be no checkpoint.
        self._saved: list[ReferenceAdamW | None] = [None]
        self._refuses = False  # An operation failed half-way: all but a load must be refused now.
        self._failed = False
        self._settled = 0
        self._suspect: list[Injected] = []  # Faults that struck the checkpoint, where only a load finds them.
        self._threads = _threads()
        self._descriptors = storage.descriptors()
        self._random = random.Random(plan.seed)
        self._system = FaultySystem(storage.system, self.injector) if layer is Layer.BELOW else storage.system

    @property
    def failed(self) -> bool:
        """Whether the last operation failed: the state is not sure to be usable before a load."""
        return self._failed

    @property
    def asleep(self) -> bool:
        return self._sleeper is not None and self._sleeper.is_asleep

    # ---- what users do -----------------------------------------------------------------------------------

    def construct(self) -> bool:
        """A new optimizer over fresh parameters; loads nothing."""
        if self.optimizer is not None:
            return False
        self._params = [
            torch.nn.Parameter(torch.randn(size, generator=self._generator()).to(dtype))
            for size, dtype in zip(SIZES, DTYPES, strict=True)
        ]
        self.reference = ReferenceAdamW(self._params, lr=1e-2)

        def construct() -> None:
            backend = self._open(SCRATCH, SUBDIRECTORY)
            self.optimizer = StreamingAdamW(
                self._params, self._config, lr=1e-2, backend=backend, staged=self._staged
            )

        self._refuses = self._failed = False
        left_before = self.storage.files(SCRATCH)
        if not self._attempt("construct", construct):
            self._check_nothing_left("a failed construction", left_before)
            return False
        return True

    def step(self) -> bool:
        if self.optimizer is None:
            return False
        if self.asleep:
            return self._must_refuse("step", self.optimizer.step, AsleepError)
        gradients = [torch.randn(p.shape, generator=self._generator()).to(p.dtype) for p in self._params]
        for param, gradient in zip(self._params, gradients, strict=True):
            param.grad = gradient
        if not self._change("step", self.optimizer.step):
            return False
        self.reference.step(gradients)
        return self._check_params("step")

    def reload(self) -> bool:
        """New weights arrive from outside; main params start again from them."""
        if self.optimizer is None:
            return False
        if self.asleep:
            return self._must_refuse("reload", self.optimizer.reload_model_params, AsleepError)
        with torch.no_grad():
            for param in self._params:
                param.copy_(torch.randn(param.shape, generator=self._generator()))
        if not self._change("reload", self.optimizer.reload_model_params):
            return False
        self.reference.reload(self._params)
        return True

    def set_hyperparameters(self, lr: float, weight_decay: float) -> bool:
        if self.optimizer is None:
            return False
        values = {"lr": lr, "weight_decay": weight_decay}
        for group in self.optimizer.param_groups:
            group.update(values)
        self.reference.set_hyperparameters(**values)
        return True

    def save(self, *, background: bool = False) -> bool:
        if self.optimizer is None:
            return False

        def save() -> None:
            self.optimizer.save_to(self._checkpoint, background=background)
            if background:
                self.optimizer.wait_for_save()

        if self.asleep:
            return self._must_refuse("save", save, AsleepError)
        now = copy.deepcopy(self.reference)
        injected = len(self.injector.injected)
        if not self._change("save", save, poisons=False):
            self._saved.append(now)
            return False
        self._saved = [now]
        if len(self.injector.injected) == injected:
            self._check_checkpoint_files()
        return True

    def load(self) -> bool:
        """Restores the checkpoint, trying again where that fails. Without one, starts a new life."""
        if self.optimizer is None:
            return False
        if self.asleep:
            load = functools.partial(self.optimizer.load_from, self._checkpoint)
            return self._must_refuse("load", load, AsleepError)
        mends = self._failed
        if self._saved == [None]:
            return self._restart() if self._failed else False
        found: list[dict] = []
        for attempt in range(LOADS_MAX + 1):
            self.injector.armed = attempt < LOADS_MAX
            if self._attempt("load", lambda: self.optimizer.load_from(self._checkpoint)):
                self.injector.armed = False
                # What was written may be lost, too: then this fails, and a load mends it again.
                if self._attempt("read back", lambda: found.extend(self._read())):
                    break
            if self.optimizer is None:
                break  # Crashed meanwhile.
        self.injector.armed = True
        if self._failed:
            # Nothing struck the last attempt: the checkpoint is not what was saved, or never came to be.
            self._remove_checkpoint()
            return self._restart()
        self._refuses = False
        self.verdict.recovered += mends
        return self._adopt(found)

    def sleep(self) -> bool:
        """Parameters and gradients go to a file of their own, beside the streamed state."""
        if self.optimizer is None or self.asleep:
            return False
        tensors = [*self._params, *(param.grad for param in self._params if param.grad is not None)]

        def sleep() -> None:
            if self._sleeper is None:
                parking = DiskParking(self._open(SCRATCH, TRAINER), chunk_bytes=PARKING_BYTES)
                self._sleeper = Sleeper(parking, memory=ReleasedStorages())
            self._sleeper.sleep(settled)

        def settled() -> list[torch.Tensor]:
            self.optimizer.streamer.leave_device()
            return tensors

        refuses = self._refuses
        if self._change("sleep", sleep, poisons=False):
            return True
        if self.optimizer is not None and not refuses:
            self._check_params("a sleep that failed")
        return False

    def wake_up(self) -> bool:
        """Brings them back. What the disk has lost is gone, and known to be: a new life begins."""
        if self.optimizer is None or not self.asleep:
            return False
        if self._attempt("wake", self._sleeper.wake_up):
            return self._check_params("wake")
        if self.optimizer is None:
            return False  # Crashed meanwhile.
        self.injector.armed = False
        woken = self._attempt("wake again", self._sleeper.wake_up)
        self.injector.armed = True
        if woken:
            return self._check_params("wake")
        if not any(self._struck(each, SCRATCH, TRAINER) for each in self.injector.injected):
            self.verdict.silent.append("a wake failed without a fault")
        return self._restart()

    def read_back(self) -> bool:
        """Compares every value with the model's."""
        if self.optimizer is None or self._failed or self.asleep:
            return False
        found: list[dict] = []
        if not self._change(
            "read back", lambda: found.extend(self.optimizer.full_state().values()), poisons=False
        ):
            return False
        if self._differences(found, self.reference):
            return self._corrupted("read back", self._differences(found, self.reference))
        self._settle(detected=False)
        return True

    def claim_again(self) -> bool:
        """Somebody else wants the same place while the optimizer lives."""
        if self.optimizer is None:
            return False
        self.verdict.operations += 1
        try:
            self._open_bare(SCRATCH, SUBDIRECTORY).close()
        except ClaimedError as error:
            if f"pid {os.getpid()}" not in error.owner:
                self.verdict.silent.append(f"a refused claimant was told of {error.owner!r}")
            return True
        self.verdict.silent.append("a second claimant got the files of a live optimizer")
        return False

    def close(self) -> bool:
        if self.optimizer is None:
            return False
        engine = weakref.ref(self.optimizer.streamer.engine)
        closed = self._attempt("close", self._close_all)
        self.optimizer = self._sleeper = None
        self._check_nothing_left("close")
        if engine() is not None:
            gc.collect()  # Tracebacks make cycles.
        if engine() is not None:
            self.verdict.leaks.append("the engine, and its memory, outlive the optimizer")
        return closed

    # ---- ends that nobody chooses ------------------------------------------------------------------------

    def kill(self) -> bool:
        """SIGKILL, on fake storage: files and the claim's record stay, locks go. What is left goes with the
        next start."""
        return self._die(lambda fake: fake.kill_processes())

    def cut_power(self) -> bool:
        """A power cut between two operations, on fake storage: what was not synced is torn."""
        return self._die(lambda fake: fake.crash(self._random))

    def finish(self) -> Verdict:
        """Mends and verifies all, without further faults, and closes."""
        self.injector.armed = False
        if self.optimizer is None and self._saved != [None]:
            self.construct()
        self.wake_up()
        self.injector.armed = False
        if self._failed:
            self.load()
            self.injector.armed = False
        self.read_back()
        if self._saved != [None]:
            self.load()
            self.injector.armed = False
            self.read_back()
        self.close()
        self._settle(detected=False)
        self.verdict.tolerated += len(self._suspect)
        self._suspect = []
        self.verdict.injected = Counter(self.injector.by_kind())
        return self.verdict

    # ---- how an operation ends ---------------------------------------------------------------------------

    def _change(self, what: str, call: Callable[[], object], *, poisons: bool = True) -> bool:
        """Attempt `call`. After a failure that `poisons`, everything must be refused."""
        if self._refuses:
            return self._must_refuse(what, call)
        if self._attempt(what, call):
            return True
        self._refuses = poisons and self.optimizer is not None
        return False

    def _must_refuse(
        self, what: str, call: Callable[[], object], expected: type[OptstreamError] = PoisonedError
    ) -> bool:
        self.verdict.operations += 1
        try:
            call()
        except expected:
            return False
        except OptstreamError as error:
            self.verdict.silent.append(
                f"{what} raised {type(error).__name__} where {expected.__name__} is due: {error}"
            )
            return False
        self.verdict.silent.append(f"{what} was not refused: {expected.__name__} is due")
        return False

    def _attempt(self, what: str, call: Callable[[], object]) -> bool:
        self.verdict.operations += 1
        try:
            call()
        except SimulatedCrash:
            self._settle(detected=True)
            self._bury()
            return False
        except OptstreamError as error:
            self._explain(what, error)
            self._failed = True
            return False
        self._failed = False
        return True

    def _explain(self, what: str, error: OptstreamError) -> None:
        known = self.injector.injected[self._settled :]
        harmful = any(fault.fault.kind not in self.layer.harmless for fault in known)
        suspect = (what in ("load", "save") and self._suspect) or (what == "load" and None in self._saved)
        # What an earlier error told of may show again until the state is restored.
        if not harmful and not suspect and not self._failed:
            self.verdict.silent.append(f"{what} raised what no fault explains: {error}")
        if "\n" in str(error):
            self.verdict.silent.append(f"{what} raised more than one line: {error}")
        self._settle(detected=True)
        if what == "load" and self._suspect:
            self.verdict.detected += len(self._suspect)
            self._suspect = []

    def _settle(self, *, detected: bool) -> None:
        """What was injected up to now led to an error, or to the right bits."""
        known = self.injector.injected[self._settled :]
        self._settled += len(known)
        for each in known:
            if self._struck(each, CHECKPOINT):
                self._suspect.append(each)
            elif detected and each.fault.kind not in self.layer.harmless:
                self.verdict.detected += 1
            else:
                self.verdict.tolerated += 1

    def _bury(self) -> None:
        """The process that had the optimizer is gone; what of it is left in this one goes, too."""
        self._refuses, self._failed = False, True
        if self.optimizer is not None:
            with suppress(OptstreamError, SimulatedCrash):
                self._close_all()
        self.optimizer = self._sleeper = None

    def _close_all(self) -> None:
        try:
            if self._sleeper is not None:
                self._sleeper.close()
        finally:
            self.optimizer.close()

    @staticmethod
    def _struck(injected: Injected, *where: str) -> bool:
        """Whether it may have changed, and told nobody, what is stored below `where`."""
        return injected.fault.kind in SILENT and f"{os.sep}{os.path.join(*where)}{os.sep}" in injected.path

    def _die(self, end: Callable[[FakeSystem], None]) -> bool:
        if self.optimizer is None or self.storage.fake is None:
            return False
        self.verdict.operations += 1
        optimizer, sleeper = self.optimizer, self._sleeper
        self.optimizer = self._sleeper = None
        engine = optimizer.streamer.engine
        optimizer.streamer._finalizer.detach()
        if sleeper is not None:
            sleeper._finalizer.detach()
        with suppress(OptstreamError, SimulatedCrash):
            engine.close()
        self._settle(detected=True)
        end(self.storage.fake)
        self._descriptors = self.storage.descriptors()
        if not self.construct():
            return False
        # No earlier failure excuses this load: what was saved must be back.
        restored = self._saved == [None] or self.load()
        self.verdict.recovered += restored
        return restored

    def _restart(self) -> bool:
        self.close()
        if not self.construct():
            return False
        self.verdict.recovered += 1
        return True

    def _adopt(self, found: list[dict]) -> bool:
        """The optimizer holds `found` and must be one of the possible checkpoints; the model is that now."""
        possible = [saved for saved in self._saved if saved is not None]
        group = self.optimizer.param_groups[0]
        fitting = [
            saved
            for saved in possible
            if saved.has_hyperparameters(group) and not self._differences(found, saved)
        ]
        if not fitting:
            where = self._differences(found, possible[-1]) or ["hyperparameters"]
            return self._corrupted("load", where)
        self._saved = [fitting[-1]]
        self.reference = copy.deepcopy(fitting[-1])
        return self._check_params("load")

    def _read(self) -> list[dict]:
        return list(self.optimizer.full_state().values())

    # ---- checks ------------------------------------------------------------------------------------------

    def _check_params(self, what: str) -> bool:
        expected = self.reference.params()
        wrong = [i for i, param in enumerate(self._params) if not same_bits(param.detach(), expected[i])]
        return self._corrupted(what, [f"param {i}" for i in wrong]) if wrong else True

    @staticmethod
    def _differences(found: list[dict], reference: ReferenceAdamW) -> list[str]:
        return [
            f"{key} of param {index}"
            for index, (one, other) in enumerate(zip(found, reference.state(), strict=True))
            for key in other
            if not same_bits(one[key], other[key])
        ]

    def _corrupted(self, what: str, where: list[str]) -> bool:
        self.verdict.silent.append(f"after {what}, {', '.join(where)} differ from the model's")
        # Go on from a known state, so that one wrong bit is not reported at every later operation.
        self._refuses, self._failed = False, True
        return False

    def _check_nothing_left(self, what: str, left_before: Iterable[str] = ()) -> None:
        armed, self.injector.armed = self.injector.armed, False
        if extra := _threads() - self._threads:
            self.verdict.leaks.append(f"{what} left threads: {sorted(extra)}")
        if (now := self.storage.descriptors()) > self._descriptors:
            self.verdict.leaks.append(f"{what} left {now - self._descriptors} descriptors")
        # A start that fails before it could reclaim what a dead run left has not left that itself.
        left = sorted(set(self.storage.files(SCRATCH)).difference(left_before))
        if left and not self._clean_up_was_struck():
            self.verdict.leaks.append(f"{what} left {left}")
        # Whatever is left, for whatever reason, goes with the next start.
        try:
            self._open_bare(SCRATCH, SUBDIRECTORY).close(remove_files=True)
        except OptstreamError as error:
            self.verdict.leaks.append(f"{what} left a claim: {error}")
        if left := self.storage.files(SCRATCH):
            self.verdict.leaks.append(f"after {what}, the next start left {left}")
        self.injector.armed = armed

    def _clean_up_was_struck(self) -> bool:
        struck = {each.fault.operation for each in self.injector.injected}
        crashed = any(each.fault.kind is Kind.CRASH for each in self.injector.injected)
        return crashed or bool(struck & {Operation.REMOVE, Operation.LIST, Operation.CLOSE, Operation.OPEN})

    def _check_checkpoint_files(self) -> None:
        names = [os.path.basename(path) for path in self.storage.files(CHECKPOINT)]
        if len(names) != 2:
            self.verdict.leaks.append(f"a save left {names}, not one manifest and one data file")

    def _remove_checkpoint(self) -> None:
        """What a person does whose checkpoint is damaged: saving refuses to take its place."""
        for subdirectory in ("optimizer/rank00000", "optimizer"):
            self._open_bare(CHECKPOINT, subdirectory).close(remove_files=True)
        self.verdict.tolerated += len(self._suspect)  # Damage that nobody read.
        self._saved, self._suspect = [None], []

    # ---- storage -----------------------------------------------------------------------------------------

    @property
    def _checkpoint(self) -> CheckpointDirectory:
        return CheckpointDirectory(
            os.path.join(self.storage.base, CHECKPOINT),
            opener=lambda _, *, subdirectory, keep: self._open(CHECKPOINT, subdirectory, keep=keep),
            reader=lambda base, *, subdirectory: DirectoryReader(
                f"{base}/{subdirectory}", system=self._system
            ),
        )

    def _open(self, what: str, subdirectory: str, *, keep: bool = False) -> Backend:
        directory = os.path.join(self.storage.base, what)
        backend = NvmeBackend(directory, subdirectory=subdirectory, keep=keep, system=self._system)
        return FaultyBackend(backend, self.injector) if self.layer is Layer.AROUND else backend

    def _open_bare(self, what: str, subdirectory: str) -> Backend:
        directory = os.path.join(self.storage.base, what)
        return NvmeBackend(directory, subdirectory=subdirectory, system=self.storage.system)

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self._random.getrandbits(32))


def _threads() -> set[int]:
    return {t.ident for t in threading.enumerate() if t.name.startswith("optstream-") and t.is_alive()}
