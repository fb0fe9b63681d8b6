"""The optimizer state in Megatron's own distributed checkpoints (`torch_dist`, fully reshardable), seen as
one of ours: the same global tensors under other names, in files of torch's.

Nothing of it is unpickled by trust: of pickles, only a short list of plain classes is let in, and all others
stand as inert objects. Tensors are read where they lie in their zip entries, so that a large one can be read
in parts; zip's own checksums are checked.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import types
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from optstream.backends.errors import MissingFileError
from optstream.backends.reader import DirectoryReader, ReadableFile
from optstream.core.errors import CheckpointError
from optstream.core.manifest import DTYPE_NAMES, Manifest, StoredItem
from optstream.core.param_groups import GroupRecord
from optstream.core.placement import ITEM_NUMEL
from optstream.core.plan import SEGMENTS
from optstream.core.rectangles import rectangles

# How Megatron calls the tensors of a segment: `optimizer.state.<this>.<parameter>`.
MEGATRON_SEGMENTS = {"main": "param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
PREFIX = "optimizer.state."
SHARDING = "fully_reshardable"
COMMON_ITEM = "common_state/shard_0_1"

_PLAIN = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    ("collections", "OrderedDict"),
    ("torch._utils", "_rebuild_tensor_v2"),
}


class _Inert:
    """Stands for an object of a class that was not let in."""

    def __new__(cls, *args: Any, **kwargs: Any) -> _Inert:
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        return None

    def __setstate__(self, state: Any) -> None:
        return None

    def __setitem__(self, key: Any, value: Any) -> None:
        return None

    def append(self, item: Any) -> None:
        return None

    def extend(self, items: Any) -> None:
        return None


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        return _Inert


# What torch.load takes for a pickle module.
_plain_pickle = types.SimpleNamespace(
    __name__="plain_pickle",
    Unpickler=_PlainUnpickler,
    load=lambda file, **options: _PlainUnpickler(file, **options).load(),
)


def is_torch_dist(reader: DirectoryReader) -> bool:
    """Whether the directory says that it is a checkpoint of that format."""
    try:
        return json.loads(reader.read("metadata.json")).get("sharded_backend") == "torch_dist"
    except (MissingFileError, ValueError, AttributeError):
        return False


def read_manifest(reader: DirectoryReader, *, item_numel: int = ITEM_NUMEL) -> Manifest:
    """What the checkpoint holds of optimizer state; items lie in its own files.

    Raises CheckpointError where there is none, or it is not the fully reshardable kind."""
    metadata = _PlainUnpickler(io.BytesIO(reader.read(".metadata"))).load()
    if not isinstance(metadata, Metadata):
        raise _unfit(reader, "its .metadata is not that of a distributed checkpoint")
    groups, step = _groups(reader, metadata)
    tensors: dict[str, TensorStorageMetadata] = {}
    items: dict[MetadataIndex, StoredItem] = {}
    for segment, theirs in MEGATRON_SEGMENTS.items():
        for name, tensor in metadata.state_dict_metadata.items():
            if name.startswith(f"{PREFIX}{theirs}."):
                ours = f"{segment}/{name.removeprefix(f'{PREFIX}{theirs}.')}"
                chunks = []
                for chunk in tensor.chunks:
                    stored = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
                    for part, item in _items(reader, stored, chunk, tensor, step, item_numel):
                        chunks.append(part)
                        items[MetadataIndex(ours, part.offsets)] = item
                properties = TensorProperties(dtype=tensor.properties.dtype)
                tensors[ours] = TensorStorageMetadata(properties, tensor.size, chunks)
    if not tensors:
        raise _unfit(reader, f"it has no tensors named {PREFIX}*")
    formats = {}
    for segment in SEGMENTS:
        dtypes = {t.properties.dtype for name, t in tensors.items() if name.startswith(f"{segment}/")}
        formats[segment] = "/".join(sorted(DTYPE_NAMES[dtype] for dtype in dtypes))
    return Manifest("", step, {}, formats, groups, {}, tensors, items)


def _common(reader: DirectoryReader, metadata: Metadata) -> Any:
    """What is no tensor: a file of its own, or from Megatron-Core 0.19 on an item among the tensors."""
    stored = metadata.storage_data.get(MetadataIndex(COMMON_ITEM))
    if stored is None:
        return _unpickled(reader.read("common.pt"))
    with reader.open(stored.relative_path) as file:
        data = bytearray(stored.length)
        file.read_into(stored.offset, memoryview(data))
    (common,) = _unpickled(bytes(data))
    return common


def _unpickled(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), pickle_module=_plain_pickle, weights_only=False)


def _groups(reader: DirectoryReader, metadata: Metadata) -> tuple[list[GroupRecord], int]:
    common = _common(reader, metadata)
    optimizer = common.get("optimizer") if isinstance(common, dict) else None
    if not isinstance(optimizer, dict):
        raise _unfit(reader, "it was saved without optimizer state")
    # Of a chain, each by its number.
    chain = [optimizer] if "optimizer" in optimizer else [optimizer[key] for key in sorted(optimizer)]
    kinds = {str(each.get("param_state_sharding_type")) for each in chain}
    if kinds != {SHARDING}:
        raise _unfit(
            reader, f"its optimizer state is sharded as {', '.join(sorted(kinds))}, not as {SHARDING}"
        )
    records, steps = [], set()
    for each in chain:
        for group in each["optimizer"]["param_groups"]:
            settings = {key: _listed(value) for key, value in group.items() if key not in ("params", "step")}
            settings.pop("is_expert_parallel", None)
            records.append(GroupRecord(settings, int(group["step"]), []))
            steps.add(int(group["step"]))
    if len(steps) != 1:
        raise _unfit(
            reader, f"its groups have different step counts, {sorted(steps)}, and it names no parameters"
        )
    return records, steps.pop()


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _items(
    reader: DirectoryReader,
    stored: Any,
    chunk: ChunkStorageMetadata,
    tensor: TensorStorageMetadata,
    step: int,
    item_numel: int,
) -> Iterator[tuple[ChunkStorageMetadata, StoredItem]]:
    width, numel = tensor.properties.dtype.itemsize, math.prod(chunk.sizes)
    with reader.open(stored.relative_path) as file:
        offset, size, crc = _tensor_bytes(file, stored)
        if size != numel * width:
            raise _unfit(reader, f"{file.path} holds {size} bytes where {numel * width} belong")
        if numel <= item_numel:
            yield chunk, StoredItem(stored.relative_path, offset, size, f"crc32:{crc:08x}", step)
            return
        _check_in_parts(reader, file, offset, size, crc)
    for start in range(0, numel, item_numel):
        for part in rectangles(chunk.sizes, start, min(start + item_numel, numel)):
            place = torch.Size(a + b for a, b in zip(chunk.offsets, part.offsets, strict=True))
            yield (
                ChunkStorageMetadata(place, torch.Size(part.sizes)),
                # Checked above, as a whole; parts have no checksum of their own.
                StoredItem(stored.relative_path, offset + part.start * width, part.numel * width, "", step),
            )


def _tensor_bytes(file: ReadableFile, stored: Any) -> tuple[int, int, int]:
    """(offset in the file, bytes, CRC-32) of the one tensor in a stored item, which is a zip archive."""
    window = _Window(file, stored.offset, stored.length)
    with zipfile.ZipFile(window) as archive:
        (entry,) = [each for each in archive.infolist() if "/data/" in each.filename]
        # The local header repeats name and extra field, with lengths of its own.
        window.seek(entry.header_offset + 26)
        name_bytes, extra_bytes = (int.from_bytes(window.read(2), "little") for _ in range(2))
        start = stored.offset + entry.header_offset + 30 + name_bytes + extra_bytes
        return start, entry.file_size, entry.CRC


def _check_in_parts(reader: DirectoryReader, file: ReadableFile, offset: int, size: int, crc: int) -> None:
    found = 0
    buffer = memoryview(bytearray(4 << 20))
    for start in range(0, size, len(buffer)):
        part = buffer[: min(len(buffer), size - start)]
        file.read_into(offset + start, part)
        found = zlib.crc32(part, found)
    if found != crc:
        raise _unfit(reader, f"{file.path} is damaged: the checksum of {size} bytes at {offset} differs")


class _Window(io.RawIOBase):
    """A range of a file, as a file that zipfile can read."""

    def __init__(self, file: ReadableFile, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        self._file.read_into(self._offset + self._at, view)
        self._at += len(view)
        return len(view)


def _unfit(reader: DirectoryReader, why: str) -> CheckpointError:
    return CheckpointError(
        f"no optimizer state can be loaded from {reader.path}",
        why=why,
        remedy="Save with --ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable, or accept a fresh "
        "optimizer state with --no-load-optim",
        path=reader.path,
    )
