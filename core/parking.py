"""Where the bytes of a sleeping trainer are: in host memory, or in a file through the storage backend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Protocol

import torch

from optstream.backends.errors import SpaceError
from optstream.backends.interface import Backend, StoredFile
from optstream.core.device_memory import Parked
from optstream.core.errors import CorruptionError
from optstream.core.integrity import checksum_of
from optstream.core.memory import allocate_host, bytes_of
from optstream.core.plan import round_up

FILE_NAME = "trainer.bin"
# Transfers in flight at once. Together their buffers are one chunk (--offload-train-disk-chunk-mb).
TRANSFERS = 4
# Larger transfers do not move faster, and smaller ones keep the disk and the device busy at the same time.
TRANSFER_BYTES_MAX = 16 << 20
# What is copied and then summed while it is still in the processor's cache.
BLOCK_BYTES = 512 << 10


class Parking(Protocol):
    """Keeps copies of storages. `save` raises before anything is lost, `load` fills the storages again."""

    def save(self, parked: Sequence[Parked]) -> None: ...

    def load(self, parked: Sequence[Parked]) -> None: ...

    @property
    def host_bytes(self) -> int:
        """Host memory that it has taken, and keeps."""

    def close(self) -> None: ...


class HostParking:
    """A host copy, pinned where the device is none of the host's: it takes as many bytes as the trainer.

    The copy is kept for the next sleep, since pinning takes longer than copying.
    """

    def __init__(self) -> None:
        self._copies: list[torch.Tensor] = []

    @property
    def host_bytes(self) -> int:
        return sum(copy.numel() for copy in self._copies)

    def save(self, parked: Sequence[Parked]) -> None:
        if [copy.numel() for copy in self._copies] != [each.size_bytes for each in parked]:
            self._copies.clear()
            self._copies = [
                allocate_host(each.size_bytes, pinned=each.storage.device.type != "cpu") for each in parked
            ]
        for each, copy in zip(parked, self._copies, strict=True):
            copy.copy_(each.as_bytes(), non_blocking=True)
        _synchronize(parked)

    def load(self, parked: Sequence[Parked]) -> None:
        for each, copy in zip(parked, self._copies, strict=True):
            each.as_bytes().copy_(copy, non_blocking=True)
        _synchronize(parked)

    def close(self) -> None:
        self._copies.clear()


@dataclass(frozen=True)
class _Transfer:
    """Bytes [start, start + size) of one storage, at `offset` of the file."""

    index: int
    parked: int
    start: int
    size_bytes: int
    offset: int


class DiskParking:
    """One file with everything in it, moved in pieces: host memory is at most `chunk_bytes`, whatever the
    trainer's size (at least one aligned block for each transfer in flight).

    backend: already claimed; this object closes it. Every piece is checked when it is read back.
    """

    def __init__(self, backend: Backend, *, chunk_bytes: int) -> None:
        self._backend = backend
        self._alignment = backend.filesystem.alignment_bytes
        share = min(chunk_bytes // TRANSFERS, TRANSFER_BYTES_MAX)
        self.transfer_bytes = max(share // self._alignment, 1) * self._alignment
        self._file_bytes = 0
        self._checksums: dict[int, int] = {}
        self._buffers: list[torch.Tensor] = []

    @property
    def host_bytes(self) -> int:
        return sum(buffer.numel() for buffer in self._buffers)

    def save(self, parked: Sequence[Parked]) -> None:
        """Raises SpaceError, with needed and free bytes, before anything is written."""
        transfers = self._transfers(parked)
        self._reserve(transfers)
        self._move(parked, transfers, self._save_one)

    def load(self, parked: Sequence[Parked]) -> None:
        """Raises TransferError, or CorruptionError for other bytes than were saved."""
        self._move(parked, self._transfers(parked), self._load_one)

    def close(self) -> None:
        self._buffers.clear()
        self._backend.close(remove_files=True)

    def _transfers(self, parked: Sequence[Parked]) -> list[_Transfer]:
        transfers: list[_Transfer] = []
        offset = 0
        for number, each in enumerate(parked):
            for start in range(0, each.size_bytes, self.transfer_bytes):
                size = min(self.transfer_bytes, each.size_bytes - start)
                transfers.append(_Transfer(len(transfers), number, start, size, offset))
                offset += round_up(size, self._alignment)
        return transfers

    def _reserve(self, transfers: list[_Transfer]) -> None:
        """The file has the size that this sleep needs: moments appear with the first step."""
        last = transfers[-1] if transfers else None
        needed = last.offset + round_up(last.size_bytes, self._alignment) if last else 0
        if needed == self._file_bytes:
            return
        free = self._backend.free_bytes() + self._file_bytes
        if needed > free:
            raise SpaceError(
                f"{self._backend.root} cannot hold the sleeping trainer",
                why=f"{needed} bytes are needed, {free} are free",
                remedy="Free space there, name another directory, or add one with A:B",
                needed_bytes=needed,
                free_bytes=free,
                path=self._backend.root,
            )
        if self._file_bytes:
            self._backend.remove(FILE_NAME)
            self._file_bytes = 0
        if needed:
            self._backend.create(FILE_NAME, needed).close()
            self._file_bytes = needed

    def _move(self, parked: Sequence[Parked], transfers: list[_Transfer], one) -> None:
        if not transfers:
            return
        buffers: SimpleQueue[torch.Tensor] = SimpleQueue()
        for buffer in self._ready_buffers(parked, transfers):
            buffers.put(buffer)
        threads = len(self._buffers)
        wholes = [each.as_bytes() for each in parked]
        with (
            self._backend.open(FILE_NAME) as file,
            ThreadPoolExecutor(threads, thread_name_prefix="optstream-offload") as pool,
        ):
            try:
                # The first failure, in the order of transfers; those that have not begun do not begin.
                for _ in pool.map(partial(one, file, wholes, buffers), transfers):
                    pass
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _ready_buffers(self, parked: Sequence[Parked], transfers: list[_Transfer]) -> list[torch.Tensor]:
        """One for each transfer at once. They are kept: finding and pinning memory takes longer than moving
        what is in it."""
        size = round_up(max(transfer.size_bytes for transfer in transfers), self._alignment)
        count = min(TRANSFERS, len(transfers))
        if len(self._buffers) < count or self._buffers[0].numel() < size:
            self._buffers.clear()
            pinned = parked[0].storage.device.type != "cpu"
            self._buffers = [allocate_host(size, pinned=pinned) for _ in range(count)]
        return self._buffers

    def _save_one(
        self, file: StoredFile, wholes: list[torch.Tensor], buffers: SimpleQueue, transfer: _Transfer
    ) -> None:
        buffer = buffers.get()
        try:
            memory, piece = bytes_of(buffer), _piece(wholes, transfer)
            self._checksums[transfer.index] = checksum_of(_copied(piece, buffer, host=memory))
            file.write_from(transfer.offset, memory[: round_up(transfer.size_bytes, self._alignment)])
        finally:
            buffers.put(buffer)

    def _load_one(
        self, file: StoredFile, wholes: list[torch.Tensor], buffers: SimpleQueue, transfer: _Transfer
    ) -> None:
        buffer = buffers.get()
        try:
            memory = bytes_of(buffer)
            file.read_into(transfer.offset, memory[: round_up(transfer.size_bytes, self._alignment)])
            piece = _piece(wholes, transfer)
            found = checksum_of(_copied(buffer[: transfer.size_bytes], piece, host=memory))
            if found != self._checksums[transfer.index]:
                raise CorruptionError(
                    f"{file.path} does not hold what was written to it",
                    why=f"{transfer.size_bytes} bytes of the sleeping trainer at offset {transfer.offset} "
                    "differ",
                    remedy="The trainer on this disk is lost: restore from a checkpoint, and check the disk",
                    bucket=transfer.parked,
                    segment="trainer",
                    path=file.path,
                    offset=transfer.offset,
                    operation="read",
                )
        finally:
            buffers.put(buffer)


def _piece(wholes: list[torch.Tensor], transfer: _Transfer) -> torch.Tensor:
    return wholes[transfer.parked][transfer.start : transfer.start + transfer.size_bytes]


def _copied(source: torch.Tensor, target: torch.Tensor, *, host: memoryview) -> Iterator[memoryview]:
    """Copy `source` to the start of `target`, and yield each block of it in host memory as it passes."""
    size = source.numel()
    on_host = source.device == target.device
    block = BLOCK_BYTES if on_host else size
    for start in range(0, size, block):
        stop = min(start + block, size)
        target[start:stop].copy_(source[start:stop])
        yield host[start:stop]


def _synchronize(parked: Sequence[Parked]) -> None:
    for device in {each.storage.device for each in parked if each.storage.device.type != "cpu"}:
        torch.get_device_module(device).synchronize(device)
