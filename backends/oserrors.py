"""From `OSError` to the typed errors of the storage layer: what failed, why, and what a person can do."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from optstream.backends.errors import SpaceError, StorageError, TransferError

DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
TRANSFERS = frozenset({"read", "write", "sync"})
REMEDIES = {
    errno.EIO: "The device reports an error: look at the kernel's log and the drive's health",
    errno.EMFILE: "Raise the limit on open files (ulimit -n), or use larger buckets",
    errno.ENFILE: "The machine is out of open files: end what holds them",
    errno.ESTALE: "The filesystem went away under the run: remount it and start again",
    errno.EROFS: "The filesystem is read-only, perhaps after an error: look at the kernel's log",
    errno.ELOOP: "A symbolic link stands where a file should be: remove it, and find out who put it there",
}


def storage_error(operation: str, path: str, error: OSError, *, offset: int | None = None) -> StorageError:
    """A TransferError for reads, writes and syncs, a StorageError for the rest."""
    kind = TransferError if operation in TRANSFERS else StorageError
    place = "" if offset is None else f" at offset {offset}"
    return kind(
        f"cannot {operation} {path}{place}",
        why=error.strerror or os.strerror(error.errno or errno.EIO),
        remedy=REMEDIES.get(error.errno, "Look at the kernel's log, or use another directory"),
        path=path,
        offset=offset,
        operation=operation,
    )


@contextmanager
def typed(operation: str, path: str) -> Iterator[None]:
    """An OSError that leaves the block becomes a typed error."""
    try:
        yield
    except OSError as error:
        raise storage_error(operation, path, error) from error


def space_error(
    operation: str, path: str, *, needed_bytes: int, free_bytes: int, offset: int | None = None
) -> SpaceError:
    return SpaceError(
        f"no space for {path}",
        why=f"{needed_bytes} bytes are needed and {free_bytes} are free",
        remedy="Free space there, or choose another directory",
        needed_bytes=needed_bytes,
        free_bytes=free_bytes,
        path=path,
        offset=offset,
        operation=operation,
    )
