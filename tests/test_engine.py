"""The engine under random completion orders and failures: right bits or one typed error, never a hang.

Every bucket holds numbers that only its own updates change, so a bucket that is updated twice, from stale
bytes or in foreign memory ends with other numbers.
"""

from __future__ import annotations

import copy
import faulthandler
import gc
import logging
import os
import random
import threading
import time
import traceback
import weakref
from collections.abc import Iterator
from contextlib import closing

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from optstream.backends.errors import StorageError, TransferError
from optstream.backends.fake import FakeSystem
from optstream.backends.interface import Backend
from optstream.backends.nvme import NvmeBackend
from optstream.core.copies import HostCopies
from optstream.core.engine import RECORDS_KEPT, SPANS_KEPT, Engine
from optstream.core.errors import CorruptionError, PoisonedError
from optstream.core.formats import segment_formats
from optstream.core.memory import allocate_host
from optstream.core.plan import Entry, plan_buckets
from optstream.core.schedule import Command, Stage
from optstream.core.store import BucketStore
from optstream.harness.faults import FaultPlan, FaultyBackend, Kind, Operation

pytestmark = pytest.mark.unit

BUCKET_NUMEL = 1024
CHUNK_BYTES = 4096
HANG_S = 300


def engine_threads() -> list[str]:
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("optstream-"))


@pytest.fixture(autouse=True)
def no_hang_and_no_thread_left() -> Iterator[None]:
    """A hang ends the test run with every thread's stack, instead of hanging it. Not a verdict on speed."""
    before = set(threading.enumerate())
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
    # What other files' tests left may end meanwhile; nothing may have come.
    left = set(threading.enumerate()) - before
    assert not [thread.name for thread in left if thread.name.startswith("optstream-")]


class SlowBackend(NvmeBackend):
    """Each transfer takes a random moment, so that completions come in a random order."""

    def __init__(self, seed: int, system: FakeSystem) -> None:
        super().__init__("/disk", subdirectory="test/engine", system=system)
        self._random = random.Random(seed)

    def open(self, name: str):
        file = super().open(name)
        for transfer in ("read_into", "write_from"):
            setattr(file, transfer, self._delayed(getattr(file, transfer)))
        return file

    def _delayed(self, transfer):
        def delayed(offset: int, buffer: memoryview) -> None:
            time.sleep(self._random.choice([0, 0, 0.0005, 0.002]))
            transfer(offset, buffer)

        return delayed


def open_fake(system: FakeSystem | None = None) -> Backend:
    return NvmeBackend("/disk", subdirectory="test/engine", system=system or FakeSystem())


def make_store(backend: Backend, buckets: int = 6, *, verify: bool = True) -> BucketStore:
    """Bucket b's main values are all b."""
    entries = [Entry(f"entry{index}", BUCKET_NUMEL, 0) for index in range(buckets)]
    plan = plan_buckets(entries, BUCKET_NUMEL)
    store = BucketStore(
        backend, entries, plan, segment_formats("fp32"), chunk_bytes=CHUNK_BYTES, verify=verify
    )
    place = allocate_host(store.place_bytes)
    for bucket in range(buckets):
        floats(place, store)[:] = float(bucket)
        store.write_bucket(bucket, place, step=0, segments=("main",))
    return store


def floats(memory: torch.Tensor, store: BucketStore, segment: str = "main") -> torch.Tensor:
    extent = store.layouts[0].segments[segment]
    return memory[extent.offset : extent.end].view(torch.float32)


def adder(store: BucketStore):
    """main += 100, exp_avg += 1, exp_avg_sq += main: what is expected follows from the count of updates."""

    def update(bucket: int, memory: torch.Tensor) -> None:
        floats(memory, store)[:] += 100
        floats(memory, store, "exp_avg")[:] += 1
        floats(memory, store, "exp_avg_sq")[:] += floats(memory, store)

    return update


def check_contents(store: BucketStore, updates: dict[int, int] | int) -> None:
    place = allocate_host(store.place_bytes)
    for bucket in range(len(store.buckets)):
        count = updates if isinstance(updates, int) else updates[bucket]
        store.read_bucket(bucket, place)
        main = [bucket + 100.0 * (step + 1) for step in range(count)]
        assert (floats(place, store) == (main[-1] if main else bucket)).all()
        assert (floats(place, store, "exp_avg") == count).all()
        assert (floats(place, store, "exp_avg_sq") == sum(main)).all()


