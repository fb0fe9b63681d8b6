"""The pipeline as a pure state machine: completions in, commands out. No threads, no clock, no memory.

Every bucket goes round once a step, through stages that overlap with those of its neighbours:

    READ -> [UPLOAD] -> UPDATE -> [DOWNLOAD] -> WRITE

A bucket in memory owns one *place* (a host buffer) from its READ to the end of its WRITE. Where the device
has memory of its own (`staged`), it also owns one of `depth` *slots* from UPLOAD to DOWNLOAD; elsewhere the
place is the slot, and the two copies do not happen. Because a bucket never waits for a second place, and
places and slots are granted in update order, the pipeline cannot deadlock.

Places beyond `depth` are a write-back cache: the last buckets of a step stay in memory, dirty, and the order
alternates from step to step so that they are the first of the next one. `keep_slots` keeps `depth` more.

The engine obeys these commands with threads and streams, the simulator in virtual time.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum


class Stage(Enum):
    """What can be asked of a bucket, in the order in which it happens to one."""

    READ = "read"
    UPLOAD = "upload"
    UPDATE = "update"
    DOWNLOAD = "download"
    WRITE = "write"


@dataclass(frozen=True)
class Command:
    """Do `stage` for `bucket`, whose bytes live in `place` (and, staged, in `slot`)."""

    stage: Stage
    bucket: int
    place: int
    slot: int | None = None


class _Phase(Enum):
    ON_FILE = "its newest bytes are on file"
    READING = "file -> place"
    IN_PLACE = "staged: in its place, not in a slot"
    UPLOADING = "place -> slot"
    UPDATABLE = "where it can be updated"
    UPDATING = "being updated"
    DOWNLOADING = "slot -> place"
    WRITING = "place -> file"


_PHASE_DURING = {
    Stage.READ: _Phase.READING,
    Stage.UPLOAD: _Phase.UPLOADING,
    Stage.UPDATE: _Phase.UPDATING,
    Stage.DOWNLOAD: _Phase.DOWNLOADING,
    Stage.WRITE: _Phase.WRITING,
}

_AT_REST_IN_MEMORY = (_Phase.IN_PLACE, _Phase.UPDATABLE)


@dataclass
class _Bucket:
    index: int
    phase: _Phase = _Phase.ON_FILE
    place: int | None = None
    slot: int | None = None
    dirty: bool = False  # newer in memory than on file
    leaving: bool = False  # to be written as soon as it is in its place


class _FreeList:
    """Numbered resources, handed out lowest first so that a run is reproducible."""

    def __init__(self, size: int) -> None:
        self._free = list(range(size))

    def __bool__(self) -> bool:
        return bool(self._free)

    def take(self) -> int:
        return heapq.heappop(self._free)

    def give(self, number: int) -> None:
        heapq.heappush(self._free, number)


class ScheduleError(RuntimeError):
    """The schedule was driven against its contract: a bug in the engine, not a user's mistake."""


