"""Every backend of the project keeps the storage contract."""

from __future__ import annotations

import errno
import fcntl
import os
from typing import Any, ClassVar

import pytest

from optstream.backends.fake import FakeSystem
from optstream.backends.nvme import NvmeBackend
from optstream.backends.probe import address_of
from optstream.backends.striped import StripedBackend
from optstream.backends.system import System
from optstream.harness.conformance import BackendContract, Subject

pytestmark = pytest.mark.unit


def raw_read(path: str, offset: int, length: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(length)


def raw_write(path: str, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def allocated_bytes(path: str) -> int:
    return os.stat(path).st_blocks * 512


class CoarseSystem(System):
    """The real kernel on a filesystem whose blocks are 64 KiB: under O_DIRECT anything finer is refused."""

    def preadv(self, descriptor, buffers, offset):
        self._check(descriptor, buffers, offset)
        return super().preadv(descriptor, buffers, offset)

    def pwritev(self, descriptor, buffers, offset):
        self._check(descriptor, buffers, offset)
        return super().pwritev(descriptor, buffers, offset)

    def _check(self, descriptor, buffers, offset):
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & self.direct_flag:
            places = [offset, *(len(b) for b in buffers), *(address_of(b) for b in buffers)]
            if any(place % 65536 for place in places):
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


class CachedSystem(System):
    """The real kernel on a filesystem without O_DIRECT."""

    direct_flag = 0


class TestNvmeBackend(BackendContract):
    system = System

    @pytest.fixture
    def subject(self, tmp_path):
        return Subject(
            open=lambda name: NvmeBackend(str(tmp_path), subdirectory=f"runs/{name}", system=self.system()),
            raw_read=raw_read,
            raw_write=raw_write,
            allocated_bytes=allocated_bytes,
        )


class TestNvmeBackendWithBlocksOf64KiB(TestNvmeBackend):
    system = CoarseSystem


class TestNvmeBackendWithoutDirectTransfers(TestNvmeBackend):
    system = CachedSystem


class TestFakeBackend(BackendContract):
    disk_options: ClassVar[dict[str, Any]] = {}

    @pytest.fixture
    def subject(self):
        disk = FakeSystem(**self.disk_options)
        return Subject(
            open=lambda name: NvmeBackend("/scratch", subdirectory=f"runs/{name}", system=disk),
            raw_read=disk.raw_read,
            raw_write=disk.raw_write,
            allocated_bytes=lambda path: disk.stat(path).st_blocks * 512,
            limit_space=lambda backend, free_bytes: disk.set_free_bytes(free_bytes),
        )


class TestFakeBackendWithBlocksOf64KiB(TestFakeBackend):
    disk_options: ClassVar = {"alignment_bytes": 65536}


class TestFakeBackendWithoutDirectTransfersOrReservation(TestFakeBackend):
    disk_options: ClassVar = {"alignment_bytes": None, "can_reserve": False}


class TestStripedBackendOnRealFiles(BackendContract):
    @pytest.fixture
    def subject(self, tmp_path):
        def open_both(name: str) -> StripedBackend:
            disks = [NvmeBackend(str(tmp_path / disk), subdirectory=f"runs/{name}") for disk in "AB"]
            return StripedBackend(disks, speeds=[1, 1])

        return Subject(
            open=open_both, raw_read=raw_read, raw_write=raw_write, allocated_bytes=allocated_bytes
        )
