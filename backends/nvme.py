"""The backend over real files: a claimed directory, space reserved on creation, O_DIRECT where it is to be
had.

Who owns the directory is `claim.py`'s business, what it sits on `probe.py`'s, and how bytes move
`nvme_file.py`'s.
"""

from __future__ import annotations

import os
import stat
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

from optstream.backends.claim import Claim, sweep
from optstream.backends.directories import CLAIM_NAME, PRIVATE_FILE, check_subdirectory
from optstream.backends.errors import (
    DirectoryError,
    InMemoryWarning,
    MissingFileError,
    StorageError,
    UnreservedSpaceWarning,
)
from optstream.backends.interface import Backend, FilesystemInfo, StoredFile, check_name
from optstream.backends.nvme_file import FILE_FLAGS, NvmeFile
from optstream.backends.oserrors import space_error, storage_error, typed
from optstream.backends.probe import PROBE_NAME, examine_filesystem
from optstream.backends.system import System


class NvmeBackend(Backend):
    """The files of `<directory>/<subdirectory>`.

    keep: the files outlive a crash of this process (checkpoints). Otherwise the next claimant removes them.
    system: the operating system to run on; tests and the fake backend pass another.

    Raises ClaimedError, DirectoryError or SpaceError; nothing is left behind then. Warns with
    InMemoryWarning on tmpfs and UnreservedSpaceWarning where the filesystem cannot reserve space.
    """

    def __init__(
        self, directory: str, *, subdirectory: str, keep: bool = False, system: System | None = None
    ) -> None:
        self._system = system or System()
        self._claim = Claim.take(directory, subdirectory, system=self._system, keep=keep)
        self.root = self._claim.root
        self._open_files: set[NvmeFile] = set()
        # One for all files of the backend: two handles of one file must share it, and blocks patched in
        # part are rare, since everything the engine moves is aligned.
        self._patch_lock = threading.Lock()
        self._closed = False
        try:
            self._filesystem = examine_filesystem(self._system, self._claim.directory, self.root)
            if not keep:
                # The first component is optstream's own, so all below it may be judged; `directory` is the
                # user's.
                first = check_subdirectory(subdirectory)[0]
                below = os.path.join(os.path.abspath(os.path.expanduser(directory)), first)
                with typed("remove what dead runs left in", below):
                    sweep(self._system, below)
        except BaseException:
            self.close(remove_files=not keep)
            raise
        self._warn_about_filesystem()

    @property
    def filesystem(self) -> FilesystemInfo:
        return self._filesystem

    def free_bytes(self) -> int:
        self._check_open()
        return self._free_bytes()

    def create(self, name: str, size_bytes: int) -> StoredFile:
        self._check_name(name)
        if size_bytes < 0:
            raise ValueError(f"size_bytes is {size_bytes}, which is negative")
        self._check_space(name, size_bytes)
        self._remove_if_present(name)
        try:
            file = self._open_file(name, os.O_CREAT | os.O_EXCL, size_bytes=size_bytes)
        except FileNotFoundError as error:
            raise storage_error("create", self._path(name), error) from error
        try:
            file.reserve(allocate=self._filesystem.reserves_space)
        except BaseException:
            file.close()
            self._remove_if_present(name)
            raise
        return file

    def open(self, name: str) -> StoredFile:
        self._check_name(name)
        try:
            return self._open_file(name, 0, size_bytes=None)
        except FileNotFoundError as error:
            raise self._missing(name, "open") from error

    def remove(self, name: str) -> None:
        self._check_name(name)
        try:
            self._system.unlink(name, dir_fd=self._claim.directory)
        except FileNotFoundError as error:
            raise self._missing(name, "remove") from error
        except OSError as error:
            raise storage_error("remove", self._path(name), error) from error

    def list(self) -> Iterator[tuple[str, int]]:
        self._check_open()
        directory = self._claim.directory
        try:
            names = sorted(self._system.listdir(directory))
            found = [(n, self._system.stat(n, dir_fd=directory, follow_symlinks=False)) for n in names]
        except OSError as error:
            raise storage_error("list", self.root, error) from error
        return iter([(n, s.st_size) for n, s in found if n != CLAIM_NAME and stat.S_ISREG(s.st_mode)])

    def publish(self, temporary: str, name: str) -> None:
        self._check_name(temporary)
        self._check_name(name)
        directory = self._claim.directory
        try:
            self._system.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
            self._system.sync(directory)
        except FileNotFoundError as error:
            raise self._missing(temporary, "publish") from error
        except OSError as error:
            raise storage_error("publish", self._path(name), error) from error

    def close(self, *, remove_files: bool = False) -> None:
        if self._closed:
            return
        self._closed = True
        with ExitStack() as all_of_it:
            all_of_it.callback(self._claim.release, remove_everything=remove_files)
            # A handle that outlived the claim could write into the next claimant's file.
            for file in list(self._open_files):
                all_of_it.callback(file.close)

    def _open_file(self, name: str, flags: int, *, size_bytes: int | None) -> NvmeFile:
        """`size_bytes`: what a new file will have; None: take it from the file. Lets FileNotFoundError
        through."""
        system, info = self._system, self._filesystem
        direct = system.direct_flag if info.bypasses_page_cache else 0
        buffered = None
        with ExitStack() as undo:
            try:
                descriptor = self._open_descriptor(name, FILE_FLAGS | flags | direct)
                undo.callback(system.close, descriptor)
                status = system.fstat(descriptor)
                self._refuse_foreign(name, status)
                size_bytes = status.st_size if size_bytes is None else size_bytes
                if info.bypasses_page_cache and not direct:
                    system.disable_cache(descriptor)
                if direct and size_bytes % info.alignment_bytes:
                    buffered = self._open_descriptor(name, FILE_FLAGS)
                    undo.callback(system.close, buffered)
            except FileNotFoundError:
                raise
            except OSError as error:
                raise storage_error("open", self._path(name), error) from error
            undo.pop_all()
        file = NvmeFile(
            system,
            name,
            self._path(name),
            size_bytes,
            descriptor,
            buffered=buffered,
            direct=bool(direct),
            alignment_bytes=info.alignment_bytes,
            on_close=self._open_files.discard,
            patch_lock=self._patch_lock,
            sync_name=partial(system.sync, self._claim.directory) if flags & os.O_CREAT else None,
        )
        self._open_files.add(file)
        return file

    def _open_descriptor(self, name: str, flags: int) -> int:
        return self._system.open(name, flags, PRIVATE_FILE, dir_fd=self._claim.directory)

    def _refuse_foreign(self, name: str, status: os.stat_result) -> None:
        me = self._system.geteuid()
        if stat.S_ISREG(status.st_mode) and status.st_uid == me:
            return
        foreign = f"it belongs to user {status.st_uid} and this process runs as user {me}"
        raise DirectoryError(
            f"{self._path(name)} is refused",
            why=foreign if stat.S_ISREG(status.st_mode) else "it is not a plain file",
            remedy="Find out who put it there, and remove it",
            path=self._path(name),
            operation="open",
        )

    def _check_space(self, name: str, size_bytes: int) -> None:
        directory = self._claim.directory
        free = self._free_bytes()
        try:
            # The file that this one replaces goes first.
            available = (
                free + self._system.stat(name, dir_fd=directory, follow_symlinks=False).st_blocks * 512
            )
        except FileNotFoundError:
            available = free
        if size_bytes > available:
            raise space_error("create", self._path(name), needed_bytes=size_bytes, free_bytes=available)

    def _free_bytes(self) -> int:
        try:
            return self._system.free_bytes(self._claim.directory)
        except OSError as error:
            raise storage_error("measure", self.root, error) from error

    def _remove_if_present(self, name: str) -> None:
        try:
            self._system.unlink(name, dir_fd=self._claim.directory)
        except FileNotFoundError:
            return
        except OSError as error:
            raise storage_error("remove", self._path(name), error) from error

    def _warn_about_filesystem(self) -> None:
        if self._filesystem.in_memory:
            warnings.warn(
                f"{self.root} is on {self._filesystem.kind}, which keeps files in host memory: the optimizer "
                "state will take the memory that streaming is meant to save. Choose a directory on a disk",
                InMemoryWarning,
                stacklevel=3,
            )
        elif not self._filesystem.reserves_space:
            warnings.warn(
                f"{self.root} is on {self._filesystem.kind}, which cannot reserve space: if others fill the "
                "disk, a write in the middle of the run fails. Leave room, or choose another filesystem",
                UnreservedSpaceWarning,
                stacklevel=3,
            )

    def _path(self, name: str) -> str:
        return os.path.join(self.root, name)

    def _check_open(self) -> None:
        if self._closed:
            raise StorageError(
                f"{self.root} is closed",
                why="its claim was given up",
                remedy="Open the backend again",
                path=self.root,
            )

    def _check_name(self, name: str) -> None:
        self._check_open()
        if check_name(name) in (CLAIM_NAME, PROBE_NAME):
            raise ValueError(f"{name!r} is a name that the backend keeps for itself")

    def _missing(self, name: str, operation: str) -> MissingFileError:
        return MissingFileError(
            f"{self._path(name)} does not exist",
            remedy="It was never created, or something else removed it",
            path=self._path(name),
            operation=operation,
        )
