"""Every operation of a life fails once, and from then on: the right bits or one typed error, nothing left."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest

from optstream.backends.fake import FakeSystem
from optstream.harness.fault_plan import Layer
from optstream.harness.faults import FaultPlan, Kind, Operation
from optstream.harness.life import Life, Storage
from optstream.harness.sweeps import CASES, once_and_from_then_on, strike_each

PASSES_MAX = 2000

SHORT = ("construct", "step", "step", "reload", "read_back", "close")
WHOLE = ("construct", "step", "save", "step", "reload", "step", "read_back", "load", "step", "save", "close")


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
    """Live `script` with the fault at the first, second, third ... operation; how many it struck."""

    def live(plan: FaultPlan) -> bool:
        life = Life(Storage("/disk", FakeSystem()), plan, layer, **streaming)
        for action in script:
            act: Callable[[], bool] = getattr(life, action)
            act()
        verdict = life.finish()
        assert verdict.silent == []
        assert verdict.leaks == []
        assert verdict.detected + verdict.tolerated == len(life.injector.injected)
        return bool(life.injector.injected)

    command = "pytest tests/test_fault_sweeps.py"
    return strike_each(kind, operation, live, sticky=sticky, passes_max=PASSES_MAX, command=command)


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
        *(
            pytest.param(*case, Layer.BELOW, False, id="below-" + "-".join(case))
            for case in CASES[Layer.BELOW]
        ),
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
    once_and_from_then_on(Layer.AROUND) + once_and_from_then_on(Layer.BELOW),
    ids=str,
)
def test_every_operation_of_a_whole_life(kind, operation, layer, sticky, streaming):
    assert check_sweep(WHOLE, kind, operation, layer, sticky=sticky, **streaming) >= 1
