"""How the items of a checkpoint get to its files and back: storage for torch.distributed.checkpoint.

Data files are raw: item after item, each at an offset, of a size and with a checksum that the manifest has.
Host memory is bounded: a few buffers on the way out, a few items on the way in.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint import (
    LoadPlan,
    LoadPlanner,
    Metadata,
    SavePlan,
    StorageReader,
    StorageWriter,
)
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from optstream.backends.errors import MissingFileError, SpaceError, StorageError, TransferError
from optstream.backends.interface import Backend, StoredFile
from optstream.backends.reader import DirectoryReader, ReadableFile
from optstream.core.checkpoint_planner import StateSavePlanner
from optstream.core.errors import CheckpointError
from optstream.core.integrity import checksum
from optstream.core.manifest import DTYPE_NAMES, Manifest, StoredItem
from optstream.core.memory import allocate_host, bytes_of
from optstream.core.plan import MEMORY_ALIGNMENT_BYTES, SEGMENTS, round_up
from optstream.core.publish import (
    CheckpointDirectory,
    data_file,
    make_visible_durable,
    publish,
    rank_directory,
    remove_others,
    remove_ranks_from,
)
from optstream.core.tasks import start
from optstream.core.workers import Workers

# As the engine's: larger transfers move no faster.
BUFFER_BYTES = 4 << 20
WRITERS = 4
READERS = 4


@dataclass(frozen=True)
class Header:
    """What a manifest says besides what the planner knows."""

    generation: str
    iteration: int
    topology: dict[str, int]


class StateWriter(StorageWriter):
    """Writes one generation of `directory`; torch's saver calls it on every rank.

    progress: told the bytes of payload written so far and in all, on this rank.
    `close` it in the end, in success and failure: claims are given up, and what was not published is removed.
    """

    def __init__(
        self,
        directory: CheckpointDirectory,
        header: Header,
        *,
        rank: int,
        ranks: int,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self._directory, self._header = directory, header
        self._rank, self._ranks, self._progress = rank, ranks, progress
        self._root: Backend | None = None
        self._own: Backend | None = None
        self._published = False

    # ---- in the order in which torch calls ---------------------------------------------------------------

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        return None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Claim what this rank will write. Raises ClaimedError where another save is at it."""
        if is_coordinator:
            self._root = self._directory.claim()
            make_visible_durable(self._root)
        self._own = self._directory.claim_rank(self._rank)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Nothing is written yet. Raises SpaceError where all ranks' files together do not fit."""
        needed = sum(file_bytes(plan) for plan in plans)
        free = self._root.free_bytes() + sum(self._leftover_bytes(rank) for rank in range(self._ranks))
        if needed > free:
            raise SpaceError(
                f"{self._directory.path} cannot hold the checkpoint",
                why=f"{needed} bytes are needed, {free} are free",
                remedy="Free space there, or save somewhere else; the checkpoint that is there stays",
                needed_bytes=needed,
                free_bytes=free,
                path=self._directory.path,
            )
        return plans

    def write_data(self, plan: SavePlan, planner: StateSavePlanner) -> Future:
        remove_others(self._own, self._visible_generation())
        name = data_file(self._header.generation)
        total = file_bytes(plan)
        results = []
        with self._own.create(name, total) as file, closing(_Appender(file)) as appender:
            for item in plan.items:
                data = planner.resolve_data(item).reshape(-1).view(torch.uint8)
                offset, digest = appender.append(data)
                stored = StoredItem(
                    f"{rank_directory(self._rank)}/{name}",
                    offset,
                    data.numel(),
                    f"{digest:016x}",
                    planner.step_of(item.index),
                )
                results.append(WriteResult(item.index, data.numel(), stored))
                self._progress(offset + data.numel(), total)
            appender.flush()
            file.sync()
        done: Future = Future()
        done.set_result(results)
        return _as_torch_future(done)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        items = {result.index: result.storage_data for of_rank in results for result in of_rank}
        files: dict[str, int] = {}
        for item in items.values():
            files[item.file] = max(
                files.get(item.file, 0), round_up(item.offset + item.size, MEMORY_ALIGNMENT_BYTES)
            )
        tensors = metadata.state_dict_metadata
        publish(
            self._root,
            Manifest(
                generation=self._header.generation,
                iteration=self._header.iteration,
                topology=self._header.topology,
                formats=_formats(tensors),
                groups=metadata.planner_data,
                files=files,
                tensors=tensors,
                items=items,
            ),
        )

    # ---- afterwards --------------------------------------------------------------------------------------

    def succeeded(self) -> None:
        """The manifest is published, and every rank knows: older generations go."""
        self._published = True
        remove_others(self._own, self._header.generation)
        if self._root is not None:
            remove_ranks_from(self._directory, self._ranks)

    def close(self) -> None:
        """Give the claims up. Idempotent."""
        with ExitStack() as closed:
            for backend in (self._root, self._own):
                if backend is not None:
                    closed.callback(backend.close)
            if self._own is not None and not self._published:
                self._remove_own()
            self._root = self._own = None

    def _remove_own(self) -> None:
        # A rename whose directory could not be synced may be undone by a crash, or not: then both generations
        # are needed, and the next save tidies up.
        visible = self._visible_generation()
        if visible != self._header.generation:
            remove_others(self._own, visible)

    def _visible_generation(self) -> str | None:
        manifest = self._directory.manifest()
        return manifest.generation if manifest is not None else None

    def _leftover_bytes(self, rank: int) -> int:
        visible = self._visible_generation()
        kept = data_file(visible) if visible is not None else None
        return sum(size for name, size in self._directory.rank_files(rank).items() if name != kept)


