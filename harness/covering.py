"""Few combinations that cover every allowed pair, or triple, of values; and an independent count of it.

allpairspy generates. It stops as soon as a row brings nothing new, and under constraints such as ours leaves
a tenth of the allowed pairs uncovered without a word. So coverage is counted here, against the tuples that
the space of allowed combinations really has, and rows are added until nothing is missing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from optstream.harness.domains import Combination
from optstream.harness.errors import ConfigurationError
from optstream.harness.valid_space import ValidSpace

Assignment = tuple[tuple[str, object], ...]


@dataclass(frozen=True, slots=True)
class Coverage:
    """How many of the allowed value tuples of some strength a set of combinations covers."""

    strength: int
    covered: int
    missing: tuple[Assignment, ...]

    @property
    def total(self) -> int:
        return self.covered + len(self.missing)


def count_coverage(rows: Sequence[Combination], space: ValidSpace, strength: int) -> Coverage:
    """Compare the value tuples in `rows` with those in the space, wherever the rows came from."""
    covered = 0
    missing: list[Assignment] = []
    for dests in itertools.combinations(space.domains, strength):
        allowed = space.project(dests)
        present = {tuple(row[dest] for dest in dests) for row in rows}
        covered += len(allowed & present)
        missing += (tuple(zip(dests, values, strict=True)) for values in allowed - present)
    return Coverage(strength, covered, tuple(missing))


def covering_array(space: ValidSpace, strength: int = 2) -> list[Combination]:
    """Allowed combinations that together hold every allowed tuple of `strength` values."""
    rows: list[Combination] = list(_generated(space, strength))
    missing = count_coverage(rows, space, strength).missing
    # Sets do not iterate alike in every process, and a covering array should be the same everywhere.
    rows += _rows_holding(sorted(missing, key=repr), space)
    return rows


def _generated(space: ValidSpace, strength: int) -> Iterator[Combination]:
    try:
        from allpairspy import AllPairs
    except ImportError as error:
        raise ConfigurationError(
            "no covering array can be made",
            why="allpairspy is not installed",
            remedy="Install it with: pip install 'optstream[test]'",
        ) from error
    dests = tuple(space.domains)

    def extendable(prefix: Sequence[object]) -> bool:
        return space.complete(dict(zip(dests, prefix, strict=False))) is not None

    for row in AllPairs(
        [list(values) for values in space.domains.values()], filter_func=extendable, n=strength
    ):
        yield dict(zip(dests, row, strict=True))


def _rows_holding(missing: Sequence[Assignment], space: ValidSpace) -> Iterator[Combination]:
    """Rows that hold all of these tuples: each takes the first one left and every other that still fits."""
    left = list(missing)
    while left:
        row: dict[str, object] = {}
        kept_out: list[Assignment] = []
        for assignment in left:
            if any(row.get(dest, value) != value for dest, value in assignment):
                kept_out.append(assignment)
                continue
            grown = {**row, **dict(assignment)}
            if len(grown) > len(row) and space.complete(grown) is None:
                kept_out.append(assignment)
                continue
            row = grown
        left = kept_out
        yield space.complete(row)
