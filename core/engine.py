"""Runs a schedule for real: I/O threads, places, slots and copy streams.

The caller of `step` runs the updates on its own thread. Reads, writes and copies run on engine threads;
whichever thread finishes a command asks the schedule, under one lock, what can start now, so that I/O goes on
while the caller is busy with an update. A bucket's chunks move in parallel, up to `IO_THREADS` each way.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.profiler import record_function

from optstream.core.copies import Copies, HostCopies
from optstream.core.errors import PoisonedError
from optstream.core.plan import Chunk
from optstream.core.records import Span, StepRecord
from optstream.core.schedule import Command, Schedule, Stage
from optstream.core.store import BucketStore, Transfer

logger = logging.getLogger(__name__)

# Measured with `optstream bench step`: fewer leave the disk idle between requests, more only add latency.
IO_THREADS = 4

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
        self._records: list[StepRecord] = []
        # Reads belong to the step that will consume them, writes to the step that produced the values.
        self._reading_for = StepRecord(step=1)
        self._produced_by: dict[int, StepRecord] = {}
        self._observe = observe or (lambda: None)
        self._readers = ThreadPoolExecutor(io_threads, thread_name_prefix="optstream-read")
        self._writers = ThreadPoolExecutor(io_threads, thread_name_prefix="optstream-write")
        self._uploader = ThreadPoolExecutor(1, thread_name_prefix="optstream-upload")
        self._downloader = ThreadPoolExecutor(1, thread_name_prefix="optstream-download")

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
        return sum(place.numel() for place in self._places.values())

    @property
    def slots(self) -> list[torch.Tensor]:
        """The memory in which buckets are updated, as far as it is allocated now."""
        with self._changed:
            return list((self._slots if self.staged else self._places).values())

    @property
    def records(self) -> list[StepRecord]:
        """One record a step, in order. Their written bytes are final after `drain`."""
        return self._records

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
        with self._changed:
            record = self._reading_for
            record.step, record.buckets = step, len(active)
            self._records.append(record)
            if self.staged:
                self._allocate_slots()
            self._dispatch(self._schedule.start_step(active))
        try:
            while (command := self._await_update(record)) is not None:
                self._run_update(command, update, record)
        except BaseException as error:
            self._abandon(error)
            raise
        self._reading_for = StepRecord(step=step + 1)
        self._give_slots_back()
        if not self._write_behind:
            with record_function("optstream::wait_for_writes"):
                record.waited_write_s += self.settle()
        record.cache_hits = record.buckets - record.reads
        record.total_s = time.perf_counter() - started
        logger.info("%s", record)
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
            self._produced_by.clear()
            self._slots.clear()

    def close(self) -> None:
        """Stop the threads and free the memory, whatever state things are in. Idempotent."""
        with self._changed:
            self._changed.wait_for(lambda: not self._io_outstanding())
        for pool in (self._readers, self._writers, self._uploader, self._downloader):
            pool.shutdown(wait=True)
        self._places.clear()
        self._slots.clear()

    def poison(self, error: BaseException) -> None:
        """Refuse further steps because of `error`, which the caller raises itself."""
        with self._changed:
            self._failure = self._failure or error
            self._surfaced = True

    def raise_failure(self) -> None:
        """Raise the first failure that nobody has been told of; after that, PoisonedError."""
        with self._changed:
            if self._failure is None:
                return
            self._changed.wait_for(lambda: not self._io_outstanding())
            if not self._surfaced:
                self._surfaced = True
                raise self._failure
            raise PoisonedError(
                "the optimizer state is not usable",
                why=f"an earlier step failed half-way ({self._failure}), so some buckets are one step ahead",
                remedy="Load a checkpoint to go on in this process, or restart from one",
                cause=self._failure,
            )

    # ---- the caller's thread -----------------------------------------------------------------------------

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
        for slot in range(self.depth):
            if slot not in self._slots:
                self._slots[slot] = self._copies.allocate_slot(self.store.slot_bytes)
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
            if self._failure is None:
                self._failure, self._surfaced = error, True
            for command in [c for c in self._schedule.outstanding if c.stage is Stage.UPDATE]:
                self._schedule.failed(command)
            self._update_due = None
            self._changed.wait_for(lambda: not self._schedule.outstanding)

    # ---- any thread --------------------------------------------------------------------------------------

    def _dispatch(self, commands: list[Command]) -> None:
        """Start `commands`. The lock is held."""
        for command in commands:
            match command.stage:
                case Stage.READ:
                    self._reading_for.reads += 1
                    self._readers.submit(self._move, command, self._readers, self._reading_for)
                case Stage.WRITE:
                    record = self._produced_by[command.bucket]
                    self._writers.submit(self._move, command, self._writers, record)
                case Stage.UPLOAD:
                    self._uploader.submit(self._copy, command)
                case Stage.DOWNLOAD:
                    self._downloader.submit(self._copy, command)
                case Stage.UPDATE:
                    self._update_due = command
        self._observe()
        self._changed.notify_all()

    def _finish(self, command: Command) -> None:
        with self._changed:
            self._dispatch(self._schedule.completed(command))

    def _fail(self, command: Command, error: BaseException) -> None:
        with self._changed:
            if self._failure is None:
                self._failure = error
            self._schedule.failed(command)
            self._changed.notify_all()

    def _io_outstanding(self) -> bool:
        return any(command.stage is not Stage.UPDATE for command in self._schedule.outstanding)

    def _copy(self, command: Command) -> None:
        started = time.perf_counter()
        try:
            size = self.store.layouts[command.bucket].state_bytes
            place, slot = self._places[command.place][:size], self._slots[command.slot][:size]
            if command.stage is Stage.UPLOAD:
                self._copies.upload(place, slot)
            else:
                self._copies.download(slot, place)
        except BaseException as error:
            self._fail(command, error)
            return
        span = Span(command.stage, command.bucket, started, time.perf_counter())
        self._records[-1].spans.append(span)
        self._finish(command)

    def _move(self, command: Command, pool: ThreadPoolExecutor, record: StepRecord) -> None:
        """Open a bucket's file and share its chunks out over `pool`."""
        try:
            place = self._place(command.place)
            if command.stage is Stage.READ:
                transfer = self.store.begin_read(command.bucket, place)
            else:
                transfer = self.store.begin_write(command.bucket)
        except BaseException as error:
            self._fail(command, error)
            return
        _Move(self, command, transfer, place, record).start(pool)

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
            self._places[number] = self._copies.allocate_place(self.store.place_bytes)
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

    def start(self, pool: ThreadPoolExecutor) -> None:
        if not self._left:
            self._end()
        for chunk in self._transfer.chunks:
            pool.submit(self._one, chunk)

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
