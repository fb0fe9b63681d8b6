"""What a directory sits on, found out by trying it rather than from a table: a write tells the truth.

The alignment is looked for from one page upwards, although many devices would take 512 bytes: with blocks
of whole pages, direct and buffered transfers of different blocks never meet in one page of the cache.
"""

from __future__ import annotations

import errno
import mmap
import os

import numpy as np

from optstream.backends.directories import PRIVATE_FILE
from optstream.backends.interface import FilesystemInfo
from optstream.backends.oserrors import DISK_FULL, space_error, storage_error
from optstream.backends.system import COPY_ON_WRITE_KINDS, IN_MEMORY_KINDS, System

PROBE_NAME = ".probe"
ALIGNMENT_BYTES_MAX = 1 << 20


def examine_filesystem(system: System, directory: int, root: str) -> FilesystemInfo:
    """Raises SpaceError on a full disk and StorageError where nothing can be written. Leaves nothing
    behind."""
    try:
        kind = system.filesystem_kind(root)
        in_memory = kind in IN_MEMORY_KINDS
        # tmpfs takes O_DIRECT on newer kernels, but the page cache is all there is to it.
        alignment = None if in_memory else _direct_alignment(system, directory)
        uncached = not in_memory and alignment is None and _can_disable_cache(system, directory)
    except OSError as error:
        if error.errno in DISK_FULL:
            free = system.free_bytes(directory)
            raise space_error("probe", root, needed_bytes=2 * system.page_bytes, free_bytes=free) from error
        raise storage_error("examine", root, error) from error
    return FilesystemInfo(
        kind=kind,
        in_memory=in_memory,
        bypasses_page_cache=alignment is not None or uncached,
        reserves_space=kind not in COPY_ON_WRITE_KINDS,
        alignment_bytes=alignment or system.page_bytes,
    )


def aligned_buffer(size_bytes: int, alignment_bytes: int, *, skew_bytes: int = 0) -> memoryview:
    """`size_bytes` of zeros whose address is `skew_bytes` past a multiple of `alignment_bytes`."""
    pages = mmap.mmap(-1, size_bytes + alignment_bytes + skew_bytes)
    whole = memoryview(pages)
    start = (-address_of(whole)) % alignment_bytes + skew_bytes
    return whole[start : start + size_bytes]


def address_of(buffer: memoryview) -> int:
    """The address of a non-empty buffer, which may be read-only."""
    return np.frombuffer(buffer, dtype=np.uint8).__array_interface__["data"][0]


def _direct_alignment(system: System, directory: int) -> int | None:
    """The smallest alignment that direct transfers are taken at; None if there are no direct transfers."""
    if not system.direct_flag:
        return None
    try:
        descriptor = _open_probe(system, directory, system.direct_flag)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return None
        raise
    try:
        alignment = system.page_bytes
        while alignment <= ALIGNMENT_BYTES_MAX:
            if _takes_direct(system, descriptor, alignment):
                return alignment
            alignment *= 2
        return None
    finally:
        system.close(descriptor)
        system.unlink(PROBE_NAME, dir_fd=directory)


def _takes_direct(system: System, descriptor: int, alignment: int) -> bool:
    # An odd multiple of the alignment everywhere, so that no luckier placement hides a stricter rule.
    buffer = aligned_buffer(alignment, 2 * alignment, skew_bytes=alignment)
    while True:
        try:
            written = system.pwritev(descriptor, [buffer], alignment)
            return written == alignment == system.preadv(descriptor, [buffer], alignment)
        except InterruptedError:
            continue
        except OSError as error:
            if error.errno == errno.EINVAL:
                return False
            raise


def _can_disable_cache(system: System, directory: int) -> bool:
    descriptor = _open_probe(system, directory, 0)
    try:
        return system.disable_cache(descriptor)
    finally:
        system.close(descriptor)
        system.unlink(PROBE_NAME, dir_fd=directory)


def _open_probe(system: System, directory: int, flags: int) -> int:
    flags |= os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    return system.open(PROBE_NAME, flags, PRIVATE_FILE, dir_fd=directory)
