"""Circumstances that broke other streaming optimizers. What is tested elsewhere is named in issue order here:

two stores on one root, a live neighbour at start, reused pids: tests/test_nvme.py; pid namespaces:
tests/test_isolation.py; a NaN gradient in the last bucket: tests/test_optimizer.py; fifty steps:
tests/test_engine.py.
"""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

import pytest
import torch

from optstream.backends.errors import StorageError, TransferError, UnreservedSpaceWarning
from optstream.backends.fake import FakeSystem
from optstream.backends.nvme import NvmeBackend
from optstream.core.config import StreamConfig
from optstream.core.errors import PoisonedError
from optstream.core.optimizer import StreamingAdamW
from optstream.harness.reference import ReferenceAdamW, same_bits

pytestmark = pytest.mark.unit

NUMEL = 3000


def streamed(backend=None, directory: str = "/unused", **fields) -> tuple[torch.nn.Parameter, StreamingAdamW]:
    param = torch.nn.Parameter(torch.linspace(-1, 1, NUMEL))
    settings = {"bucket_numel": 1024, "depth": 2, **fields}
    return param, StreamingAdamW([param], StreamConfig(True, (directory,), **settings), backend=backend)


def step(param: torch.nn.Parameter, optimizer: StreamingAdamW) -> None:
    param.grad = torch.ones(NUMEL)
    optimizer.step()


def step_and_settle(param: torch.nn.Parameter, optimizer: StreamingAdamW) -> None:
    """Also where only a trailer is gone, and it is the write behind the step that fails."""
    step(param, optimizer)
    optimizer.streamer.engine.settle()


@pytest.mark.parametrize("kept_bytes", [0, 4096, 12288])
def test_a_bucket_file_truncated_between_steps(tmp_path, kept_bytes):
    param, optimizer = streamed(directory=str(tmp_path))
    step(param, optimizer)
    optimizer.streamer.engine.drain()
    victim = next(tmp_path.rglob("bucket-00001.bin"))
    os.truncate(victim, kept_bytes)
    with pytest.raises(TransferError) as caught:
        step_and_settle(param, optimizer)
    message = str(caught.value)
    assert str(victim) in message
    assert "bucket 1" in message
    assert f"offset {caught.value.offset}" in message
    assert "\n" not in message
    with pytest.raises(PoisonedError, match="Load a checkpoint"):
        step(param, optimizer)
    optimizer.close()
    assert list(tmp_path.iterdir()) == []


def test_a_poisoned_optimizer_refuses_until_a_checkpoint_is_loaded_in_the_same_process(tmp_path):
    scratch, checkpoint = tmp_path / "scratch", tmp_path / "checkpoint"
    param, optimizer = streamed(directory=str(scratch))
    reference = ReferenceAdamW([param], lr=1e-3)
    step(param, optimizer)
    reference.step([param.grad])
    optimizer.save_to(checkpoint)
    optimizer.streamer.engine.drain()
    os.truncate(next(scratch.rglob("bucket-00002.bin")), 0)
    with pytest.raises(StorageError):
        step(param, optimizer)
    for refused in (
        lambda: step(param, optimizer),
        lambda: optimizer.save_to(checkpoint),
        optimizer.full_state,
    ):
        with pytest.raises(PoisonedError, match="Load a checkpoint"):
            refused()
    # A restore needs neither what was in the file nor its length.
    assert optimizer.load_from(checkpoint)
    for _ in range(2):
        step(param, optimizer)
        reference.step([param.grad])
        assert same_bits(param.detach(), reference.params()[0])
    optimizer.close()


def test_where_nothing_can_be_reserved_it_is_said_at_start_and_a_full_disk_is_typed():
    system = FakeSystem(kind="zfs", can_reserve=False)
    with pytest.warns(UnreservedSpaceWarning, match="cannot reserve space"):
        backend = NvmeBackend("/disk", subdirectory="optstream/test", system=system)
    param, optimizer = streamed(backend)
    step(param, optimizer)
    optimizer.close()
    assert system.files() == []


def test_a_disk_that_others_fill_later_cannot_hurt():
    system = FakeSystem()
    param, optimizer = streamed(NvmeBackend("/disk", subdirectory="optstream/test", system=system))
    reference = ReferenceAdamW([param], lr=1e-3)
    system.set_free_bytes(0)
    for _ in range(3):
        step(param, optimizer)
        reference.step([param.grad])
    assert same_bits(param.detach(), reference.params()[0])
    optimizer.close()


def test_a_limit_of_64_descriptors(tmp_path):
    """Forty buckets: files are open while they are read or written, not for the whole run."""
    param, optimizer = streamed(directory=str(tmp_path), bucket_numel=75)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/dev/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(64, used + 16), hard))
    try:
        for _ in range(3):
            step(param, optimizer)
        optimizer.streamer.engine.drain()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    optimizer.close()


@pytest.mark.parametrize("jump_s", [-1e9, 1e9])
def test_a_clock_that_jumps(monkeypatch, tmp_path, jump_s):
    param, optimizer = streamed(directory=str(tmp_path))
    reference = ReferenceAdamW([param], lr=1e-3)
    real = time.time
    for _ in range(3):
        step(param, optimizer)
        reference.step([param.grad])
        monkeypatch.setattr(time, "time", lambda: real() + jump_s)
    assert same_bits(param.detach(), reference.params()[0])
    optimizer.close()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_at_construction_writes_nothing_and_states_the_bytes(tmp_path):
    system = FakeSystem(capacity_bytes=40_000)
    backend = NvmeBackend("/disk", subdirectory="optstream/test", system=system)
    with pytest.raises(StorageError) as caught:
        streamed(backend)
    assert f"{caught.value.needed_bytes} bytes are needed" in str(caught.value)
    assert f"{caught.value.free_bytes} are free" in str(caught.value)
    assert system.files() == []
    assert system.open_descriptors() == 0


def test_files_and_directories_are_private(tmp_path):
    param, optimizer = streamed(directory=str(tmp_path / "scratch"))
    step(param, optimizer)
    for path in Path(tmp_path, "scratch").rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
    optimizer.close()
