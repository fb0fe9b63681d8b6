"""Which faults happen when: plans that can be printed, repeated and swept.

A plan is written on one line, `seed=7 EIO@write#3 lost@write#5+ crash@sync#1`: kind, operation, which one
of that operation counting from 1, and `+` for "from then on". The seed decides what the kinds leave open,
such as which bit flips, so that the same plan over the same operations does the same damage.
"""

from __future__ import annotations

import os
import random
import re
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self

PLAN_VARIABLE = "OPTSTREAM_FAULT_PLAN"


class Kind(StrEnum):
    """The kinds of fault; `faults.py` says what each does."""

    EIO = "EIO"
    ENOSPC = "ENOSPC"
    EINTR = "EINTR"
    SHORT = "short"
    LOST = "lost"
    TORN = "torn"
    MISDIRECTED = "misdirected"
    STALE = "stale"
    BIT_FLIP = "bitflip"
    LATENCY = "latency"
    REORDER = "reorder"
    CRASH = "crash"


class Operation(StrEnum):
    """The operations that are counted, each on its own."""

    CREATE = "create"
    OPEN = "open"
    READ = "read"
    WRITE = "write"
    SYNC = "sync"
    REMOVE = "remove"
    LIST = "list"
    PUBLISH = "publish"
    FREE = "free"
    CLOSE = "close"


ANYWHERE = frozenset(Operation)
APPLIES: dict[Kind, frozenset[Operation]] = {
    Kind.EIO: ANYWHERE,
    Kind.ENOSPC: frozenset({Operation.CREATE, Operation.WRITE}),
    Kind.EINTR: frozenset({Operation.READ, Operation.WRITE}),
    Kind.SHORT: frozenset({Operation.READ, Operation.WRITE}),
    Kind.LOST: frozenset({Operation.WRITE}),
    Kind.TORN: frozenset({Operation.WRITE}),
    Kind.MISDIRECTED: frozenset({Operation.WRITE}),
    Kind.STALE: frozenset({Operation.READ}),
    Kind.BIT_FLIP: frozenset({Operation.READ, Operation.WRITE}),
    Kind.LATENCY: ANYWHERE,
    Kind.REORDER: ANYWHERE,
    Kind.CRASH: ANYWHERE,
}
_FAULT = re.compile(r"(?P<kind>\w+)@(?P<operation>\w+)#(?P<nth>[1-9]\d*)(?P<sticky>\+?)")


class Layer(StrEnum):
    """Where faults strike. Around the backend every transfer is exact, so a short one is an error; in the
    system calls below it, short and interrupted calls are everyday life, and nothing may come of them."""

    AROUND = "around"
    BELOW = "below"

    @property
    def harmless(self) -> frozenset[Kind]:
        delays = frozenset({Kind.LATENCY, Kind.REORDER})
        return delays if self is Layer.AROUND else delays | {Kind.EINTR, Kind.SHORT}


@dataclass(frozen=True)
class Fault:
    """`kind` at the `nth` (from 1) operation of that name; `sticky`: and at every one after it."""

    kind: Kind
    operation: Operation
    nth: int
    sticky: bool = False

    def __post_init__(self) -> None:
        if self.operation not in APPLIES[self.kind]:
            raise ValueError(f"{self.kind} cannot happen to {self.operation}")
        if self.nth < 1:
            raise ValueError(f"operations are counted from 1, not {self.nth}")

    def __str__(self) -> str:
        return f"{self.kind}@{self.operation}#{self.nth}{'+' if self.sticky else ''}"

    @classmethod
    def parse(cls, text: str) -> Self:
        match = _FAULT.fullmatch(text)
        if match is None:
            raise ValueError(
                f"{text!r} is no fault; one looks like EIO@write#3, or EIO@write#3+ for all from then on"
            )
        return cls(
            Kind(match["kind"]), Operation(match["operation"]), int(match["nth"]), bool(match["sticky"])
        )