class WatchedCopies(HostCopies):
    """Follows the memory that it hands out for as long as it really lives."""

    def __init__(self) -> None:
        self.places: list[tuple[weakref.ref, int]] = []
        self.slots: list[tuple[weakref.ref, int]] = []

    def allocate_place(self, size_bytes: int) -> torch.Tensor:
        return self._watched(super().allocate_place(size_bytes), self.places)

    def allocate_slot(self, size_bytes: int) -> torch.Tensor:
        return self._watched(super().allocate_slot(size_bytes), self.slots)

    @staticmethod
    def _watched(memory: torch.Tensor, found: list) -> torch.Tensor:
        # The storage and not the tensor: a view keeps the one alive and lets the other go.
        found.append((weakref.ref(memory.untyped_storage()), memory.numel()))
        return memory

    def place_bytes(self) -> int:
        return sum(size for alive, size in self.places if alive() is not None)

    def slot_bytes(self) -> int:
        return sum(size for alive, size in self.slots if alive() is not None)


modes = pytest.mark.parametrize("staged", [False, True], ids=["in place", "staged"])


# ---- right bits --------------------------------------------------------------------------------------------


@given(
    seed=st.integers(0, 2**32),
    buckets=st.integers(1, 7),
    depth=st.integers(1, 4),
    cache=st.integers(0, 4),
    keep_slots=st.booleans(),
    write_behind=st.booleans(),
    staged=st.booleans(),
    io_threads=st.integers(1, 4),
    data=st.data(),
)
def test_random_completion_orders_give_the_same_bits(
    seed, buckets, depth, cache, keep_slots, write_behind, staged, io_threads, data
):
    store = make_store(SlowBackend(seed, FakeSystem()), buckets)
    copies = WatchedCopies()
    peaks = {"slots": 0, "places": 0}

    def observe() -> None:
        peaks["slots"] = max(peaks["slots"], copies.slot_bytes())
        peaks["places"] = max(peaks["places"], copies.place_bytes())

    engine = Engine(
        store,
        depth=depth,
        cache_bytes=cache * store.place_bytes,
        keep_slots=keep_slots,
        write_behind=write_behind,
        staged=staged,
        copies=copies,
        io_threads=io_threads,
        observe=observe,
    )
    with closing(engine):
        expected = dict.fromkeys(range(buckets), 0)
        for step in range(1, data.draw(st.integers(1, 4), label="steps") + 1):
            if data.draw(st.booleans(), label="read ahead"):
                engine.read_ahead()
            everything = st.just(set(expected))
            active = data.draw(everything | st.sets(st.sampled_from(sorted(expected))), label="active")
            record = engine.step(sorted(active), adder(store), step=step)
            assert record.buckets == len(active) == record.reads + record.cache_hits
            assert record.cache_hits >= 0
            for bucket in active:
                expected[bucket] += 1
            if staged and not keep_slots:
                assert copies.slot_bytes() == 0, "slots are given back between steps"
        engine.drain()
        check_contents(store, expected)
        assert peaks["slots"] <= engine.device_bytes_bound
        assert peaks["places"] <= engine.host_bytes_bound
        assert engine.host_bytes_bound <= (depth + cache) * store.place_bytes
    assert copies.slot_bytes() == copies.place_bytes() == 0


@modes
@pytest.mark.parametrize(("depth", "cache", "keep_slots"), [(1, 0, False), (3, 0, False), (2, 3, True)])
def test_real_files(tmp_path, staged, depth, cache, keep_slots):
    store = make_store(NvmeBackend(str(tmp_path), subdirectory="test/engine"))
    engine = Engine(
        store, depth=depth, cache_bytes=cache * store.place_bytes, keep_slots=keep_slots, staged=staged
    )
    for step in (1, 2, 3):
        engine.read_ahead()
        engine.step(range(6), adder(store), step=step)
    engine.drain()
    check_contents(store, 3)
    engine.close()
    store.close(remove_files=True)


