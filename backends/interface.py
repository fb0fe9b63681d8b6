"""The contract every storage backend keeps: positional, exact, typed.

`harness/conformance.py` checks this contract on any implementation. The rules, in prose:

- A backend owns one directory, claimed exclusively until `close`. A second claimant, in this process or
  another, gets a `ClaimedError` that names the owner. The claim dies with its process.
- A file is created with its whole size reserved: a full disk is a `SpaceError` before the first step, not in
  the middle of one. Fresh bytes read as zeros.
- Reads and writes are exact: all of the buffer at that offset, or a typed error. Any offset and length inside
  the file is allowed; those that are multiples of `alignment` (buffer address included) are fast.
- Calls on one file may come from several threads at once, on ranges that do not overlap.
- What `sync` returned for survives a crash; `publish` replaces a name atomically and durably.
- Every error is an `optstream.backends.errors.StorageError`; an `OSError` never escapes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self


@dataclass(frozen=True)
class FilesystemInfo:
    """What a directory sits on.

    kind: the filesystem's name as the kernel spells it (`ext4`, `xfs`, `tmpfs`), or "" where unknown.
    in_memory: files live in RAM, so streaming to them saves no memory.
    bypasses_page_cache: transfers go around the page cache (O_DIRECT).
    reserves_space: `create` really reserves blocks; otherwise a disk that others fill can still fail a write.
    alignment_bytes: fast transfers have offset, length and buffer address at multiples of this.
    """

    kind: str
    in_memory: bool
    bypasses_page_cache: bool
    reserves_space: bool
    alignment_bytes: int


class StoredFile(ABC):
    """An open file of fixed size. Closing it twice is harmless; using it closed is a `StorageError`."""

    name: str
    path: str
    size_bytes: int

    @abstractmethod
    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` (writable, contiguous, bytes) from `offset`. Short reads are `TransferError`."""

    @abstractmethod
    def write_from(self, offset: int, buffer: memoryview) -> None:
        """Write all of `buffer` at `offset`. Writing past `size_bytes` is a `TransferError`, nothing
        written."""

    @abstractmethod
    def sync(self) -> None:
        """Return once everything written so far would survive a crash. A failed sync is final for the file:
        later syncs of this object fail too, since the kernel may have dropped the dirty pages."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Backend(ABC):
    """One claimed directory of files. Names are single path components."""

    root: str

    @property
    @abstractmethod
    def filesystem(self) -> FilesystemInfo: ...

    @abstractmethod
    def free_bytes(self) -> int:
        """Bytes an unprivileged user can still write here."""

    @abstractmethod
    def create(self, name: str, size_bytes: int) -> StoredFile:
        """A new file of exactly this size, reserved and reading as zeros. An existing name is replaced.

        Raises SpaceError with needed and free bytes; nothing is left behind then.
        """

    @abstractmethod
    def open(self, name: str) -> StoredFile:
        """An existing file. Raises MissingFileError."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Raises MissingFileError."""

    @abstractmethod
    def list(self) -> Iterator[tuple[str, int]]:
        """(name, size in bytes) of every file, sorted by name; the claim's own file is not among them."""

    @abstractmethod
    def publish(self, temporary: str, name: str) -> None:
        """Rename `temporary` (already synced by the caller) to `name` atomically, replacing it, and sync the
        directory, so that after a crash `name` is wholly the old or wholly the new file."""

    @abstractmethod
    def close(self, *, remove_files: bool = False) -> None:
        """Give up the claim; with `remove_files`, remove every file and the directory first. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def check_name(name: str) -> str:
    """`name` if it is one plain path component, else ValueError (a programming error, not a user's)."""
    if not name or name in (".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"{name!r} is not a plain file name")
    return name


Directories = Sequence[str]
