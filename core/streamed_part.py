"""The streamed state of one optimizer, as something to save and to restore."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from optstream.core.memory import allocate_host
from optstream.core.placement import Placement, Region, regions_of
from optstream.core.plan import SEGMENTS
from optstream.core.state_part import StatePart, Values
from optstream.core.store import BucketStore
from optstream.core.streamer import StateStreamer
from optstream.core.update import Publish


class StreamedPart(StatePart):
    """placements: of each entry's parameter. starts: where each entry begins in its flattened parameter.
    publish: takes restored main values into the model's own parameters; not needed to save."""

    def __init__(
        self,
        streamer: StateStreamer,
        placements: Sequence[Sequence[Placement]],
        starts: Sequence[int],
        publish: Publish | None = None,
    ) -> None:
        self._streamer, self._publish = streamer, publish
        self.regions = [
            region
            for bucket in streamer.buckets
            for piece in bucket.pieces
            for region in regions_of(
                placements[piece.entry],
                block=bucket.index,
                entry=piece.entry,
                start=starts[piece.entry] + piece.start,
                stop=starts[piece.entry] + piece.stop,
                position=piece.offset,
            )
        ]
        self._place: torch.Tensor | None = None

    def snapshot(self) -> StreamedSnapshot:
        return StreamedSnapshot(self._streamer, self.regions)

    def open_block(self, block: int) -> Values:
        store = self._streamer.store
        if self._place is None:
            self._place = allocate_host(store.place_bytes)
        values = _values(store, block, self._place)
        for segment in values.values():
            for padding in self._streamer.buckets[block].padding(len(segment)):
                segment[padding].zero_()
        return values

    def flush_block(self, block: int, step: int) -> None:
        store = self._streamer.store
        store.write_bucket(block, self._place, step=step, workers=self._streamer.engine.writers)
        main = _values(store, block, self._place)["main"]
        for piece in self._streamer.buckets[block].pieces:
            self._publish(piece, main[piece.span])

    def restore_steps(self, steps: Mapping[int, int]) -> None:
        self._place = None
        for entry, step in steps.items():
            self._streamer.counts.entries[entry] = step
        self._streamer.steps = max(steps.values(), default=0)


class StreamedSnapshot:
    """A `PartSnapshot` of the files: nothing is in memory but the block that is read."""

    def __init__(self, streamer: StateStreamer, regions: Sequence[Region]) -> None:
        streamer.engine.drain()
        self._store = streamer.store
        self._files = self._store.snapshot()
        self.regions = regions
        self.dtypes = {name: self._store.formats[name].dtype for name in SEGMENTS}
        self.steps = list(streamer.counts.entries)
        self.block_bytes = self._store.place_bytes

    def read(self, block: int, memory: torch.Tensor) -> Values:
        self._files.read_bucket(block, memory)
        return _values(self._store, block, memory)

    def release(self, block: int) -> None:
        self._files.release(block)

    def close(self) -> None:
        self._files.close()


def _values(store: BucketStore, block: int, memory: torch.Tensor) -> Values:
    extents = store.layouts[block].segments
    return {
        name: memory[extents[name].offset : extents[name].end].view(store.formats[name].dtype)
        for name in SEGMENTS
    }
