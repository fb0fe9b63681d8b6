"""What a step did: bytes, seconds and spans, as one typed object."""

from __future__ import annotations

from dataclasses import dataclass, field

from optstream.core.schedule import Stage


@dataclass(frozen=True)
class Span:
    """One stage of one bucket, in seconds of `time.perf_counter`."""

    stage: Stage
    bucket: int
    start_s: float
    end_s: float


@dataclass
class StepRecord:
    """One step of one store.

    read_bytes, written_bytes: payload of the state that this step consumed and produced, whenever it moved:
    a write that finishes during the next forward, or is cached and written steps later, still counts here,
    so both can grow until the store is drained. padding_bytes: what moved besides.
    buckets: how many were updated. reads: how many of them were read from file; cache_hits: how many not.
    start_s: when `step` was called, by `time.perf_counter`. total_s: how long it took.
    waited_read_s, waited_write_s: what the caller of `step` waited for data to come or for room to be made.
    """

    step: int
    read_bytes: int = 0
    written_bytes: int = 0
    padding_bytes: int = 0
    buckets: int = 0
    reads: int = 0
    cache_hits: int = 0
    start_s: float = 0.0
    total_s: float = 0.0
    update_s: float = 0.0
    waited_read_s: float = 0.0
    waited_write_s: float = 0.0
    spans: list[Span] = field(default_factory=list, repr=False)

    @property
    def gigabytes_per_s(self) -> float:
        """Payload in both directions over the time the caller spent in `step`; write-behind can exceed the
        disk's own rate."""
        return (self.read_bytes + self.written_bytes) / self.total_s / 1e9 if self.total_s else 0.0

    def __str__(self) -> str:
        return (
            f"step {self.step}: read {self.read_bytes / 1e9:.3f} GB, wrote {self.written_bytes / 1e9:.3f} GB "
            f"in {self.total_s:.3f} s ({self.gigabytes_per_s:.2f} GB/s); update {self.update_s:.3f} s, "
            f"waited {self.waited_read_s:.3f} s for reads and {self.waited_write_s:.3f} s for writes; "
            f"{self.cache_hits} of {self.buckets} buckets from memory"
        )
