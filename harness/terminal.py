"""What a person sees beside the output: our own warnings in one line each, and nobody else's noise."""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Iterator

# Megatron and torch.distributed warn at every start about what this harness chooses on purpose: fallbacks
# without TransformerEngine, deprecations among themselves.
_NOISY = ("megatron", "torch")


@contextlib.contextmanager
def plain_warnings() -> Iterator[None]:
    """Inside, libraries are silent and a warning of optstream is one line on standard error, shown once."""
    megatron_log = logging.getLogger("megatron")
    level = megatron_log.level
    with warnings.catch_warnings():
        for library in _NOISY:
            warnings.filterwarnings("ignore", module=rf"{library}(\..*)?$")
        warnings.showwarning = _show
        megatron_log.setLevel(logging.ERROR)
        try:
            yield
        finally:
            megatron_log.setLevel(level)


def _show(message, category, filename, lineno, file=None, line=None) -> None:
    print(f"optstream: warning: {message}", file=file or sys.stderr)