@modes
def test_bytes_are_the_arithmetic_less_what_is_kept(staged):
    element, numel = 4, BUCKET_NUMEL
    for cache, keep_slots in ((0, False), (2, False), (0, True), (2, True)):
        store = make_store(open_fake())
        engine = Engine(
            store, depth=2, cache_bytes=cache * store.place_bytes, keep_slots=keep_slots, staged=staged
        )
        for step in range(1, 5):
            engine.step(range(6), adder(store), step=step)
        engine.drain()
        kept = cache + (2 if keep_slots else 0)
        records = engine.records
        assert records[0].read_bytes == 6 * numel * element, "the first step needs no moments"
        assert all(record.read_bytes == (6 - kept) * 3 * numel * element for record in records[1:])
        # What is kept is written once it is newer again, by a later step; the last step's at the drain.
        assert [record.written_bytes for record in records] == [(6 - kept) * 3 * numel * element] * 3 + [
            6 * 3 * numel * element
        ]
        assert [record.cache_hits for record in records] == [0, kept, kept, kept]
        engine.close()
        store.close(remove_files=True)


def test_read_ahead_for_a_step_that_wants_others():
    """What was read in vain belongs to no step's hits."""
    store = make_store(open_fake())
    engine = Engine(store, depth=4)
    engine.read_ahead()
    engine.settle()
    record = engine.step([5], adder(store), step=1)
    assert (record.buckets, record.reads, record.cache_hits) == (1, 1, 0)
    engine.drain()
    check_contents(store, {0: 0, 1: 0, 2: 0, 3: 0, 4: 0, 5: 1})
    engine.close()
    store.close(remove_files=True)


def test_a_diary_of_bounded_length():
    store = make_store(open_fake(), 1)
    engine = Engine(store, depth=1, write_behind=False)
    for step in range(1, SPANS_KEPT + 3):
        engine.step([0], adder(store), step=step)
    records = engine.records
    assert [bool(record.spans) for record in records] == [False] * 2 + [True] * SPANS_KEPT
    assert all(record.read_bytes for record in records)
    for step in range(SPANS_KEPT + 3, RECORDS_KEPT + 3):
        engine.step([], adder(store), step=step)
    assert [record.step for record in engine.records] == list(range(3, RECORDS_KEPT + 3))
    engine.close()
    store.close(remove_files=True)


def test_each_stage_of_each_bucket_has_a_span():
    store = make_store(open_fake())
    engine = Engine(store, depth=2, staged=True)
    engine.step(range(6), adder(store), step=1)
    record = engine.step(range(6), adder(store), step=2)
    engine.drain()
    seen = sorted((span.bucket, span.stage.value) for span in record.spans)
    assert seen == sorted((bucket, stage.value) for bucket in range(6) for stage in Stage)
    assert all(span.start_s <= span.end_s for span in record.spans)
    engine.close()
    store.close(remove_files=True)


def test_a_step_is_logged_in_one_line(caplog):
    store = make_store(open_fake())
    engine = Engine(store, depth=2)
    with caplog.at_level(logging.INFO, logger="optstream.core.engine"):
        engine.step(range(6), adder(store), step=7)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("step 7: read 0.000 GB")
    assert "0 of 6 buckets from memory" in line
    engine.close()
    store.close(remove_files=True)


def test_nothing_to_stream():
    store = make_store(open_fake(), 0)
    engine = Engine(store, depth=4, staged=True)
    assert engine.step([], adder(store), step=1).buckets == 0
    engine.read_ahead()
    engine.drain()
    assert engine.host_bytes_bound == engine.device_bytes_bound == 0
    engine.close()
    store.close(remove_files=True)


# ---- failures ----------------------------------------------------------------------------------------------


def expect_poison_and_recovery(engine: Engine, store: BucketStore, cause: type[BaseException]) -> None:
    """From the second call on PoisonedError; restored files and a reset make the engine as new."""
    for call in (lambda: engine.step([0], adder(store), step=9), engine.drain, engine.settle):
        with pytest.raises(PoisonedError, match="Load a checkpoint") as caught:
            call()
        assert isinstance(caught.value.cause, cause)
        assert "\n" not in str(caught.value)
    engine.read_ahead()
    assert not engine._schedule.outstanding
    recover(engine, store)


def recover(engine: Engine, store: BucketStore) -> None:
    engine.reset()
    place = allocate_host(store.place_bytes)
    place.zero_()
    for bucket in range(len(store.buckets)):
        floats(place, store)[:] = float(bucket)
        store.write_bucket(bucket, place, step=0)
    for step in (1, 2):
        record = engine.step(range(len(store.buckets)), adder(store), step=step)
        assert record.step == step
        assert record.buckets == len(store.buckets)
    engine.drain()
    check_contents(store, 2)
    numel = sum(entry.numel for entry in store.entries)
    assert [(r.step, r.read_bytes, r.written_bytes) for r in engine.records[-2:]] == [
        (step, 12 * numel, 12 * numel) for step in (1, 2)
    ]


