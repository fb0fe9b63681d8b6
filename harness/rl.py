"""A loop of generate, train and update weights, on each rank, under the flags of a deployment.

The trainer and the rollout engine share a device (`--colocate`) or have one each. Where the flags park the
trainer, it sleeps whenever it does not train. A function for `run_ranks`, with plain data in and out.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer

from optstream.core.megatron import (
    MegatronStateStore,
    setup_optimizer_state_streaming,
    streaming_construction,
)
from optstream.core.trainer_offload import TrainerOffload, trainer_offload
from optstream.core.validator import STREAM, validate_arguments
from optstream.harness.device_budget import BudgetedStorages, CudaBudget, DeviceBudget
from optstream.harness.diary import Diary
from optstream.harness.errors import DeviceMemoryError
from optstream.harness.final_state import Final, digest_of, final_of
from optstream.harness.ledger import STATE, Ledger, gradient_roots, resident_roots, streamed_roots
from optstream.harness.rollout import RolloutEngine
from optstream.harness.stream_settings import StreamSettings
from optstream.harness.training import Trainer
from optstream.harness.training_config import TrainingConfig

PROMPT = b"    def __init__(self, "
SAMPLE_BYTES = 32
# What engines are usually given of a device: most of it, since throughput grows with the cache.
ROLLOUT_SHARE = 0.75

# Called on rank 0 when a phase begins: its name, and the step of the loop.
Progress = Callable[[str, int], None]


@dataclass(frozen=True)
class RlSettings:
    """steps: of the loop. stream: the deployment's flags. device_memory: bytes of each device, None for no
    limit."""

    steps: int
    stream: StreamSettings
    device_memory: int | None = None


@dataclass(frozen=True)
class Phase:
    """device_bytes_peak: of the device that the phase used."""

    name: str
    seconds: float
    device_bytes_peak: int


@dataclass
class RlRun:
    """What a loop did on this rank.

    samples: greedy continuations of PROMPT, before each step and after the last. sleep_bytes, wake_bytes: of
    each sleep and wake, in their order. read_bytes, written_bytes: of each step, over all stores.
    device_bytes_peak: of the trainer's device. host_bytes_peak: staging and caches, parked copies, and
    weights on their way to the rollout engine.
    out_of_memory: what did not fit, in the last of `phases`; what would come after it is missing then.
    """

    phases: list[Phase] = field(default_factory=list)
    samples: list[str] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    sleep_s: list[float] = field(default_factory=list)
    wake_s: list[float] = field(default_factory=list)
    sleep_bytes: list[int] = field(default_factory=list)
    wake_bytes: list[int] = field(default_factory=list)
    read_bytes: list[int] = field(default_factory=list)
    written_bytes: list[int] = field(default_factory=list)
    state_bytes_peak: int = 0
    state_bytes_bound: int = 0
    state_bytes_timeline: list[tuple[float, int]] = field(default_factory=list)
    device_bytes_peak: int = 0
    host_bytes_peak: int = 0
    parameters: int = 0
    buckets: int = 0
    depth: int = 0
    out_of_memory: str | None = None
    digest: str = ""
    final: Final | None = field(default=None, repr=False)

    @property
    def step_s(self) -> list[float]:
        """Seconds of each training step, forward, backward and optimizer together."""
        trains, steps = (self._seconds_of(name) for name in ("train", "step"))
        return [train + step for train, step in zip(trains, steps, strict=True)]

    def _seconds_of(self, name: str) -> list[float]:
        return [phase.seconds for phase in self.phases if phase.name == name]


def run_rl(
    rank: int, config: TrainingConfig, settings: RlSettings, progress: Progress | None = None
) -> RlRun:
    """The whole loop on this rank. Running out of device memory is a result; everything else that fails is
    raised. Files are gone either way."""
    with _Job(rank, config, settings, progress if rank == 0 else None) as job:
        return job.run()


class _Job:
    """Trainer, rollout engine, their devices, and what is known of them."""

    def __init__(
        self, rank: int, config: TrainingConfig, settings: RlSettings, progress: Progress | None
    ) -> None:
        self._rank, self._config, self._settings = rank, config, settings
        self._args = settings.stream.namespace()
        resolved = validate_arguments(self._args)
        self._streams = bool(resolved[STREAM])
        limit = settings.device_memory
        make_device = CudaBudget if torch.cuda.is_available() else DeviceBudget
        self._device = make_device(limit)
        self._rollout_device = self._device if resolved["colocate"] else make_device(limit)
        self._engine = RolloutEngine(
            config, self._rollout_device, cache_bytes=int(ROLLOUT_SHARE * limit) if limit else 0
        )
        self._ledger = Ledger()
        self._trainer: Trainer | None = None
        self._stores: list[MegatronStateStore] = []
        self._diary = Diary(())
        self._offload: TrainerOffload | None = None
        self._progress = progress or (lambda name, step: None)
        self._step = 0
        self._result = RlRun()

    def __enter__(self) -> _Job:
        return self

    def __exit__(self, *exception) -> None:
        with contextlib.ExitStack() as stack:
            if self._trainer is not None:
                stack.callback(self._trainer.close)
            for store in self._stores:
                stack.callback(store.close)
            if self._offload is not None:
                stack.callback(self._offload.close)

    def run(self) -> RlRun:
        result = self._result
        try:
            self._loop()
            self._wake_up()  # for the comparison of what it has become
            self._finish()
        except DeviceMemoryError as error:
            result.out_of_memory = str(error)
        result.device_bytes_peak = self._device.peak_bytes
        return result

    def _loop(self) -> None:
        with self._phase("build"):
            self._build()
        self._update_weights()
        self._sleep()
        for step in range(1, self._settings.steps + 1):
            self._step = step
            self._rollout()
            self._wake_up()
            self._train()
            self._update_weights()
            self._sleep()
        self._rollout()

    def _build(self) -> None:
        with self._device.in_use():
            self._trainer = Trainer(
                self._config,
                rank=self._rank,
                construction=lambda: streaming_construction(self._args),
                after_construction=self._set_up,
            )
        self._result.parameters = sum(
            param.numel() for chunk in self._trainer.model for param in chunk.parameters()
        )
        model = self._trainer.model
        buffers = [buffer for chunk in model for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        self._device.name("model params", lambda: (buffer.param_data for buffer in buffers))
        self._device.name("gradients", lambda: (buffer.grad_data for buffer in buffers))
        self._device.name("upcast gradients", gradient_roots(self._trainer.optimizer))
        self._offload = trainer_offload(
            self._args,
            model,
            self._trainer.optimizer,
            backend_factory=self._settings.stream.open_backend,
            memory=None if isinstance(self._device, CudaBudget) else BudgetedStorages(self._device),
        )

    def _set_up(self, optimizer: MegatronOptimizer) -> None:
        self._stores += setup_optimizer_state_streaming(
            self._args,
            optimizer,
            backend_factory=self._settings.stream.open_backend,
            staged=True,
            observe=self._ledger.sample,
        )
        roots = streamed_roots(self._stores) if self._streams else resident_roots(optimizer)
        self._diary = Diary(self._stores)
        self._device.name("optimizer state", roots)
        self._ledger.follow(STATE, roots)

    def _update_weights(self) -> None:
        with contextlib.ExitStack() as stack:
            if self._config.pp > 1:  # other stages' weights come by way of the trainer's device
                stack.enter_context(self._phase("gather"))
                stack.enter_context(self._device.in_use())
            self._engine.update_weights(self._trainer)

    def _rollout(self) -> None:
        prompt = PROMPT[: self._config.seq // 2]
        length = min(SAMPLE_BYTES, self._config.seq - len(prompt))
        with self._phase("rollout", self._rollout_device):
            self._result.samples += self._engine.generate([prompt], length=length)

    def _train(self) -> None:
        """One training step, as two phases: what Megatron's optimizer does is the second."""
        trainer, original = self._trainer, self._trainer.optimizer.step
        with contextlib.ExitStack() as phases:
            phases.enter_context(self._phase("train"))

            def step():
                phases.close()
                phases.enter_context(self._phase("step"))
                return original()

            trainer.optimizer.step = step
            try:
                with self._device.in_use():
                    self._result.loss.append(trainer.train_step().loss)
            finally:
                del trainer.optimizer.step
        self._diary.turn_page()

    def _sleep(self) -> None:
        if self._offload is not None:
            with self._phase("sleep"):
                moved = self._offload.sleep()
            self._result.sleep_s.append(moved.seconds)
            self._result.sleep_bytes.append(moved.bytes)

    def _wake_up(self) -> None:
        if self._offload is not None:
            with self._phase("wake"):
                moved = self._offload.wake_up()
            self._result.wake_s.append(moved.seconds)
            self._result.wake_bytes.append(moved.bytes)

    def _finish(self) -> None:
        result = self._result
        result.final = final_of(self._trainer, self._stores if self._streams else None)
        result.digest = digest_of(result.final)
        # Reading the final state has drained the stores: the records' bytes are final.
        for records in self._diary.steps:
            result.read_bytes.append(sum(record.read_bytes for record in records))
            result.written_bytes.append(sum(record.written_bytes for record in records))
        engines = [store.streamer.engine for store in self._stores]
        result.buckets = sum(len(store.streamer.buckets) for store in self._stores)
        result.depth = max((engine.depth for engine in engines), default=0)
        result.state_bytes_bound = sum(engine.device_bytes_bound for engine in engines) + sum(
            store.resident_bytes for store in self._stores
        )
        result.state_bytes_peak = self._ledger.peak_bytes(STATE)
        result.state_bytes_timeline = self._ledger.timeline(STATE)

    @contextlib.contextmanager
    def _phase(self, name: str, device: DeviceBudget | None = None) -> Iterator[None]:
        device = device or self._device
        self._progress(name, self._step)
        device.take_peak()
        started = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - started
            self._ledger.sample()
            self._result.phases.append(Phase(name, seconds, device.take_peak()))
            self._result.host_bytes_peak = max(self._result.host_bytes_peak, self._host_bytes())

    def _host_bytes(self) -> int:
        streams = sum(store.streamer.engine.host_bytes for store in self._stores)
        parked = self._offload.host_bytes if self._offload is not None else 0
        return streams + parked + self._engine.host_bytes
