"""The engine's own schedule in virtual time, over a model of a node: overlap can be tested without a clock.

What is modelled, in bytes and seconds:

- Each rank reads one bucket at a time and writes one at a time, in the order in which the schedule asks, as
  the engine's I/O threads do; its update and its two copy directions are servers of their own.
- The disks belong to all ranks. Ranks that move in one direction share its bandwidth evenly; where both
  directions are busy, together they get no more than the mixed bandwidth, split evenly, and what one of them
  cannot use goes to the other.
- A transfer starts with one latency, and no rank is faster than its queue depth allows: `queue_depth` chunks
  every latency.

Everything is deterministic: the same input gives the same times. What is not modelled: noise, the processor,
memory bandwidth that Adam and the disks take from each other.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from optstream.core.records import Span
from optstream.core.schedule import Command, Schedule, Stage

# Parts of a transfer that are smaller than this share of it are rounding.
_ROUNDING = 1e-12


@dataclass(frozen=True)
class DeviceModel:
    """The speeds of one node. Infinite and zero are allowed and mean "does not matter".

    read_bytes_per_s, write_bytes_per_s: all disks together, one direction alone.
    mixed_bytes_per_s: both directions together; infinite if they do not disturb each other.
    latency_s, chunk_bytes, queue_depth: of one request; its size; how many a rank keeps in flight each way.
    link_bytes_per_s: between host and device, each rank and direction.
    adam_bytes_per_s: state that one rank updates.
    """

    read_bytes_per_s: float
    write_bytes_per_s: float
    adam_bytes_per_s: float
    mixed_bytes_per_s: float = math.inf
    link_bytes_per_s: float = math.inf
    latency_s: float = 0.0
    chunk_bytes: int = 4 << 20
    queue_depth: int = 4

    @property
    def rank_bytes_per_s(self) -> float:
        """The most one rank moves in one direction, by Little's law."""
        return self.queue_depth * self.chunk_bytes / self.latency_s if self.latency_s else math.inf

    def disk_rates(self, readers: int, writers: int) -> tuple[float, float]:
        """Bytes a second of each of `readers` ranks that read and of `writers` that write meanwhile."""
        read = min(self.read_bytes_per_s, readers * self.rank_bytes_per_s)
        write = min(self.write_bytes_per_s, writers * self.rank_bytes_per_s)
        if readers and writers and read + write > self.mixed_bytes_per_s:
            half = self.mixed_bytes_per_s / 2
            read, write = (
                min(read, max(half, self.mixed_bytes_per_s - write)),
                min(write, max(half, self.mixed_bytes_per_s - read)),
            )
        return (read / readers if readers else 0.0), (write / writers if writers else 0.0)


@dataclass(frozen=True)
class SimulatedStep:
    """When a step began, when its last rank was done, and the spans of each rank that ended meanwhile."""

    start_s: float
    end_s: float
    spans: list[list[Span]]

    @property
    def total_s(self) -> float:
        return self.end_s - self.start_s


@dataclass
class _Work:
    command: Command
    size_bytes: float
    latency_left_s: float
    bytes_left: float
    started_s: float | None = None


@dataclass
class _Rank:
    schedule: Schedule
    queues: dict[Stage, deque[_Work]] = field(default_factory=lambda: {stage: deque() for stage in Stage})
    spans: list[Span] = field(default_factory=list)