def file_bytes(plan: SavePlan) -> int:
    """The size of the data file that a rank's plan makes."""
    return sum(round_up(_item_bytes(item), MEMORY_ALIGNMENT_BYTES) for item in plan.items)


def _item_bytes(item: Any) -> int:
    data = item.tensor_data
    return data.chunk.sizes.numel() * data.properties.dtype.itemsize


def _formats(tensors: dict[str, Any]) -> dict[str, str]:
    found = {}
    for segment in SEGMENTS:
        dtypes = {t.properties.dtype for name, t in tensors.items() if name.startswith(f"{segment}/")}
        found[segment] = "/".join(sorted(DTYPE_NAMES[dtype] for dtype in dtypes))
    return found


def _as_torch_future(done: Future) -> torch.futures.Future:
    future: torch.futures.Future = torch.futures.Future()
    future.set_result(done.result())
    return future


class _Appender:
    """Items one after the other into a file, through a few buffers that are written while others fill."""

    def __init__(self, file: StoredFile) -> None:
        self._file = file
        self._workers = Workers(WRITERS, "optstream-save")
        self._buffers = [allocate_host(BUFFER_BYTES) for _ in range(WRITERS + 1)]
        self._writing: list[Future | None] = [None] * len(self._buffers)
        self._turn = 0
        self._filled = 0
        self._written = 0

    def append(self, data: torch.Tensor) -> tuple[int, int]:
        """Returns the offset (bytes) and the checksum of `data` (1-D uint8 on the host)."""
        offset = self._written + self._filled
        digest = checksum(bytes_of(data))
        padded = round_up(data.numel(), MEMORY_ALIGNMENT_BYTES)
        done = 0
        while done < padded:
            room = min(BUFFER_BYTES - self._filled, padded - done)
            into = self._buffers[self._turn][self._filled : self._filled + room]
            given = data[done : done + room]
            into[: given.numel()].copy_(given)
            into[given.numel() :].zero_()
            done += room
            self._filled += room
            if self._filled == BUFFER_BYTES:
                self._send()
        return offset, digest

    def flush(self) -> None:
        """Return when everything is written. Raises what writing raised."""
        if self._filled:
            self._send()
        for future in self._writing:
            if future is not None:
                future.result()

    def close(self) -> None:
        self._workers.close()

    def _send(self) -> None:
        memory = bytes_of(self._buffers[self._turn][: self._filled])
        self._writing[self._turn] = start(self._workers, self._file.write_from, self._written, memory)
        self._written += self._filled
        self._filled = 0
        self._turn = (self._turn + 1) % len(self._buffers)
        if (future := self._writing[self._turn]) is not None:
            future.result()


