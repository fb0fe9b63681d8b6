"""A run of a flattened tensor as a few rectangles of the tensor itself. Pure.

A rank of a distributed optimizer owns elements [start, stop) of a flattened parameter, which is no rectangle
in general: a torn first row, whole rows, a torn last row, and the same again in every further dimension. Each
of the at most 2N - 1 rectangles is contiguous in the flattened tensor, too, so that nothing need be gathered.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Rectangle:
    """`sizes` elements from `offsets` on; `start` is its first element's place in the flattened tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


def rectangles(shape: Sequence[int], start: int, stop: int) -> Iterator[Rectangle]:
    """The rectangles that elements [start, stop) of a flattened tensor of this shape are, in order.

    Raises ValueError for a run that is not inside the tensor.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"elements {start} to {stop} are not in a tensor of shape {tuple(shape)}")
    return _rectangles(tuple(shape), start, stop, (), 0)


def _rectangles(
    shape: tuple[int, ...], start: int, stop: int, outer: tuple[int, ...], base: int
) -> Iterator[Rectangle]:
    """`outer`: indices into the dimensions already fixed; `base`: where that part begins, flattened."""
    if start == stop:
        return
    ones = (1,) * len(outer)
    if not shape:
        yield Rectangle(outer, ones, base)
        return
    row = math.prod(shape[1:])
    first, last = start // row, stop // row  # `last` is the row that is torn, or one past the end
    if first == last:
        yield from _rectangles(
            shape[1:], start - first * row, stop - first * row, (*outer, first), base + first * row
        )
        return
    if start % row:
        yield from _rectangles(shape[1:], start % row, row, (*outer, first), base + first * row)
        first += 1
    if first < last:
        zeros = (0,) * (len(shape) - 1)
        yield Rectangle((*outer, first, *zeros), (*ones, last - first, *shape[1:]), base + first * row)
    if stop % row:
        yield from _rectangles(shape[1:], 0, stop % row, (*outer, last), base + last * row)