class Simulation:
    """`ranks` equal ranks on one node, each with buckets of `sizes_bytes`.

    depth, cache_places, keep_slots, staged: as for `Schedule`. `now_s` is the virtual clock.
    """

    def __init__(
        self,
        device: DeviceModel,
        sizes_bytes: Sequence[float],
        *,
        depth: int,
        ranks: int = 1,
        cache_places: int = 0,
        keep_slots: bool = False,
        staged: bool = False,
    ) -> None:
        self.now_s = 0.0
        self._device = device
        self._sizes = tuple(sizes_bytes)
        self._ranks = [
            _Rank(
                Schedule(
                    len(self._sizes), depth, cache_places=cache_places, keep_slots=keep_slots, staged=staged
                )
            )
            for _ in range(ranks)
        ]

    def step(self) -> SimulatedStep:
        """All ranks step at once; returns when the last is done. Writes may go on behind."""
        started = self.now_s
        for rank in self._ranks:
            rank.spans = []
            self._accept(rank, rank.schedule.start_step(range(len(self._sizes))))
        while not all(rank.schedule.step_done for rank in self._ranks):
            self._advance(math.inf)
        return SimulatedStep(started, self.now_s, [rank.spans for rank in self._ranks])

    def read_ahead(self) -> None:
        """Backward has begun on all ranks."""
        for rank in self._ranks:
            self._accept(rank, rank.schedule.read_ahead())

    def wait(self, seconds: float) -> None:
        """Forward and backward: time passes, and transfers with it."""
        until = self.now_s + seconds
        while self.now_s < until:
            self._advance(until)

    def drain(self) -> None:
        """Write whatever is newer than its file, and wait for it."""
        self._settle()
        for rank in self._ranks:
            self._accept(rank, rank.schedule.drain())
        self._settle()

    def _settle(self) -> None:
        while any(rank.schedule.outstanding for rank in self._ranks):
            self._advance(math.inf)

    def _accept(self, rank: _Rank, commands: list[Command]) -> None:
        for command in commands:
            size = self._sizes[command.bucket]
            on_disk = command.stage in (Stage.READ, Stage.WRITE)
            latency = self._device.latency_s if on_disk else 0.0
            rank.queues[command.stage].append(_Work(command, size, latency, size))

    def _advance(self, until_s: float) -> None:
        """To the next moment at which anything ends or changes its rate, but not beyond `until_s`."""
        active = [
            (rank, stage, rank.queues[stage][0])
            for rank in self._ranks
            for stage in Stage
            if rank.queues[stage]
        ]
        readers, writers = (
            sum(stage is direction and not work.latency_left_s for _, stage, work in active)
            for direction in (Stage.READ, Stage.WRITE)
        )
        read_rate, write_rate = self._device.disk_rates(readers, writers)
        rates = {
            Stage.READ: read_rate,
            Stage.UPLOAD: self._device.link_bytes_per_s,
            Stage.UPDATE: self._device.adam_bytes_per_s,
            Stage.DOWNLOAD: self._device.link_bytes_per_s,
            Stage.WRITE: write_rate,
        }
        left = [work.latency_left_s or work.bytes_left / rates[stage] for _, stage, work in active]
        passed = min([*left, until_s - self.now_s])
        for (_, stage, work), seconds in zip(active, left, strict=True):
            if work.started_s is None:
                work.started_s = self.now_s
            ends = seconds <= passed * (1 + _ROUNDING)
            if work.latency_left_s:
                work.latency_left_s = 0.0 if ends else work.latency_left_s - passed
            else:
                work.bytes_left = 0.0 if ends else work.bytes_left - passed * rates[stage]
        self.now_s += passed
        for rank, stage, work in active:
            if not work.bytes_left:
                rank.queues[stage].popleft()
                rank.spans.append(Span(stage, work.command.bucket, work.started_s, self.now_s))
                self._accept(rank, rank.schedule.completed(work.command))


def lower_bound_s(device: DeviceModel, sizes_bytes: Sequence[float], *, ranks: int = 1) -> float:
    """No order of work makes a step, its writes included, faster than its busiest resource."""
    one_rank = sum(sizes_bytes)
    node = ranks * one_rank
    read = min(device.read_bytes_per_s, ranks * device.rank_bytes_per_s)
    write = min(device.write_bytes_per_s, ranks * device.rank_bytes_per_s)
    # Some disks are faster one way than both ways: those are best kept to one direction at a time.
    both = max(device.mixed_bytes_per_s, read, write)
    return max(
        node / read,
        node / write,
        2 * node / both,
        one_rank / device.adam_bytes_per_s,
        one_rank / device.link_bytes_per_s,
    )
