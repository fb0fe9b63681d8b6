"""Where the elements of a parameter lie in the global tensors of a checkpoint. Pure.

The tensors of a checkpoint are the model's own, by name and whole: how they were cut over ranks, and how a
rank's shard was cut into buckets, is gone from it. So any rank of any topology finds what it needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from optstream.core.rectangles import rectangles

# The most elements of one stored item: what a reader holds in memory to take some of them.
ITEM_NUMEL = 8 << 20


@dataclass(frozen=True)
class Placement:
    """Elements [start, stop) of a flattened parameter are one box of a global tensor.

    key: the tensor's name. global_shape: its shape. offsets, sizes: the box. owner: whether this rank is the
    one that saves it, of those that hold a copy.
    """

    key: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int = 0
    owner: bool = True

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.sizes)


def whole(key: str, shape: Sequence[int]) -> Placement:
    """A parameter that is a global tensor itself."""
    return Placement(key, tuple(shape), (0,) * len(shape), tuple(shape))


@dataclass(frozen=True)
class Item:
    """A rectangle of the global tensor `key`, contiguous at element `position` of a block's segments."""

    key: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    position: int

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


@dataclass(frozen=True)
class Region:
    """Elements [start, stop) of a flattened parameter, all in one placement, and where they are held: from
    element `position` on in the segments of block `block`. `entry` is whose they are."""

    block: int
    entry: int
    placement: Placement
    start: int
    stop: int
    position: int

    @property
    def span(self) -> slice:
        return slice(self.position, self.position + self.stop - self.start)

    def items(self, numel_max: int = ITEM_NUMEL) -> Iterator[Item]:
        box = self.placement
        for start in range(self.start, self.stop, numel_max):
            stop = min(start + numel_max, self.stop)
            for part in rectangles(box.sizes, start - box.start, stop - box.start):
                yield Item(
                    box.key,
                    box.global_shape,
                    tuple(a + b for a, b in zip(box.offsets, part.offsets, strict=True)),
                    part.sizes,
                    self.position + box.start + part.start - self.start,
                )


def regions_of(
    placements: Sequence[Placement], *, block: int, entry: int, start: int, stop: int, position: int
) -> Iterator[Region]:
    """Elements [start, stop) of a flattened parameter, held from `position` on, cut by its placements."""
    for placement in placements:
        low, high = max(start, placement.start), min(stop, placement.stop)
        if low < high:
            yield Region(block, entry, placement, low, high, position + low - start)
