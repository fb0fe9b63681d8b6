"""Bytes of a sleeping trainer: all of them come back, bounded host memory moves them, and wrong ones are
caught."""

from __future__ import annotations

import os

import pytest
import torch

from optstream.backends import open_backend
from optstream.backends.errors import SpaceError, TransferError
from optstream.backends.fake import FakeSystem
from optstream.backends.nvme import NvmeBackend
from optstream.core.device_memory import Parked, ReleasedStorages
from optstream.core.errors import CorruptionError
from optstream.core.parking import DiskParking, HostParking
from optstream.harness.faults import FaultPlan, FaultyBackend

pytestmark = pytest.mark.unit

SIZES = [1, 63, 4096, 4097, 1_000_003]
CHUNK_BYTES = 64 << 10


def tensors(sizes=SIZES) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(len(sizes))
    return [torch.randint(256, (size,), dtype=torch.uint8, generator=generator) for size in sizes]


def parked(held: list[torch.Tensor]) -> list[Parked]:
    return [Parked(tensor.untyped_storage(), tensor.numel()) for tensor in held]


def disk(directory, **settings) -> DiskParking:
    backend = open_backend([str(directory)], subdirectory="test/trainer")
    return DiskParking(backend, chunk_bytes=settings.get("chunk_bytes", CHUNK_BYTES))


@pytest.fixture(params=["cpu", "disk"])
def parking(request, tmp_path):
    parking = HostParking() if request.param == "cpu" else disk(tmp_path)
    yield parking
    parking.close()


def test_every_byte_comes_back_under_the_same_tensors(parking):
    held, memory = tensors(), ReleasedStorages()
    expected = [tensor.clone() for tensor in held]
    views = [tensor[tensor.numel() // 2 :] for tensor in held]
    for _ in range(2):
        units = parked(held)
        parking.save(units)
        memory.release(units)
        assert all(unit.storage.nbytes() == 0 for unit in units)
        memory.restore(units)
        parking.load(units)
        for tensor, view, before in zip(held, views, expected, strict=True):
            assert torch.equal(tensor, before)
            assert torch.equal(view, before[before.numel() // 2 :])


def test_a_trainer_that_has_grown_since_is_saved_whole(parking):
    for sizes in ([5000], [5000, 70_000], [5000]):
        held = tensors(sizes)
        expected = [tensor.clone() for tensor in held]
        parking.save(parked(held))
        for tensor in held:
            tensor.zero_()
        parking.load(parked(held))
        assert all(torch.equal(*pair) for pair in zip(held, expected, strict=True))


def test_nothing_to_park_is_no_error(parking):
    parking.save([])
    parking.load([])
    assert parking.host_bytes == 0


def test_host_memory_is_what_was_promised(tmp_path):
    held = tensors([3 << 20])
    host = HostParking()
    host.save(parked(held))
    assert host.host_bytes == 3 << 20
    parking = disk(tmp_path)
    parking.save(parked(held))
    assert 0 < parking.host_bytes <= CHUNK_BYTES
    parking.close()


@pytest.mark.parametrize("damage", ["flip", "truncate"])
def test_damage_on_disk_is_caught(tmp_path, damage):
    parking = disk(tmp_path)
    held = tensors()
    parking.save(parked(held))
    (path,) = tmp_path.rglob("trainer.bin")
    if damage == "flip":
        with open(path, "r+b") as file:
            file.seek(200_000)
            byte = file.read(1)
            file.seek(200_000)
            file.write(bytes([byte[0] ^ 1]))
        with pytest.raises(CorruptionError, match="does not hold what was written"):
            parking.load(parked(held))
    else:
        os.truncate(path, 100_000)
        with pytest.raises(TransferError):
            parking.load(parked(held))
    parking.close()


@pytest.mark.parametrize("nth", [1, 7, 60])
def test_a_failing_write_is_an_error_and_nothing_is_lost(tmp_path, nth):
    backend = open_backend([str(tmp_path)], subdirectory="test/trainer")
    faulty = FaultyBackend(backend, FaultPlan.parse(f"seed=0 EIO@write#{nth}"))
    parking = DiskParking(faulty, chunk_bytes=CHUNK_BYTES)
    held = tensors()
    expected = [tensor.clone() for tensor in held]
    with pytest.raises(TransferError):
        parking.save(parked(held))
    assert all(torch.equal(*pair) for pair in zip(held, expected, strict=True))
    parking.save(parked(held))  # the disk has recovered
    for tensor in held:
        tensor.zero_()
    parking.load(parked(held))
    assert all(torch.equal(*pair) for pair in zip(held, expected, strict=True))
    parking.close()


def test_a_full_disk_is_said_before_anything_is_written():
    system = FakeSystem(capacity_bytes=1 << 20)
    parking = DiskParking(
        NvmeBackend("/disk", subdirectory="test/trainer", system=system), chunk_bytes=CHUNK_BYTES
    )
    with pytest.raises(SpaceError) as raised:
        parking.save(parked(tensors([3 << 20])))
    assert raised.value.needed_bytes == 3 << 20
    assert 0 < raised.value.free_bytes < 3 << 20
    parking.close()


def test_files_are_gone_when_it_is_closed(tmp_path):
    parking = disk(tmp_path)
    parking.save(parked(tensors()))
    parking.close()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
