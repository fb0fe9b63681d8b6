"""Where files live: the contract (`interface`), its implementations, and the one function that picks one."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optstream.backends.interface import Backend, Directories
    from optstream.backends.reader import DirectoryReader

__all__ = ["open_backend", "open_reader"]


def open_backend(
    directories: Directories, *, subdirectory: str, kind: str = "nvme", keep: bool = False
) -> Backend:
    """Claim `<directory>/<subdirectory>` and return the backend over it.

    directories: one or several base directories, created if missing; over several the files are spread.
    subdirectory: a relative path unique to this job, role and rank; created 0700 and claimed exclusively.
        Below its first component, which all runs of a machine can share, what dead runs left is removed.
    kind: "nvme" (real files) or "fake" (in memory, for tests).
    keep: files outlive a crash of this process (checkpoints); the next claimant removes scratch files.

    Raises DirectoryError, ClaimedError or SpaceError; nothing is left behind then.
    """
    if not directories:
        raise ValueError("no directory given")
    if kind == "fake":
        from optstream.backends.fake import open_fake

        return open_fake(directories, subdirectory=subdirectory, keep=keep)
    if kind != "nvme":
        raise ValueError(f"unknown kind of backend {kind!r}: nvme and fake are known")
    from optstream.backends.nvme import NvmeBackend
    from optstream.backends.striped import open_striped

    return open_striped(
        [partial(NvmeBackend, directory, subdirectory=subdirectory, keep=keep) for directory in directories]
    )


def open_reader(directory: str, *, subdirectory: str, kind: str = "nvme") -> DirectoryReader:
    """What `open_backend` of the same place has published, read without a claim, however many read it."""
    from optstream.backends.reader import DirectoryReader

    path = f"{directory}/{subdirectory}"
    if kind == "fake":
        from optstream.backends.fake import fake_disk

        return DirectoryReader(path, system=fake_disk(directory))
    return DirectoryReader(path)
