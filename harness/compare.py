"""Trains twice from the same seed, first with resident state and then streamed, and compares every bit.

One rank's part of `optstream train`: a function for `run_ranks`, with plain data in and out.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from megatron.core.optimizer.optimizer import MegatronOptimizer

from optstream.core.megatron import (
    MegatronStateStore,
    setup_optimizer_state_streaming,
    streaming_construction,
)
from optstream.core.records import StepRecord
from optstream.harness.diary import Diary
from optstream.harness.final_state import (
    SEGMENTS,
    Final,
    digest_of,
    final_of,
    first_difference,
    largest_error,
)
from optstream.harness.ledger import (
    GRADIENTS,
    STATE,
    TEMPORARIES,
    Ledger,
    gradient_roots,
    resident_roots,
    streamed_roots,
)
from optstream.harness.resume import Resume
from optstream.harness.stream_settings import StreamSettings
from optstream.harness.training import Trainer
from optstream.harness.training_config import TrainingConfig

# What happens, and in which step; called on rank 0 only.
Progress = Callable[[str, int], None]


@dataclass(frozen=True)
class RunResult:
    """One run on one rank. Bytes are of device memory: the state's, and beside it the fp32 gradients that
    Megatron upcasts and what the update allocates for itself."""

    loss: list[float]
    step_s: list[float]
    state_bytes_peak: int
    state_bytes_timeline: list[tuple[float, int]]
    gradient_bytes_peak: int
    temporary_bytes_peak: int
    digest: str


@dataclass(frozen=True)
class StreamedResult(RunResult):
    """The streamed run, with the bound on its state's device bytes and what each step moved (all stores)."""

    state_bytes_bound: int
    host_bytes_bound: int
    read_bytes: list[int]
    written_bytes: list[int]
    padding_bytes: list[int]
    buckets: int
    depth: int
    records: list[StepRecord] = field(repr=False, default_factory=list)


@dataclass(frozen=True)
class Comparison:
    """One rank's two runs. `difference` names the first value that differs, None if none does.

    max_error: the largest absolute difference of any main param or moment.
    main_error: the same over main params alone.
    """

    resident: RunResult
    streamed: StreamedResult
    difference: str | None
    max_error: float
    main_error: float
    parameters: int


def compare_on_rank(
    rank: int,
    config: TrainingConfig,
    settings: StreamSettings,
    progress: Progress | None = None,
    resume: Resume | None = None,
) -> Comparison:
    """Both runs on this rank, both from the checkpoint that `resume` names, if any. Raises what the streamed
    run raised; its files are gone either way."""
    report = progress if progress is not None and rank == 0 else _silent
    resume = resume or Resume()
    resident, resident_final = _run_resident(rank, config, report, resume)
    streamed, streamed_final = _run_streamed(rank, config, settings, report, resume)
    difference = first_difference(resident.loss, streamed.loss, resident_final, streamed_final)
    errors = {name: largest_error(resident_final, streamed_final, name) for name in SEGMENTS}
    return Comparison(
        resident,
        streamed,
        difference,
        max_error=max(errors.values()),
        main_error=errors["main"],
        parameters=sum(param.numel() for param in resident_final.params.values()),
    )


def _run_resident(
    rank: int, config: TrainingConfig, progress: Progress, resume: Resume
) -> tuple[RunResult, Final]:
    ledger = Ledger()
    trainer = Trainer(
        config,
        rank=rank,
        construction=lambda: ledger.watch_allocations(STATE),
        after_construction=lambda optimizer: ledger.follow(STATE, resident_roots(optimizer)),
    )
    try:
        resume.begin(trainer, streamed=False)
        loss, step_s = _train(trainer, "resident", progress, ledger)
        final = final_of(trainer)
        return RunResult(loss, step_s, *_measured(ledger), digest_of(final)), final
    finally:
        trainer.close()


