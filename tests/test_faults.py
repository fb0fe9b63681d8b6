"""Each kind of fault does what the model says, where the plan says, and nothing else."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optstream.backends.errors import SpaceError, StorageError, TransferError
from optstream.backends.fake import FakeSystem
from optstream.backends.nvme import NvmeBackend
from optstream.harness import faults
from optstream.harness.conformance import BackendContract, Subject, pattern, read
from optstream.harness.fault_plan import APPLIES, PLAN_VARIABLE
from optstream.harness.faults import (
    Fault,
    FaultPlan,
    FaultyBackend,
    Injector,
    Kind,
    Operation,
    SimulatedCrash,
    sweep,
)
from optstream.harness.faulty_system import FaultySystem

pytestmark = pytest.mark.unit

SIZE_BYTES = 64 * 512
NEVER = 10**9


def open_disk(disk: FakeSystem, plan: FaultPlan | None = None) -> NvmeBackend | FaultyBackend:
    backend = NvmeBackend("/scratch", subdirectory="runs/faults", keep=True, system=disk)
    return backend if plan is None else FaultyBackend(backend, plan)


@pytest.fixture
def disk():
    return FakeSystem()


class TestFaultyBackendKeepsTheContractWhereNoFaultStrikes(BackendContract):
    @pytest.fixture
    def subject(self, disk):
        # A crash that never comes switches the bookkeeping of replaced bytes on.
        plan = FaultPlan.single(Kind.CRASH, Operation.WRITE, NEVER)
        return Subject(
            open=lambda name: FaultyBackend(
                NvmeBackend("/scratch", subdirectory=f"runs/{name}", system=disk), plan
            ),
            raw_read=disk.raw_read,
            raw_write=disk.raw_write,
            allocated_bytes=lambda path: disk.stat(path).st_blocks * 512,
            limit_space=lambda backend, free_bytes: disk.set_free_bytes(free_bytes),
        )


# Plans


plans = st.builds(
    FaultPlan,
    st.lists(
        st.sampled_from([(k, o) for k in Kind for o in sorted(APPLIES[k])]).flatmap(
            lambda pair: st.builds(
                Fault, st.just(pair[0]), st.just(pair[1]), st.integers(1, 10**6), st.booleans()
            )
        ),
        max_size=5,
    ).map(tuple),
    st.integers(0, 2**64),
)


@given(plans)
def test_a_plan_survives_being_printed_and_parsed(plan):
    assert FaultPlan.parse(str(plan)) == plan


@pytest.mark.parametrize(
    "text", ["", "EIO@write#1", "seed=x", "seed=1 EIO@write", "seed=1 lost@read#1", "seed=1 EIO@write#0"]
)
def test_what_is_no_plan_is_refused(text):
    with pytest.raises(ValueError, match=r"."):
        FaultPlan.parse(text)


def test_random_plans_follow_from_their_seed():
    one, again, other = (FaultPlan.random(seed, faults=20, nth_max=50) for seed in (1, 1, 2))
    assert one == again != other
    assert len(one.faults) == 20


def test_counts_are_kept_by_operation_and_once_is_once():
    injector = Injector(FaultPlan.parse("seed=0 EIO@write#2"))
    struck = [
        injector.due(operation, "f") for operation in (Operation.READ, Operation.WRITE) for _ in range(3)
    ]
    assert struck == [None, None, None, None, Kind.EIO, None]
    assert injector.counts == {Operation.READ: 3, Operation.WRITE: 3}
    assert injector.by_kind() == {"EIO": 1}


def test_sticky_is_from_then_on():
    injector = Injector(FaultPlan.parse("seed=0 EIO@write#2+"))
    assert [injector.due(Operation.WRITE, "f") for _ in range(4)] == [None, Kind.EIO, Kind.EIO, Kind.EIO]


def test_an_error_carries_its_plan_and_the_command_that_replays_it(monkeypatch):
    plan = FaultPlan.parse("seed=7 lost@write#3+")
    with pytest.raises(RuntimeError) as caught, plan.explained("pytest tests/test_x.py"):
        raise RuntimeError("wrong bits")
    assert f"{PLAN_VARIABLE}='seed=7 lost@write#3+' pytest tests/test_x.py" in caught.value.__notes__[0]
    monkeypatch.setenv(PLAN_VARIABLE, "seed=7 lost@write#3+")
    assert FaultPlan.from_environment(FaultPlan()) == plan


def test_a_sweep_reaches_every_operation_and_ends(disk):
    for plan in sweep(Kind.EIO, Operation.WRITE):
        backend = open_disk(disk, plan)
        failed = None
        try:
            with backend.create("f", 10) as file:
                for offset in range(5):
                    file.write_from(offset, memoryview(b"x"))
        except TransferError as error:
            failed = error.offset
        backend.close(remove_files=True)
        if not backend.injector.injected:
            break
        assert failed == plan.faults[0].nth - 1
    assert plan.faults[0].nth == 6


# What each kind does


def written(disk: FakeSystem, fault: str, *, writes: int = 2) -> tuple[FaultyBackend, list[bytes]]:
    """A file "f" written `writes` times with other bytes each time under a plan, and those bytes."""
    backend = open_disk(disk, FaultPlan.parse(f"seed=3 {fault}"))
    versions = [bytes(SIZE_BYTES)]
    with backend.create("f", SIZE_BYTES) as file:
        for number in range(writes):
            versions.append(pattern(SIZE_BYTES, number + 1))
            file.write_from(0, memoryview(versions[-1]))
    return backend, versions


def stored(disk: FakeSystem, name: str = "f") -> bytes:
    return disk.raw_read(f"/scratch/runs/faults/{name}", 0, SIZE_BYTES + 1)


@pytest.mark.parametrize("kind", [Kind.EIO, Kind.ENOSPC, Kind.SHORT])
def test_a_failing_write_is_typed_and_leaves_a_part(disk, kind):
    backend = open_disk(disk, FaultPlan.single(kind, Operation.WRITE, 1))
    data = pattern(SIZE_BYTES)
    with backend.create("f", SIZE_BYTES) as file:
        with pytest.raises(SpaceError if kind is Kind.ENOSPC else TransferError) as caught:
            file.write_from(0, memoryview(data))
        assert (caught.value.path, caught.value.offset) == (file.path, 0)
        assert stored(disk) == data[: SIZE_BYTES // 2] + bytes(SIZE_BYTES // 2)
        file.write_from(0, memoryview(data))
    assert stored(disk) == data


def test_a_failing_read_is_typed_and_the_next_one_is_right(disk):
    backend, versions = written(disk, "EIO@read#1 short@read#2")
    with backend.open("f") as file:
        for _ in range(2):
            with pytest.raises(TransferError, match="injected"):
                read(file, 0, SIZE_BYTES)
        assert read(file, 0, SIZE_BYTES) == versions[-1]


@pytest.mark.parametrize("operation", sorted(set(Operation) - {Operation.READ, Operation.WRITE}))
def test_any_other_operation_can_fail_and_does_nothing_then(disk, operation):
    backend, versions = written(disk, f"EIO@{operation}#{2 if operation is Operation.CREATE else 1}")

    def sync():
        with backend.open("f") as file:
            file.sync()

    act = {
        Operation.CREATE: lambda: backend.create("g", 10),
        Operation.OPEN: lambda: backend.open("f"),
        Operation.SYNC: sync,
        Operation.REMOVE: lambda: backend.remove("f"),
        Operation.LIST: lambda: list(backend.list()),
        Operation.PUBLISH: lambda: backend.publish("f", "g"),
        Operation.FREE: backend.free_bytes,
        Operation.CLOSE: backend.close,
    }[operation]
    with pytest.raises(StorageError, match="injected"):
        act()
    assert stored(disk) == versions[-1]
    if operation is Operation.CLOSE:
        # It gave its claim up all the same.
        backend = open_disk(disk)
    assert list(backend.list()) == [("f", SIZE_BYTES)]


def test_a_failed_sync_is_final_for_its_file(disk):
    backend, _ = written(disk, "EIO@sync#1")
    with backend.open("f") as file:
        for _ in range(2):
            with pytest.raises(TransferError):
                file.sync()
    with backend.open("f") as file:
        file.sync()


def test_a_lost_write_stores_nothing(disk):
    _, versions = written(disk, "lost@write#2")
    assert stored(disk) == versions[1]


def test_a_torn_write_stores_some_sectors(disk):
    _, versions = written(disk, "torn@write#2")
    origins = {
        number
        for start in range(0, SIZE_BYTES, 512)
        for number in (1, 2)
        if stored(disk)[start : start + 512] == versions[number][start : start + 512]
    }
    assert origins == {1, 2}
    whole = [
        stored(disk)[start : start + 512]
        in (versions[1][start : start + 512], versions[2][start : start + 512])
        for start in range(0, SIZE_BYTES, 512)
    ]
    assert all(whole)


def test_a_misdirected_write_lands_in_another_place(disk):
    backend = open_disk(disk, FaultPlan.parse("seed=1 misdirected@write#1"))
    chunk = pattern(1024)
    with backend.create("f", SIZE_BYTES) as file:
        file.write_from(0, memoryview(chunk))
    at = stored(disk).index(chunk)
    assert at > 0
    assert stored(disk) == bytes(at) + chunk + bytes(SIZE_BYTES - at - 1024)


def test_a_write_of_a_whole_file_is_misdirected_into_another_file(disk):
    backend = open_disk(disk, FaultPlan.parse("seed=1 misdirected@write#1"))
    data = pattern(SIZE_BYTES)
    with backend.create("f", SIZE_BYTES) as file, backend.create("g", SIZE_BYTES):
        file.write_from(0, memoryview(data))
    assert stored(disk, "f") == bytes(SIZE_BYTES)
    assert stored(disk, "g") == data


def test_a_stale_read_returns_what_was_there_before_the_last_write(disk):
    backend, versions = written(disk, "stale@read#1")
    with backend.open("f") as file:
        assert read(file, 0, SIZE_BYTES) == versions[-2]
        assert read(file, 0, SIZE_BYTES) == versions[-1]


def test_a_stale_read_of_a_part_that_was_written_in_parts(disk):
    backend = open_disk(disk, FaultPlan.parse("seed=1 stale@read#1"))
    with backend.create("f", 100) as file:
        for offset in (0, 50):
            file.write_from(offset, memoryview(b"a" * 50))
        for offset in (0, 50):
            file.write_from(offset, memoryview(b"b" * 50))
        assert read(file, 30, 40) == b"a" * 40


@pytest.mark.parametrize("operation", [Operation.READ, Operation.WRITE])
def test_a_bit_flip_changes_one_bit(disk, operation):
    backend, versions = written(disk, f"bitflip@{operation}#1", writes=1)
    with backend.open("f") as file:
        got = read(file, 0, SIZE_BYTES)
        assert read(file, 0, SIZE_BYTES) == (stored(disk) if operation is Operation.WRITE else versions[-1])
    assert differing_bits(got, versions[-1]) == 1
    assert differing_bits(stored(disk), versions[-1]) == (1 if operation is Operation.WRITE else 0)


def differing_bits(one: bytes, other: bytes) -> int:
    return (int.from_bytes(one) ^ int.from_bytes(other)).bit_count()


@pytest.mark.parametrize("kind", [Kind.LATENCY, Kind.REORDER])
def test_delays_change_no_bits(disk, kind):
    backend, versions = written(disk, f"{kind}@write#1+ {kind}@read#1+")
    with backend.open("f") as file:
        assert read(file, 0, SIZE_BYTES) == versions[-1]
    assert backend.injector.by_kind() == {str(kind): 3}


def test_a_reordered_write_is_carried_out_after_one_that_began_later(disk, monkeypatch):
    monkeypatch.setattr(faults, "REORDER_S_MAX", 60)
    backend = open_disk(disk, FaultPlan.parse("seed=0 reorder@write#1"))
    carried_out, held_back = [], threading.Event()
    with backend.create("f", 10) as file:
        write = file.inner.write_from

        def log(offset: int, buffer: memoryview) -> None:
            carried_out.append(offset)
            write(offset, buffer)

        monkeypatch.setattr(file.inner, "write_from", log)
        monkeypatch.setattr(backend._turn, "wait_for", announce(backend._turn.wait_for, held_back))
        first = threading.Thread(target=file.write_from, args=(0, memoryview(b"x")))
        first.start()
        held_back.wait()
        file.write_from(5, memoryview(b"x"))
        first.join()
        assert carried_out == [5, 0]
        assert read(file, 0, 10) == b"x\0\0\0\0x\0\0\0\0"


def announce(wait_for, event: threading.Event):
    def waiting(predicate, timeout):
        event.set()
        return wait_for(predicate, timeout)

    return waiting


# Crashes


def test_a_crash_keeps_what_was_synced(disk):
    backend = open_disk(disk, FaultPlan.parse("seed=5 crash@write#3"))
    file = backend.create("f", SIZE_BYTES)
    file.write_from(0, memoryview(pattern(SIZE_BYTES, 1)))
    file.sync()
    file.write_from(0, memoryview(pattern(SIZE_BYTES, 2)))
    with pytest.raises(SimulatedCrash):
        file.write_from(0, memoryview(pattern(SIZE_BYTES, 3)))
    after = stored(disk)
    one, two = pattern(SIZE_BYTES, 1), pattern(SIZE_BYTES, 2)
    sectors = [range(start, start + 512) for start in range(0, SIZE_BYTES, 512)]
    from_one = [after[s.start : s.stop] == one[s.start : s.stop] for s in sectors]
    from_two = [after[s.start : s.stop] == two[s.start : s.stop] for s in sectors]
    assert any(from_one)
    assert any(from_two)
    assert all(a or b for a, b in zip(from_one, from_two, strict=True))


def test_after_a_crash_the_wrapper_is_dead_and_its_directory_free(disk):
    backend = open_disk(disk, FaultPlan.parse("seed=5 crash@free#1"))
    file = backend.create("f", 10)
    with pytest.raises(SimulatedCrash):
        backend.free_bytes()
    with pytest.raises(SimulatedCrash):
        file.write_from(0, memoryview(b"x"))
    file.close()
    backend.close(remove_files=True)
    with open_disk(disk) as again:
        assert {name for name, _ in again.list()} <= {"f"}


@pytest.mark.parametrize("seed", range(8))
def test_published_and_synced_files_are_whole_after_a_crash(disk, seed):
    for nth in range(1, 6):
        open_disk(disk).close(remove_files=True)
        backend = open_disk(disk, FaultPlan((Fault(Kind.CRASH, Operation.PUBLISH, nth),), seed))
        done = 0
        try:
            for turn in range(5):
                with backend.create("part", 4096) as file:
                    file.write_from(0, memoryview(pattern(4096, turn)))
                    file.sync()
                backend.publish("part", "final")
                done = turn + 1
        except SimulatedCrash:
            pass
        assert done == nth - 1
        with open_disk(disk) as again:
            assert ("final" in dict(again.list())) == (done > 0)
            if done:
                with again.open("final") as file:
                    assert read(file, 0, 4096) == pattern(4096, done - 1)
            again.close(remove_files=True)


# Below the file backend


def faulty_disk(disk: FakeSystem, fault: str) -> FaultySystem:
    system = FaultySystem(disk, FaultPlan.parse(f"seed=0 {fault}"))
    system.injector.armed = False
    return system


@pytest.mark.parametrize("fault", ["EINTR@read#1", "EINTR@write#1", "short@read#1", "short@write#1"])
@pytest.mark.parametrize("size_bytes", [1 << 20, 5 * 4096, 5000])
def test_interrupted_and_short_calls_end_in_the_right_bits(disk, fault, size_bytes):
    system = faulty_disk(disk, fault)
    backend = NvmeBackend("/scratch", subdirectory="runs/faults", system=system)
    with backend.create("f", size_bytes) as file:
        system.injector.armed = True
        data = pattern(size_bytes)
        file.write_from(0, memoryview(data))
        assert disk.raw_read(file.path, 0, size_bytes) == data
        assert read(file, 0, size_bytes) == data
    assert len(system.injector.injected) == 1


def test_calls_that_never_move_anything_end_in_a_typed_error():
    class Stuck(FakeSystem):
        def preadv(self, descriptor, buffers, offset):
            return min(super().preadv(descriptor, buffers, offset), self.limit)

    stuck = Stuck()
    stuck.limit = 1 << 30
    backend = NvmeBackend("/scratch", subdirectory="runs/faults", system=stuck)
    with backend.create("f", 8192) as file:
        for stuck.limit in (0, 100):
            with pytest.raises(TransferError, match="of 8192 bytes"):
                read(file, 0, 8192)


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("EIO@read#1", TransferError),
        ("EIO@write#1", TransferError),
        ("ENOSPC@write#1", SpaceError),
        ("EIO@sync#1", TransferError),
    ],
)
def test_errors_of_the_system_become_typed(disk, fault, expected):
    system = faulty_disk(disk, fault)
    backend = NvmeBackend("/scratch", subdirectory="runs/faults", system=system)
    with backend.create("f", 8192) as file:
        system.injector.armed = True

        def use() -> None:
            file.write_from(4096, memoryview(pattern(4096)))
            file.read_into(4096, memoryview(bytearray(4096)))
            file.sync()

        with pytest.raises(expected) as caught:
            use()
        assert caught.value.path == file.path
        assert caught.value.offset == (None if "sync" in fault else 4096)
        if "sync" in fault:
            with pytest.raises(TransferError):
                file.sync()


def test_a_system_refuses_faults_that_no_call_can_suffer(disk):
    with pytest.raises(ValueError, match="lost"):
        faulty_disk(disk, "lost@write#1")