@dataclass(frozen=True)
class FaultPlan:
    """Faults and the seed of what they leave open. `str()` and `parse` are inverse."""

    faults: tuple[Fault, ...] = ()
    seed: int = 0

    @classmethod
    def single(
        cls,
        kind: Kind | str,
        operation: Operation | str,
        nth: int = 1,
        *,
        sticky: bool = False,
        seed: int = 0,
    ) -> Self:
        return cls((Fault(Kind(kind), Operation(operation), nth, sticky),), seed)

    @classmethod
    def random(
        cls,
        seed: int,
        *,
        faults: int,
        nth_max: int,
        kinds: Sequence[Kind | str] = tuple(Kind),
        operations: Sequence[Operation | str] = tuple(Operation),
    ) -> Self:
        """`faults` faults among the first `nth_max` operations of each name, all of it decided by the
        seed."""
        rng = random.Random(seed)
        choices = [
            (Kind(k), Operation(o)) for k in kinds for o in operations if Operation(o) in APPLIES[Kind(k)]
        ]
        drawn = (rng.choice(choices) for _ in range(faults))
        return cls(tuple(Fault(kind, operation, rng.randint(1, nth_max)) for kind, operation in drawn), seed)

    @classmethod
    def parse(cls, text: str) -> Self:
        seed, *faults = text.split() or [""]
        if not seed.startswith("seed="):
            raise ValueError(f"a plan starts with seed=NUMBER, not with {seed!r}")
        return cls(tuple(Fault.parse(fault) for fault in faults), int(seed.removeprefix("seed=")))

    @classmethod
    def from_environment(cls, otherwise: Self) -> Self:
        """The plan in $OPTSTREAM_FAULT_PLAN, which replays a failure, or `otherwise`."""
        return cls.parse(os.environ[PLAN_VARIABLE]) if PLAN_VARIABLE in os.environ else otherwise

    def __str__(self) -> str:
        return " ".join([f"seed={self.seed}", *map(str, self.faults)])

    @contextmanager
    def explained(self, command: str) -> Iterator[None]:
        """Adds to any error that leaves the block the whole plan and the command line that replays it."""
        try:
            yield
        except BaseException as error:
            error.add_note(f"fault plan: {self}\nreplay with: {PLAN_VARIABLE}='{self}' {command}")
            raise


@dataclass(frozen=True)
class Injected:
    """A fault that happened: to what, and where (bytes, or None)."""

    fault: Fault
    nth: int
    path: str
    offset: int | None

    def __str__(self) -> str:
        place = "" if self.offset is None else f" at {self.offset}"
        return f"{self.fault.kind} at {self.fault.operation} {self.nth} of {self.path}{place}"


@dataclass
class Injector:
    """Counts operations, from any thread, and says which fault is due.

    injected: every fault that happened, in order. counts: operations so far, by name.
    armed: False lets everything through, uncounted.
    """

    plan: FaultPlan
    injected: list[Injected] = field(default_factory=list)
    counts: Counter[Operation] = field(default_factory=Counter)
    armed: bool = True

    def __post_init__(self) -> None:
        self.rng = random.Random(self.plan.seed)
        self._lock = threading.Lock()

    def due(self, operation: Operation, path: str, offset: int | None = None) -> Kind | None:
        """Count one more `operation`; the kind of the first fault of the plan that strikes it, if any."""
        if not self.armed:
            return None
        with self._lock:
            self.counts[operation] += 1
            nth = self.counts[operation]
            for fault in self.plan.faults:
                hit = nth >= fault.nth if fault.sticky else nth == fault.nth
                if fault.operation == operation and hit:
                    self.injected.append(Injected(fault, nth, path, offset))
                    return fault.kind
            return None

    def by_kind(self) -> dict[str, int]:
        return dict(Counter(str(one.fault.kind) for one in self.injected))


def sweep(
    kind: Kind | str, operation: Operation | str, *, sticky: bool = False, seed: int = 0
) -> Iterator[FaultPlan]:
    """Plans that strike the 1st, 2nd, 3rd ... operation. The caller stops at the first that nothing
    happened in, so that no operation is out of reach."""
    nth = 1
    while True:
        yield FaultPlan.single(kind, operation, nth, sticky=sticky, seed=seed)
        nth += 1
