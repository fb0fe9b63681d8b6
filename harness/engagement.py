"""What a run on the fake filesystem must show: that it streamed, where its files lie, and its bits.

Expectations come from the oracle and from arithmetic, never from the code under test.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from optstream.backends.fake import FakeSystem, forget_fake_disks, put_fake_disk
from optstream.core.records import StepRecord
from optstream.core.validator import BUCKET_NUMEL, DISK_DIR, HOST_CACHE, MOMENT_DTYPE
from optstream.harness import oracle
from optstream.harness.domains import Combination


class UnexpectedError(Exception):
    """What a run showed is not what it should have shown."""


@dataclass(frozen=True)
class FakeScratch:
    """One fake disk in the place of the directories that a streaming combination names."""

    combination: Combination
    disk: FakeSystem
    directories: tuple[str, ...]

    def expect_files(self, *, numel: int, buckets: int) -> None:
        """They hold the state of `numel` parameters, in these directories and nowhere else."""
        files = dict(_files(self.disk, "/"))
        homes = {
            directory: [path for path in files if path.startswith(f"{directory}/")]
            for directory in self.directories
        }
        if outside := files.keys() - {path for paths in homes.values() for path in paths}:
            raise UnexpectedError(f"files outside {self.directories}: {sorted(outside)}")
        if (used := sum(map(bool, homes.values()))) < min(buckets, len(self.directories)):
            raise UnexpectedError(f"{buckets} buckets lie in {used} of {len(self.directories)} directories")
        needed = numel * (4 + 2 * _moment_bytes(self.combination))
        if sum(files.values()) < needed:
            raise UnexpectedError(f"files hold {sum(files.values())} bytes, and the state has {needed}")

    def expect_no_files(self) -> None:
        expect("files after close", [path for path, _ in _files(self.disk, "/")], [])


@contextmanager
def fake_scratch(combination: Combination) -> Iterator[FakeScratch]:
    """Its body must not touch the real disk at the directories that the combination resolves to."""
    # From the oracle, so that the validator does not vouch for itself.
    directories = tuple(oracle.resolved(combination)[DISK_DIR].split(os.pathsep))
    on_real_disk = [os.path.lexists(directory) for directory in directories]
    disk = FakeSystem()
    for directory in directories:
        put_fake_disk(directory, disk)
    try:
        yield FakeScratch(combination, disk, directories)
    finally:
        forget_fake_disks()
    expect("the real disk", [os.path.lexists(directory) for directory in directories], on_real_disk)


def expect_streamed(
    combination: Combination, records: Sequence[StepRecord], *, steps: int, numel: int
) -> None:
    """Every step went through the buckets, and moved what the arithmetic says."""
    expect("steps that streamed", [record.step for record in records], list(range(1, steps + 1)))
    buckets = {record.buckets for record in records}
    one_bucket = combination[BUCKET_NUMEL] >= numel
    if len(buckets) != 1 or (max(buckets) == 1) != one_bucket:
        raise UnexpectedError(f"buckets of each step are {buckets}, for {numel} elements")
    if combination[HOST_CACHE] or combination["stream_optimizer_state_keep_slots"]:
        return  # what is kept is not moved; that volume is arithmetic of its own
    moments = 2 * _moment_bytes(combination)
    reads = [4 * numel] + [(4 + moments) * numel] * (steps - 1)
    expect("bytes read", [record.read_bytes for record in records], reads)
    expect("bytes written", [record.written_bytes for record in records], [(4 + moments) * numel] * steps)


def expect(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise UnexpectedError(f"{what}: {found}, not {expected}")


def expect_bits(what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    if found.dtype != expected.dtype or not torch.equal(found, expected):
        raise UnexpectedError(
            f"{what} differs from resident by up to {(found.float() - expected.float()).abs().max()}"
        )


def _moment_bytes(combination: Combination) -> int:
    return {"fp32": 4, "bf16": 2}[combination[MOMENT_DTYPE]]


def _files(disk: FakeSystem, directory: str) -> Iterator[tuple[str, int]]:
    """Path and size in bytes of every file below a directory."""
    descriptor = disk.open(directory, os.O_RDONLY)
    try:
        names = disk.listdir(descriptor)
    finally:
        disk.close(descriptor)
    for name in names:
        path = os.path.join(directory, name)
        status = disk.stat(path)
        if stat.S_ISDIR(status.st_mode):
            yield from _files(disk, path)
        else:
            yield path, status.st_size
