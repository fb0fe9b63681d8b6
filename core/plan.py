"""Entries -> buckets -> byte layout. Pure: no torch, no storage, no clock.

An entry is one parameter shard that this rank owns. Entries are packed into buckets in the given order; a
bucket is the unit that streams. Each bucket is one file:

    [ main | exp_avg | exp_avg_sq | trailer ]      every part padded to the backend's alignment

so that a whole bucket is one contiguous range, and the first step, which needs no moments, reads a prefix.
The trailer says what the rest should be: see `integrity.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

# Pieces start, and entries are cut, at multiples of this many elements. torch's fused CPU Adam works in
# cache lines of 16 fp32 elements and rounds a remainder differently, so other cuts would give other bits.
GRAIN_ELEMENTS = 64

SEGMENTS = ("main", "exp_avg", "exp_avg_sq")


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Entry:
    """One parameter shard: its unique name, its number of elements, and the index of its param group."""

    name: str
    numel: int
    group: int


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of an entry, kept at element `offset` of every segment of its bucket."""

    entry: int
    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def span(self) -> slice:
        """Where the piece lies in its bucket's segments, in elements."""
        return slice(self.offset, self.offset + self.numel)


@dataclass(frozen=True)
class Bucket:
    """Pieces that stream together. `numel` counts elements with the padding between pieces."""

    index: int
    pieces: tuple[Piece, ...]

    @cached_property
    def numel(self) -> int:
        last = self.pieces[-1]
        return round_up(last.offset + last.numel, GRAIN_ELEMENTS)

    @cached_property
    def payload_numel(self) -> int:
        return sum(piece.numel for piece in self.pieces)

    def padding(self, length: int) -> Iterator[slice]:
        """What lies between and behind the pieces in a segment of `length` elements."""
        end = 0
        for piece in self.pieces:
            yield slice(end, piece.span.start)
            end = piece.span.stop
        yield slice(end, length)


def plan_buckets(entries: Sequence[Entry], bucket_numel: int) -> tuple[Bucket, ...]:
    """Pack `entries` in order into buckets of at most `bucket_numel` elements, padding included.

    `bucket_numel` is rounded up to a multiple of GRAIN_ELEMENTS. An entry larger than what is left of a
    bucket starts a new one; an entry larger than a bucket is cut at multiples of GRAIN_ELEMENTS.
    """
    if bucket_numel <= 0:
        raise ValueError(f"bucket_numel must be positive, not {bucket_numel}")
    names = [entry.name for entry in entries]
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"entry names must be unique; these are not: {', '.join(twice)}")
    capacity = round_up(bucket_numel, GRAIN_ELEMENTS)
    filled: list[list[Piece]] = []
    room = 0
    for index, entry in enumerate(entries):
        if entry.numel <= 0:
            raise ValueError(f"entry {entry.name!r} has {entry.numel} elements; it must have at least one")
        start = 0
        while start < entry.numel:
            remaining = entry.numel - start
            if room == 0 or remaining > room:
                filled.append([])
                room = capacity
            numel = min(remaining, room)
            filled[-1].append(Piece(index, start, start + numel, capacity - room))
            room -= round_up(numel, GRAIN_ELEMENTS)
            start += numel
    return tuple(Bucket(index, tuple(pieces)) for index, pieces in enumerate(filled))


@dataclass(frozen=True)
class Extent:
    """A byte range of a bucket's file and of the slot that mirrors it; `payload_bytes` excludes padding."""

    offset: int
    size: int
    payload_bytes: int

    @property
    def end(self) -> int:
        return self.offset + self.size


@dataclass(frozen=True)
class Chunk:
    """The unit of one transfer and of one checksum: a byte range inside one segment of a bucket's file."""

    index: int
    segment: str
    offset: int
    size: int


@dataclass(frozen=True)
class Layout:
    """Where one bucket's parts lie in its file, in bytes. A place in memory has the same layout."""

    segments: dict[str, Extent]
    chunks: tuple[Chunk, ...]
    trailer: Extent

    @property
    def size_bytes(self) -> int:
        return self.trailer.end

    @property
    def state_bytes(self) -> int:
        """Bytes of the segments, padding included: what a slot on the device holds."""
        return self.trailer.offset

    @property
    def payload_bytes(self) -> int:
        return sum(extent.payload_bytes for extent in self.segments.values())


# A tensor view of any stored type starts aligned, and so does a cache line.
MEMORY_ALIGNMENT_BYTES = 64


def bucket_layout(
    bucket: Bucket,
    element_bytes: dict[str, int],
    *,
    alignment_bytes: int,
    chunk_bytes: int,
    trailer_bytes: Callable[[int], int],
) -> Layout:
    """Lay out one bucket.

    element_bytes: each segment's stored bytes per element.
    alignment_bytes: of the backend; segments, chunks and the trailer start and end at multiples of it.
    chunk_bytes: the most one transfer moves (rounded up to the alignment).
    trailer_bytes: how large a trailer for that many chunks is.
    """
    alignment = math.lcm(MEMORY_ALIGNMENT_BYTES, alignment_bytes)
    chunk_size = round_up(chunk_bytes, alignment)
    segments: dict[str, Extent] = {}
    chunks: list[Chunk] = []
    offset = 0
    for name in SEGMENTS:
        size = round_up(bucket.numel * element_bytes[name], alignment)
        segments[name] = Extent(offset, size, bucket.payload_numel * element_bytes[name])
        for start in range(offset, offset + size, chunk_size):
            chunks.append(Chunk(len(chunks), name, start, min(chunk_size, offset + size - start)))
        offset += size
    trailer = Extent(offset, round_up(trailer_bytes(len(chunks)), alignment), 0)
    return Layout(segments, tuple(chunks), trailer)
