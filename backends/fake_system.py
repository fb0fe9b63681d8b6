"""A fake kernel with one disk, over pyfakefs' FakeFilesystem, for the real file backend to run on.

`FakeSystem` answers the calls that the file backend makes. Names, permissions, links and the capacity are
pyfakefs', driven explicitly and never by patching `os`; what pyfakefs lacks is here:

- positional transfers, which under O_DIRECT are as strict about alignment as the strictest device:
  offset, length and buffer address must all be multiples of `alignment_bytes`, or EINVAL;
- locks that conflict between descriptors;
- what is durable and what is only cached: file contents become durable when their file is synced, names
  when their directory is. `crash` goes back to what was durable, or to a torn mixture, and invalidates
  every descriptor, as a power cut does.
"""

from __future__ import annotations

import errno
import os
import random
import stat
import threading
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING

from optstream.backends.errors import OptstreamError
from optstream.backends.probe import address_of
from optstream.backends.system import System

if TYPE_CHECKING:
    from pyfakefs.fake_file import FakeDirectory, FakeFile
    from pyfakefs.fake_filesystem import FakeFilesystem

SECTOR_BYTES = 512
BLOCK_BYTES = 4096
# Far above the kernel's, so that a number that strays into a real call fails instead of hitting a real file.
FIRST_DESCRIPTOR = 1 << 20


def _new_filesystem(capacity_bytes: int) -> FakeFilesystem:
    try:
        from pyfakefs.fake_filesystem import FakeFilesystem
    except ImportError as error:
        raise OptstreamError(
            "the fake backend cannot start",
            why="pyfakefs is not installed",
            remedy="Install it with: pip install 'optstream[test]'",
        ) from error
    filesystem = FakeFilesystem(path_separator="/", total_size=capacity_bytes)
    # The shuffle draws from the global generator, which belongs to the training.
    filesystem.shuffle_listdir_results = False
    return filesystem


@dataclass
class _Inode:
    """The bytes of one file: as programs see them, and as they would be after a crash (None: the same)."""

    cached: bytearray = field(default_factory=bytearray)
    durable: bytes | None = b""


@dataclass
class _Descriptor:
    object: FakeFile
    direct: bool


