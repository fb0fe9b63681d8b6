"""The fake backend: the code of the real one on fake disks, one for each directory of this process.

Opening a directory again finds its files again, and claims are as exclusive as they are on real disks.
"""

from __future__ import annotations

import os
from functools import partial

from optstream.backends.fake_system import FakeSystem
from optstream.backends.interface import Backend, Directories
from optstream.backends.nvme import NvmeBackend
from optstream.backends.striped import open_striped

__all__ = ["FakeSystem", "fake_disk", "forget_fake_disks", "open_fake", "put_fake_disk"]

_disks: dict[str, FakeSystem] = {}


def open_fake(directories: Directories, *, subdirectory: str, keep: bool = False) -> Backend:
    """What `open_backend` does, on the fake disks of these directories."""
    return open_striped(
        [
            partial(NvmeBackend, directory, subdirectory=subdirectory, keep=keep, system=fake_disk(directory))
            for directory in directories
        ],
        # A fake disk has no speed to measure.
        speeds=[1.0] * len(directories),
    )


def fake_disk(directory: str) -> FakeSystem:
    """The disk that `directory` is on, made at the first call. Tests set its capacity or crash it."""
    path = os.path.abspath(os.path.expanduser(directory))
    # setdefault, for threads that ask for the same directory at once.
    return _disks[path] if path in _disks else _disks.setdefault(path, FakeSystem())


def put_fake_disk(directory: str, disk: FakeSystem) -> FakeSystem:
    """Use `disk` for `directory` from now on."""
    _disks[os.path.abspath(os.path.expanduser(directory))] = disk
    return disk


def forget_fake_disks() -> None:
    """Throw every fake disk of this process away, files and claims included."""
    _disks.clear()
