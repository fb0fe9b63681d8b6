"""Steps as a Chrome trace, to look at in Perfetto or chrome://tracing.

One track for the steps, and for each stage as many as it has buckets at the same time: slices of one track
may not overlap. Times count from the first slice.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from optstream.core.records import StepRecord
from optstream.core.schedule import Stage
from optstream.harness.output import write_text

MICROSECONDS = 1e6
PROCESS = 0


@dataclass(frozen=True)
class Slice:
    """Something that took from `start_s` to `end_s`, shown on one of the tracks called `track`."""

    track: str
    name: str
    start_s: float
    end_s: float
    facts: dict[str, int | float]


def write_trace(path: str, records: Sequence[StepRecord]) -> None:
    """Write `records` to `path`. Records too old to have kept their spans show as steps alone.

    Raises ConfigurationError where the file cannot be written.
    """
    write_text(path, json.dumps({"traceEvents": trace_events(records), "displayTimeUnit": "ms"}))


def trace_events(records: Iterable[StepRecord]) -> list[dict]:
    """The events of the Chrome trace format: a complete slice ("X") for each span and step, names ("M")."""
    slices = sorted(_slices(records), key=lambda each: (each.start_s, each.end_s))
    if not slices:
        return []
    origin_s = slices[0].start_s
    tracks = _Tracks()
    events = [
        {
            "ph": "X",
            "pid": PROCESS,
            "tid": tracks.number_of(each),
            "name": each.name,
            "cat": each.track,
            "ts": (each.start_s - origin_s) * MICROSECONDS,
            "dur": (each.end_s - each.start_s) * MICROSECONDS,
            "args": each.facts,
        }
        for each in slices
    ]
    return tracks.names() + events


def _slices(records: Iterable[StepRecord]) -> Iterator[Slice]:
    for record in records:
        facts = {
            "read_bytes": record.read_bytes,
            "written_bytes": record.written_bytes,
            "cache_hits": record.cache_hits,
            "waited_read_s": record.waited_read_s,
            "waited_write_s": record.waited_write_s,
        }
        yield Slice("step", f"step {record.step}", record.start_s, record.start_s + record.total_s, facts)
        for span in record.spans:
            facts = {"bucket": span.bucket, "step": record.step}
            yield Slice(span.stage.value, f"bucket {span.bucket}", span.start_s, span.end_s, facts)


class _Tracks:
    """Hands out track numbers. Slices must come in the order of their starts."""

    # Tracks of one kind lie together, in the order of the pipeline.
    _KINDS = ("step", *(stage.value for stage in Stage))
    _KIND_STRIDE = 1000

    def __init__(self) -> None:
        self._busy_until_s: dict[str, list[float]] = {kind: [] for kind in self._KINDS}

    def number_of(self, each: Slice) -> int:
        busy_until_s = self._busy_until_s[each.track]
        free = (index for index, until_s in enumerate(busy_until_s) if until_s <= each.start_s)
        index = next(free, len(busy_until_s))
        busy_until_s[index : index + 1] = [each.end_s]
        return self._number(each.track, index)

    def names(self) -> list[dict]:
        return [
            {
                "ph": "M",
                "pid": PROCESS,
                "tid": self._number(kind, index),
                "name": "thread_name",
                "args": {"name": kind if len(busy) == 1 else f"{kind} {index + 1}"},
            }
            for kind, busy in self._busy_until_s.items()
            for index in range(len(busy))
        ]

    def _number(self, kind: str, index: int) -> int:
        return self._KINDS.index(kind) * self._KIND_STRIDE + index
