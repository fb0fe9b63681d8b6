"""Runs a schedule for real: I/O threads, places, slots and copy streams.

The caller of `step` runs the updates on its own thread. Reads, writes and copies run on engine threads;
whichever thread finishes a command asks the schedule, under one lock, what can start now, so that I/O goes on
while the caller is busy with an update. A bucket's chunks move in parallel, up to `IO_THREADS` each way.

The first failure is kept, nothing new starts, and what is in flight lands before anybody is told.
"""

from __future__ import annotations

import copy
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from contextlib import ExitStack, closing
from functools import partial

import torch
from torch.profiler import record_function

from optstream.core.copies import Copies, HostCopies
from optstream.core.errors import OptstreamError, PoisonedError
from optstream.core.pacing import PACE
from optstream.core.plan import Chunk
from optstream.core.records import Span, StepRecord
from optstream.core.schedule import Command, Schedule, Stage
from optstream.core.store import BucketStore, Transfer
from optstream.core.workers import Workers

logger = logging.getLogger(__name__)

# Measured with `optstream bench step`: fewer leave the disk idle between requests, more only add latency.
IO_THREADS = 4

# A run of weeks must not grow by its own diary. Spans are most of it: a handful a bucket.
RECORDS_KEPT = 1000
SPANS_KEPT = 100

Update = Callable[[int, torch.Tensor], None]


