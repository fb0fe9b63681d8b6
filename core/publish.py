"""Where a checkpoint lies on storage, and how it becomes visible: all of it, by one rename.

    <base>/optimizer/manifest.json              what makes it a checkpoint
    <base>/optimizer/rank00000/<generation>.bin   one data file a rank

Every save writes data files of a new generation beside those of the old one, syncs them, writes the manifest
under a temporary name, syncs it and renames it. Until that rename the manifest names the old generation, all
of whose files are still there. What no manifest names is a leftover of an interrupted save, and goes with the
next one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Protocol

from optstream.backends import open_backend, open_reader
from optstream.backends.errors import MissingFileError
from optstream.backends.interface import Backend
from optstream.backends.reader import DirectoryReader
from optstream.core.manifest import Manifest

SUBDIRECTORY = "optimizer"
MANIFEST = "manifest.json"
UNPUBLISHED = "manifest.json.new"
_RANK = re.compile(r"rank(\d{5,})")


def rank_directory(rank: int) -> str:
    return f"rank{rank:05d}"


def data_file(generation: str) -> str:
    return f"{generation}.bin"


class Opener(Protocol):
    """As `open_backend`."""

    def __call__(self, directories: list[str], *, subdirectory: str, keep: bool) -> Backend: ...


class CheckpointDirectory:
    """The checkpoint at `base`: who may write it, and what it holds now.

    opener, reader: as `open_backend` and `open_reader`; tests and harnesses pass others.
    """

    def __init__(
        self,
        base: str | os.PathLike,
        *,
        opener: Opener = open_backend,
        reader: Callable[..., DirectoryReader] = open_reader,
    ) -> None:
        self.base = os.fspath(base)
        self._opener, self._reader = opener, reader

    @property
    def path(self) -> str:
        return os.path.join(self.base, SUBDIRECTORY)

    @property
    def manifest_path(self) -> str:
        return os.path.join(self.path, MANIFEST)

    def claim(self) -> Backend:
        """The manifest's directory, exclusively: only one save at a time. Raises ClaimedError."""
        return self._opener([self.base], subdirectory=SUBDIRECTORY, keep=True)

    def claim_rank(self, rank: int) -> Backend:
        return self._opener([self.base], subdirectory=f"{SUBDIRECTORY}/{rank_directory(rank)}", keep=True)

    def reader(self) -> DirectoryReader:
        return self._reader(self.base, subdirectory=SUBDIRECTORY)

    def reader_of_base(self) -> DirectoryReader:
        """Of what others have put beside the optimizer state."""
        return self._reader(self.base, subdirectory="")

    def manifest(self) -> Manifest | None:
        """Of the published checkpoint; None where there is none. Raises CheckpointError for a damaged one."""
        try:
            data = self.reader().read(MANIFEST)
        except MissingFileError:
            return None
        return Manifest.from_bytes(data, self.manifest_path)

    def rank_files(self, rank: int) -> dict[str, int]:
        """The files of a rank's directory with their sizes in bytes."""
        where = f"{SUBDIRECTORY}/{rank_directory(rank)}"
        return self._reader(self.base, subdirectory=where).names()[0]

    def ranks(self) -> list[int]:
        """The ranks that have a directory here, of this save or another."""
        names = self.reader().names()[1]
        return sorted(int(found[1]) for found in map(_RANK.fullmatch, names) if found)


def checkpoint_directory(base: str | os.PathLike | CheckpointDirectory) -> CheckpointDirectory:
    """`base` itself, where it is one already: on storage that no path names."""
    return base if isinstance(base, CheckpointDirectory) else CheckpointDirectory(base)


def make_visible_durable(root: Backend) -> None:
    """Whatever manifest is visible now will be after a crash, too.

    The sync of a rename may have failed in an earlier save: its manifest can be seen, and be gone after a
    crash. Nothing may be removed on its word before its directory was synced.
    """
    _write(root, UNPUBLISHED, b"{}")
    root.remove(UNPUBLISHED)


def publish(root: Backend, manifest: Manifest) -> None:
    """Make `manifest` the checkpoint: written, synced, then renamed. Its data files are synced already."""
    _write(root, UNPUBLISHED, manifest.to_bytes())
    root.publish(UNPUBLISHED, MANIFEST)


def remove_others(backend: Backend, generation: str | None) -> None:
    """Remove the files of a rank's directory that do not belong to `generation`."""
    for name, _ in list(backend.list()):
        if generation is None or name != data_file(generation):
            backend.remove(name)


def remove_ranks_from(directory: CheckpointDirectory, ranks: int) -> None:
    """Remove what an earlier save left in the directories of ranks that this save does not have."""
    for rank in directory.ranks():
        if rank >= ranks:
            directory.claim_rank(rank).close(remove_files=True)


def _write(root: Backend, name: str, data: bytes) -> None:
    with root.create(name, len(data)) as file:
        file.write_from(0, memoryview(bytearray(data)))
        file.sync()