FAILURES = [
    (Kind.EIO, Operation.READ, True),
    (Kind.SHORT, Operation.READ, False),
    (Kind.EIO, Operation.WRITE, True),
    (Kind.EIO, Operation.WRITE, False),
    (Kind.ENOSPC, Operation.WRITE, True),
    (Kind.EIO, Operation.OPEN, True),
]


@modes
@pytest.mark.parametrize(("kind", "operation", "write_behind"), FAILURES)
def test_a_failing_transfer_surfaces_once_wherever_it_strikes(staged, kind, operation, write_behind):
    """Sweeps over every operation of two steps and a drain, until a pass meets no fault."""
    struck = 0
    for nth in range(1, 10_000):
        store = make_store(open_fake(), 3)
        plan = FaultPlan.single(kind, operation, nth)
        faulty = FaultyBackend(store.backend, plan)
        store.backend = faulty
        engine = Engine(store, depth=2, staged=staged, write_behind=write_behind)
        with plan.explained("pytest tests/test_engine.py"):
            failures = []
            for call in (
                lambda: engine.step(range(3), adder(store), step=1),  # noqa: B023
                lambda: engine.step(range(3), adder(store), step=2),  # noqa: B023
                engine.drain,
            ):
                try:
                    call()
                except (StorageError, PoisonedError) as error:
                    failures.append(error)
            if not faulty.injector.injected:
                store.backend = faulty.inner
                assert failures == []
                check_contents(store, 2)
                assert nth > 3, "the sweep reached nothing"
                engine.close()
                store.close(remove_files=True)
                break
            struck += 1
            assert isinstance(failures[0], StorageError)
            assert failures[0].path
            assert "bucket-" in str(failures[0])
            assert all(isinstance(error, PoisonedError) for error in failures[1:])
            if nth in (1, 2, 7):
                expect_poison_and_recovery(engine, store, StorageError)
            engine.close()
            store.close(remove_files=True)
    assert struck == nth - 1


@modes
def test_a_silent_fault_is_caught_when_it_is_read(staged):
    for kind in (Kind.LOST, Kind.TORN, Kind.MISDIRECTED, Kind.BIT_FLIP):
        store = make_store(open_fake(), 3)
        store.backend = FaultyBackend(store.backend, FaultPlan.single(kind, Operation.WRITE, 2))
        engine = Engine(store, depth=2, staged=staged)
        engine.step(range(3), adder(store), step=1)
        with pytest.raises(CorruptionError, match="bucket-0000"):
            engine.step(range(3), adder(store), step=2)
        expect_poison_and_recovery(engine, store, CorruptionError)
        engine.close()
        store.close(remove_files=True)


@modes
@pytest.mark.parametrize("error", [ValueError("no such luck"), KeyboardInterrupt(), MemoryError()])
def test_a_failing_update_surfaces_as_it_is(staged, error):
    store = make_store(open_fake())
    copies = WatchedCopies()
    engine = Engine(store, depth=3, staged=staged, copies=copies)
    engine.step(range(6), adder(store), step=1)

    def update(bucket: int, memory: torch.Tensor) -> None:
        if bucket == 3:
            raise copy.copy(error)
        adder(store)(bucket, memory)

    with pytest.raises(type(error)):
        engine.step(range(6), update, step=2)
    assert len(engine.records) == 1, "a failed step is no step"
    expect_poison_and_recovery(engine, store, type(error))
    engine.close()
    assert copies.slot_bytes() == copies.place_bytes() == 0
    store.close(remove_files=True)


def test_a_remembered_failure_keeps_no_memory():
    """Its traceback would: of the bucket, of the caller, of everything that the caller holds."""
    store = make_store(open_fake())
    copies = WatchedCopies()
    engine = Engine(store, depth=3, staged=True, copies=copies)

    class Held:
        pass

    def fail(bucket: int, memory: torch.Tensor) -> None:
        raise ValueError(len(memory))

    def train() -> weakref.ref:
        held = Held()
        try:
            engine.step(range(6), fail, step=1)
        except ValueError:
            return weakref.ref(held)

    held = train()
    gc.collect()
    assert held() is None
    assert copies.slot_bytes() == 0
    with pytest.raises(PoisonedError, match="ValueError: 12288"):
        engine.step([0], fail, step=1)
    engine.close()
    store.close(remove_files=True)


