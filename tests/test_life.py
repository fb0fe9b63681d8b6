"""Any order of operations and faults on the fake backend, against a plain AdamW in memory."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from optstream.backends.fake import FakeSystem
from optstream.harness.fault_plan import APPLIES, Fault, FaultPlan, Kind, Layer
from optstream.harness.life import Life, Storage

# Below the backend, what only a backend's wrapper can do cannot happen; a reordering is a delay.
KINDS = {
    Layer.AROUND: [kind for kind in Kind if kind is not Kind.EINTR],
    Layer.BELOW: [Kind.EIO, Kind.ENOSPC, Kind.EINTR, Kind.SHORT],
}
NTH_MAX = 60


@pytest.fixture(autouse=True)
def quiet_and_quick() -> Iterator[None]:
    """Background saves log failures, which come by the dozen; collections need not look at all of torch."""
    logging.disable(logging.CRITICAL)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    logging.disable(logging.NOTSET)


@st.composite
def plans(draw: st.DrawFn, layer: Layer) -> FaultPlan:
    possible = [(kind, operation) for kind in KINDS[layer] for operation in sorted(APPLIES[kind])]
    faults = draw(
        st.lists(st.tuples(st.sampled_from(possible), st.integers(1, NTH_MAX)), max_size=8, unique=True)
    )
    return FaultPlan(
        tuple(Fault(kind, operation, nth) for (kind, operation), nth in faults), draw(st.integers(0, 1 << 16))
    )


class Lives(RuleBasedStateMachine):
    """Every rule is an operation of a `Life`, which judges it; nothing it complains about may remain."""

    life: Life | None = None

    @initialize(
        layer_and_plan=st.sampled_from(Layer).flatmap(lambda layer: st.tuples(st.just(layer), plans(layer))),
        staged=st.booleans(),
        depth=st.integers(1, 3),
        cache_bytes=st.sampled_from([0, 1 << 16]),
        write_behind=st.booleans(),
    )
    def begin(self, layer_and_plan, staged, depth, cache_bytes, write_behind) -> None:
        layer, plan = layer_and_plan
        self.life = Life(
            Storage("/disk", FakeSystem()),
            plan,
            layer,
            staged=staged,
            depth=depth,
            host_cache_bytes=cache_bytes,
            write_behind=write_behind,
        )
        self.life.construct()

    @rule()
    def construct(self) -> None:
        self.life.construct()

    @precondition(lambda self: self.life.optimizer is not None)
    @rule(times=st.integers(1, 3))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.life.step()

    @precondition(lambda self: self.life.optimizer is not None)
    @rule(lr=st.sampled_from([1e-3, 1e-1]), weight_decay=st.sampled_from([0.0, 0.1]))
    def set_hyperparameters(self, lr: float, weight_decay: float) -> None:
        self.life.set_hyperparameters(lr, weight_decay)

    @precondition(lambda self: self.life.optimizer is not None)
    @rule()
    def reload(self) -> None:
        self.life.reload()

    @precondition(lambda self: self.life.optimizer is not None)
    @rule(background=st.booleans())
    def save(self, background: bool) -> None:
        self.life.save(background=background)

    @precondition(lambda self: self.life.optimizer is not None)
    @rule()
    def load(self) -> None:
        self.life.load()

    @precondition(lambda self: self.life.optimizer is not None)
    @rule()
    def read_back(self) -> None:
        self.life.read_back()

    @precondition(lambda self: self.life.optimizer is not None)
    @rule()
    def sleep(self) -> None:
        self.life.sleep()

    @precondition(lambda self: self.life.asleep)
    @rule()
    def wake_up(self) -> None:
        self.life.wake_up()

    @precondition(lambda self: self.life.optimizer is not None)
    @rule(how=st.sampled_from(["close", "kill", "cut_power"]))
    def end(self, how: str) -> None:
        getattr(self.life, how)()

    def teardown(self) -> None:
        if self.life is None:
            return
        with self.life.injector.plan.explained("pytest tests/test_life.py"):
            verdict = self.life.finish()
            assert verdict.silent == []
            assert verdict.leaks == []
            assert verdict.detected + verdict.tolerated == verdict.injected.total()


@pytest.mark.unit
def test_short_lives():
    run_state_machine_as_test(Lives, settings=settings(max_examples=10, stateful_step_count=12))


@pytest.mark.nightly
def test_long_lives():
    run_state_machine_as_test(Lives, settings=settings(max_examples=1000, stateful_step_count=60))
