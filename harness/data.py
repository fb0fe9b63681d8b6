"""Real text as bytes, and batches drawn from it that depend on nothing but their coordinates.

The vocabulary is the 256 byte values, so any text will do and no tokenizer is needed.
"""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import numpy as np
import torch

from optstream.harness.errors import DataError

TEXT_BYTES_MAX = 4 << 20

# Installed packages differ from machine to machine; the standard library of one Python version does not.
_NOT_STANDARD_LIBRARY = frozenset({"site-packages", "dist-packages"})


def load_text(path: str | os.PathLike | None = None, *, bytes_max: int = TEXT_BYTES_MAX) -> torch.Tensor:
    """The first `bytes_max` bytes of a text file, or of a directory's text files in the order of their paths.

    Without a path: the running Python's own standard-library source. Files that hold a NUL byte are binary;
    in a directory they are passed over. Returns a 1-D uint8 tensor.

    Raises DataError if the path is missing or unreadable, the file empty or binary, or the directory without
    text.
    """
    if path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        text = _concatenate(_files_under(root, suffix=".py"), bytes_max)
        if not text:
            raise DataError(
                f"no default training text: {root} holds no Python source",
                remedy="Name a text file or directory with --data",
            )
    else:
        text = _read_path(Path(path), bytes_max)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def check_data(path: str | os.PathLike | None) -> None:
    """Raise DataError now, with one line, and not later in a rank."""
    load_text(path)


def _read_path(path: Path, bytes_max: int) -> bytes:
    remedy = "Give a text file, or a directory that holds some"
    if path.is_dir():
        text = _concatenate(_files_under(path), bytes_max)
        if not text:
            raise DataError(f"no training text in {path}", why="every file is empty or binary", remedy=remedy)
        return text
    text = _read(path, bytes_max)
    if not text:
        raise DataError(f"no training text in {path}", why="the file is empty", remedy=remedy)
    if b"\0" in text:
        raise DataError(f"no training text in {path}", why="the file is binary (NUL bytes)", remedy=remedy)
    return text


def _files_under(root: Path, suffix: str = "") -> list[Path]:
    def refuse(error: OSError) -> None:
        raise DataError(f"cannot list {error.filename}", why=error.strerror or str(error))

    files = []
    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if name not in _NOT_STANDARD_LIBRARY]
        paths = (Path(folder, name) for name in names if name.endswith(suffix))
        files += [path for path in paths if path.is_file()]  # no pipes, sockets or dangling links
    return sorted(files, key=lambda path: path.relative_to(root).parts)


def _concatenate(files: list[Path], bytes_max: int) -> bytes:
    text = bytearray()
    for path in files:
        if len(text) >= bytes_max:
            break
        piece = _read(path, bytes_max - len(text))
        if b"\0" not in piece:
            text += piece
    return bytes(text)


def _read(path: Path, bytes_max: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(bytes_max)
    except OSError as error:
        raise DataError(f"cannot read {path}", why=error.strerror or str(error)) from error


class ByteDataset:
    """Windows of `seq` bytes at places drawn from (seed, step, microbatch, data-parallel rank).

    No state: any batch can be asked for again, which is what a second run and a resumed one rely on.
    Raises DataError if the text is too short for one window and its labels.
    """

    def __init__(self, text: torch.Tensor, *, seq: int, seed: int) -> None:
        if text.numel() < seq + 1:
            raise DataError(
                f"the training text has {text.numel()} bytes",
                why=f"a sequence of {seq} and its labels need {seq + 1}",
                remedy="Give more text, or a smaller --seq",
            )
        self._text, self._seq, self._seed = text, seq, seed

    def batch(
        self, *, step: int, microbatch: int, dp_rank: int, batch: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and labels, each int64 of shape [batch, seq]; a label is the token that follows."""
        random = np.random.default_rng([self._seed, step, microbatch, dp_rank])
        starts = random.integers(0, self._text.numel() - self._seq, size=batch)
        windows = torch.stack([self._text[start : start + self._seq + 1] for start in starts]).long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