class StateReader(StorageReader):
    """Reads what `StateWriter` wrote; every item is checked against its checksum."""

    def __init__(self, manifest: Manifest, reader: DirectoryReader) -> None:
        self._manifest, self._reader = manifest, reader

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        return None

    def read_metadata(self) -> Metadata:
        return self._manifest.metadata()

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        return None

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        # Several reads may take parts of one stored item; those that follow each other share it.
        order: list[MetadataIndex] = []
        for read in plan.items:
            if not order or order[-1] != read.storage_index:
                order.append(read.storage_index)
        with closing(_Items(self._manifest, self._reader, order)) as items:
            stored = iter(items)
            current, tensor = None, None
            for read in plan.items:
                if read.storage_index != current:
                    current, tensor = read.storage_index, next(stored)
                part = tensor
                for dim, (offset, length) in enumerate(zip(read.storage_offsets, read.lengths, strict=True)):
                    part = part.narrow(dim, offset, length)
                target = planner.resolve_tensor(read)
                target.copy_(part)
                planner.commit_tensor(read, target)
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(None)
        return future


class _Items:
    """The stored items named in `order`, whole and checked, some read ahead of their turn."""

    def __init__(self, manifest: Manifest, reader: DirectoryReader, order: list[MetadataIndex]) -> None:
        self._manifest, self._order = manifest, order
        self._shapes = {
            MetadataIndex(name, chunk.offsets): (chunk.sizes, tensor.properties.dtype)
            for name, tensor in manifest.tensors.items()
            for chunk in tensor.chunks
        }
        self._files = OpenFiles(reader)
        self._workers = Workers(READERS, "optstream-load")

    def __iter__(self) -> Iterator[torch.Tensor]:
        ahead: list[Future] = [start(self._workers, self._read, index) for index in self._order[:READERS]]
        for position in range(len(self._order)):
            tensor = ahead.pop(0).result()
            if position + READERS < len(self._order):
                ahead.append(start(self._workers, self._read, self._order[position + READERS]))
            yield tensor

    def close(self) -> None:
        self._workers.close()
        self._files.close()

    def _read(self, index: MetadataIndex) -> torch.Tensor:
        item = self._manifest.items[index]
        sizes, dtype = self._shapes[index]
        memory = read_item(self._files.open(item.file), index.fqn, item)
        return memory.view(dtype).view(sizes)


class OpenFiles:
    def __init__(self, reader: DirectoryReader) -> None:
        self._reader = reader
        self._open: dict[str, ReadableFile] = {}

    def open(self, name: str) -> ReadableFile:
        if name not in self._open:
            try:
                # Two threads that open it at once leave one handle over, which is closed with the object.
                file = self._reader.open(name)
            except MissingFileError as error:
                raise CheckpointError(
                    f"the checkpoint in {self._reader.path} is incomplete",
                    why=f"{error.path} is missing",
                    remedy="Load an older checkpoint",
                    path=error.path,
                ) from error
            if self._open.setdefault(name, file) is not file:
                file.close()
        return self._open[name]

    def close(self) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()


def read_item(file: ReadableFile, name: str, item: StoredItem) -> torch.Tensor:
    """The bytes of an item (1-D uint8). Raises CheckpointError where they are not those that were saved."""
    memory = torch.empty(item.size, dtype=torch.uint8)
    try:
        file.read_into(item.offset, bytes_of(memory))
    except TransferError as error:
        raise _not_as_saved(file, name, item, error.why) from error
    if not _is_as_saved(memory, item.checksum):
        raise _not_as_saved(file, name, item, "the checksum differs")
    return memory


def _is_as_saved(memory: torch.Tensor, expected: str) -> bool:
    if not expected:
        return True  # A part of a tensor of another format, which was checked as a whole.
    if expected.startswith("crc32:"):
        return f"crc32:{zlib.crc32(bytes_of(memory)):08x}" == expected
    return f"{checksum(bytes_of(memory)):016x}" == expected


def _not_as_saved(file: ReadableFile, name: str, item: StoredItem, why: str) -> StorageError:
    return CheckpointError(
        f"{file.path} does not hold what was saved",
        why=f"{name}, {item.size} bytes at offset {item.offset}: {why}",
        remedy="Load an older checkpoint, and check the disk",
        path=file.path,
        offset=item.offset,
        operation="read",
    )
