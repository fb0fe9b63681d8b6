"""Typed errors of the harness."""

from __future__ import annotations

from optstream.backends.errors import OptstreamError

__all__ = ["ConfigurationError", "DataError", "DeviceMemoryError", "OptstreamError", "RankError"]


class ConfigurationError(OptstreamError):
    """A training configuration that cannot run: a world that does not divide, a feature that does not
    combine."""


class DataError(OptstreamError):
    """Training data that cannot be read as text."""


class DeviceMemoryError(OptstreamError):
    """A device, simulated or real, is full. Carries `resident`: bytes in use by name."""

    exit_code = 1

    def __init__(self, what: str, *, resident: dict[str, int], **fields) -> None:
        super().__init__(what, **fields)
        self.resident = resident


class RankError(OptstreamError):
    """A rank died or raised something that is no OptstreamError. Carries `rank` and `traceback_text`."""

    exit_code = 1

    def __init__(self, what: str, *, rank: int, traceback_text: str = "", **fields) -> None:
        super().__init__(what, **fields)
        self.rank, self.traceback_text = rank, traceback_text
