"""The exclusive claim on a directory: made private, locked for as long as its process lives, reclaimed
after it.

A claim is a locked file in the claimed directory. The lock alone decides who is alive: the kernel drops it
when the process ends, however it ends. Pids are never compared, since they are reused and mean nothing in
another container; the record inside the file (`Owner`) is there to name the owner, and to mark what a dead
run left:

- A live owner's file is locked and holds its record.
- A clean close removes the file, so files that it leaves behind are kept on purpose.
- A dead owner's file is unlocked and still holds its record: its files are leftovers and are removed, by
  the next claimant of the same directory or by the sweep of any later claimant nearby, unless the record
  says `keep`. The record is on stable storage before any other file is made, and is only ever overwritten
  in place: after a power cut, too, there is one.

Whoever has taken the lock checks that the locked file is still the one under that name, and starts over
otherwise: a sweep may have removed it between the opening and the locking.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from typing import Self

from optstream.backends.directories import (
    CLAIM_NAME,
    DIRECTORY_FLAGS,
    PRIVATE_FILE,
    cannot_create,
    check_subdirectory,
    open_directories,
    remove_empty_directories,
    remove_files,
)
from optstream.backends.errors import ClaimedError, StorageError
from optstream.backends.oserrors import typed
from optstream.backends.system import System

# A neighbour's sweep holds a dead claim's lock for an instant before it says so, and a predecessor may be
# exiting.
PATIENCE_TRIES, RETRY_S = 20, 0.05
# Removing a dead run's hundreds of gigabytes takes a while; the sweep says that it is at it.
RECLAIMING_TRIES = 2400
# Every record fills one sector, which a disk writes whole or not at all.
RECORD_BYTES = 512


@dataclass(frozen=True)
class Owner:
    """Who holds a claim. `keep`: its files outlive a crash (checkpoints). `reclaiming`: a sweep, soon to
    be over."""

    pid: int
    host: str
    boot_id: str
    process_start: str
    claimed_at: str
    keep: bool
    reclaiming: bool = False

    @classmethod
    def of_this_process(cls, system: System, *, keep: bool) -> Self:
        return cls(
            pid=system.process_id(),
            host=system.host,
            boot_id=system.boot_id,
            process_start=system.process_start(),
            claimed_at=datetime.now(UTC).isoformat(timespec="seconds"),
            keep=keep,
        )

    def shares_kernel_with(self, system: System) -> bool:
        """Whether a lock of this owner would have been visible here: locks do not cross every network
        filesystem."""
        return self.host == system.host or bool(self.boot_id and self.boot_id == system.boot_id)

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host} (since {self.claimed_at})"


class Claim:
    """An exclusively held directory: `root` is its path, `directory` a descriptor of it."""

    def __init__(
        self, system: System, base: str, root: str, directory: int, lock: int, created: list[str]
    ) -> None:
        self.root, self.directory = root, directory
        self._system, self._base, self._lock, self._created = system, base, lock, created
        self._pid = system.process_id()

    @classmethod
    def take(cls, directory: str, subdirectory: str, *, system: System, keep: bool = False) -> Self:
        """Create what is missing of `<directory>/<subdirectory>`, lock it and remove a dead owner's
        leftovers.

        Raises ClaimedError if a live process holds it, DirectoryError if it cannot be used; nothing is left
        behind.
        """
        base = os.path.abspath(os.path.expanduser(directory))
        parts = check_subdirectory(subdirectory)
        root = os.path.join(base, *parts)
        created: list[str] = []
        try:
            tries = 0
            while True:
                owner, vanished = None, None
                try:
                    opened = open_directories(system, base, parts, created)
                except FileNotFoundError as error:
                    vanished = error  # a neighbour that ended took an empty directory with it
                else:
                    lock, owner = _lock_or_close(system, opened, root, keep=keep)
                    if lock is not None:
                        return cls(system, base, root, opened, lock, created)
                tries += 1
                if tries >= (RECLAIMING_TRIES if owner is not None and owner.reclaiming else PATIENCE_TRIES):
                    raise cannot_create(root, vanished) if vanished else _claimed(root, owner)
                system.sleep(RETRY_S)
        except BaseException as error:
            remove_empty_directories(system, created)
            if isinstance(error, OSError):
                raise cannot_create(root, error) from error
            raise

    def release(self, *, remove_everything: bool) -> None:
        """Give the directory up; `remove_everything`: first its files, then the directories that this
        leaves empty.

        The directory the user named stays unless this claim created it.
        """
        if self._system.process_id() != self._pid:
            # A forked child: the claim and the files are its parent's, and its lock descriptor is closed
            # already.
            return
        try:
            if remove_everything:
                remove_files(self._system, self.directory)
            self._system.unlink(CLAIM_NAME, dir_fd=self.directory)
        except OSError as error:
            raise StorageError(
                f"cannot clean up {self.root}",
                why=error.strerror or str(error),
                remedy="The next run that uses the directory does it; or remove the directory by hand",
                path=self.root,
                operation="close",
            ) from error
        finally:
            with typed("close", self.root), ExitStack() as both:
                both.callback(self._system.close, self.directory)
                both.callback(self._system.close_lock, self._lock)
        if remove_everything:
            between = os.path.relpath(self.root, self._base).split(os.sep)
            ours = [os.path.join(self._base, *between[:depth]) for depth in range(1, len(between) + 1)]
            remove_empty_directories(self._system, [p for p in self._created if p not in ours] + ours)


def _claimed(root: str, owner: Owner | None) -> ClaimedError:
    return ClaimedError(
        f"{root} is in use",
        why=f"it is claimed by {owner or 'a process that is only just starting'}",
        remedy="Wait for that process, end it, or choose another directory",
        owner=str(owner or "a process that is only just starting"),
        path=root,
        operation="claim",
    )


def _lock_or_close(
    system: System, directory: int, root: str, *, keep: bool
) -> tuple[int | None, Owner | None]:
    lock = None
    try:
        lock, owner = _try_lock(system, directory, root, keep=keep)
        return lock, owner
    finally:
        if lock is None:
            system.close(directory)


def _try_lock(system: System, directory: int, root: str, *, keep: bool) -> tuple[int | None, Owner | None]:
    """(the lock, None) when the directory is now ours, else (None, the owner as far as it is known)."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        lock = system.open(CLAIM_NAME, flags, PRIVATE_FILE, dir_fd=directory)
    except FileNotFoundError:
        return None, None  # a neighbour's clean-up removed the directory after it was opened
    except OSError as error:
        raise cannot_create(os.path.join(root, CLAIM_NAME), error) from error
    taken = False
    try:
        if not system.try_lock(lock):
            return None, read_owner(system, lock)
        if not is_still_named(system, lock, CLAIM_NAME, directory):
            return None, None
        blank = not system.fstat(lock).st_size
        try:
            previous = read_owner(system, lock)
            if previous is not None and not previous.keep:
                remove_files(system, directory)
            write_owner(system, lock, Owner.of_this_process(system, keep=keep))
            system.sync(lock)
        except OSError:
            if blank:
                # Nobody's before, and nobody's now: a full disk must not be left fuller than it was.
                system.unlink(CLAIM_NAME, dir_fd=directory)
            raise
        taken = True
        return lock, None
    except OSError as error:
        raise cannot_create(os.path.join(root, CLAIM_NAME), error) from error
    finally:
        if not taken:
            system.close_lock(lock)


