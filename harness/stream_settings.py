"""How a run of the harness streams. Imports neither torch nor Megatron."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from optstream.backends import open_backend
from optstream.backends.interface import Backend, Directories


@dataclass(frozen=True)
class StreamSettings:
    """How the streamed run streams: a trainer's flags by argparse name, and the kind of backend."""

    flags: dict[str, Any]
    backend: str = "nvme"

    def namespace(self) -> argparse.Namespace:
        return argparse.Namespace(**self.flags)

    def open_backend(self, directories: Directories, *, subdirectory: str) -> Backend:
        return open_backend(directories, subdirectory=subdirectory, kind=self.backend)