def _run_streamed(
    rank: int, config: TrainingConfig, settings: StreamSettings, progress: Progress, resume: Resume
) -> tuple[StreamedResult, Final]:
    ledger = Ledger()
    stores: list[MegatronStateStore] = []
    args = settings.namespace()

    def set_up(optimizer: MegatronOptimizer) -> None:
        ledger.follow(STATE, streamed_roots(stores))
        stores.extend(
            setup_optimizer_state_streaming(
                args,
                optimizer,
                backend_factory=settings.open_backend,
                # Simulated devices have memory of their own, too: what is proved here is the path of GPUs.
                staged=True,
                observe=ledger.sample,
            )
        )

    @contextlib.contextmanager
    def construction() -> Iterator[None]:
        with streaming_construction(args), ledger.watch_allocations(STATE):
            yield

    trainer = Trainer(config, rank=rank, construction=construction, after_construction=set_up)
    try:
        resume.begin(trainer, streamed=True)
        diary = Diary(stores)

        def after_step(trainer: Trainer) -> None:
            diary.turn_page()
            resume.save_if_due(trainer)

        loss, step_s = _train(trainer, "streamed", progress, ledger, after_step=after_step)
        # Reading the final state drains the stores: after that, the records' bytes are final.
        final = final_of(trainer, stores)
        return _streamed_result(loss, step_s, ledger, stores, diary.steps, final), final
    finally:
        for store in stores:
            store.close()
        trainer.close()


# The step in which the update's own allocations are watched, which slows it: an early one, past the first.
WATCHED_STEP = 2


def _train(
    trainer: Trainer,
    name: str,
    progress: Progress,
    ledger: Ledger,
    after_step: Callable[[Trainer], None] = lambda trainer: None,
) -> tuple[list[float], list[float]]:
    ledger.follow(GRADIENTS, gradient_roots(trainer.optimizer))
    loss, step_s = [], []
    watched = min(trainer.step + WATCHED_STEP, trainer.config.steps)
    for step in range(trainer.step + 1, trainer.config.steps + 1):
        started = time.perf_counter()
        with _update_watched(trainer.optimizer, ledger) if step == watched else contextlib.nullcontext():
            loss.append(trainer.train_step().loss)
        step_s.append(time.perf_counter() - started)
        after_step(trainer)
        ledger.sample()
        progress(name, step)
    return loss, step_s


@contextlib.contextmanager
def _update_watched(optimizer: MegatronOptimizer, ledger: Ledger) -> Iterator[None]:
    """What `optimizer.step` allocates meanwhile is counted; the rest of the training step is not watched."""
    original = optimizer.step

    def step():
        with ledger.watch_allocations(TEMPORARIES):
            return original()

    optimizer.step = step
    try:
        yield
    finally:
        del optimizer.step


def _measured(ledger: Ledger) -> tuple[int, list[tuple[float, int]], int, int]:
    return (
        ledger.peak_bytes(STATE),
        ledger.timeline(STATE),
        ledger.peak_bytes(GRADIENTS),
        ledger.peak_bytes(TEMPORARIES),
    )


def _streamed_result(
    loss: list[float],
    step_s: list[float],
    ledger: Ledger,
    stores: list[MegatronStateStore],
    steps: list[tuple[StepRecord, ...]],
    final: Final,
) -> StreamedResult:
    engines = [store.streamer.engine for store in stores]
    return StreamedResult(
        loss,
        step_s,
        *_measured(ledger),
        digest_of(final),
        state_bytes_bound=sum(engine.device_bytes_bound for engine in engines)
        + sum(store.resident_bytes for store in stores),
        host_bytes_bound=sum(engine.host_bytes_bound for engine in engines),
        read_bytes=[sum(record.read_bytes for record in step) for step in steps],
        written_bytes=[sum(record.written_bytes for record in step) for step in steps],
        padding_bytes=[sum(record.padding_bytes for record in step) for step in steps],
        buckets=sum(len(store.streamer.buckets) for store in stores),
        depth=max((engine.depth for engine in engines), default=0),
        records=[record for step in steps for record in step],
    )


def _silent(run: str, step: int) -> None:
    return None
