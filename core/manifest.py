"""What a checkpoint holds, as one JSON file that is written last: without it there is no checkpoint.

It names every stored item with its place, size and checksum, and ends with a checksum of itself. It is data
only: reading one runs no code, whoever wrote it.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from optstream.core.errors import CheckpointError
from optstream.core.param_groups import GroupRecord

FORMAT = "optstream checkpoint"
VERSION = 1
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class StoredItem:
    """A rectangle of a tensor: `size` bytes at `offset` of `file`. `step`: updates that its elements had."""

    file: str
    offset: int
    size: int
    checksum: str
    step: int


@dataclass
class Manifest:
    """One checkpoint. `generation` is the name that its data files have in common; `iteration` the trainer's
    count of steps; `topology` the ranks that saved it; `formats` each segment's dtype; `files` their sizes.

    tensors: by name, dtype, shape and the offsets and sizes of each stored item. items: where each of them
    is."""

    generation: str
    iteration: int
    topology: dict[str, int]
    formats: dict[str, str]
    groups: list[GroupRecord]
    files: dict[str, int]
    tensors: dict[str, TensorStorageMetadata] = field(repr=False)
    items: dict[MetadataIndex, StoredItem] = field(repr=False)

    @property
    def data_bytes(self) -> int:
        return sum(item.size for item in self.items.values())

    @property
    def entries(self) -> int:
        """Parameters whose state it holds."""
        return sum(name.startswith("main/") for name in self.tensors)

    def metadata(self) -> Metadata:
        return Metadata(self.tensors, planner_data=self.groups, storage_data=self.items)

    def to_bytes(self) -> bytes:
        body = {
            "format": FORMAT,
            "version": VERSION,
            "generation": self.generation,
            "iteration": self.iteration,
            "topology": self.topology,
            "formats": self.formats,
            "groups": [asdict(group) for group in self.groups],
            "files": self.files,
            "tensors": {name: self._tensor(name, tensor) for name, tensor in sorted(self.tensors.items())},
        }
        text = json.dumps(body, separators=(",", ":"), ensure_ascii=True)
        return f'{text[:-1]},"checksum":"{xxhash.xxh3_64_hexdigest(text.encode())}"}}\n'.encode()

    def _tensor(self, name: str, tensor: TensorStorageMetadata) -> dict[str, Any]:
        stored = [self.items[MetadataIndex(name, chunk.offsets)] for chunk in tensor.chunks]
        return {
            "dtype": DTYPE_NAMES[tensor.properties.dtype],
            "shape": list(tensor.size),
            "items": [
                [list(c.offsets), list(c.sizes), i.file, i.offset, i.size, i.checksum, i.step]
                for c, i in zip(tensor.chunks, stored, strict=True)
            ],
        }

    @classmethod
    def from_bytes(cls, data: bytes, path: str) -> Manifest:
        """Raises CheckpointError, naming `path`, for anything but an intact manifest of this version."""
        try:
            body = json.loads(data)
            is_ours = body["format"] == FORMAT
            version = int(body["version"])
        except (ValueError, TypeError, KeyError) as error:
            raise damaged(path, "it is not the JSON of a manifest") from error
        if not is_ours:
            raise damaged(path, f"its format is {body['format']!r}")
        if version != VERSION:
            raise CheckpointError(
                f"{path} cannot be read",
                why=f"it is of format version {version}, and this optstream reads version {VERSION}",
                remedy="Use the optstream that wrote it",
                path=path,
            )
        text, _, _ = data.rpartition(b',"checksum":')
        if body.get("checksum") != xxhash.xxh3_64_hexdigest(text + b"}"):
            raise damaged(path, "its checksum differs")
        try:
            return cls._from_body(body)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise damaged(path, f"{type(error).__name__}: {error}") from error

    @classmethod
    def _from_body(cls, body: dict[str, Any]) -> Manifest:
        tensors, items = {}, {}
        for name, tensor in body["tensors"].items():
            shape, chunks = torch.Size(tensor["shape"]), []
            for offsets, sizes, file, offset, size, checksum, step in tensor["items"]:
                chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
                items[MetadataIndex(name, offsets)] = StoredItem(file, offset, size, checksum, step)
            properties = TensorProperties(dtype=DTYPES[tensor["dtype"]])
            check_coverage(name, shape, chunks)
            tensors[name] = TensorStorageMetadata(properties, shape, chunks)
        return cls(
            generation=body["generation"],
            iteration=body["iteration"],
            topology=body["topology"],
            formats=body["formats"],
            groups=[GroupRecord(**group) for group in body["groups"]],
            files=body["files"],
            tensors=tensors,
            items=items,
        )


def check_coverage(name: str, shape: torch.Size, chunks: list[ChunkStorageMetadata]) -> None:
    """Raises ValueError unless the chunks have as many elements as the tensor."""
    held = sum(math.prod(chunk.sizes) for chunk in chunks)
    if held != math.prod(shape):
        raise ValueError(f"{held} of the {math.prod(shape)} elements of {name} are there")


def damaged(path: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is damaged", why=why, remedy="Load an older checkpoint, and check the disk", path=path
    )