def test_an_exception_that_cannot_be_copied_is_remembered_by_its_words():
    class Stubborn(Exception):
        def __init__(self, first, second):
            super().__init__("only this")

    store = make_store(open_fake())
    engine = Engine(store, depth=1)

    def fail(bucket: int, memory: torch.Tensor) -> None:
        raise Stubborn(1, 2)

    with pytest.raises(Stubborn):
        engine.step([0], fail, step=1)
    with pytest.raises(PoisonedError, match="Stubborn: only this"):
        engine.drain()
    engine.close()
    store.close(remove_files=True)


def test_a_write_behind_failure_waits_for_the_next_call():
    store = make_store(open_fake())
    store.backend = FaultyBackend(store.backend, FaultPlan.single(Kind.EIO, Operation.WRITE, 24))
    engine = Engine(store, depth=6)
    engine.step(range(6), adder(store), step=1)
    with pytest.raises(TransferError, match="injected"):
        engine.drain()
    with pytest.raises(PoisonedError, match="injected"):
        engine.step(range(6), adder(store), step=2)
    engine.close()
    store.close(remove_files=True)


def test_a_read_ahead_failure_waits_for_the_next_step():
    store = make_store(open_fake())
    store.backend = FaultyBackend(store.backend, FaultPlan.single(Kind.EIO, Operation.READ, 1))
    engine = Engine(store, depth=6)
    engine.read_ahead()
    updated = []
    with pytest.raises(TransferError, match="injected"):
        engine.step(range(6), lambda bucket, memory: updated.append(bucket), step=1)
    assert updated == []
    engine.close()
    store.close(remove_files=True)


def test_a_write_that_fails_while_the_next_step_begins():
    """After the step has asked whether anything failed, and before its first command."""
    store = make_store(open_fake(), 1)
    store.backend = FaultyBackend(store.backend, FaultPlan.single(Kind.EIO, Operation.WRITE, 1))
    engine = Engine(store, depth=1)
    write_chunk, raise_failure, asked = store.write_chunk, engine.raise_failure, threading.Event()

    def write_late(*arguments) -> None:
        asked.wait()
        write_chunk(*arguments)

    def ask_early() -> None:
        raise_failure()
        asked.set()
        with engine._changed:
            engine._changed.wait_for(lambda: engine._failure)

    store.write_chunk = write_late
    engine.step([0], adder(store), step=1)
    engine.raise_failure = ask_early
    with pytest.raises(TransferError, match="injected"):
        engine.step([0], adder(store), step=2)
    engine.close()
    store.close(remove_files=True)


def test_close_tells_of_a_failure_that_nobody_heard_of():
    store = make_store(open_fake())
    store.backend = FaultyBackend(store.backend, FaultPlan.single(Kind.EIO, Operation.WRITE, 24))
    engine = Engine(store, depth=6)
    engine.step(range(6), adder(store), step=1)
    with pytest.raises(TransferError, match="injected"):
        engine.close()
    assert engine.host_bytes == 0
    engine.close()
    store.close(remove_files=True)


def test_an_interrupt_while_waiting_for_writes_poisons(monkeypatch):
    """All buckets are updated, but the caller's step counts are not: going on would be silently wrong."""
    store = make_store(open_fake())
    engine = Engine(store, depth=2, write_behind=False)

    def interrupted() -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "settle", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step(range(6), adder(store), step=1)
    monkeypatch.undo()
    expect_poison_and_recovery(engine, store, KeyboardInterrupt)
    engine.close()
    store.close(remove_files=True)


def test_no_device_memory_for_slots_is_no_failed_step():
    store = make_store(open_fake())
    copies = WatchedCopies()
    engine = Engine(store, depth=3, staged=True, copies=copies)
    allocate, left = copies.allocate_slot, [2]

    def scarce(size_bytes: int) -> torch.Tensor:
        if not left[0]:
            raise torch.OutOfMemoryError("no more")
        left[0] -= 1
        return allocate(size_bytes)

    copies.allocate_slot = scarce
    with pytest.raises(torch.OutOfMemoryError):
        engine.step(range(6), adder(store), step=1)
    assert copies.slot_bytes() == 0
    left[0] = 3
    engine.step(range(6), adder(store), step=1)
    engine.drain()
    check_contents(store, 1)
    assert len(engine.records) == 1
    engine.close()
    store.close(remove_files=True)


