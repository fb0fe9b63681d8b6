"""Clean-up that happens however a program ends: its owner is closed, forgotten, or the process exits."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable
from multiprocessing.util import Finalize

from optstream.backends.errors import OptstreamError


class Finalizer:
    """Calls `clean_up(*arguments)` once: when it is called itself, when `owner` is collected, or at exit.

    Its errors reach whoever calls it; where nobody does, they are one line on standard error. In a forked
    child nothing happens: what there is to clean up is its parent's. `arguments` must not refer to `owner`.
    """

    def __init__(self, owner: object, clean_up: Callable[..., None], *arguments: object) -> None:
        self._clean_up, self._arguments, self._pid = clean_up, arguments, os.getpid()
        self._unattended = weakref.finalize(owner, self._report)
        # Children that multiprocessing forked end without Python's exit handlers, but not without its own.
        Finalize(owner, self._unattended, exitpriority=0)

    @property
    def alive(self) -> bool:
        """Whether it is still to come."""
        return self._unattended.alive

    def __call__(self) -> None:
        if self.detach():
            self._run()

    def detach(self) -> bool:
        """Nothing will be cleaned up. False if that has been done already."""
        return self._unattended.detach() is not None

    def _run(self) -> None:
        if os.getpid() == self._pid:
            self._clean_up(*self._arguments)

    def _report(self) -> None:
        try:
            self._run()
        except OptstreamError as error:
            print(f"optstream: error: {error}", file=sys.stderr)
