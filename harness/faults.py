"""Faults around any backend, and under the file backend.

The model. A disk, its controller, the kernel and other users of the machine may do the following to us,
at any operation, once or from then on, and the code above must end in the right bits or in a typed error:

- EIO: the operation fails with an I/O error. A write may have stored a part of its bytes first.
- ENOSPC: a create or a write finds no space. A write may have stored a part first.
- EINTR: a system call is interrupted before anything moved (below the file backend only).
- short: fewer bytes move than were asked for. Around a backend that is a TransferError, since backends are
  exact; below the file backend it is a short return, from which the backend must carry on.
- lost: a write reports success and stores nothing.
- torn: a write reports success and stores some of its 512-byte sectors.
- misdirected: a write reports success and stores its bytes elsewhere, in the same file or in another one.
- stale: a read returns what the range held before the last write to it.
- bitflip: one bit is wrong, in what a read returns or in what a write stores.
- latency: the operation takes longer.
- reorder: the operation goes on only after another one has finished, where one is under way.
- crash: the power goes at this operation. Of what was not synced, each sector survives or not on its own; a
  file created and never synced may be gone; names are published wholly or not at all. The wrapper is dead
  afterwards and raises `SimulatedCrash`; a new backend can open its files again.

Nothing else happens: operations that no fault strikes do what the contract says, synced bytes stay (until
a write above damages them), and memory is right. A fault is injected, and counted, even where it does no
damage: a lost write of bytes that were there already cannot be told from a good one.

`FaultyBackend` goes around any backend. `faulty_system.FaultySystem` goes under the file backend, real or
fake, as its `system`. Both draw from an `Injector`, which says afterwards what was injected.
"""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from optstream.backends.errors import StorageError
from optstream.backends.interface import Backend, FilesystemInfo, StoredFile
from optstream.backends.oserrors import space_error, storage_error
from optstream.harness.fault_plan import Fault, FaultPlan, Injected, Injector, Kind, Operation, sweep

__all__ = [
    "Fault",
    "FaultPlan",
    "FaultyBackend",
    "Injected",
    "Injector",
    "Kind",
    "Operation",
    "SimulatedCrash",
    "sweep",
]

SECTOR_BYTES = 512
LATENCY_S = 0.002
# Long enough for another thread to overtake; an operation that is alone goes on after it.
REORDER_S_MAX = 0.02
FAILS = frozenset({Kind.EIO, Kind.ENOSPC, Kind.SHORT})


class SimulatedCrash(BaseException):
    """The process is dead as of here. No `except Exception` may handle that, as none could handle a
    power cut."""


