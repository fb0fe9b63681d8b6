"""The directories of a claim: created private, opened without following links, refused when someone else's.

Every component is opened relative to the one above it and checked on the open descriptor, so that what was
checked is what is used, whoever renames things meanwhile.
"""

from __future__ import annotations

import errno
import os
import stat
import warnings
from contextlib import ExitStack

from optstream.backends.errors import DirectoryError, StorageError, StorageWarning
from optstream.backends.oserrors import DISK_FULL, space_error
from optstream.backends.system import System

CLAIM_NAME = ".claim"
PRIVATE_DIRECTORY = 0o700
PRIVATE_FILE = 0o600
SMALLEST_CLAIM_BYTES = 4096
DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def check_subdirectory(subdirectory: str) -> list[str]:
    """The components of a relative path that stays below its base, else ValueError (a programming error)."""
    parts = [part for part in subdirectory.split("/") if part]
    if not parts or subdirectory.startswith("/") or any(part in (".", "..", CLAIM_NAME) for part in parts):
        raise ValueError(f"{subdirectory!r} is not a relative path below the directory")
    return parts


def open_directories(system: System, base: str, parts: list[str], created: list[str]) -> int:
    """Create what is missing and return a descriptor of the last directory; new paths go into `created`.

    Lets FileNotFoundError through: a neighbour that ended took an empty directory with it. Try again.
    """
    _create_base(system, base, created)
    descriptor = _open_own_directory(system, base, path=base, inside=None)
    path = base
    for part in parts:
        path = os.path.join(path, part)
        with ExitStack() as undo:
            undo.callback(system.close, descriptor)
            try:
                system.mkdir(part, PRIVATE_DIRECTORY, dir_fd=descriptor)
                created.append(path)
            except FileExistsError:
                pass
            except FileNotFoundError:
                raise
            except OSError as error:
                raise cannot_create(path, error) from error
            below = _open_own_directory(system, part, path=path, inside=descriptor)
            undo.pop_all()
        with ExitStack() as undo:
            undo.callback(system.close, below)
            system.close(descriptor)
            undo.pop_all()
        descriptor = below
    return descriptor


def _create_base(system: System, base: str, created: list[str]) -> None:
    missing = []
    path = base
    while not _exists(system, path):
        missing.append(path)
        path = os.path.dirname(path)
    for path in reversed(missing):
        try:
            system.mkdir(path, PRIVATE_DIRECTORY)
            created.append(path)
        except FileExistsError:
            continue  # another rank was faster; its owner is checked on opening
        except FileNotFoundError:
            raise
        except OSError as error:
            raise cannot_create(path, error) from error


def _exists(system: System, path: str) -> bool:
    try:
        system.stat(path, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return path == os.path.dirname(path)
    except OSError as error:
        raise cannot_create(path, error) from error
    return True


def _open_own_directory(system: System, name: str, *, path: str, inside: int | None) -> int:
    try:
        descriptor = system.open(name, DIRECTORY_FLAGS, dir_fd=inside)
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            link = stat.S_ISLNK(system.stat(name, dir_fd=inside, follow_symlinks=False).st_mode)
            raise DirectoryError(
                f"{path} cannot hold the optimizer state",
                why="it is a symbolic link" if link else "it is not a directory",
                remedy="Name the directory that it points to" if link else "Choose another directory",
                path=path,
                operation="claim",
            ) from error
        raise cannot_create(path, error) from error
    owner, me = system.fstat(descriptor).st_uid, system.geteuid()
    # Root may be told to use a user's directory, but what lies below it is made, and later removed, as our
    # own.
    if owner != me and not (me == 0 and inside is None):
        system.close(descriptor)
        raise DirectoryError(
            f"{path} cannot hold the optimizer state",
            why=f"it belongs to user {owner} and this process runs as user {me}",
            remedy="Choose a directory of your own, for example a new one below it",
            path=path,
            operation="claim",
        )
    return descriptor


def cannot_create(path: str, error: OSError) -> StorageError:
    """SpaceError on a full disk, DirectoryError for every other reason."""
    if error.errno in DISK_FULL:
        # Even a name or a small record takes a block, and the disk says that it has none.
        return space_error("claim", path, needed_bytes=SMALLEST_CLAIM_BYTES, free_bytes=0)
    return DirectoryError(
        f"{path} cannot be created or opened",
        why=error.strerror or str(error),
        remedy="Choose a directory that this user can write",
        path=path,
        operation="claim",
    )


def remove_files(system: System, directory: int) -> None:
    """Unlink everything in `directory` but its claim file and its directories, which may hold other
    claims."""
    for name in system.listdir(directory):
        if name == CLAIM_NAME:
            continue
        if not stat.S_ISDIR(system.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
            system.unlink(name, dir_fd=directory)


def remove_empty_directories(system: System, paths: list[str]) -> None:
    """Remove `paths`, deepest first, as far as they are empty: neighbours may live in them."""
    for path in sorted(paths, key=len, reverse=True):
        try:
            system.rmdir(path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.EBUSY):
                warnings.warn(f"cannot remove {path}: {error.strerror}", StorageWarning, stacklevel=2)
