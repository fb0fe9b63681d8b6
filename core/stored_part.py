"""The state in a checkpoint, as something to save again: one block for each stored item of a main param."""

from __future__ import annotations

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from optstream.core.checkpoint import Source
from optstream.core.checkpoint_storage import OpenFiles, read_item
from optstream.core.errors import UnsupportedError
from optstream.core.placement import Placement, Region
from optstream.core.plan import SEGMENTS
from optstream.core.state_part import Values


class StoredPart:
    """A part that can only be saved, and is its own snapshot: what is stored does not change."""

    def __init__(self, source: Source) -> None:
        self._source, self._files = source, OpenFiles(source.reader)
        tensors = source.manifest.tensors
        names = sorted(name.removeprefix("main/") for name in tensors if name.startswith("main/"))
        self.regions: list[Region] = []
        self.steps: list[int] = []
        for name in names:
            main = tensors[f"main/{name}"]
            self._check_same_items(name)
            for chunk in main.chunks:
                block = len(self.steps)
                place = Placement(name, tuple(main.size), tuple(chunk.offsets), tuple(chunk.sizes))
                self.regions.append(Region(block, block, place, 0, place.stop, 0))
                self.steps.append(source.manifest.items[MetadataIndex(f"main/{name}", chunk.offsets)].step)
        self.dtypes = {
            segment: tensors[f"{segment}/{names[0]}"].properties.dtype if names else torch.float32
            for segment in SEGMENTS
        }
        # Items are read into memory of their own.
        self.block_bytes = 0

    def snapshot(self) -> StoredPart:
        return self

    def read(self, block: int, memory: torch.Tensor) -> Values:
        place = self.regions[block].placement
        return {segment: self._read(f"{segment}/{place.key}", place.offsets) for segment in SEGMENTS}

    def release(self, block: int) -> None:
        return None

    def close(self) -> None:
        self._files.close()

    def _read(self, name: str, offsets: tuple[int, ...]) -> torch.Tensor:
        manifest = self._source.manifest
        item = manifest.items[MetadataIndex(name, offsets)]
        return read_item(self._files.open(item.file), name, item).view(
            manifest.tensors[name].properties.dtype
        )

    def _check_same_items(self, name: str) -> None:
        tensors = self._source.manifest.tensors
        cuts = {
            tuple((tuple(c.offsets), tuple(c.sizes)) for c in tensors[f"{segment}/{name}"].chunks)
            if f"{segment}/{name}" in tensors
            else ()
            for segment in SEGMENTS
        }
        if len(cuts) != 1:
            raise UnsupportedError(
                f"{self._source.path} cannot be converted",
                why=f"the moments of {name} are cut unlike its values",
            )
