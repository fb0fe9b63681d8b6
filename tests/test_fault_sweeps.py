"""Every operation of a life fails once, and from then on: the right bits or one typed error, nothing left.

A sweep ends with the first pass in which nothing was injected, so that no operation is out of reach.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator

import pytest

from optstream.backends.fake import FakeSystem
from optstream.harness.faults import Kind, Operation, sweep
from optstream.harness.life import Layer, Life, Storage

PASSES_MAX = 2000
# Calls that never get anywhere are tests/test_faults.py's.
ENDLESS = {Layer.AROUND: (), Layer.BELOW: (Kind.EINTR, Kind.SHORT)}

SHORT = ("construct", "step", "step", "reload", "read_back", "close")
WHOLE = ("construct", "step", "save", "step", "reload", "step", "read_back", "load", "step", "save", "close")

AROUND = [
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
]
BELOW = [
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
]


@pytest.fixture(autouse=True)
def quick_collections() -> Iterator[None]:
    """Each life ends with a collection, which need not look at all of torch again."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def check_sweep(
    script: tuple[str, ...], kind: Kind, operation: Operation, layer: Layer, *, sticky: bool, **streaming
) -> int:
    """Live `script` with the fault at the first, second, third ... operation; the number of passes."""
    for passes, plan in enumerate(itertools.islice(sweep(kind, operation, sticky=sticky), PASSES_MAX)):
        with plan.explained("pytest tests/test_fault_sweeps.py"):
            life = Life(Storage("/disk", FakeSystem()), plan, layer, **streaming)
            for action in script:
                act: Callable[[], bool] = getattr(life, action)
                act()
            verdict = life.finish()
            assert verdict.silent == []
            assert verdict.leaks == []
            assert verdict.detected + verdict.tolerated == len(life.injector.injected)
        if not life.injector.injected:
            return passes
    raise AssertionError(f"after {PASSES_MAX} passes there is still an operation to strike")


def both_modes(cases: list[tuple[Kind, Operation]], layer: Layer) -> list:
    return [
        pytest.param(kind, operation, layer, sticky, id=f"{layer}-{kind}@{operation}{'+' if sticky else ''}")
        for kind, operation in cases
        for sticky in (False, True)
        if not (sticky and kind in (Kind.CRASH, *ENDLESS[layer]))
    ]


SOME_AROUND = [
    (Kind.EIO, Operation.OPEN),
    (Kind.EIO, Operation.READ),
    (Kind.EIO, Operation.WRITE),
    (Kind.LOST, Operation.WRITE),
    (Kind.TORN, Operation.WRITE),
    (Kind.MISDIRECTED, Operation.WRITE),
    (Kind.STALE, Operation.READ),
    (Kind.BIT_FLIP, Operation.READ),
    (Kind.CRASH, Operation.WRITE),
]


@pytest.mark.unit
@pytest.mark.parametrize(
    ("kind", "operation", "layer", "sticky"),
    [
        *(pytest.param(*case, Layer.AROUND, False, id="-".join(case)) for case in SOME_AROUND),
        *(pytest.param(*case, Layer.BELOW, False, id="below-" + "-".join(case)) for case in BELOW),
        pytest.param(Kind.EIO, Operation.WRITE, Layer.AROUND, True, id="EIO-write+"),
        pytest.param(Kind.LOST, Operation.WRITE, Layer.AROUND, True, id="lost-write+"),
        pytest.param(Kind.EIO, Operation.CLOSE, Layer.BELOW, True, id="below-EIO-close+"),
    ],
)
def test_every_operation_of_a_short_life(kind, operation, layer, sticky):
    # One bucket: every kind of operation is there, and none of them often.
    assert check_sweep(SHORT, kind, operation, layer, sticky=sticky, bucket_numel=1024) >= 1


@pytest.mark.nightly
@pytest.mark.parametrize("streaming", [{}, {"staged": True, "depth": 1}, {"write_behind": False}], ids=str)
@pytest.mark.parametrize(
    ("kind", "operation", "layer", "sticky"),
    both_modes(AROUND, Layer.AROUND) + both_modes(BELOW, Layer.BELOW),
)
def test_every_operation_of_a_whole_life(kind, operation, layer, sticky, streaming):
    assert check_sweep(WHOLE, kind, operation, layer, sticky=sticky, **streaming) >= 1