def test_a_failing_observer_is_heard():
    store = make_store(open_fake())

    def observe() -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("the ledger is wrong")

    engine = Engine(store, depth=2, observe=observe)
    with pytest.raises(ValueError, match="the ledger is wrong"):
        engine.step(range(6), adder(store), step=1)
    engine.close()
    store.close(remove_files=True)


# ---- ends --------------------------------------------------------------------------------------------------


@modes
@pytest.mark.parametrize("state", ["fresh", "reading ahead", "write-behind", "cached", "failed"])
def test_close_in_any_state_leaves_nothing(staged, state):
    system = FakeSystem()
    store = make_store(SlowBackend(0, system))
    copies = WatchedCopies()
    cache_bytes = 6 * store.place_bytes if state == "cached" else 0
    engine = Engine(store, depth=2, cache_bytes=cache_bytes, staged=staged, copies=copies)
    if state == "reading ahead":
        engine.read_ahead()
    elif state in ("write-behind", "cached"):
        engine.step(range(6), adder(store), step=1)
    elif state == "failed":
        with pytest.raises(ZeroDivisionError):
            engine.step(range(6), lambda bucket, memory: 1 // 0, step=1)
    engine.close()
    engine.close()
    assert engine.slots == []
    assert copies.slot_bytes() == copies.place_bytes() == 0
    store.close(remove_files=True)
    assert system.open_descriptors() == 0


@modes
def test_fifty_steps_grow_nothing(tmp_path, staged):
    process = psutil.Process()
    store = make_store(NvmeBackend(str(tmp_path), subdirectory="test/engine"))
    engine = Engine(store, depth=3, staged=staged)

    def steps(first: int, count: int) -> tuple[list[str], int, int]:
        for step in range(first, first + count):
            engine.read_ahead()
            engine.step(range(6), adder(store), step=step)
        engine.drain()
        gc.collect()
        return engine_threads(), len(os.listdir("/proc/self/fd")), process.memory_info().rss

    threads, descriptors, rss = steps(1, 1)
    threads_after, descriptors_after, rss_after = steps(2, 50)
    assert threads_after == threads
    assert descriptors_after == descriptors
    # Fifty leaked buckets would be several times that; the allocator's own ups and downs are not.
    assert rss_after - rss < 20 * store.place_bytes
    engine.close()
    store.close(remove_files=True)


def test_threads_that_cannot_start_leave_none(monkeypatch):
    store = make_store(open_fake())
    start, left = threading.Thread.start, [6]

    def scarce(thread: threading.Thread) -> None:
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", scarce)
    with pytest.raises(RuntimeError, match="can't start"):
        Engine(store, depth=2)
    store.close(remove_files=True)


def test_waiting_threads_keep_nothing():
    """A thread that waits must not hold what its last task held."""
    store = make_store(open_fake())
    copies = WatchedCopies()
    engine = Engine(store, depth=3, staged=True, copies=copies)
    engine.step(range(6), adder(store), step=1)
    engine.drain()
    engine._places.clear()
    gc.collect()
    assert copies.place_bytes() == copies.slot_bytes() == 0
    engine.close()
    store.close(remove_files=True)


def test_a_slot_is_free_as_soon_as_the_step_knows_it():
    """A copy thread that is slow to return must not hold it: the next step allocates its own."""
    store = make_store(open_fake(), 1)
    copies = WatchedCopies()
    engine = Engine(store, depth=1, staged=True, copies=copies)
    measured = threading.Event()
    finish = engine._finish

    def finish_slowly(command: Command) -> None:
        finish(command)
        if command.stage is Stage.DOWNLOAD:
            measured.wait()

    engine._finish = finish_slowly
    engine.step([0], adder(store), step=1)
    held_bytes = copies.slot_bytes()
    measured.set()
    assert held_bytes == 0
    engine.close()
    store.close(remove_files=True)


def test_tracebacks_show_where_it_happened():
    store = make_store(open_fake())
    store.backend = FaultyBackend(store.backend, FaultPlan.single(Kind.EIO, Operation.READ, 1))
    engine = Engine(store, depth=2)
    with pytest.raises(TransferError) as caught:
        engine.step(range(6), adder(store), step=1)
    names = {frame.name for frame in traceback.extract_tb(caught.value.__traceback__)}
    assert {"step", "read_chunk"} <= names
    engine.close()
    store.close(remove_files=True)
