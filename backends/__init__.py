"""Where files live: the contract (`interface`), its implementations, and the one function that picks one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optstream.backends.interface import Backend, Directories

__all__ = ["open_backend"]


def open_backend(directories: Directories, *, subdirectory: str, kind: str = "nvme") -> Backend:
    """Claim `<directory>/<subdirectory>` and return the backend over it.

    directories: one or several base directories, created if missing.
    subdirectory: a relative path unique to this job, role and rank; created 0700 and claimed exclusively.
    kind: "nvme" (real files) or "fake" (in memory, for tests).

    Raises DirectoryError, ClaimedError or SpaceError; nothing is left behind then.
    """
    if kind == "fake":
        from optstream.backends.fake import open_fake

        return open_fake(directories, subdirectory=subdirectory)
    from optstream.backends.nvme import NvmeBackend

    return NvmeBackend(directories[0], subdirectory=subdirectory)