class FaultyBackend(Backend):
    """`inner` with the faults of a plan. Everything else passes through, `inner`'s paths and errors
    included."""

    def __init__(self, inner: Backend, plan: FaultPlan | Injector) -> None:
        self.inner = inner
        self.injector = plan if isinstance(plan, Injector) else Injector(plan)
        self.root = inner.root
        self.crashed = False
        self._lock = threading.RLock()
        self._turn = threading.Condition()
        self._finished = 0
        self._open_files: dict[str, FaultyFile] = {}
        # Reading what a write is about to replace costs a read a write, so it is done only for plans that
        # need it.
        kinds = {fault.kind for fault in self.injector.plan.faults}
        self._history = History() if kinds & {Kind.CRASH, Kind.STALE} else None

    @property
    def filesystem(self) -> FilesystemInfo:
        return self.inner.filesystem

    def free_bytes(self) -> int:
        with self._operation(Operation.FREE, self.root):
            return self.inner.free_bytes()

    def create(self, name: str, size_bytes: int) -> StoredFile:
        with self._operation(Operation.CREATE, name):
            file = self.inner.create(name, size_bytes)
            if self._history:
                self._history.created(name)
            return self._wrap(name, file)

    def open(self, name: str) -> StoredFile:
        with self._operation(Operation.OPEN, name):
            return self._wrap(name, self.inner.open(name))

    def remove(self, name: str) -> None:
        with self._operation(Operation.REMOVE, name):
            self.inner.remove(name)
            if self._history:
                self._history.removed(name)

    def list(self) -> Iterator[tuple[str, int]]:
        with self._operation(Operation.LIST, self.root):
            return self.inner.list()

    def publish(self, temporary: str, name: str) -> None:
        with self._operation(Operation.PUBLISH, name):
            self.inner.publish(temporary, name)
            if self._history:
                self._history.published(temporary, name)

    def close(self, *, remove_files: bool = False) -> None:
        if self.crashed:
            return
        try:
            with self._operation(Operation.CLOSE, self.root):
                pass
        finally:
            # A close that fails gives everything up all the same, and a crash has done so.
            if not self.crashed:
                self.inner.close(remove_files=remove_files)

    @contextmanager
    def _operation(self, operation: Operation, path: str, offset: int | None = None) -> Iterator[Kind | None]:
        """One counted operation: crashes, delays and failures happen here; a kind that does damage is
        yielded."""
        kind = self._strike(operation, path, offset)
        try:
            if kind in FAILS and operation not in (Operation.READ, Operation.WRITE):
                raise failure(kind, operation, path, offset)
            yield kind
        except StorageError as error:
            if self.crashed:
                raise SimulatedCrash(f"{operation} during the crash") from error
            raise
        finally:
            with self._turn:
                self._finished += 1
                self._turn.notify_all()

    def _strike(self, operation: Operation, path: str, offset: int | None) -> Kind | None:
        if self.crashed:
            raise SimulatedCrash(f"{operation} after the crash")
        kind = self.injector.due(operation, path, offset)
        if kind is Kind.CRASH:
            self._crash()
            raise SimulatedCrash(f"at {operation} {self.injector.counts[operation]} of {path}")
        if kind is Kind.LATENCY:
            time.sleep(LATENCY_S)
            return None
        if kind is Kind.REORDER:
            with self._turn:
                before = self._finished
                self._turn.wait_for(lambda: self._finished > before, timeout=REORDER_S_MAX)
            return None
        return kind

    def _wrap(self, name: str, file: StoredFile) -> FaultyFile:
        wrapped = FaultyFile(self, name, file)
        with self._lock:
            self._open_files[name] = wrapped
        return wrapped

    def _crash(self) -> None:
        with self._lock:
            if self.crashed:
                return
            self.crashed = True
            self._history.take_back(self.inner, self.injector.rng)
            self.inner.close()