class Engine:
    """Streams the buckets of `store` past an update function.

    depth: buckets in the pipeline at once. cache_bytes: host memory for a write-back cache, used in whole
    buckets. keep_slots, write_behind: see the flags of the same names.
    copies: how memory moves to the device. staged: the device has memory of its own.
    observe: called, under the engine's lock, whenever memory may have changed hands (for ledgers).

    Host memory is at most `host_bytes`, device memory at most `device_bytes`.
    """

    def __init__(
        self,
        store: BucketStore,
        *,
        depth: int,
        cache_bytes: int = 0,
        keep_slots: bool = False,
        write_behind: bool = True,
        copies: Copies | None = None,
        staged: bool = False,
        io_threads: int = IO_THREADS,
        observe: Callable[[], None] | None = None,
    ) -> None:
        self.store = store
        self.staged = staged
        self.depth = min(depth, max(1, len(store.buckets)))
        cache_places = min(cache_bytes // store.place_bytes, len(store.buckets)) if store.buckets else 0
        self._keep_slots = keep_slots
        self._write_behind = write_behind
        self._copies = copies or HostCopies()
        self._schedule = Schedule(
            len(store.buckets), self.depth, cache_places=cache_places, keep_slots=keep_slots, staged=staged
        )
        self._places: dict[int, torch.Tensor] = {}
        self._slots: dict[int, torch.Tensor] = {}
        self._changed = threading.Condition()
        self._update_due: Command | None = None
        self._failure: BaseException | None = None
        self._surfaced = False
        self._records: deque[StepRecord] = deque(maxlen=RECORDS_KEPT)
        # Reads belong to the step that will consume them, writes to the step that produced the values.
        self._reading_for = StepRecord(step=1)
        self._produced_by: dict[int, StepRecord] = {}
        self._observe = observe or (lambda: None)
        self._turns = itertools.count()
        with ExitStack() as undo:
            self._workers = {
                stage: undo.enter_context(closing(Workers(count, f"optstream-{stage.value}")))
                for stage, count in (
                    (Stage.READ, io_threads),
                    (Stage.UPLOAD, int(staged)),
                    (Stage.DOWNLOAD, int(staged)),
                    (Stage.WRITE, io_threads),
                )
            }
            undo.pop_all()

    # ---- bounds ------------------------------------------------------------------------------------------

    @property
    def host_bytes_bound(self) -> int:
        """The most host memory that places can take: the pipeline's and the cache's."""
        return min(self._schedule.place_count, len(self.store.buckets)) * self.store.place_bytes

    @property
    def device_bytes_bound(self) -> int:
        """The most device memory that state can take: `depth` x the largest bucket."""
        return self.depth * self.store.slot_bytes

    @property
    def host_bytes(self) -> int:
        """Host memory allocated for places now."""
        with self._changed:
            return sum(place.numel() for place in self._places.values())

    @property
    def writers(self) -> Workers:
        """The threads that write, for whoever writes whole buckets while the engine is idle."""
        return self._workers[Stage.WRITE]

    @property
    def slots(self) -> list[torch.Tensor]:
        """The memory in which buckets are updated, as far as it is allocated now.

        Takes no lock: `observe` may ask for it under the lock of another engine."""
        return list((self._slots if self.staged else self._places).values())

    @property
    def records(self) -> list[StepRecord]:
        """One record a step, in order: the latest RECORDS_KEPT, the latest SPANS_KEPT of them with spans.
        Their written bytes are final after `drain`."""
        return list(self._records)

    # ---- what an optimizer calls -------------------------------------------------------------------------

    def step(self, active: Collection[int], update: Update, *, step: int) -> StepRecord:
        """Fetch, update and flush every bucket in `active`; `update(bucket, memory)` runs on this thread.

        memory: 1-D uint8 on the device, laid out as the bucket's file without its trailer.
        step: numbers the values that are produced.

        Returns once the last update is done and slots are given back; with write-behind, writes go on. A
        failure, of this step or of an earlier write, is raised here once; from then on the engine refuses
        with PoisonedError until `reset`.
        """
        self.raise_failure()
        started = time.perf_counter()
        if self.staged and active:
            self._allocate_slots()
        try:
            with PACE.stepping():
                record = self._run_step(active, update, step)
            record.start_s, record.total_s = started, time.perf_counter() - started
            logger.info("%s", record)
        except BaseException as error:
            # An interrupt too: whoever is interrupted here cannot know which buckets are updated.
            self._abandon(error)
            raise
        return record

    def read_ahead(self) -> None:
        """Start reading what the next step will want first. Failures surface at the next step."""
        with self._changed:
            if self._failure is None and self._schedule.step_done:
                self._dispatch(self._schedule.read_ahead())

    def settle(self) -> float:
        """Wait until nothing is in flight. Returns the seconds waited; raises what failed meanwhile."""
        started = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: not self._schedule.outstanding)
        self.raise_failure()
        return time.perf_counter() - started

    def drain(self) -> None:
        """Write everything that is newer in memory than on file, and wait for it."""
        self.settle()
        with self._changed:
            self._dispatch(self._schedule.drain())
        self.settle()

    def reset(self) -> None:
        """Forget what is in memory and any failure: the files were restored and are the truth again."""
        with self._changed:
            self._changed.wait_for(lambda: not self._schedule.outstanding)
            self._schedule.reset()
            self._failure, self._surfaced, self._update_due = None, False, None
            self._reading_for = StepRecord(step=0)
            self._produced_by.clear()
            self._slots.clear()

    def close(self) -> None:
        """Stop the threads and free the memory, whatever state things are in. Idempotent.

        Raises, at the end, a failure that nobody has been told of."""
        with self._changed:
            self._changed.wait_for(lambda: not self._io_outstanding())
        for workers in self._workers.values():
            workers.close()
        self._places.clear()
        self._slots.clear()
        if self._failure is not None and not self._surfaced:
            self.raise_failure()

    def runs(self, thread: threading.Thread) -> bool:
        """Whether it is one of the engine's own, which cannot wait for the engine."""
        return any(thread in workers for workers in self._workers.values())

    def poison(self, error: BaseException) -> None:
        """Refuse further steps because of `error`, which the caller raises itself."""
        with self._changed:
            if not self._surfaced:
                self._failure, self._surfaced = _without_frames(self._failure or error), True

    def raise_failure(self) -> None:
        """Raise the first failure that nobody has been told of; after that, PoisonedError."""
        with self._changed:
            if self._failure is None:
                return
            self._changed.wait_for(lambda: not self._io_outstanding())
            if not self._surfaced:
                error = self._failure
                self._failure, self._surfaced = _without_frames(error), True
                raise error
            raise PoisonedError(
                "the optimizer state is not usable",
                why=f"an earlier call failed ({_described(self._failure)}), maybe with some buckets updated",
                remedy="Load a checkpoint with load_from to go on in this process, or restart from one",
                cause=self._failure,
            )

    # ---- the caller's thread -----------------------------------------------------------------------------

    def _run_step(self, active: Collection[int], update: Update, step: int) -> StepRecord:
        with self._changed:
            self.raise_failure()  # A pending write may have failed since `step` asked.
            record = self._reading_for
            record.step, record.buckets = step, len(active)
            self._dispatch(self._schedule.start_step(active))
        while (command := self._await_update(record)) is not None:
            self._run_update(command, update, record)
        with self._changed:
            read = {span.bucket for span in record.spans if span.stage is Stage.READ}
            record.reads = len(read.intersection(active))
            record.cache_hits = record.buckets - record.reads
            self._reading_for = StepRecord(step=step + 1)
        self._give_slots_back()
        if not self._write_behind:
            with record_function("optstream::wait_for_writes"):
                record.waited_write_s += self.settle()
        self._records.append(record)
        if len(self._records) > SPANS_KEPT:
            self._records[-1 - SPANS_KEPT].spans.clear()
        return record

    def _await_update(self, record: StepRecord) -> Command | None:
        """The next update to run, or None once the step is done. Raises the step's failure."""
        started = time.perf_counter()
        with self._changed:
            waiting_for = self._schedule.waiting_for
            with record_function(f"optstream::wait_for_{waiting_for.value if waiting_for else 'nothing'}"):
                self._changed.wait_for(
                    lambda: self._failure or self._update_due is not None or self._schedule.step_done
                )
            waited = time.perf_counter() - started
            if waiting_for in (Stage.READ, Stage.UPLOAD):
                record.waited_read_s += waited
            else:
                record.waited_write_s += waited
            self.raise_failure()
            command, self._update_due = self._update_due, None
            return command

    def _run_update(self, command: Command, update: Update, record: StepRecord) -> None:
        started = time.perf_counter()
        with record_function("optstream::update"):
            update(command.bucket, self._memory_of(command))
            self._copies.update_enqueued()
        ended = time.perf_counter()
        record.update_s += ended - started
        self._produced_by[command.bucket] = record
        record.spans.append(Span(Stage.UPDATE, command.bucket, started, ended))
        self._finish(command)

    def _memory_of(self, command: Command) -> torch.Tensor:
        memory = self._slots[command.slot] if self.staged else self._places[command.place]
        return memory[: self.store.layouts[command.bucket].state_bytes]

    def _allocate_slots(self) -> None:
        # All at once and on the caller's stream, so that uploads need wait for that stream only here.
        try:
            for slot in range(self.depth):
                if slot not in self._slots:
                    memory = self._copies.allocate_slot(self.store.slot_bytes)
                    with self._changed:
                        self._slots[slot] = memory
        except BaseException:
            # Out of memory, say. No bucket was touched: whoever frees some can step again.
            self._give_slots_back()
            raise
        self._copies.step_begins()

    def _give_slots_back(self) -> None:
        """Activations need the device's memory between steps; slots that are kept stay."""
        with self._changed:
            kept = self._schedule.held_slots
            self._slots = {slot: memory for slot, memory in self._slots.items() if slot in kept}
            self._observe()

    def _abandon(self, error: BaseException) -> None:
        """The caller's thread cannot go on with the step. What is in flight still lands."""
        with self._changed:
            self.poison(error)
            for command in [c for c in self._schedule.outstanding if c.stage is Stage.UPDATE]:
                self._schedule.failed(command)
            self._update_due = None
            self._changed.wait_for(lambda: not self._schedule.outstanding)
            self._slots.clear()
            self._observe()

    # ---- any thread --------------------------------------------------------------------------------------

    def _dispatch(self, commands: list[Command]) -> None:
        """Start `commands`. The lock is held."""
        for command in commands:
            turn = next(self._turns)
            match command.stage:
                case Stage.READ:
                    task = partial(self._move, command, self._reading_for, turn)
                case Stage.WRITE:
                    task = partial(self._move, command, self._produced_by[command.bucket], turn)
                case Stage.UPLOAD:
                    task = partial(self._copy, command, self._reading_for)
                case Stage.DOWNLOAD:
                    task = partial(self._copy, command, self._produced_by[command.bucket])
                case Stage.UPDATE:
                    self._update_due = command
                    continue
            self._workers[command.stage].submit(task, turn)
        self._observe()
        self._changed.notify_all()

    def _finish(self, command: Command) -> None:
        with self._changed:
            try:
                self._dispatch(self._schedule.completed(command))
            except BaseException as error:
                # On an engine thread nobody else would hear of it, and the caller would wait for ever.
                self._failure = self._failure or error
                self._changed.notify_all()

    def _fail(self, command: Command, error: BaseException) -> None:
        with self._changed:
            if self._failure is None:
                self._failure = error
            self._schedule.failed(command)
            self._changed.notify_all()

    def _io_outstanding(self) -> bool:
        return any(command.stage is not Stage.UPDATE for command in self._schedule.outstanding)

    def _copy(self, command: Command, record: StepRecord) -> None:
        started = time.perf_counter()
        try:
            self._copy_bytes(command)
        except BaseException as error:
            self._fail(command, error)
            return
        record.spans.append(Span(command.stage, command.bucket, started, time.perf_counter()))
        self._finish(command)

    def _copy_bytes(self, command: Command) -> None:
        # Apart, so that no local of a thread still holds the slot when the step has given it back.
        size = self.store.layouts[command.bucket].state_bytes
        place, slot = self._places[command.place][:size], self._slots[command.slot][:size]
        if command.stage is Stage.UPLOAD:
            self._copies.upload(place, slot)
        else:
            self._copies.download(slot, place)

    def _move(self, command: Command, record: StepRecord, turn: int) -> None:
        """Open a bucket's file and share its chunks out over the threads of that direction.

        In `turn`: what is needed first arrives first, instead of sharing the disk with what comes later.
        """
        try:
            place = self._place(command.place)
            if command.stage is Stage.READ:
                transfer = self.store.begin_read(command.bucket, place)
            else:
                transfer = self.store.begin_write(command.bucket)
        except BaseException as error:
            self._fail(command, error)
            return
        _Move(self, command, transfer, place, record).start(self._workers[command.stage], turn)

    def _moved(self, command: Command, transfer: Transfer, record: StepRecord, span: Span) -> None:
        with self._changed:
            if command.stage is Stage.READ:
                record.read_bytes += transfer.payload_bytes
            else:
                record.written_bytes += transfer.payload_bytes
            record.padding_bytes += transfer.padding_bytes
            record.spans.append(span)
            self._finish(command)

    def _place(self, number: int) -> torch.Tensor:
        if number not in self._places:
            place = self._copies.allocate_place(self.store.place_bytes)
            with self._changed:
                self._places[number] = place
        return self._places[number]


