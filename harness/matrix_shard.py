"""`pytest --matrix-shard i/n`: the nightly matrix, split over runners.

Tests of the matrix take a `matrix_part` parameter, one test a part. A shard keeps every n-th of those and
leaves all other tests alone, so that the shards 1/n to n/n together run each part once.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass

PARAMETER = "matrix_part"


@dataclass(frozen=True, slots=True)
class Shard:
    """The `index`-th (from 1) of `of` shards."""

    index: int
    of: int

    def select(self, items: Sequence) -> tuple[list, list]:
        """Split collected test items into those that run in this shard and those that do not."""
        kept, dropped = [], []
        place = 0
        for item in items:
            callspec = getattr(item, "callspec", None)
            if callspec is None or PARAMETER not in callspec.params:
                kept.append(item)
                continue
            (kept if place % self.of == self.index - 1 else dropped).append(item)
            place += 1
        return kept, dropped


def parse_shard(text: str) -> Shard:
    """`2/3` is the second of three. Raises argparse.ArgumentTypeError for anything else."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match:
        index, of = map(int, match.groups())
        if 1 <= index <= of:
            return Shard(index, of)
    raise argparse.ArgumentTypeError(f"{text!r} is no shard: write I/N with 1 <= I <= N, as in 2/3")
