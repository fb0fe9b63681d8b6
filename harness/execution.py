"""Run one allowed combination of flags for real: a few optimizer steps on the fake filesystem.

What streams must give the bits of a resident AdamW, and must have streamed: every step went through the
buckets, their files lie in the directories that the flags name and nowhere else, and go when it is closed.
With bf16 moments, a plain round-to-nearest cast, the reference is a resident AdamW whose moments are rounded
so after every step: its bits, too. What does not stream must not engage anything.
"""

from __future__ import annotations

import os
import stat
import warnings
from collections.abc import Iterator
from unittest import mock

import torch

from optstream.backends.fake import FakeSystem, forget_fake_disks, open_fake, put_fake_disk
from optstream.core import streamer
from optstream.core.config import StreamConfig
from optstream.core.optimizer import StreamingAdamW
from optstream.core.validator import (
    BUCKET_NUMEL,
    DISK_DIR,
    HOST_CACHE,
    MOMENT_DTYPE,
    STREAM,
    stream_config,
    validate_arguments,
)
from optstream.harness import oracle
from optstream.harness.check import parse_flags
from optstream.harness.domains import Combination, command_line

STEPS = 4  # the first has no moments to read, and the bucket order may alternate after it
_SHAPES = (((13, 10), torch.float32), ((67,), torch.bfloat16), ((1,), torch.float32))
_SETTINGS = ({"lr": 1e-2, "weight_decay": 0.1}, {"lr": 1e-3, "betas": (0.8, 0.95)}, {})


class UnexpectedError(Exception):
    """What a run showed is not what it should have shown."""


def execute(combination: Combination) -> str | None:
    """None, or what went wrong."""
    try:
        _execute(combination)
    except Exception as error:
        # One broken combination must not end a run over thousands; it is reported with its command.
        return f"{type(error).__name__}: {error}"
    return None


def _execute(combination: Combination) -> None:
    args = parse_flags(command_line(combination))
    config = stream_config(validate_arguments(args))
    _expect("streaming", config.enabled, combination[STREAM])
    if not config.enabled:
        _expect("directories", config.directories, ())
        return
    # From the oracle, so that the validator does not vouch for itself.
    directories = tuple(oracle.resolved(combination)[DISK_DIR].split(os.pathsep))
    on_real_disk = [os.path.lexists(directory) for directory in directories]
    disk = FakeSystem()
    for directory in directories:
        put_fake_disk(directory, disk)
    try:
        with mock.patch.object(streamer, "open_backend", wraps=open_fake) as opener:
            _stream(combination, config, disk, directories)
        _expect("directories opened", [call.args[0] for call in opener.call_args_list], [directories])
    finally:
        forget_fake_disks()
    _expect("the real disk", [os.path.lexists(directory) for directory in directories], on_real_disk)


def _stream(
    combination: Combination, config: StreamConfig, disk: FakeSystem, directories: tuple[str, ...]
) -> None:
    random = torch.Generator().manual_seed(1)
    params = [torch.nn.Parameter(torch.randn(shape, generator=random).to(dtype)) for shape, dtype in _SHAPES]
    numel = sum(param.numel() for param in params)
    reference = _Resident(params, moment_dtype=combination[MOMENT_DTYPE])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # bf16 moments warn by beta2, and are meant here
        optimizer = StreamingAdamW(_groups(params), config)
    try:
        for _ in range(STEPS):
            for param in params:
                param.grad = torch.randn(param.shape, generator=random).to(param.dtype)
            reference.step([param.grad for param in params])
            optimizer.step()
        state = optimizer.full_state()
        for index, param in enumerate(params):
            _expect_bits(f"param {index}", param.detach(), reference.params[index])
        for index, found in enumerate(state.values()):
            for key, value in reference.state(index).items():
                _expect_bits(f"{key} of param {index}", found[key], value)
        _expect_streamed(combination, optimizer, numel)
        _expect_files(combination, disk, directories, numel, buckets=optimizer.records[0].buckets)
    finally:
        optimizer.close()
    _expect("files after close", [path for path, _ in _files(disk, "/")], [])


def _groups(params: list) -> list[dict]:
    return [{"params": [param], **setting} for param, setting in zip(params, _SETTINGS, strict=True)]


class _Resident:
    """AdamW with everything in memory: fp32 main params, copied into `params` after each step."""

    def __init__(self, params: list[torch.nn.Parameter], *, moment_dtype: str) -> None:
        self.params = [param.detach().clone() for param in params]
        self._mains = [torch.nn.Parameter(param.detach().float().clone()) for param in params]
        self._optimizer = torch.optim.AdamW(_groups(self._mains))
        self._stored_as = {"fp32": torch.float32, "bf16": torch.bfloat16}[moment_dtype]

    def step(self, gradients: list[torch.Tensor]) -> None:
        for main, gradient in zip(self._mains, gradients, strict=True):
            main.grad = gradient.float()
        self._optimizer.step()
        for param, main in zip(self.params, self._mains, strict=True):
            param.copy_(main.detach())
            for moment in ("exp_avg", "exp_avg_sq"):
                value = self._optimizer.state[main][moment]
                value.copy_(value.to(self._stored_as))

    def state(self, index: int) -> dict[str, torch.Tensor]:
        main = self._mains[index]
        moments = self._optimizer.state[main]
        return {"main": main.detach(), "exp_avg": moments["exp_avg"], "exp_avg_sq": moments["exp_avg_sq"]}


def _expect_streamed(combination: Combination, optimizer: StreamingAdamW, numel: int) -> None:
    records = optimizer.records
    _expect("steps that streamed", [record.step for record in records], list(range(1, STEPS + 1)))
    buckets = {record.buckets for record in records}
    one_bucket = combination[BUCKET_NUMEL] >= numel
    if len(buckets) != 1 or (max(buckets) == 1) != one_bucket:
        raise UnexpectedError(f"buckets of each step are {buckets}, for {numel} elements")
    if combination[HOST_CACHE] or combination["stream_optimizer_state_keep_slots"]:
        return  # what is kept is not moved; that volume is arithmetic of its own
    moments = 2 * _moment_bytes(combination)
    reads = [4 * numel] + [(4 + moments) * numel] * (STEPS - 1)
    _expect("bytes read", [record.read_bytes for record in records], reads)
    _expect("bytes written", [record.written_bytes for record in records], [(4 + moments) * numel] * STEPS)


def _expect_files(
    combination: Combination, disk: FakeSystem, directories: tuple[str, ...], numel: int, *, buckets: int
) -> None:
    files = dict(_files(disk, "/"))
    homes = {
        directory: [path for path in files if path.startswith(f"{directory}/")] for directory in directories
    }
    if outside := files.keys() - {path for paths in homes.values() for path in paths}:
        raise UnexpectedError(f"files outside {directories}: {sorted(outside)}")
    if (used := sum(map(bool, homes.values()))) < min(buckets, len(directories)):
        raise UnexpectedError(f"{buckets} buckets lie in {used} of {len(directories)} directories")
    needed = numel * (4 + 2 * _moment_bytes(combination))
    if sum(files.values()) < needed:
        raise UnexpectedError(f"files hold {sum(files.values())} bytes, and the state has {needed}")


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


def _expect(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise UnexpectedError(f"{what}: {found}, not {expected}")


def _expect_bits(what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    if found.dtype != expected.dtype or not torch.equal(found, expected):
        raise UnexpectedError(
            f"{what} differs from resident by up to {(found.float() - expected.float()).abs().max()}"
        )
