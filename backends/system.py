"""The operating system as the file backend uses it: one object with the calls, and nothing else.

The backend takes a `System` instead of calling `os` itself, so that the same code runs on the real kernel,
on the fake one (`fake.FakeSystem`) and under system-level faults (an interrupted call, a short transfer, a
full disk). Every method raises `OSError` and returns what the call of the same name in `os` returns.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
import sys
import time
from collections.abc import Callable
from functools import cached_property

IN_MEMORY_KINDS = frozenset({"tmpfs", "ramfs", "rootfs", "hugetlbfs"})
# Every overwrite there allocates new blocks, so space reserved once is not space kept.
COPY_ON_WRITE_KINDS = frozenset({"btrfs", "zfs", "bcachefs", "apfs"})
# What `System.reserve` raises where a filesystem cannot; EINVAL is the C library's emulation meeting
# O_DIRECT.
CANNOT_RESERVE = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
_MOUNTINFO_ESCAPE = re.compile(r"\\([0-7]{3})")

_held_locks: set[int] = set()


def _close_inherited_locks() -> None:
    # A forked child (a data loader's worker, say) shares the parent's lock: without this, a child that
    # outlives a killed parent would keep the parent's claim alive.
    while _held_locks:
        os.close(_held_locks.pop())


os.register_at_fork(after_in_child=_close_inherited_locks)


class System:
    """The real one."""

    open = staticmethod(os.open)
    close = staticmethod(os.close)
    preadv: Callable[[int, list[memoryview], int], int] = staticmethod(os.preadv)
    pwritev: Callable[[int, list[memoryview], int], int] = staticmethod(os.pwritev)
    ftruncate = staticmethod(os.ftruncate)
    fstat = staticmethod(os.fstat)
    stat = staticmethod(os.stat)
    mkdir = staticmethod(os.mkdir)
    rmdir = staticmethod(os.rmdir)
    unlink = staticmethod(os.unlink)
    rename = staticmethod(os.rename)
    listdir = staticmethod(os.listdir)
    geteuid = staticmethod(os.geteuid)
    sleep = staticmethod(time.sleep)

    # 0 where the platform has no such flag: macOS turns the cache off on an open descriptor instead.
    direct_flag: int = getattr(os, "O_DIRECT", 0)
    page_bytes: int = os.sysconf("SC_PAGE_SIZE")

    def reserve(self, descriptor: int, size_bytes: int) -> None:
        """Allocate blocks for the first `size_bytes`. OSError(EOPNOTSUPP) where the platform cannot."""
        if not hasattr(os, "posix_fallocate"):
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        os.posix_fallocate(descriptor, 0, size_bytes)

    def sync(self, descriptor: int) -> None:
        """Return once the descriptor's data and the metadata to reach it are on stable storage."""
        if hasattr(fcntl, "F_FULLFSYNC"):
            # fsync on macOS stops at the drive's own cache.
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
        else:
            os.fsync(descriptor)

    def free_bytes(self, descriptor: int) -> int:
        """What an unprivileged user can still write on the descriptor's filesystem."""
        status = os.fstatvfs(descriptor)
        return status.f_bavail * status.f_frsize

    def disable_cache(self, descriptor: int) -> bool:
        """Turn the page cache off for a descriptor opened without `direct_flag`; False where that is
        impossible."""
        if not hasattr(fcntl, "F_NOCACHE"):
            return False
        fcntl.fcntl(descriptor, fcntl.F_NOCACHE, 1)
        return True

    def try_lock(self, descriptor: int) -> bool:
        """Take an exclusive lock that dies with the process; False if another descriptor holds it."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        _held_locks.add(descriptor)
        return True

    def close_lock(self, descriptor: int) -> None:
        """Close a descriptor that `try_lock` was called on, and with it give up its lock."""
        _held_locks.discard(descriptor)
        os.close(descriptor)

    def filesystem_kind(self, path: str) -> str:
        """The kernel's name for the filesystem that `path` is on, or "" where it does not say."""
        try:
            with open("/proc/self/mountinfo") as file:
                return kind_from_mountinfo(file.read(), os.path.realpath(path))
        except FileNotFoundError:
            return ""

    @cached_property
    def host(self) -> str:
        return socket.gethostname()

    @cached_property
    def boot_id(self) -> str:
        """Equal for all processes (in any container) of one running kernel; "" where the kernel does not
        say."""
        return _first_line("/proc/sys/kernel/random/boot_id")

    def process_id(self) -> int:
        return os.getpid()

    def process_start(self) -> str:
        """The process's start in kernel ticks since boot, which tells it from a later one with the same
        pid."""
        # The command name, in parentheses, may hold blanks; field 22 is the 20th after it.
        fields = _first_line("/proc/self/stat").rpartition(")")[2].split()
        return fields[19] if len(fields) > 19 else ""


def kind_from_mountinfo(mountinfo: str, path: str) -> str:
    """The filesystem type of the mount that holds `path`: the longest mount point above it, the latest
    if shadowed."""
    best, kind = "", ""
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        mount_point = _MOUNTINFO_ESCAPE.sub(lambda match: chr(int(match[1], 8)), before.split(" ")[4])
        inside = path == mount_point or path.startswith(mount_point.rstrip("/") + "/")
        if inside and len(mount_point) >= len(best):
            best, kind = mount_point, after.split(" ")[0]
    return kind


def _first_line(path: str) -> str:
    if sys.platform != "linux":
        return ""
    with open(path) as file:
        return file.readline().strip()