def is_still_named(system: System, descriptor: int, name: str, directory: int) -> bool:
    """Whether `name` in `directory` is the very file that `descriptor` has open."""
    try:
        named = system.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    opened = system.fstat(descriptor)
    return (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)


def read_owner(system: System, lock: int) -> Owner | None:
    """The record in a claim file; None where there is none yet, or a crash tore it."""
    buffer = bytearray(RECORD_BYTES)
    length = _transfer(system.preadv, lock, memoryview(buffer))
    try:
        record = json.loads(buffer[:length])
        return Owner(**{field.name: record[field.name] for field in fields(Owner)})
    except (ValueError, TypeError, KeyError):
        return None


def write_owner(system: System, lock: int, owner: Owner) -> None:
    record = json.dumps(asdict(owner)).encode().ljust(RECORD_BYTES)
    if _transfer(system.pwritev, lock, memoryview(record)) != len(record):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _transfer(call: Callable[..., int], descriptor: int, view: memoryview) -> int:
    """Bytes moved from the start of the file until it ends, or `view` does, however often a call stops
    early."""
    done = 0
    while done < len(view):
        try:
            moved = call(descriptor, [view[done:]], done)
        except InterruptedError:
            continue
        if not moved:
            break
        done += moved
    return done


def sweep(system: System, directory: str) -> None:
    """Remove what dead runs of this machine left anywhere below `directory`; live claims are never touched.

    Everything below `directory` must be ours to judge: directories of other users are not entered.
    """
    try:
        descriptor = system.open(directory, DIRECTORY_FLAGS)
    except FileNotFoundError:
        return
    try:
        _sweep(system, descriptor, directory)
    finally:
        system.close(descriptor)


def _sweep(system: System, directory: int, path: str) -> bool:
    """Returns whether anything was reclaimed here or below."""
    reclaimed = False
    for name in system.listdir(directory):
        try:
            if name == CLAIM_NAME:
                reclaimed |= _reclaim_if_dead(system, directory)
                continue
            status = system.stat(name, dir_fd=directory, follow_symlinks=False)
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != system.geteuid():
                continue
            descriptor = system.open(name, DIRECTORY_FLAGS, dir_fd=directory)
        except FileNotFoundError:
            continue  # its owner ended, or a neighbour sweeps too
        below = os.path.join(path, name)
        try:
            reclaimed_below = _sweep(system, descriptor, below)
        finally:
            system.close(descriptor)
        if reclaimed_below:
            remove_empty_directories(system, [below])
            reclaimed = True
    return reclaimed


def _reclaim_if_dead(system: System, directory: int) -> bool:
    lock = system.open(CLAIM_NAME, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    try:
        if not system.try_lock(lock) or not is_still_named(system, lock, CLAIM_NAME, directory):
            return False
        owner = read_owner(system, lock)
        # No record: a process between creating its claim file and locking it. It tries again after us.
        if owner is None or owner.keep or not owner.shares_kernel_with(system):
            return False
        write_owner(system, lock, replace(owner, reclaiming=True))
        remove_files(system, directory)
        system.unlink(CLAIM_NAME, dir_fd=directory)
        return True
    finally:
        system.close_lock(lock)
