"""Typed errors of the core. Storage errors live beside the backends; both share `OptstreamError`."""

from __future__ import annotations

from optstream.backends.errors import OptstreamError, StorageError

__all__ = [
    "AsleepError",
    "CheckpointError",
    "CorruptionError",
    "OptstreamError",
    "PoisonedError",
    "RemoteRankError",
    "StorageError",
    "StreamConfigError",
    "UnsupportedError",
]


class StreamConfigError(OptstreamError):
    """Arguments that do not go together. `violations` lists every broken rule."""

    def __init__(self, what: str, *, violations: tuple = (), **fields) -> None:
        super().__init__(what, **fields)
        self.violations = violations


class UnsupportedError(OptstreamError):
    """A set-up that cannot be streamed, named."""


class CorruptionError(StorageError):
    """Bytes read back are not the bytes last written. Carries `bucket` and `segment`."""

    def __init__(self, what: str, *, bucket: int, segment: str, **fields) -> None:
        super().__init__(what, **fields)
        self.bucket, self.segment = bucket, segment


class CheckpointError(StorageError):
    """A checkpoint that cannot be loaded: incomplete, damaged, of another version or of another model."""


class AsleepError(OptstreamError):
    """A tensor of a trainer that sleeps was used: its memory is somebody else's meanwhile."""


class PoisonedError(OptstreamError):
    """A step failed half-way: some buckets are updated, others are not. `cause` is the first failure."""

    def __init__(self, what: str, *, cause: BaseException | None = None, **fields) -> None:
        super().__init__(what, **fields)
        self.cause = cause


class RemoteRankError(OptstreamError):
    """Another rank failed, and this one stopped with it. Carries `rank`, the failing one's global rank."""

    def __init__(self, what: str, *, rank: int, **fields) -> None:
        super().__init__(what, **fields)
        self.rank = rank
