"""Reading a checkpoint's files: whatever fails is a typed error, and no descriptor stays open."""

from __future__ import annotations

import pytest

from optstream.backends.errors import StorageError
from optstream.backends.fake import FakeSystem
from optstream.backends.nvme import NvmeBackend
from optstream.backends.reader import DirectoryReader
from optstream.harness.faults import FaultPlan, Injector, Kind, Operation
from optstream.harness.faulty_system import FaultySystem
from optstream.harness.sweeps import strike_each

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("sticky", [False, True])
@pytest.mark.parametrize("operation", [Operation.OPEN, Operation.READ, Operation.LIST, Operation.CLOSE])
def test_every_operation_of_a_reader_fails_with_a_typed_error(operation, sticky):
    disk = FakeSystem()
    backend = NvmeBackend("/disk", subdirectory="a", keep=True, system=disk)
    with backend, backend.create("f", 5) as file:
        file.write_from(0, memoryview(bytearray(b"bytes")))
    before = disk.open_descriptors()

    def live(plan: FaultPlan) -> bool:
        injector = Injector(plan)
        reader = DirectoryReader("/disk/a", system=FaultySystem(disk, injector))
        failed = False
        for call in (reader.names, lambda: reader.read("f")):
            try:
                call()
            except StorageError:
                failed = True
        assert disk.open_descriptors() == before
        assert failed == bool(injector.injected)
        return failed

    command = "pytest tests/test_reader.py"
    strike_each(Kind.EIO, operation, live, sticky=sticky, passes_max=20, command=command)