class Schedule:
    """Decides what happens next to each of `buckets` buckets.

    depth: how many buckets the pipeline may hold at once.
    cache_places: how many more may stay in host memory between steps.
    keep_slots: leave the last `depth` buckets of a step where they were updated.
    staged: the device has its own memory, so UPLOAD and DOWNLOAD happen.
    """

    def __init__(
        self,
        buckets: int,
        depth: int,
        *,
        cache_places: int = 0,
        keep_slots: bool = False,
        staged: bool = False,
    ) -> None:
        if buckets < 0 or depth < 1 or cache_places < 0:
            raise ScheduleError(f"cannot schedule {buckets} buckets with depth {depth}, cache {cache_places}")
        self.staged = staged
        self.place_count = depth + cache_places
        self.slot_count = depth if staged else 0
        self._kept_in_slots = depth if keep_slots else 0
        self._kept = cache_places + self._kept_in_slots
        self._places = _FreeList(self.place_count)
        self._slots = _FreeList(self.slot_count)
        self._buckets = [_Bucket(index) for index in range(buckets)]
        self._expected_active: list[int] = list(range(buckets))
        self._backwards = False
        self._broken = False
        self.outstanding: set[Command] = set()
        self._set_order([])
        self._updating = False

    # ---- what an engine calls ----------------------------------------------------------------------------

    def start_step(self, active: Iterable[int]) -> list[Command]:
        """Begin a step over the buckets in `active`; the others are neither read nor written."""
        self._require_between_steps()
        self._expected_active = sorted(active)
        self._set_order(self._expected_active)
        self._updating = bool(self._order)
        if self._kept:
            self._backwards = not self._backwards
        return self._let_go_of_unordered() + self._advance()

    def read_ahead(self) -> list[Command]:
        """Between steps: start reading what the next step is expected to want first."""
        self._require_between_steps()
        self._set_order(self._expected_active)
        return self._advance()

    def drain(self) -> list[Command]:
        """Between steps: write every bucket that is newer than its file and hold none in memory any more."""
        self._require_between_steps()
        self._set_order([])
        return self._let_go_of_unordered()

    def completed(self, command: Command) -> list[Command]:
        """`command` was carried out. Returns what can start now."""
        bucket = self._retire(command)
        if self._broken:
            return []
        commands: list[Command] = []
        match command.stage:
            case Stage.READ:
                bucket.phase = _Phase.IN_PLACE if self.staged else _Phase.UPDATABLE
                if bucket.index not in self._position:
                    self._release(bucket)
            case Stage.UPLOAD:
                bucket.phase = _Phase.UPDATABLE
            case Stage.UPDATE:
                bucket.phase, bucket.dirty = _Phase.UPDATABLE, True
                self._next_update += 1
                commands = self._after_update(bucket)
            case Stage.DOWNLOAD:
                bucket.phase = _Phase.IN_PLACE
                self._give_slot_back(bucket)
                if bucket.leaving:
                    commands = [self._command(Stage.WRITE, bucket)]
            case Stage.WRITE:
                self._release(bucket)
        if self._updating and self._next_update == len(self._order):
            self._updating = False
        return commands + self._advance()

    def failed(self, command: Command) -> None:
        """`command` failed. Nothing new starts; what is outstanding still has to report."""
        self._retire(command)
        self._broken = True

    def reset(self) -> None:
        """Forget what is in memory: the files are the truth again. Ends a failure."""
        if self.outstanding:
            raise ScheduleError("cannot reset while commands are outstanding")
        for bucket in self._buckets:
            if bucket.place is not None:
                self._release(bucket)
        self._broken = self._updating = False
        self._set_order([])

    @property
    def step_done(self) -> bool:
        """All updates of the step are done and every slot is free or kept; writes may be outstanding."""
        return not self._updating and not any(
            command.stage in (Stage.UPLOAD, Stage.UPDATE, Stage.DOWNLOAD) for command in self.outstanding
        )

    @property
    def dirty(self) -> list[int]:
        """Buckets that are newer in memory than on file."""
        return [bucket.index for bucket in self._buckets if bucket.dirty]

    @property
    def waiting_for(self) -> Stage | None:
        """What holds up the next update: the next bucket's READ or UPLOAD, or a WRITE or DOWNLOAD that will
        make room for it. None where nothing does."""
        if not self._updating:
            return None
        head = self._order[self._next_update]
        stages = {command.bucket: command.stage for command in self.outstanding}
        if head in stages:
            return stages[head]
        return next((stage for stage in stages.values() if stage in (Stage.WRITE, Stage.DOWNLOAD)), None)

    @property
    def held(self) -> dict[int, int]:
        """The buckets that own a place, and which."""
        return {bucket.index: bucket.place for bucket in self._buckets if bucket.place is not None}

    @property
    def held_slots(self) -> set[int]:
        """The slots that hold a bucket."""
        return {bucket.slot for bucket in self._buckets if bucket.slot is not None}

    # ---- decisions ---------------------------------------------------------------------------------------

    def _set_order(self, active: Sequence[int]) -> None:
        self._order = list(reversed(active)) if self._backwards else list(active)
        self._position = {bucket: position for position, bucket in enumerate(self._order)}
        count = len(self._order)
        self._first_kept = max(0, count - self._kept)
        self._first_kept_in_slot = max(0, count - self._kept_in_slots)
        self._next_read = self._next_upload = self._next_update = 0

    def _advance(self) -> list[Command]:
        if self._broken:
            return []
        commands = self._reads()
        if self._updating:
            commands += self._uploads() + self._update()
            if not self.outstanding:
                commands += self._make_room_for_head()
        return commands

    def _reads(self) -> list[Command]:
        commands = []
        while self._next_read < len(self._order):
            bucket = self._buckets[self._order[self._next_read]]
            if bucket.phase is _Phase.ON_FILE:
                if not self._places:
                    break
                bucket.place = self._places.take()
                commands.append(self._command(Stage.READ, bucket))
            elif bucket.phase is _Phase.WRITING or bucket.leaving:
                break  # Its write is in flight: it must land before the bytes are read back.
            self._next_read += 1
        return commands

    def _uploads(self) -> list[Command]:
        commands = []
        while self.staged and self._next_upload < len(self._order):
            bucket = self._buckets[self._order[self._next_upload]]
            if bucket.phase is _Phase.IN_PLACE:
                if not self._slots:
                    break
                bucket.slot = self._slots.take()
                commands.append(self._command(Stage.UPLOAD, bucket))
            elif bucket.phase is not _Phase.UPDATABLE:
                break  # Slots are granted in update order, or the first in line could wait for the last.
            self._next_upload += 1
        return commands

    def _update(self) -> list[Command]:
        if self._next_update == len(self._order):
            return []
        bucket = self._buckets[self._order[self._next_update]]
        return [self._command(Stage.UPDATE, bucket)] if bucket.phase is _Phase.UPDATABLE else []

    def _after_update(self, bucket: _Bucket) -> list[Command]:
        position = self._position[bucket.index]
        bucket.leaving = position < self._first_kept
        if position >= self._first_kept_in_slot:
            return []
        return self._towards_file(bucket) if self.staged or bucket.leaving else []

    def _make_room_for_head(self) -> list[Command]:
        """Nothing is in flight and the step is not over: what the next bucket needs is held by others.

        This happens only when the buckets kept from the last step are not the first of this one, because
        another set of parameters has gradients. The kept bucket that is needed last gives way.
        """
        head = self._buckets[self._order[self._next_update]]
        others = [
            bucket for bucket in self._buckets if bucket is not head and bucket.phase in _AT_REST_IN_MEMORY
        ]
        if head.phase is _Phase.IN_PLACE:
            last = max((b for b in others if b.slot is not None), key=self._position_of)
            return [self._command(Stage.DOWNLOAD, last)]
        last = max(others, key=self._position_of)
        if last.dirty:
            last.leaving = True
            return self._towards_file(last)
        self._release(last)
        return self._reads()

    def _let_go_of_unordered(self) -> list[Command]:
        commands = []
        for bucket in self._buckets:
            if bucket.index in self._position or bucket.phase not in _AT_REST_IN_MEMORY:
                continue
            if bucket.dirty:
                bucket.leaving = True
                commands += self._towards_file(bucket)
            else:
                self._release(bucket)
        return commands

    def _towards_file(self, bucket: _Bucket) -> list[Command]:
        in_slot = bucket.slot is not None
        return [self._command(Stage.DOWNLOAD if in_slot else Stage.WRITE, bucket)]

    # ---- bookkeeping -------------------------------------------------------------------------------------

    def _command(self, stage: Stage, bucket: _Bucket) -> Command:
        bucket.phase = _PHASE_DURING[stage]
        command = Command(stage, bucket.index, bucket.place, bucket.slot)
        self.outstanding.add(command)
        return command

    def _retire(self, command: Command) -> _Bucket:
        if command not in self.outstanding:
            raise ScheduleError(f"{command} is not outstanding")
        self.outstanding.remove(command)
        return self._buckets[command.bucket]

    def _release(self, bucket: _Bucket) -> None:
        self._give_slot_back(bucket)
        self._places.give(bucket.place)
        bucket.place = None
        bucket.phase = _Phase.ON_FILE
        bucket.dirty = bucket.leaving = False

    def _give_slot_back(self, bucket: _Bucket) -> None:
        if bucket.slot is not None:
            self._slots.give(bucket.slot)
            bucket.slot = None

    def _position_of(self, bucket: _Bucket) -> int:
        return self._position[bucket.index]

    def _require_between_steps(self) -> None:
        if self._broken:
            raise ScheduleError("a command failed; reset first")
        if not self.step_done:
            raise ScheduleError("the previous step is not done")
