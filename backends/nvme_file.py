"""One open file: exact transfers at any offset, as few copies as the filesystem allows.

How a transfer reaches the file, when the filesystem takes O_DIRECT:

- Offset, length and buffer address at multiples of the alignment: one `preadv` or `pwritev` on the direct
  descriptor, no copy, no lock, the GIL released. This is the path of the step.
- Anything else is cut at block boundaries. Whole blocks bounce through an aligned buffer. A block that the
  request covers in part is read, patched and written back under a lock, since another thread may own the
  rest of it.
- The last block of a file whose size is no multiple of the alignment cannot be transferred directly without
  changing the size. That block, and nothing else, goes through a second, buffered descriptor. The two never
  touch the same page, because the alignment is at least a page, so that neither can see the other's stale
  data.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from optstream.backends.errors import StorageError, TransferError
from optstream.backends.interface import StoredFile
from optstream.backends.oserrors import DISK_FULL, space_error, storage_error, typed
from optstream.backends.probe import address_of, aligned_buffer
from optstream.backends.system import CANNOT_RESERVE, System

FILE_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
BOUNCE_BYTES = 1 << 20
# The kernel may stop a transfer anywhere; one that stops again and again within the same block is no
# progress.
STALLS_MAX = 16


class NvmeFile(StoredFile):
    """A file of the nvme backend. `direct` says whether `descriptor` was opened with O_DIRECT.

    patch_lock: held while a block is read, patched and written back; shared by all handles of the file.
    on_close: told once, when the file is closed.
    sync_name: makes a new file's name durable; called once, by the first sync.
    buffered: the second descriptor, for the odd last block of a file opened with O_DIRECT; else None.
    """

    def __init__(
        self,
        system: System,
        name: str,
        path: str,
        size_bytes: int,
        descriptor: int,
        *,
        buffered: int | None,
        direct: bool,
        alignment_bytes: int,
        patch_lock: threading.Lock,
        on_close: Callable[[NvmeFile], None],
        sync_name: Callable[[], None] | None = None,
    ) -> None:
        self.name, self.path, self.size_bytes = name, path, size_bytes
        self._system, self._descriptor, self._direct = system, descriptor, direct
        self._alignment = alignment_bytes
        self._patch_lock, self._buffered = patch_lock, buffered
        self._state_lock = threading.Lock()
        self._in_flight = 0
        self._closed = False
        self._on_close, self._sync_name = on_close, sync_name
        self._sync_failure: StorageError | None = None

    # The contract

    def read_into(self, offset: int, buffer: memoryview) -> None:
        view = self._checked("read", offset, memoryview(buffer).cast("B"))
        with self._transfer():
            if self._goes_straight(offset, view):
                self._exact("read", self._descriptor, offset, view)
            else:
                self._read_in_pieces(offset, view)

    def write_from(self, offset: int, buffer: memoryview) -> None:
        view = self._checked("write", offset, memoryview(buffer).cast("B"))
        with self._transfer():
            if self._goes_straight(offset, view):
                self._exact("write", self._descriptor, offset, view)
            else:
                self._write_in_pieces(offset, view)

    def sync(self) -> None:
        with self._transfer():
            if self._sync_failure is not None:
                raise self._sync_failure
            try:
                self._system.sync(self._descriptor)
                if self._sync_name is not None:
                    self._sync_name()
                    self._sync_name = None
            except OSError as error:
                self._sync_failure = storage_error("sync", self.path, error)
                raise self._sync_failure from error

    def close(self) -> None:
        with self._state_lock:
            if self._closed:
                return
            self._closed = True
            self._on_close(self)
            idle = self._in_flight == 0
        if idle:
            self._close_descriptors()

    def reserve(self, *, allocate: bool) -> None:
        """Give the empty file its size, reading as zeros, with blocks under it if `allocate`.

        Raises SpaceError on a full disk.
        """
        if self.size_bytes == 0:
            return
        try:
            if not allocate:
                self._system.ftruncate(self._descriptor, self.size_bytes)
                return
            try:
                self._system.reserve(self._descriptor, self.size_bytes)
            except OSError as error:
                if error.errno not in CANNOT_RESERVE:
                    raise
                self._system.ftruncate(self._descriptor, self.size_bytes)
                self._write_zeros()
        except OSError as error:
            raise self._failure("write", 0, self.size_bytes, error) from error

    # Opening and closing around transfers in flight

    @contextmanager
    def _transfer(self) -> Iterator[None]:
        """Keeps the descriptors open: a number closed under a transfer may by then name another file."""
        with self._state_lock:
            if self._closed:
                raise StorageError(
                    f"{self.path} is closed",
                    why="it was used after close",
                    remedy="Open it again",
                    path=self.path,
                )
            self._in_flight += 1
        try:
            yield
        finally:
            with self._state_lock:
                self._in_flight -= 1
                last_out = self._closed and self._in_flight == 0
            if last_out:
                self._close_descriptors()

    def _close_descriptors(self) -> None:
        with typed("close", self.path), ExitStack() as both:
            if self._buffered is not None:
                both.callback(self._system.close, self._buffered)
            both.callback(self._system.close, self._descriptor)

    # Transfers

    def _checked(self, operation: str, offset: int, view: memoryview) -> memoryview:
        if offset < 0 or offset + len(view) > self.size_bytes:
            raise TransferError(
                f"cannot {operation} {self.path} at offset {offset}",
                why=f"{len(view)} bytes from there are not inside its {self.size_bytes} bytes",
                remedy="The layout and the file disagree: the file is another one, or of another run",
                path=self.path,
                offset=offset,
                operation=operation,
            )
        return view

    def _goes_straight(self, offset: int, view: memoryview) -> bool:
        if not self._direct or not len(view):
            return True
        return not (
            offset % self._alignment or len(view) % self._alignment or address_of(view) % self._alignment
        )

    def _exact(self, operation: str, descriptor: int, offset: int, view: memoryview) -> None:
        """All of `view`, however often the kernel stops early. Blocks cut by a short direct transfer are
        redone."""
        call = self._system.preadv if operation == "read" else self._system.pwritev
        grain = self._alignment if self._direct and descriptor == self._descriptor else 1
        done, stalls = 0, 0
        while done < len(view):
            try:
                moved = call(descriptor, [view[done:] if done else view], offset + done)
            except InterruptedError:
                continue
            except OSError as error:
                raise self._failure(operation, offset + done, len(view) - done, error) from error
            advance = moved if done + moved == len(view) else moved // grain * grain
            stalls = 0 if advance else stalls + 1
            if moved == 0 or stalls > STALLS_MAX:
                raise self._short(operation, offset + done, moved, len(view) - done)
            done += advance

    def _pieces(self, offset: int, length: int) -> Iterator[tuple[str, int, int]]:
        """Cut a range into (kind, start, end): "tail" in the file's odd last block, "part" of one block, or
        "whole" blocks, BOUNCE_BYTES (at least one block) of them at most."""
        block, end = self._alignment, offset + length
        tail = self.size_bytes // block * block
        at_once = max(BOUNCE_BYTES // block, 1) * block
        while offset < end:
            if offset >= tail:
                kind, stop = "tail", end
            elif offset % block or end - offset < block:
                kind, stop = "part", min(end, (offset // block + 1) * block)
            else:
                kind, stop = "whole", min(end // block * block, tail, offset + at_once)
            yield kind, offset, stop
            offset = stop

    def _read_in_pieces(self, offset: int, view: memoryview) -> None:
        bounce = None
        for kind, start, stop in self._pieces(offset, len(view)):
            target = view[start - offset : stop - offset]
            if kind == "tail":
                self._exact("read", self._buffered, start, target)
                continue
            bounce = bounce or self._bounce_buffer(len(view))
            first = start // self._alignment * self._alignment
            blocks = bounce[: -(-(stop - first) // self._alignment) * self._alignment]
            self._exact("read", self._descriptor, first, blocks)
            target[:] = blocks[start - first : stop - first]

    def _write_in_pieces(self, offset: int, view: memoryview) -> None:
        bounce = None
        for kind, start, stop in self._pieces(offset, len(view)):
            source = view[start - offset : stop - offset]
            if kind == "tail":
                self._exact("write", self._buffered, start, source)
                continue
            bounce = bounce or self._bounce_buffer(len(view))
            if kind == "whole":
                bounce[: len(source)] = source
                self._exact("write", self._descriptor, start, bounce[: len(source)])
                continue
            first = start // self._alignment * self._alignment
            block = bounce[: self._alignment]
            with self._patch_lock:
                self._exact("read", self._descriptor, first, block)
                block[start - first : stop - first] = source
                self._exact("write", self._descriptor, first, block)

    def _bounce_buffer(self, length: int) -> memoryview:
        blocks = -(-min(length, BOUNCE_BYTES) // self._alignment)
        return aligned_buffer(max(blocks, 1) * self._alignment, self._alignment)

    def _write_zeros(self) -> None:
        zeros = aligned_buffer(-(-BOUNCE_BYTES // self._alignment) * self._alignment, self._alignment)
        for offset in range(0, self.size_bytes, len(zeros)):
            self.write_from(offset, zeros[: min(len(zeros), self.size_bytes - offset)])

    # Errors

    def _failure(self, operation: str, offset: int, length: int, error: OSError) -> StorageError:
        if error.errno not in DISK_FULL:
            return storage_error(operation, self.path, error, offset=offset)
        with typed("measure the free space of", self.path):
            free = self._system.free_bytes(self._descriptor)
        return space_error(operation, self.path, needed_bytes=length, free_bytes=free, offset=offset)

    def _short(self, operation: str, offset: int, moved: int, wanted: int) -> TransferError:
        return TransferError(
            f"cannot {operation} {self.path} at offset {offset}",
            why=f"{moved} of {wanted} bytes were transferred, again and again",
            remedy="The file was truncated or the device is failing: look at the kernel's log",
            path=self.path,
            offset=offset,
            operation=operation,
        )
