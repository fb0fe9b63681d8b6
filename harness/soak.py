"""Random lives under random faults, on the fake backend and on real files, until the time is up.

A life follows from its seed alone: what is configured, which faults strike, which operations come in which
order. So a life that shows a bug is lived again by `optstream soak --minutes 0 --seed SEED`.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import random
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

from optstream.backends.errors import StorageWarning
from optstream.backends.fake_system import FakeSystem
from optstream.backends.system import System
from optstream.harness.fault_plan import FaultPlan, Kind, Layer, Operation
from optstream.harness.life import Life, Storage
from optstream.harness.verdict import Verdict

# No life takes a fraction of this, however slow the machine; who waits longer waits for ever.
HANG_S = 300.0
ACTIONS_PER_LIFE = 24
# Transfers are most of what happens in a life; plans reach as far as these come.
TRANSFERS, OTHERS = 200, 24
TRANSFER_OPERATIONS = (Operation.READ, Operation.WRITE)
RARE, DENSE = 6, 250
AROUND_KINDS = tuple(kind for kind in Kind if kind is not Kind.EINTR)
BELOW_KINDS = (Kind.EIO, Kind.ENOSPC, Kind.EINTR, Kind.SHORT, Kind.LATENCY)
# What can happen at every turn without ending everything at the first.
SILENT_KINDS = (Kind.LOST, Kind.TORN, Kind.MISDIRECTED, Kind.STALE, Kind.BIT_FLIP)
EVERYDAY_KINDS = (Kind.EINTR, Kind.SHORT)
ACTIONS: dict[str, int] = {
    "step": 8,
    "save": 2,
    "load": 2,
    "reload": 1,
    "read_back": 2,
    "claim_again": 1,
    "sleep": 1,
    "kill": 1,
    "cut_power": 1,
    "close": 1,
}


@dataclass
class SoakReport:
    """What came of the lives lived, added up. failures: what to read and to repeat, one entry a seed."""

    verdict: Verdict = field(default_factory=Verdict)
    hangs: int = 0
    seeds: list[int] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        return self.verdict.sound and not self.hangs

    def as_json(self) -> dict:
        verdict = self.verdict
        return {
            "operations": verdict.operations,
            "faults_injected": verdict.injected.total(),
            "faults_by_kind": dict(sorted(verdict.injected.items())),
            "detected": verdict.detected,
            "tolerated": verdict.tolerated,
            "recovered": verdict.recovered,
            "silent_corruptions": len(verdict.silent),
            "leaks": len(verdict.leaks),
            "hangs": self.hangs,
            "seeds": self.seeds,
        }


def soak(
    minutes: float,
    seed: int,
    *,
    files: bool = True,
    lives_max: int | None = None,
    progress: Callable[[SoakReport], None] = lambda report: None,
) -> SoakReport:
    """Live the lives of `seed`, `seed + 1`, ... until `minutes` are over: one at least, `lives_max` at most.

    files: every second life on real files, in the system's temporary directory. Stops at a hang, since what
    hangs keeps its threads.
    """
    report = SoakReport()
    deadline_s = time.monotonic() + minutes * 60
    # A collection after each life must not look at all of torch again.
    gc.collect()
    gc.freeze()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", StorageWarning)
            while not report.hangs and (lives_max is None or len(report.seeds) < lives_max):
                live_and_judge(seed + len(report.seeds), report, files=files)
                progress(report)
                if time.monotonic() >= deadline_s:
                    break
    finally:
        gc.unfreeze()
    return report


def live_and_judge(seed: int, report: SoakReport, *, files: bool) -> None:
    """One life, on a thread of its own, so that it can be found to hang."""
    report.seeds.append(seed)
    outcome: list[Verdict] = []
    with tempfile.TemporaryDirectory(prefix="optstream-soak-") as folder:
        life, rng = random_life(seed, folder if files else None)
        thread = threading.Thread(
            target=lambda: outcome.append(live(life, rng)), name=f"life-{seed}", daemon=True
        )
        thread.start()
        thread.join(HANG_S)
        if not outcome:
            report.hangs += 1
            report.failures.append(f"seed {seed}: hangs; {life.injector.plan}")
            faulthandler.dump_traceback(all_threads=True, file=sys.stderr)
            return
    verdict = outcome[0]
    report.verdict.add(verdict)
    if not verdict.sound:
        found = "; ".join(verdict.silent + verdict.leaks) or "faults were not accounted for"
        report.failures.append(f"seed {seed}: {found}; {life.layer} the backend, {life.injector.plan}")


def random_life(seed: int, folder: str | None) -> tuple[Life, random.Random]:
    """The life of a seed, not lived yet, and the generator that its operations are drawn from."""
    rng = random.Random(seed)
    layer = rng.choice(list(Layer))
    on_files = rng.random() < 0.5 and folder is not None
    storage = Storage(folder, System()) if on_files else Storage("/disk", FakeSystem())
    life = Life(
        storage,
        random_plan(rng, layer),
        layer,
        staged=rng.random() < 0.5,
        bucket_numel=rng.choice([64, 128, 1024]),
        depth=rng.randint(1, 3),
        host_cache_bytes=rng.choice([0, 1 << 16]),
        keep_slots=rng.random() < 0.3,
        write_behind=rng.random() < 0.7,
    )
    return life, rng


def random_plan(rng: random.Random, layer: Layer) -> FaultPlan:
    """Some lives meet a few faults, some meet one at every turn."""
    kinds = AROUND_KINDS if layer is Layer.AROUND else BELOW_KINDS
    dense = rng.random() < 0.6
    if dense:
        kinds = SILENT_KINDS if layer is Layer.AROUND else EVERYDAY_KINDS
    seeds = rng.getrandbits(32), rng.getrandbits(32)
    transfers = FaultPlan.random(
        seeds[0],
        faults=DENSE if dense else rng.randint(0, RARE),
        nth_max=TRANSFERS,
        kinds=kinds,
        operations=TRANSFER_OPERATIONS,
    )
    others = FaultPlan.random(
        seeds[1],
        faults=rng.randint(0, RARE),
        nth_max=OTHERS,
        kinds=(Kind.EIO, Kind.ENOSPC),
        operations=[operation for operation in Operation if operation not in TRANSFER_OPERATIONS],
    )
    return FaultPlan(transfers.faults + others.faults, rng.getrandbits(32))


def live(life: Life, rng: random.Random) -> Verdict:
    """All of a life."""

    def actions() -> None:
        for _ in range(ACTIONS_PER_LIFE):
            act(life, rng)

    return judge(life, actions)


def judge(life: Life, actions: Callable[[], None]) -> Verdict:
    """The verdict after `actions`. What is raised past a life's own judgement is no typed error: a bug."""
    try:
        actions()
        return life.finish()
    except Exception as error:
        verdict = life.verdict
        verdict.injected.update(life.injector.by_kind())
        where = traceback.extract_tb(error.__traceback__)[-1]
        verdict.silent.append(f"{type(error).__name__} from {os.path.basename(where.filename)}: {error}")
        return verdict


def act(life: Life, rng: random.Random) -> None:
    """One random operation. Asleep or after a failure mostly the way out, else what must be refused."""
    if life.optimizer is None:
        life.construct()
    elif life.asleep and rng.random() < 0.7:
        life.wake_up()
    elif life.failed and rng.random() < 0.7:
        life.load()
    elif rng.random() < 0.1:
        life.set_hyperparameters(rng.choice([1e-3, 1e-2]), rng.choice([0.0, 0.1]))
    else:
        name = rng.choices(list(ACTIONS), weights=list(ACTIONS.values()))[0]
        if name == "save":
            life.save(background=rng.random() < 0.5)
        else:
            getattr(life, name)()