class FaultyFile(StoredFile):
    """A file of a FaultyBackend."""

    def __init__(self, backend: FaultyBackend, name: str, inner: StoredFile) -> None:
        self._backend, self.inner = backend, inner
        self.name, self.path, self.size_bytes = name, inner.path, inner.size_bytes
        self._sync_failure: StorageError | None = None

    def read_into(self, offset: int, buffer: memoryview) -> None:
        view = memoryview(buffer).cast("B")
        with self._backend._operation(Operation.READ, self.path, offset) as kind:
            if kind in FAILS:
                self.inner.read_into(offset, view[: len(view) // 2])
                raise failure(kind, Operation.READ, self.path, offset)
            self.inner.read_into(offset, view)
            if kind is Kind.BIT_FLIP:
                flip_bit(view, self._backend.injector.rng)
            elif kind is Kind.STALE:
                self._backend._history.make_stale(self.name, offset, view)

    def write_from(self, offset: int, buffer: memoryview) -> None:
        view = memoryview(buffer).cast("B")
        rng = self._backend.injector.rng
        with self._backend._operation(Operation.WRITE, self.path, offset) as kind:
            self.remember(offset, len(view))
            if kind is None:
                self.inner.write_from(offset, view)
            elif kind is Kind.TORN:
                write_sectors(self.inner, offset, view, rng)
            elif kind is Kind.MISDIRECTED:
                self._misdirect(offset, view, rng)
            elif kind is Kind.BIT_FLIP:
                changed = bytearray(view)
                flip_bit(memoryview(changed), rng)
                self.inner.write_from(offset, memoryview(changed))
            elif kind in FAILS:
                self.inner.write_from(offset, view[: len(view) // 2])
                raise failure(kind, Operation.WRITE, self.path, offset)
            elif kind is not Kind.LOST:
                raise ValueError(f"{kind} cannot happen to a write")

    def sync(self) -> None:
        if self._sync_failure is not None:
            raise self._sync_failure
        try:
            with self._backend._operation(Operation.SYNC, self.path):
                self.inner.sync()
                if self._backend._history:
                    self._backend._history.synced(self.name)
        except StorageError as error:
            self._sync_failure = error
            raise

    def close(self) -> None:
        with self._backend._lock:
            if self._backend._open_files.get(self.name) is self:
                del self._backend._open_files[self.name]
        self.inner.close()

    def remember(self, offset: int, length: int) -> None:
        """Keep what the range holds now. Ranges that leave the file are for the inner file to refuse."""
        if self._backend._history is None or offset < 0 or offset + length > self.size_bytes:
            return
        before = bytearray(length)
        self.inner.read_into(offset, memoryview(before))
        self._backend._history.replacing(self.name, offset, bytes(before))

    def _misdirect(self, offset: int, view: memoryview, rng: random.Random) -> None:
        """To another place of this file or of another open one; lost, where no other place can hold
        the bytes."""
        with self._backend._lock:
            files = sorted(self._backend._open_files.values(), key=lambda file: file.name)
        places: list[tuple[FaultyFile, int]] = []
        for file in files:
            ends = range(0, file.size_bytes - len(view) + 1, SECTOR_BYTES)
            starts = [at for at in ends if file is not self or at != offset]
            if starts:
                places.append((file, rng.choice(starts)))
        if places:
            file, at = rng.choice(places)
            file.remember(at, len(view))
            file.inner.write_from(at, view)


class History:
    """What a crash takes back and a stale read returns: the bytes that writes replaced, by file and range."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._unsynced: dict[str, dict[tuple[int, int], bytes]] = {}
        self._replaced: dict[str, dict[tuple[int, int], bytes]] = {}
        self._names_at_risk: set[str] = set()

    def created(self, name: str) -> None:
        with self._lock:
            self._unsynced[name], self._replaced[name] = {}, {}
            self._names_at_risk.add(name)

    def replacing(self, name: str, offset: int, before: bytes) -> None:
        key = (offset, len(before))
        with self._lock:
            # A crash goes back to the last sync, so the oldest counts; a stale read to the write before,
            # the newest.
            self._unsynced.setdefault(name, {}).setdefault(key, before)
            self._replaced.setdefault(name, {})[key] = before

    def synced(self, name: str) -> None:
        with self._lock:
            self._unsynced[name] = {}
            self._names_at_risk.discard(name)

    def removed(self, name: str) -> None:
        with self._lock:
            self._unsynced.pop(name, None)
            self._replaced.pop(name, None)
            self._names_at_risk.discard(name)

    def published(self, temporary: str, name: str) -> None:
        with self._lock:
            self._unsynced[name] = self._unsynced.pop(temporary, {})
            self._replaced[name] = self._replaced.pop(temporary, {})
            # Publishing syncs the directory, and with it the name.
            self._names_at_risk -= {temporary, name}

    def make_stale(self, name: str, offset: int, view: memoryview) -> None:
        with self._lock:
            for (start, length), before in self._replaced.get(name, {}).items():
                low, high = max(start, offset), min(start + length, offset + len(view))
                if low < high:
                    view[low - offset : high - offset] = before[low - start : high - start]

    def take_back(self, backend: Backend, rng: random.Random) -> None:
        with self._lock:
            for name in sorted(self._unsynced):
                if name in self._names_at_risk and rng.random() < 0.5:
                    backend.remove(name)
                    continue
                with backend.open(name) as file:
                    for (offset, _), before in reversed(self._unsynced[name].items()):
                        write_sectors(file, offset, memoryview(before), rng)


def failure(kind: Kind, operation: Operation, path: str, offset: int | None) -> StorageError:
    """The typed error that a backend raises for a fault of this kind."""
    if kind is Kind.ENOSPC:
        return space_error(operation, path, needed_bytes=1, free_bytes=0, offset=offset)
    reason = "fewer bytes moved than were asked for" if kind is Kind.SHORT else os.strerror(errno.EIO)
    return storage_error(operation, path, OSError(errno.EIO, f"{reason} (injected)"), offset=offset)


def write_sectors(file: StoredFile, offset: int, data: memoryview, rng: random.Random) -> None:
    """Each 512-byte sector of `data` is stored or not, on its own."""
    for start in range(0, len(data), SECTOR_BYTES):
        if rng.random() < 0.5:
            file.write_from(offset + start, data[start : start + SECTOR_BYTES])


def flip_bit(view: memoryview, rng: random.Random) -> None:
    if len(view):
        view[rng.randrange(len(view))] ^= 1 << rng.randrange(8)
