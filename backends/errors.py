"""Typed errors of the storage layer, and the base class of every error that optstream raises on purpose.

This module sits at the bottom of the import order so that backends, core and harness share one base.
A message says what happened, why, and what to do about it, in that order.
"""

from __future__ import annotations


class OptstreamError(Exception):
    """An error a person can act on. `str()` is one line: what, why, what to do."""

    exit_code = 2

    def __init__(self, what: str, *, why: str = "", remedy: str = "") -> None:
        self.what, self.why, self.remedy = what, why, remedy
        message = f"{what}: {why}" if why else what
        super().__init__(f"{message}. {remedy}" if remedy else message)

    def __reduce__(self):
        # Errors travel between ranks and worker processes; keyword-only fields need spelling out.
        return _rebuild, (type(self), self.__dict__.copy(), self.args)


def _rebuild(cls: type[OptstreamError], state: dict, args: tuple) -> OptstreamError:
    error = cls.__new__(cls)
    Exception.__init__(error, *args)
    error.__dict__.update(state)
    return error


class StorageError(OptstreamError):
    """A storage operation failed. Carries `path`, `offset` (bytes, or None) and `operation`."""

    def __init__(
        self,
        what: str,
        *,
        why: str = "",
        remedy: str = "",
        path: str = "",
        offset: int | None = None,
        operation: str = "",
    ) -> None:
        super().__init__(what, why=why, remedy=remedy)
        self.path, self.offset, self.operation = path, offset, operation
        self.holds = ""

    def say_what_it_holds(self, what: str) -> None:
        """Whoever knows what the bytes are for says so, once, in the message and as `holds`."""
        if not self.holds:
            self.holds = what
            self.args = (f"{self.args[0]} ({what})", *self.args[1:])


class DirectoryError(StorageError):
    """A directory cannot be used: it cannot be created or written, or belongs to someone else."""


class ClaimedError(StorageError):
    """Another live process holds the directory. Carries `owner`, a description with pid and host."""

    def __init__(self, what: str, *, owner: str = "", **fields) -> None:
        super().__init__(what, **fields)
        self.owner = owner


class SpaceError(StorageError):
    """The filesystem cannot hold what was asked for. Carries `needed_bytes` and `free_bytes`."""

    def __init__(self, what: str, *, needed_bytes: int, free_bytes: int, **fields) -> None:
        super().__init__(what, **fields)
        self.needed_bytes, self.free_bytes = needed_bytes, free_bytes


class TransferError(StorageError):
    """A read, write or sync failed or came up short."""


class MissingFileError(StorageError):
    """A file that should be there is not."""


class StorageWarning(UserWarning):
    """The storage works, but not as well as the user is likely to expect."""


class InMemoryWarning(StorageWarning):
    """Files on this filesystem live in RAM, so streaming to them saves no memory."""


class UnreservedSpaceWarning(StorageWarning):
    """This filesystem cannot reserve space: a disk that others fill can still fail a write in the middle
    of a run."""
