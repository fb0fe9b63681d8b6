"""All steps of a run: an engine keeps the records of its latest ones only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from optstream.core.records import StepRecord


class Recorded(Protocol):
    """A store or an optimizer that streams."""

    @property
    def records(self) -> list[StepRecord]: ...


class Diary:
    """Call `turn_page` after every step of the trainer. A step that is skipped leaves no record."""

    def __init__(self, stores: Sequence[Recorded]) -> None:
        self._stores = stores
        self._records: list[list[StepRecord]] = [[] for _ in stores]

    def turn_page(self) -> None:
        for store, kept in zip(self._stores, self._records, strict=True):
            for latest in store.records[-1:]:
                if not kept or kept[-1] is not latest:
                    kept.append(latest)

    @property
    def steps(self) -> list[tuple[StepRecord, ...]]:
        """By step, one record of each store. Their written bytes are final once the stores are drained."""
        return list(zip(*self._records, strict=True))
