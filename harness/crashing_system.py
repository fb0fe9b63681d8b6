"""A machine that loses power at a chosen system call, for sweeps over every storage operation of a save."""

from __future__ import annotations

import random
import threading
from typing import Any

from optstream.backends.fake_system import FakeSystem
from optstream.harness.faults import SimulatedCrash

# Calls of a `System` that touch the disk. Power can go at any of them; nothing of the call happens then.
CALLS = frozenset(
    {
        "open",
        "close",
        "close_lock",
        "try_lock",
        "preadv",
        "pwritev",
        "ftruncate",
        "reserve",
        "fstat",
        "stat",
        "mkdir",
        "rmdir",
        "unlink",
        "rename",
        "listdir",
        "sync",
        "free_bytes",
    }
)


class CrashingSystem:
    """`disk`, whose `nth` call from now on (counting from 1) is the moment at which the power goes.

    rng: None: everything that was not synced is lost; else it survives in torn pieces. Afterwards every call
    raises `SimulatedCrash`: the process is dead. What is left on `disk` is for another system to find.
    crashed: whether it came to that.
    """

    def __init__(self, disk: FakeSystem, nth: int, rng: random.Random | None = None) -> None:
        self._disk, self._left, self._rng = disk, nth, rng
        self._lock = threading.Lock()
        self.crashed = False

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._disk, name)
        if name not in CALLS:
            return call

        def perhaps(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                if not self.crashed:
                    self._left -= 1
                    if not self._left:
                        self.crashed = True
                        self._disk.crash(self._rng)
                if self.crashed:
                    raise SimulatedCrash(f"at {name}{args[:1]}")
                return call(*args, **kwargs)

        return perhaps
