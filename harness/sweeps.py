"""Sweeps: the same life again and again, with a fault at its first, second, third ... operation.

A sweep ends with the first pass in which nothing was injected, so that no operation is out of reach.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from optstream.harness.fault_plan import FaultPlan, Kind, Layer, Operation, sweep

# What can strike live files, by layer.
CASES: dict[Layer, list[tuple[Kind, Operation]]] = {
    Layer.AROUND: [
        (Kind.EIO, Operation.CREATE),
        (Kind.EIO, Operation.OPEN),
        (Kind.EIO, Operation.READ),
        (Kind.EIO, Operation.WRITE),
        (Kind.EIO, Operation.FREE),
        (Kind.EIO, Operation.CLOSE),
        (Kind.ENOSPC, Operation.CREATE),
        (Kind.ENOSPC, Operation.WRITE),
        (Kind.SHORT, Operation.READ),
        (Kind.SHORT, Operation.WRITE),
        (Kind.LOST, Operation.WRITE),
        (Kind.TORN, Operation.WRITE),
        (Kind.MISDIRECTED, Operation.WRITE),
        (Kind.STALE, Operation.READ),
        (Kind.BIT_FLIP, Operation.READ),
        (Kind.BIT_FLIP, Operation.WRITE),
        (Kind.CRASH, Operation.READ),
        (Kind.CRASH, Operation.WRITE),
    ],
    Layer.BELOW: [
        (Kind.EIO, Operation.OPEN),
        (Kind.EIO, Operation.READ),
        (Kind.EIO, Operation.WRITE),
        (Kind.EIO, Operation.CREATE),
        (Kind.EIO, Operation.REMOVE),
        (Kind.EIO, Operation.LIST),
        (Kind.EIO, Operation.FREE),
        (Kind.EIO, Operation.CLOSE),
        (Kind.ENOSPC, Operation.CREATE),
        (Kind.ENOSPC, Operation.WRITE),
        (Kind.EINTR, Operation.READ),
        (Kind.EINTR, Operation.WRITE),
        (Kind.SHORT, Operation.READ),
        (Kind.SHORT, Operation.WRITE),
    ],
}
# Below the backend, such calls from then on never get anywhere.
ENDLESS = {Layer.AROUND: (), Layer.BELOW: (Kind.EINTR, Kind.SHORT)}


def once_and_from_then_on(
    layer: Layer, *, without: Iterable[Kind] = ()
) -> list[tuple[Kind, Operation, Layer, bool]]:
    """(kind, operation, layer, sticky) of the layer's cases, as far as they can be sticky."""
    excluded = set(without)
    return [
        (kind, operation, layer, sticky)
        for kind, operation in CASES[layer]
        for sticky in (False, True)
        if kind not in excluded and not (sticky and kind in (Kind.CRASH, *ENDLESS[layer]))
    ]


def strike_each(
    kind: Kind,
    operation: Operation,
    live: Callable[[FaultPlan], bool],
    *,
    sticky: bool,
    passes_max: int,
    command: str,
) -> int:
    """`live` one life after the other until it says that nothing was injected; returns how many were struck.

    command: what replays one, for the note on an error. Raises AssertionError if there is no end to it."""
    for passes, plan in enumerate(itertools.islice(sweep(kind, operation, sticky=sticky), passes_max)):
        with plan.explained(command):
            struck = live(plan)
        if not struck:
            return passes
    raise AssertionError(f"after {passes_max} passes there is still an operation to strike")
