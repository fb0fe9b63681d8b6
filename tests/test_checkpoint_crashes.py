"""Whatever happens to a save, the checkpoint is the old or the new one, whole, and the next save works."""

from __future__ import annotations

import contextlib
import random

import pytest
import torch

from optstream.backends.errors import SpaceError, StorageError
from optstream.backends.fake import FakeSystem
from optstream.backends.nvme import NvmeBackend
from optstream.backends.reader import DirectoryReader
from optstream.core.checkpoint import find
from optstream.core.config import StreamConfig
from optstream.core.errors import CheckpointError
from optstream.core.optimizer import StreamingAdamW
from optstream.core.publish import CheckpointDirectory
from optstream.harness.crashing_system import CrashingSystem
from optstream.harness.fault_plan import FaultPlan
from optstream.harness.faults import SimulatedCrash
from optstream.harness.faulty_system import FaultySystem
from optstream.harness.killed_saves import kill_at_random_moments

pytestmark = pytest.mark.unit

SEGMENTS = ("main", "exp_avg", "exp_avg_sq")


def optimizer() -> tuple[list[torch.nn.Parameter], StreamingAdamW]:
    params = [torch.nn.Parameter(torch.arange(130.0).view(13, 10)), torch.nn.Parameter(torch.ones(70))]
    scratch = NvmeBackend("/scratch", subdirectory="test/optimizer", system=FakeSystem())
    return params, StreamingAdamW(params, StreamConfig(True, ("/unused",), bucket_numel=128), backend=scratch)


def step(params: list[torch.nn.Parameter], streamed: StreamingAdamW) -> None:
    for param in params:
        param.grad = torch.sin(param.detach())
    streamed.step()


def directory(system) -> CheckpointDirectory:
    """A checkpoint on the fake disk of `system`."""

    def open_backend(directories, *, subdirectory, keep):
        return NvmeBackend(directories[0], subdirectory=subdirectory, keep=keep, system=system)

    def open_reader(base, *, subdirectory):
        return DirectoryReader(f"{base}/{subdirectory}", system=system)

    return CheckpointDirectory("/checkpoint", opener=open_backend, reader=open_reader)


def save(streamed: StreamingAdamW, system) -> None:
    streamed._checkpoints.save(directory(system), iteration=None, background=False)


def load(streamed: StreamingAdamW, system) -> dict:
    streamed._checkpoints.load(directory(system), streamed._publish, keep_schedule=False)
    return streamed.full_state()


def same(one: dict, other: dict) -> bool:
    return all(
        one[name]["step"] == other[name]["step"]
        and all(torch.equal(one[name][key], other[name][key]) for key in SEGMENTS)
        for name in one
    )


class Saved:
    """An optimizer that has saved at step 1 and is at step 2 now."""

    def __init__(self) -> None:
        self.params, self.source = optimizer()
        _, self.target = optimizer()
        step(self.params, self.source)
        self.old = self.source.full_state()
        step(self.params, self.source)
        self.new = self.source.full_state()

    def disk_with_old(self) -> FakeSystem:
        disk = FakeSystem()
        # Not by stepping back: a state that was saved once is loaded and saved again.
        if not hasattr(self, "_other"):
            params, self._other = optimizer()
            step(params, self._other)
        save(self._other, disk)
        return disk

    def close(self) -> None:
        for streamed in (self.source, self.target, self._other):
            streamed.close()


@pytest.fixture(scope="module")
def saved():
    made = Saved()
    yield made
    made.close()


def expect_old_or_new(saved: Saved, disk: FakeSystem) -> None:
    found = load(saved.target, disk)
    assert same(found, saved.old) or same(found, saved.new)
    # Not blocked by what the interrupted save has left, which goes.
    save(saved.source, disk)
    assert same(load(saved.target, disk), saved.new)
    files = DirectoryReader("/checkpoint/optimizer", system=disk)
    assert list(files.names()[0]) == ["manifest.json"]
    (data,) = DirectoryReader("/checkpoint/optimizer/rank00000", system=disk).names()[0]
    assert data.startswith("step00000002-")


@pytest.mark.parametrize("seed", [None, 1], ids=["nothing unsynced survives", "torn"])
def test_power_goes_at_every_operation_of_a_save(saved, seed):
    nth, crashed = 0, True
    while crashed:
        nth += 1
        disk = saved.disk_with_old()
        rng = None if seed is None else random.Random(seed * 1000 + nth)
        system = CrashingSystem(disk, nth, rng)
        try:
            save(saved.source, system)
        except SimulatedCrash:
            assert system.crashed
        crashed = system.crashed
        if crashed:
            disk.crash(random.Random(nth))
        expect_old_or_new(saved, disk)
    assert nth > 50, "the sweep went through a whole save"


def test_power_goes_at_every_operation_of_the_first_save(saved):
    nth, crashed = 0, True
    while crashed:
        nth += 1
        disk = FakeSystem()
        system = CrashingSystem(disk, nth)
        try:
            save(saved.source, system)
        except SimulatedCrash:
            assert system.crashed
        crashed = system.crashed
        if directory(disk).manifest() is not None:
            assert same(load(saved.target, disk), saved.new)
        else:
            assert crashed
            with pytest.raises(CheckpointError, match="--no-load-optim"):
                find(directory(disk))
        save(saved.source, disk)
        assert same(load(saved.target, disk), saved.new)


@pytest.mark.parametrize("sticky", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize(
    "operation", ["create", "open", "read", "write", "sync", "remove", "list", "publish", "free"]
)
def test_an_operation_fails(saved, operation, sticky):
    nth, happened = 0, True
    while happened:
        nth += 1
        disk = saved.disk_with_old()
        system = FaultySystem(disk, FaultPlan.single("EIO", operation, nth, sticky=sticky))
        with contextlib.suppress(StorageError):
            save(saved.source, system)
        happened = bool(system.injector.injected)
        # The machine may fail a moment later, too.
        disk.crash()
        expect_old_or_new(saved, disk)
        if sticky:
            break  # From the first on is from any on; later ones are among those of "once".
    assert nth > 1 or sticky


def test_a_full_disk_leaves_the_old_checkpoint_and_says_what_is_needed(saved):
    disk = saved.disk_with_old()
    disk.set_free_bytes(1000)
    with pytest.raises(SpaceError) as caught:
        save(saved.source, disk)
    assert caught.value.free_bytes <= 1000 < caught.value.needed_bytes
    assert str(caught.value.needed_bytes) in str(caught.value)
    assert same(load(saved.target, disk), saved.old)
    disk.set_free_bytes(1 << 30)
    expect_old_or_new(saved, disk)


def test_a_disk_that_fills_while_the_checkpoint_is_written(saved):
    nth, happened = 0, True
    while happened:
        nth += 1
        disk = saved.disk_with_old()
        system = FaultySystem(disk, FaultPlan.single("ENOSPC", "write", nth, sticky=True))
        happened = False
        try:
            save(saved.source, system)
        except SpaceError:
            happened = True
        assert happened == bool(system.injector.injected)
        expect_old_or_new(saved, disk)


def test_an_unfinished_save_is_not_mistaken_for_a_checkpoint(saved):
    disk = FakeSystem()
    save(saved.source, disk)
    with directory(disk).claim() as root:
        root.remove("manifest.json")
    with pytest.raises(CheckpointError, match="never finished"):
        find(directory(disk))


def test_sigkill_at_random_moments_of_a_save(tmp_path):
    kill_at_random_moments(tmp_path, 3)
