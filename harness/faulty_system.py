"""Faults below the file backend, in the system calls that it makes. `faults.py` holds the model."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from typing import Any

from optstream.backends.system import System
from optstream.harness.fault_plan import FaultPlan, Injector, Kind, Operation

LATENCY_S = 0.002
CALLS = {
    "open": Operation.OPEN,
    "preadv": Operation.READ,
    "pwritev": Operation.WRITE,
    "reserve": Operation.CREATE,
    "ftruncate": Operation.CREATE,
    "sync": Operation.SYNC,
    "unlink": Operation.REMOVE,
    "listdir": Operation.LIST,
    "rename": Operation.PUBLISH,
    "free_bytes": Operation.FREE,
    "close": Operation.CLOSE,
}
SUPPORTED = frozenset({Kind.EIO, Kind.ENOSPC, Kind.EINTR, Kind.SHORT, Kind.LATENCY})


class FaultySystem:
    """`inner`, a `System`, with faults in its calls: pass it as the file backend's `system`.

    EINTR and short returns are what a kernel may do at any time: the backend must carry on to the right bits.
    EIO and ENOSPC must become its typed errors.
    """

    def __init__(self, inner: System, plan: FaultPlan | Injector) -> None:
        self._inner = inner
        self.injector = plan if isinstance(plan, Injector) else Injector(plan)
        unsupported = {fault.kind for fault in self.injector.plan.faults} - SUPPORTED
        if unsupported:
            raise ValueError(f"no system call can suffer {', '.join(sorted(unsupported))}")

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._inner, name)
        if name not in CALLS:
            return call

        def faulty(*args: Any, **kwargs: Any) -> Any:
            offset = args[2] if name in ("preadv", "pwritev") else None
            kind = self.injector.due(CALLS[name], f"{name}({args[0]})", offset)
            if kind is Kind.LATENCY:
                time.sleep(LATENCY_S)
            elif kind is Kind.SHORT:
                return _short(name, call, *args)
            elif kind is not None:
                if name == "close":
                    # Linux closes the descriptor even when it reports an error.
                    call(*args)
                number = getattr(errno, kind)
                raise OSError(number, f"{os.strerror(number)} (injected)")
            return call(*args, **kwargs)

        return faulty


def _short(
    name: str, call: Callable[..., int], descriptor: int, buffers: list[memoryview], offset: int
) -> int:
    moved = call(descriptor, buffers, offset)
    kept = moved - moved // 2
    if name == "preadv":
        # What lies beyond a short read can be anything; make sure that nobody takes it for data.
        buffers[0][kept:moved] = b"\xee" * (moved - kept)
    return kept
