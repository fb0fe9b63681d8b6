"""Several disks as one backend: each file lives whole on one of them, so that buckets spread over all.

A new file goes where it makes the busiest disk least busy: bytes placed over measured speed, among the
disks that have room for it. Disks within a quarter of the fastest count as equally fast, because a short
measurement says no more.

Names on the disks end in a generation, `name@7`. Publishing over a file on another disk cannot be one
atomic rename: the new generation is published first and the old one removed after, and whoever finds both
after a crash takes the newer and removes the older.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from optstream.backends.errors import MissingFileError, SpaceError, StorageError
from optstream.backends.interface import Backend, FilesystemInfo, StoredFile, check_name
from optstream.backends.probe import aligned_buffer

MEASURED_BYTES = 16 << 20
MEASURED_NAME = ".speed"
ALIKE = 0.75


def open_striped(
    openers: Sequence[Callable[[], Backend]], *, speeds: Sequence[float] | None = None
) -> Backend:
    """Open all of the backends or, if one fails, none. One alone is returned as it is."""
    with ExitStack() as undo:
        backends = []
        for opener in openers:
            backends.append(opener())
            undo.callback(backends[-1].close)
        result = backends[0] if len(backends) == 1 else StripedBackend(backends, speeds=speeds)
        undo.pop_all()
    return result


@dataclass(frozen=True)
class Place:
    """Where a file is: on which disk, under which name there."""

    disk: int
    stored: str
    size_bytes: int

    @property
    def generation(self) -> int:
        return split_generation(self.stored)[1]


class StripedBackend(Backend):
    """One backend over several, which it owns and closes.

    speeds: relative speeds of the backends; measured with a short write and read where not given.
    Errors are those of the disk concerned and name its path.
    """

    def __init__(self, backends: Sequence[Backend], *, speeds: Sequence[float] | None = None) -> None:
        if not backends or (speeds is not None and len(speeds) != len(backends)):
            raise ValueError(f"{len(backends)} backends with speeds {speeds}")
        self._backends = list(backends)
        self.root = ":".join(backend.root for backend in backends)
        self._lock = threading.Lock()
        self._closed = False
        self._places: dict[str, Place] = {}
        self._placed_bytes = [0] * len(backends)
        self._find_files()
        speeds = speeds or [measure_speed(backend) for backend in backends]
        self._speeds = [max(speeds) if speed >= ALIKE * max(speeds) else speed for speed in speeds]

    @property
    def filesystem(self) -> FilesystemInfo:
        infos = [backend.filesystem for backend in self._backends]
        return FilesystemInfo(
            kind="+".join(sorted({info.kind for info in infos})),
            in_memory=any(info.in_memory for info in infos),
            bypasses_page_cache=all(info.bypasses_page_cache for info in infos),
            reserves_space=all(info.reserves_space for info in infos),
            # All are powers of two, so the largest suits every disk.
            alignment_bytes=max(info.alignment_bytes for info in infos),
        )

    def free_bytes(self) -> int:
        """The sum over the disks; directories on one filesystem count it twice. A file needs it on one
        disk."""
        self._check_open()
        return sum(backend.free_bytes() for backend in self._backends)

    def create(self, name: str, size_bytes: int) -> StoredFile:
        with self._lock:
            self._check_open()
            check_name(name)
            old = self._places.get(name)
            disk = self._choose(name, size_bytes, old)
            stored = f"{name}@{self._next_generation(name)}"
            if old is not None:
                self._drop(name)
            file = self._backends[disk].create(stored, size_bytes)
            self._place(name, Place(disk, stored, size_bytes))
        file.name = name
        return file

    def open(self, name: str) -> StoredFile:
        with self._lock:
            place = self._find(name, "open")
            file = self._backends[place.disk].open(place.stored)
        file.name = name
        return file

    def remove(self, name: str) -> None:
        with self._lock:
            self._find(name, "remove")
            self._drop(name)

    def list(self) -> Iterator[tuple[str, int]]:
        self._check_open()
        sizes = [dict(backend.list()) for backend in self._backends]
        with self._lock:
            places = sorted(self._places.items())
        # A file that vanished from under its disk is not listed, whatever the index says.
        return iter([(n, sizes[p.disk][p.stored]) for n, p in places if p.stored in sizes[p.disk]])

    def publish(self, temporary: str, name: str) -> None:
        with self._lock:
            source = self._find(temporary, "publish")
            check_name(name)
            stored = f"{name}@{self._next_generation(name)}"
            self._backends[source.disk].publish(source.stored, stored)
            self._forget(temporary)
            if name in self._places:
                self._drop(name)
            self._place(name, Place(source.disk, stored, source.size_bytes))

    def close(self, *, remove_files: bool = False) -> None:
        if self._closed:
            return
        self._closed = True
        # Every disk gets its turn, also after one that fails.
        with ExitStack() as every_disk:
            for backend in self._backends:
                every_disk.callback(backend.close, remove_files=remove_files)

    def _find_files(self) -> None:
        for disk, backend in enumerate(self._backends):
            for stored, size_bytes in list(backend.list()):
                name, generation = split_generation(stored)
                if name in self._places:
                    if self._places[name].generation > generation:
                        backend.remove(stored)
                        continue
                    self._drop(name)
                self._place(name, Place(disk, stored, size_bytes))

    def _choose(self, name: str, size_bytes: int, replaced: Place | None) -> int:
        free = [backend.free_bytes() for backend in self._backends]
        placed = list(self._placed_bytes)
        if replaced is not None:
            free[replaced.disk] += replaced.size_bytes
            placed[replaced.disk] -= replaced.size_bytes
        roomy = [disk for disk in range(len(free)) if free[disk] >= size_bytes]
        if not roomy:
            raise SpaceError(
                f"no space for {name} in {self.root}",
                why=f"{size_bytes} bytes are needed and the emptiest disk has {max(free)} free",
                remedy="Free space there, or add a directory",
                needed_bytes=size_bytes,
                free_bytes=max(free),
                path=self.root,
                operation="create",
            )
        return min(
            roomy, key=lambda disk: ((placed[disk] + size_bytes) / self._speeds[disk], -free[disk], disk)
        )

    def _next_generation(self, name: str) -> int:
        return self._places[name].generation + 1 if name in self._places else 0

    def _place(self, name: str, place: Place) -> None:
        self._places[name] = place
        self._placed_bytes[place.disk] += place.size_bytes

    def _forget(self, name: str) -> Place:
        place = self._places.pop(name)
        self._placed_bytes[place.disk] -= place.size_bytes
        return place

    def _drop(self, name: str) -> None:
        place = self._forget(name)
        self._backends[place.disk].remove(place.stored)

    def _find(self, name: str, operation: str) -> Place:
        self._check_open()
        check_name(name)
        if name not in self._places:
            raise MissingFileError(
                f"{name} is on none of {self.root}",
                remedy="If it was written to more directories, name all of them, in any order",
                path=self.root,
                operation=operation,
            )
        return self._places[name]

    def _check_open(self) -> None:
        if self._closed:
            raise StorageError(
                f"{self.root} is closed",
                why="its claims were given up",
                remedy="Open the backend again",
                path=self.root,
            )


def split_generation(stored: str) -> tuple[str, int]:
    """`name@7` -> (name, 7). What a single-disk run left has no generation and counts as older than any."""
    name, _, generation = stored.rpartition("@")
    return (name, int(generation)) if name and generation.isdecimal() else (stored, -1)


def measure_speed(backend: Backend) -> float:
    """Bytes a second of a short write, sync and read; next to nothing where not even that fits."""
    alignment = backend.filesystem.alignment_bytes
    size_bytes = min(MEASURED_BYTES, backend.free_bytes() // 2) // alignment * alignment
    if size_bytes == 0:
        return 1.0
    buffer = aligned_buffer(size_bytes, alignment)
    try:
        with backend.create(MEASURED_NAME, size_bytes) as file:
            start = time.perf_counter()
            file.write_from(0, buffer)
            file.sync()
            file.read_into(0, buffer)
            elapsed_s = time.perf_counter() - start
    finally:
        backend.remove(MEASURED_NAME)
    return size_bytes / max(elapsed_s, 1e-9)