class FakeSystem(System):
    """A fake kernel with one disk.

    alignment_bytes: what O_DIRECT demands; None refuses O_DIRECT.
    can_reserve: False makes `reserve` fail as filesystems without fallocate do. kind: the filesystem's name.
    """

    direct_flag = getattr(os, "O_DIRECT", 1 << 30)
    page_bytes = BLOCK_BYTES
    host = "fake"
    boot_id = "fake"

    def __init__(
        self,
        *,
        capacity_bytes: int = 1 << 40,
        alignment_bytes: int | None = BLOCK_BYTES,
        can_reserve: bool = True,
        kind: str = "fakefs",
    ) -> None:
        self._filesystem = _new_filesystem(capacity_bytes)
        self._alignment_bytes, self._can_reserve, self._kind = alignment_bytes, can_reserve, kind
        self._mutex = threading.RLock()
        self._descriptors: dict[int, _Descriptor] = {}
        self._next_descriptor = FIRST_DESCRIPTOR
        self._inodes: dict[int, _Inode] = {}
        self._locks: dict[int, int] = {}
        self._durable_names: dict[str, dict[str, FakeFile]] = {}

    # Names

    def open(self, path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        with self._mutex:
            direct = bool(flags & self.direct_flag)
            if direct and self._alignment_bytes is None:
                raise _error(errno.EINVAL, path)
            try:
                found = self._find(path, dir_fd)
            except FileNotFoundError:
                if not flags & os.O_CREAT:
                    raise
                found = self._create(self._full_path(path, dir_fd), mode)
            else:
                if flags & os.O_CREAT and flags & os.O_EXCL:
                    raise _error(errno.EEXIST, path)
                if stat.S_ISLNK(found.st_mode):
                    if flags & os.O_NOFOLLOW:
                        raise _error(errno.ENOTDIR if flags & os.O_DIRECTORY else errno.ELOOP, path)
                    found = self._filesystem.resolve(self._full_path(path, dir_fd))
                if flags & os.O_DIRECTORY and not _is_directory(found):
                    raise _error(errno.ENOTDIR, path)
            number = self._next_descriptor
            self._next_descriptor += 1
            self._descriptors[number] = _Descriptor(found, direct)
            if flags & os.O_TRUNC:
                self.ftruncate(number, 0)
            return number

    def _create(self, full: str, mode: int) -> FakeFile:
        created = self._filesystem.create_file(
            full, stat.S_IFREG | mode, contents=b"", create_missing_dirs=False
        )
        self._inodes[created.st_ino] = _Inode()
        return created

    def close(self, descriptor: int) -> None:
        with self._mutex:
            closed = self._descriptor(descriptor)
            del self._descriptors[descriptor]
            inode = closed.object.st_ino
            if self._locks.get(inode) == descriptor:
                del self._locks[inode]
            self._forget_if_gone(closed.object)

    def stat(self, path: str, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> SimpleNamespace:
        with self._mutex:
            if follow_symlinks:
                return _status(self._filesystem.resolve(self._full_path(path, dir_fd)))
            return _status(self._find(path, dir_fd))

    def fstat(self, descriptor: int) -> SimpleNamespace:
        with self._mutex:
            return _status(self._descriptor(descriptor).object)

    def mkdir(self, path: str, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        with self._mutex:
            self._filesystem.makedir(self._full_path(path, dir_fd), mode)

    def rmdir(self, path: str, *, dir_fd: int | None = None) -> None:
        with self._mutex:
            self._filesystem.rmdir(self._full_path(path, dir_fd))

    def unlink(self, path: str, *, dir_fd: int | None = None) -> None:
        with self._mutex:
            removed = self._find(path, dir_fd)
            self._filesystem.remove(self._full_path(path, dir_fd))
            self._forget_if_gone(removed)

    def rename(self, source: str, target: str, *, src_dir_fd: int | None, dst_dir_fd: int | None) -> None:
        with self._mutex:
            full = self._full_path(target, dst_dir_fd)
            replaced = self._filesystem.lresolve(full) if self._filesystem.exists(full) else None
            self._filesystem.rename(self._full_path(source, src_dir_fd), full)
            if replaced is not None:
                self._forget_if_gone(replaced)

    def listdir(self, descriptor: int) -> list[str]:
        with self._mutex:
            return list(self._directory(descriptor).entries)

    # Bytes

    def preadv(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
        with self._mutex:
            cached = self._transfer_target(descriptor, buffers, offset)
            done = 0
            for buffer in buffers:
                chunk = memoryview(cached)[offset + done : offset + done + len(buffer)]
                buffer[: len(chunk)] = chunk
                done += len(chunk)
            return done

    def pwritev(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
        with self._mutex:
            cached = self._transfer_target(descriptor, buffers, offset)
            end = offset + sum(len(buffer) for buffer in buffers)
            if end > len(cached):
                self.ftruncate(descriptor, end)
            self._about_to_change(descriptor)
            done = offset
            for buffer in buffers:
                cached[done : done + len(buffer)] = buffer
                done += len(buffer)
            return done - offset

    def ftruncate(self, descriptor: int, size_bytes: int) -> None:
        with self._mutex:
            file = self._descriptor(descriptor).object
            file.size = size_bytes
            self._about_to_change(descriptor)
            cached = self._inodes[file.st_ino].cached
            if size_bytes < len(cached):
                del cached[size_bytes:]
            else:
                cached.extend(bytes(size_bytes - len(cached)))

    def reserve(self, descriptor: int, size_bytes: int) -> None:
        if not self._can_reserve:
            raise _error(errno.EOPNOTSUPP, "")
        with self._mutex:
            if size_bytes > self._descriptor(descriptor).object.st_size:
                self.ftruncate(descriptor, size_bytes)

    def sync(self, descriptor: int) -> None:
        with self._mutex:
            synced = self._descriptor(descriptor).object
            if synced.st_ino in self._inodes:
                self._inodes[synced.st_ino].durable = None
            else:
                self._durable_names[synced.path] = _files_of(synced)

    def free_bytes(self, descriptor: int) -> int:
        with self._mutex:
            self._descriptor(descriptor)
            return self._filesystem.get_disk_usage("/").free

    def disable_cache(self, descriptor: int) -> bool:
        return False

    # Processes

    def try_lock(self, descriptor: int) -> bool:
        with self._mutex:
            inode = self._descriptor(descriptor).object.st_ino
            return self._locks.setdefault(inode, descriptor) == descriptor

    def close_lock(self, descriptor: int) -> None:
        self.close(descriptor)

    def sleep(self, seconds: float) -> None:
        # Only threads of this process use the disk, so nobody needs long to finish.
        time.sleep(seconds / 20)

    def geteuid(self) -> int:
        from pyfakefs.helpers import get_uid

        return get_uid()

    def filesystem_kind(self, path: str) -> str:
        return self._kind

    # What only a fake can do

    def open_descriptors(self) -> int:
        return len(self._descriptors)

    def files(self) -> list[str]:
        """The paths of all files, sorted."""
        with self._mutex:
            return sorted(entry.path for d in self._directories() for entry in _files_of(d).values())

    def set_free_bytes(self, free_bytes: int) -> None:
        """Let other users of the disk take or give back space, so that this much is left."""
        with self._mutex:
            used = self._filesystem.get_disk_usage("/")[1]
            self._filesystem.set_disk_usage(used + free_bytes, "/")

    def raw_read(self, path: str, offset: int, length: int) -> bytes:
        """A file's bytes as another program would read them, past the backend."""
        with self._mutex:
            cached = self._inodes[self._filesystem.resolve(path).st_ino].cached
            return bytes(cached[offset : offset + length])

    def raw_write(self, path: str, offset: int, data: bytes) -> None:
        with self._mutex:
            self._inodes[self._filesystem.resolve(path).st_ino].cached[offset : offset + len(data)] = data

    def symlink(self, path: str, target: str) -> None:
        with self._mutex:
            self._filesystem.create_symlink(path, target, create_missing_dirs=False)

    def chown(self, path: str, user: int) -> None:
        with self._mutex:
            self._filesystem.resolve(path).st_uid = user

    def kill_processes(self) -> None:
        """End every process at once, as SIGKILL does: descriptors and locks go, written bytes stay."""
        with self._mutex:
            self._descriptors.clear()
            self._locks.clear()

    def crash(self, rng: random.Random | None = None) -> None:
        """Cut the power: only what was synced is left. With `rng`, what was not synced survives in torn
        pieces: each sector on its own, each directory's changes all or none of them."""
        with self._mutex:
            self.kill_processes()
            for directory in self._directories():
                before = self._durable_names.get(directory.path, {})
                if rng is None or rng.random() < 0.5:
                    self._restore_names(directory, before)
                self._durable_names[directory.path] = _files_of(directory)
            for inode in self._inodes.values():
                if inode.durable is not None:
                    inode.cached[:] = _tear(inode.durable, bytes(inode.cached), rng)
                    inode.durable = None

    def _restore_names(self, directory: FakeDirectory, before: dict[str, FakeFile]) -> None:
        for name in list(_files_of(directory)):
            directory.remove_entry(name)
        for name, file in before.items():
            file.name = name
            directory.add_entry(file)

    def _directories(self) -> list[FakeDirectory]:
        found, todo = [], [self._filesystem.root]
        while todo:
            directory = todo.pop()
            found.append(directory)
            todo.extend(entry for entry in directory.entries.values() if _is_directory(entry))
        return found

    # Helpers; the caller holds the mutex

    def _descriptor(self, number: int) -> _Descriptor:
        if number not in self._descriptors:
            raise _error(errno.EBADF, f"descriptor {number}")
        return self._descriptors[number]

    def _directory(self, number: int) -> FakeDirectory:
        directory = self._descriptor(number).object
        # Walked, not resolved: pyfakefs takes its time over every component of a path.
        found = self._filesystem.root
        for name in directory.path.strip("/").split("/"):
            found = found.entries.get(name) if name and _is_directory(found) else found
            if found is None:
                raise _error(errno.ENOENT, directory.path)
        if found is not directory:
            raise _error(errno.ENOENT, directory.path)
        return directory

    def _find(self, path: str, dir_fd: int | None) -> FakeFile:
        """What stands at `path` (one component, where it is below a descriptor), be it a link."""
        if dir_fd is None:
            return self._filesystem.lresolve(path)
        found = self._directory(dir_fd).entries.get(path)
        if found is None:
            raise _error(errno.ENOENT, path)
        return found

    def _full_path(self, path: str, dir_fd: int | None) -> str:
        return path if dir_fd is None else f"{self._directory(dir_fd).path}/{path}"

    def _transfer_target(self, number: int, buffers: list[memoryview], offset: int) -> bytearray:
        descriptor = self._descriptor(number)
        if descriptor.direct:
            places = [offset, *(len(b) for b in buffers), *(address_of(b) for b in buffers if len(b))]
            if any(place % self._alignment_bytes for place in places):
                raise _error(errno.EINVAL, descriptor.object.path)
        return self._inodes[descriptor.object.st_ino].cached

    def _about_to_change(self, number: int) -> None:
        inode = self._inodes[self._descriptor(number).object.st_ino]
        if inode.durable is None:
            inode.durable = bytes(inode.cached)

    def _forget_if_gone(self, file: FakeFile) -> None:
        """Drop the bytes of a file without a name, unless it is open or a crash would bring its name back."""
        if file.st_nlink or any(d.object is file for d in self._descriptors.values()):
            return
        if any(file in names.values() for names in self._durable_names.values()):
            return
        self._inodes.pop(file.st_ino, None)


def _files_of(directory: FakeDirectory) -> dict[str, FakeFile]:
    return {name: entry for name, entry in directory.entries.items() if not _is_directory(entry)}


def _is_directory(entry: FakeFile) -> bool:
    return stat.S_ISDIR(entry.st_mode)


def _status(file: FakeFile) -> SimpleNamespace:
    return SimpleNamespace(
        st_mode=file.st_mode,
        st_uid=file.st_uid,
        st_ino=file.st_ino,
        st_dev=file.st_dev,
        st_size=file.st_size,
        st_blocks=-(-file.st_size // BLOCK_BYTES) * (BLOCK_BYTES // SECTOR_BYTES),
    )


def _tear(durable: bytes, cached: bytes, rng: random.Random | None) -> bytes:
    if rng is None:
        return durable.ljust(len(cached), b"\0")[: len(cached)]
    torn = bytearray(cached)
    for start in range(0, len(cached), SECTOR_BYTES):
        if rng.random() < 0.5:
            old = durable[start : start + SECTOR_BYTES]
            torn[start : start + SECTOR_BYTES] = old.ljust(len(torn[start : start + SECTOR_BYTES]), b"\0")
    return bytes(torn)


def _error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)
