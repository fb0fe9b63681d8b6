"""Steps first: a save behind the steps leaves the disk and the processor to a step while one runs.

Both move the same bytes over the same disk, so whatever the save moves during a step, the step waits for.
Between steps, while forward and backward run, the disk has nothing else to do. All optimizers of a process
share its disks, and so one pace.

A save is never starved: it waits at most `WAITING` times as long as it works, and for one step at the start;
and where a step needs what the save holds, it does not wait at all.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

WAITING = 3


class Pace:
    """Which steps run now, and whether one of them waits for work that gives way to it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.longest_step_s = 0.0
        self._changed = threading.Condition()
        self._stepping = 0
        self._needing = 0

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """A step runs."""
        began = self.clock()
        with self._changed:
            self._stepping += 1
        try:
            yield
        finally:
            with self._changed:
                self._stepping -= 1
                self.longest_step_s = max(self.longest_step_s, self.clock() - began)
                self._changed.notify_all()

    @contextmanager
    def needing(self) -> Iterator[None]:
        """A step cannot go on before the work behind it does."""
        with self._changed:
            self._needing += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._needing -= 1

    def wait_for_steps(self, timeout_s: float) -> None:
        """Return when no step runs, when one needs the caller's work, or after `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._stepping or self._needing, timeout_s)


PACE = Pace()


class Background:
    """Work behind the steps, from its construction on. It calls `give_way` before each of its pieces."""

    def __init__(self, pace: Pace = PACE) -> None:
        self._pace = pace
        self._began = pace.clock()
        self._waited_s = 0.0

    def give_way(self) -> None:
        """Wait for steps that run, as long as the patience lasts."""
        before = self._pace.clock()
        worked_s = before - self._began - self._waited_s
        patience_s = WAITING * worked_s + self._pace.longest_step_s - self._waited_s
        if patience_s > 0:
            self._pace.wait_for_steps(patience_s)
            self._waited_s += self._pace.clock() - before
