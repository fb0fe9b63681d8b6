"""Reading published files without claiming their directory: many read a checkpoint, also a read-only one.

Every error is a typed StorageError; links and other users' permissions are refused by the kernel as usual.
"""

from __future__ import annotations

import os
import stat
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from optstream.backends.directories import CLAIM_NAME
from optstream.backends.errors import MissingFileError, TransferError
from optstream.backends.oserrors import storage_error, typed
from optstream.backends.system import System


class ReadableFile:
    """An open file that is only read. `size_bytes` is what it had when it was opened."""

    def __init__(self, system: System, path: str, descriptor: int) -> None:
        self.path, self._system, self._descriptor = path, system, descriptor
        self.size_bytes = system.fstat(descriptor).st_size

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`. Raises TransferError where the file ends before that."""
        done = 0
        while done < len(buffer):
            try:
                moved = self._system.preadv(self._descriptor, [buffer[done:]], offset + done)
            except InterruptedError:
                continue
            except OSError as error:
                raise storage_error("read", self.path, error, offset=offset + done) from error
            if not moved:
                raise TransferError(
                    f"cannot read {self.path} at offset {offset + done}",
                    why=f"the file ends after {self.size_bytes} bytes",
                    remedy="It was cut short: use another copy of it",
                    path=self.path,
                    offset=offset + done,
                    operation="read",
                )
            done += moved

    def close(self) -> None:
        with typed("close", self.path):
            self._system.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class DirectoryReader:
    """The files of one directory, as they are now. A directory that is missing holds nothing."""

    def __init__(self, path: str, *, system: System | None = None) -> None:
        self.path = os.path.abspath(os.path.expanduser(path))
        self._system = system or System()

    def open(self, name: str) -> ReadableFile:
        """`name` may lead through sub-directories. Raises MissingFileError or StorageError."""
        path = os.path.join(self.path, name)
        try:
            with ExitStack() as undo:
                descriptor = self._system.open(path, os.O_RDONLY | os.O_CLOEXEC)
                undo.callback(self._system.close, descriptor)
                file = ReadableFile(self._system, path, descriptor)
                undo.pop_all()
                return file
        except (FileNotFoundError, NotADirectoryError) as error:
            raise MissingFileError(
                f"{path} is missing", why="there is no such file", path=path, operation="open"
            ) from error
        except OSError as error:
            raise storage_error("open", path, error) from error

    def read(self, name: str) -> bytes:
        """All of a small file."""
        with self.open(name) as file:
            data = bytearray(file.size_bytes)
            file.read_into(0, memoryview(data))
            return bytes(data)

    def names(self) -> tuple[dict[str, int], list[str]]:
        """(sizes in bytes of the files, by name, without the claim's own; names of the directories)."""
        try:
            directory = self._system.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return {}, []
        except OSError as error:
            raise storage_error("list", self.path, error) from error
        with typed("list", self.path), ExitStack() as closed:
            closed.callback(self._system.close, directory)
            found = {}
            for name in sorted(self._system.listdir(directory)):
                try:
                    found[name] = self._system.stat(name, dir_fd=directory, follow_symlinks=False)
                except FileNotFoundError:
                    continue  # Removed meanwhile: its owner tidies up.
        files = {n: s.st_size for n, s in found.items() if stat.S_ISREG(s.st_mode) and n != CLAIM_NAME}
        return files, [n for n, s in found.items() if stat.S_ISDIR(s.st_mode)]
