"""SIGTERM as an ordinary end: what cleans up at the end of a program does so then, too.

Python ends at once on SIGTERM, without `finally` or exit handlers, unless somebody handles it. Schedulers
send it before SIGKILL, so a run that does not handle it leaves its files to the next start. Signal handlers
belong to the program and not to a library, so nothing is installed by importing or constructing anything: a
program that has no handler of its own calls `clean_up_on_sigterm` once.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import NoReturn


class Ended(SystemExit):
    """SIGTERM came. Carries the exit code that shells give such a process."""


def clean_up_on_sigterm() -> bool:
    """Let SIGTERM raise `Ended`, a SystemExit, in the main thread.

    False, and nothing is changed, where the program handles SIGTERM itself or this is not the main thread,
    which alone can."""
    if threading.current_thread() is not threading.main_thread():
        return False
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return False
    signal.signal(signal.SIGTERM, _exit)
    return True


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    # Once is enough: a second one must not interrupt the cleaning up.
    signal.signal(number, signal.SIG_IGN)
    raise Ended(128 + number)
