"""Every operation of a trainer's sleep to disk, its wake and the end of it fails once, and from then on.

Either the call succeeds with the right bits, or it raises one typed error: a failed sleep has lost nothing, a
failed wake can be tried again, and no wrong byte ever gets into the trainer. Afterwards nothing is left.
"""

from __future__ import annotations

import threading

import pytest
import torch

from optstream.backends.errors import OptstreamError, StorageError
from optstream.backends.fake import FakeSystem
from optstream.backends.nvme import NvmeBackend
from optstream.core.device_memory import Parked, ReleasedStorages
from optstream.core.errors import CorruptionError
from optstream.core.parking import DiskParking
from optstream.harness.fault_plan import Layer
from optstream.harness.faults import FaultPlan, FaultyBackend, Injector, Kind
from optstream.harness.faulty_system import FaultySystem
from optstream.harness.sweeps import once_and_from_then_on, strike_each

pytestmark = pytest.mark.unit

SIZES = [1, 9000]
CHUNK_BYTES = 32 << 10  # Transfers of 8 KiB: several of them in flight, and several storages.
PASSES_MAX = 500
SLEEPS = 2  # The second one finds its file there.


class Trainer:
    """Tensors of several storages, their values, and the disk that they go to."""

    def __init__(self, injector: Injector, layer: Layer) -> None:
        self.injector, self._below = injector, layer is Layer.BELOW
        self.system = FakeSystem()
        generator = torch.Generator().manual_seed(1)
        self.held = [torch.randint(256, (size,), dtype=torch.uint8, generator=generator) for size in SIZES]
        self.expected = [tensor.clone() for tensor in self.held]
        self.memory = ReleasedStorages()
        self.errors: list[OptstreamError] = []

    def open(self) -> DiskParking:
        system = FaultySystem(self.system, self.injector) if self._below else self.system
        backend = NvmeBackend("/disk", subdirectory="test/trainer", system=system)
        return DiskParking(
            backend if self._below else FaultyBackend(backend, self.injector), chunk_bytes=CHUNK_BYTES
        )

    def attempt(self, call, *arguments) -> bool:
        """Whether it succeeded. Only a typed error, of one line, that says where it was is a failure."""
        try:
            call(*arguments)
        except StorageError as error:
            self.errors.append(error)
            return False
        return True

    def is_right(self) -> bool:
        return all(map(torch.equal, self.held, self.expected))

    def sleep_and_wake(self, parking: DiskParking) -> bool:
        """Whether the trainer is there afterwards: what was written wrongly is lost, and known to be."""
        parked = [Parked(tensor.untyped_storage(), tensor.numel()) for tensor in self.held]
        if not self.attempt(parking.save, parked):
            assert self.is_right(), "a sleep that failed has changed the trainer"
            self.injector.armed = False
            parking.save(parked)  # The disk has recovered, and so does the trainer.
        self.memory.release(parked)
        self.memory.restore(parked)
        if self.attempt(parking.load, parked):
            assert self.is_right(), "wrong bytes, and nobody was told"
            return True
        self.injector.armed = False
        if self.attempt(parking.load, parked):
            assert self.is_right()
            return True
        assert isinstance(self.errors[-1], CorruptionError)
        return False


def sleep_and_wake_all(trainer: Trainer) -> None:
    try:
        parking = trainer.open()
    except OptstreamError as error:
        trainer.errors.append(error)
        return
    try:
        for _ in range(SLEEPS):
            if not trainer.sleep_and_wake(parking):
                return
    finally:
        trainer.attempt(parking.close)


@pytest.mark.parametrize(
    ("kind", "operation", "layer", "sticky"),
    [case for layer in Layer for case in once_and_from_then_on(layer, without=(Kind.CRASH,))],
    ids=str,
)
def test_every_operation_of_a_sleep_and_a_wake(kind, operation, layer, sticky):
    before = set(threading.enumerate())

    def live(plan: FaultPlan) -> bool:
        injector = Injector(plan)
        trainer = Trainer(injector, layer)
        sleep_and_wake_all(trainer)
        if not injector.injected:
            return False
        if kind in layer.harmless:
            assert trainer.errors == []
        assert all(error.path and "\n" not in str(error) for error in trainer.errors)
        assert trainer.system.open_descriptors() == 0
        assert set(threading.enumerate()) <= before
        # What could not be removed goes with the next start, and the place is free for it.
        injector.armed = False
        trainer.open().close()
        assert trainer.system.files() == []
        return True

    command = "pytest tests/test_sleep_sweeps.py"
    assert strike_each(kind, operation, live, sticky=sticky, passes_max=PASSES_MAX, command=command)