class _Move:
    """One READ or WRITE in progress: counts its chunks down and reports once, when the last has ended."""

    def __init__(
        self, engine: Engine, command: Command, transfer: Transfer, place: torch.Tensor, record: StepRecord
    ) -> None:
        self._engine = engine
        self._command = command
        self._transfer = transfer
        self._place = place
        self._record = record
        self._started = time.perf_counter()
        self._lock = threading.Lock()
        self._left = len(transfer.chunks)
        self._error: BaseException | None = None

    def start(self, workers: Workers, turn: int) -> None:
        if not self._left:
            self._end()
        for chunk in self._transfer.chunks:
            workers.submit(partial(self._one, chunk), turn)

    def _one(self, chunk: Chunk) -> None:
        store = self._engine.store
        move = store.read_chunk if self._command.stage is Stage.READ else store.write_chunk
        try:
            if self._error is None:
                move(self._transfer, chunk, self._place)
        except BaseException as error:
            self._error = self._error or error
        with self._lock:
            self._left -= 1
            last = not self._left
        if last:
            self._end()

    def _end(self) -> None:
        transfer, record, command = self._transfer, self._record, self._command
        try:
            with transfer.file:
                if self._error is not None:
                    raise self._error
                if command.stage is Stage.WRITE:
                    self._engine.store.end_write(transfer, self._place, step=record.step)
        except BaseException as error:
            self._engine._fail(command, error)
            return
        span = Span(command.stage, command.bucket, self._started, time.perf_counter())
        self._engine._moved(command, transfer, record, span)


def _without_frames(error: BaseException) -> BaseException:
    """A copy to remember `error` by. The error itself holds, by its traceback, every local of every caller:
    bucket memory, gradients, the optimizer."""
    try:
        return copy.copy(error)
    except Exception:  # An exception whose constructor takes more than its `args` says it does.
        return OptstreamError(_described(error))


def _described(error: BaseException) -> str:
    if isinstance(error, OptstreamError):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
