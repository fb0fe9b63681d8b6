"""What `optstream bench step` compares: one mixed-precision optimizer step, done in several ways.

All start from the same fp32 gradients, and all end with new bf16 model params: Adam on fp32 main params, then
the copy into the model's own. That is what Megatron's optimizer does, with and without streaming, so that
what the contenders differ in is where the state lives and how it moves.
"""

from __future__ import annotations

import itertools
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from optstream.backends import open_backend
from optstream.core.config import StreamConfig
from optstream.core.copies import Copies, HostCopies, copies_for
from optstream.core.engine import Engine
from optstream.core.formats import segment_formats
from optstream.core.memory import bytes_of
from optstream.core.plan import Entry, Piece, bucket_layout, plan_buckets
from optstream.core.records import StepRecord
from optstream.core.store import BucketStore
from optstream.core.streamer import StateStreamer
from optstream.core.update import BucketUpdater

# A param as large as a 4096 x 4096 matrix, at most: models consist of many, and cutting few is not typical.
PARAM_NUMEL_MAX = 1 << 24
SERIAL_ALIGNMENT_BYTES = 4096

_numbers = itertools.count()


class Contender(Protocol):
    """One way to do the step."""

    def run(self, steps: int) -> float:
        """Seconds a step: `steps` steps back to back, and whatever they leave undone, divided by `steps`."""

    def close(self) -> None: ...


class Problem:
    """Parameters of `numel` elements in all and their fp32 gradients, the same values for every contender."""

    def __init__(self, numel: int, device: torch.device, *, fused: bool) -> None:
        self.device = device
        self._fused = fused
        whole, rest = divmod(numel, PARAM_NUMEL_MAX)
        self.numels = [PARAM_NUMEL_MAX] * whole + ([rest] if rest else [])
        self.gradients = list(self._values(seed=1, scale=1e-2))

    def model(self) -> Model:
        """A fresh one, with the initial values."""
        return Model([values.bfloat16() for values in self._values(seed=0, scale=1.0)], self.gradients)

    def adamw(self, params: list[torch.Tensor]) -> torch.optim.AdamW:
        return torch.optim.AdamW(params, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.01, fused=self._fused)

    def entries(self) -> list[Entry]:
        return [Entry(f"param{index}", numel, 0) for index, numel in enumerate(self.numels)]

    def synchronize(self) -> None:
        """Wait for the device, so that a clock read afterwards has seen its work."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def _values(self, *, seed: int, scale: float) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        for numel in self.numels:
            yield torch.empty(numel).uniform_(-scale, scale, generator=generator).to(self.device)


@dataclass(frozen=True)
class Model:
    """bf16 params, 1-D, and their fp32 gradients, as a streamed update asks for them."""

    params: list[torch.Tensor]
    gradients: list[torch.Tensor]

    def values(self, piece: Piece) -> torch.Tensor:
        return self.params[piece.entry][piece.start : piece.stop]

    def gradient(self, piece: Piece) -> torch.Tensor:
        return self.gradients[piece.entry][piece.start : piece.stop]

    def publish(self, piece: Piece, main: torch.Tensor) -> None:
        self.values(piece).copy_(main)


class Resident:
    """torch's AdamW with all state on the device."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self.model = problem.model()
        self._mains = [param.float() for param in self.model.params]
        for main, gradient in zip(self._mains, problem.gradients, strict=True):
            main.grad = gradient
        self._optimizer = problem.adamw(self._mains)

    def run(self, steps: int) -> float:
        started = time.perf_counter()
        for _ in range(steps):
            self._optimizer.step()
            for param, main in zip(self.model.params, self._mains, strict=True):
                param.copy_(main)
        self._problem.synchronize()
        return (time.perf_counter() - started) / steps

    def close(self) -> None:
        """Nothing but memory to give back."""


class Streamed:
    """The state streamed as it ships, with the given flags."""

    def __init__(self, problem: Problem, config: StreamConfig) -> None:
        self._problem = problem
        self.model = problem.model()
        self._streamer = StateStreamer(
            config,
            problem.adamw(self.model.params),
            problem.entries(),
            self.model.values,
            device=problem.device,
            subdirectory=_subdirectory(),
        )

    def run(self, steps: int) -> float:
        started = time.perf_counter()
        for _ in range(steps):
            self._step()
        self._streamer.engine.drain()
        self._problem.synchronize()
        return (time.perf_counter() - started) / steps

    def run_with_gaps(self, steps: int, gap_s: float) -> list[StepRecord]:
        """The records of `steps` steps with a pause before each, which stands for forward and backward:
        backward, twice as long as forward, starts the read-ahead."""
        for _ in range(steps):
            time.sleep(gap_s / 3)
            self._streamer.read_ahead()
            time.sleep(gap_s * 2 / 3)
            self._step()
        records = self.records[-steps:]
        self._streamer.engine.drain()
        return records

    @property
    def records(self) -> list[StepRecord]:
        return self._streamer.engine.records

    @property
    def host_bytes(self) -> int:
        """Host memory that buckets take now. It never shrinks before `close`."""
        return self._streamer.engine.host_bytes

    def close(self) -> None:
        self._streamer.close()

    def _step(self) -> None:
        everything = range(len(self._streamer.entries))
        self._streamer.step(self.model.gradient, self.model.publish, everything)


class Serial:
    """The schedule that streaming is known with: one thread, buffered files, nothing in flight meanwhile.

    Bucket by bucket: read each segment chunk by chunk, update, write each segment chunk by chunk. What was
    written is flushed and dropped from the page cache before each step, off the clock, so that reads reach
    the disk; writes only have to reach the page cache, which is in this schedule's favour.
    """

    def __init__(self, problem: Problem, config: StreamConfig) -> None:
        self._problem = problem
        self.model = problem.model()
        entries = problem.entries()
        formats = segment_formats(config.moment_dtype)
        element_bytes = {name: format_.element_bytes for name, format_ in formats.items()}
        self._buckets = plan_buckets(entries, config.bucket_numel)
        self._layouts = [
            bucket_layout(
                bucket,
                element_bytes,
                alignment_bytes=SERIAL_ALIGNMENT_BYTES,
                chunk_bytes=config.chunk_bytes,
                trailer_bytes=lambda chunks: 0,
            )
            for bucket in self._buckets
        ]
        master = problem.adamw(self.model.params)
        self._updater = BucketUpdater(master, [entry.group for entry in entries], formats)
        size = max(layout.state_bytes for layout in self._layouts)
        self._host = torch.zeros(size, dtype=torch.uint8, pin_memory=problem.device.type != "cpu")
        self._slot = self._host.to(problem.device)
        # Claimed for its clean-up alone: what a killed run leaves here, the next one removes.
        backend = open_backend(config.directories[:1], subdirectory=_subdirectory())
        self._resources = ExitStack()
        self._resources.callback(backend.close, remove_files=True)
        paths = [Path(backend.root, str(bucket.index)) for bucket in self._buckets]
        self._files = [self._resources.enter_context(path.open("w+b", buffering=0)) for path in paths]
        self._write_initial()

    def run(self, steps: int) -> float:
        elapsed = 0.0
        for _ in range(steps):
            self._drop_from_page_cache()
            started = time.perf_counter()
            self._step()
            elapsed += time.perf_counter() - started
        self._drop_from_page_cache()  # Or its writes would slow down whoever runs next.
        return elapsed / steps

    def close(self) -> None:
        self._resources.close()

    def _step(self) -> None:
        for bucket, layout, file in zip(self._buckets, self._layouts, self._files, strict=True):
            state = slice(0, layout.state_bytes)
            for chunk in layout.chunks:
                file.seek(chunk.offset)
                file.readinto(self._memory(chunk.offset, chunk.size))
            if self._slot is not self._host:
                self._slot[state].copy_(self._host[state])
            self._updater.update(bucket, layout, self._slot[state], self.model.gradient, self.model.publish)
            if self._slot is not self._host:
                self._host[state].copy_(self._slot[state])
            for chunk in layout.chunks:
                file.seek(chunk.offset)
                file.write(self._memory(chunk.offset, chunk.size))
        self._updater.counts.advance(range(len(self.model.params)))
        self._problem.synchronize()

    def _write_initial(self) -> None:
        for bucket, layout, file in zip(self._buckets, self._layouts, self._files, strict=True):
            self._host.zero_()
            extent = layout.segments["main"]
            main = self._host[extent.offset : extent.end].view(torch.float32)
            for piece in bucket.pieces:
                main[piece.span].copy_(self.model.values(piece))
            file.write(self._memory(0, layout.state_bytes))

    def _drop_from_page_cache(self) -> None:
        for file in self._files:
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):  # Without it, reads come from memory: in this schedule's favour.
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def _memory(self, offset: int, size: int) -> memoryview:
        return bytes_of(self._host)[offset : offset + size]


@dataclass(frozen=True)
class FloorSetting:
    """How the engine moves bytes: transfer size, threads each way, and what its buffers are made of."""

    chunk_bytes: int
    io_threads: int
    backing: str

    def __str__(self) -> str:
        return f"{self.chunk_bytes >> 20} MiB chunks, {self.io_threads} threads each way, {self.backing}"


class SmallPageCopies(HostCopies):
    """Places of ordinary 4 KiB pages, wherever the kernel finds them."""

    def allocate_place(self, size_bytes: int) -> torch.Tensor:
        mapping = mmap.mmap(-1, max(size_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            mapping.madvise(mmap.MADV_NOHUGEPAGE)
        return torch.frombuffer(mapping, dtype=torch.uint8)[:size_bytes]


def floor_settings(device: torch.device) -> list[FloorSetting]:
    """The sweep. Devices copy from pinned buffers alone, so there the backing is no choice."""
    if device.type != "cpu":
        return [FloorSetting(c << 20, threads, "pinned memory") for c in (1, 8, 16) for threads in (2, 4, 8)]
    swept = [FloorSetting(c << 20, threads, "huge pages") for c in (1, 8, 16) for threads in (2, 4)]
    return [*swept, FloorSetting(8 << 20, 4, "small pages"), FloorSetting(16 << 20, 4, "small pages")]


class Floor:
    """The same bytes through the same engine, without an update and without verification."""

    def __init__(self, problem: Problem, config: StreamConfig, setting: FloorSetting) -> None:
        self.setting = setting
        entries = problem.entries()
        copies: Copies = copies_for(problem.device)
        if setting.backing == "small pages":
            copies = SmallPageCopies()
        self._store = BucketStore(
            open_backend(config.directories, subdirectory=f"torch/pid{os.getpid()}/floor{next(_numbers)}"),
            entries,
            plan_buckets(entries, config.bucket_numel),
            segment_formats(config.moment_dtype),
            chunk_bytes=setting.chunk_bytes,
            verify=False,
        )
        self._engine = Engine(
            self._store,
            depth=config.depth,
            cache_bytes=config.host_cache_bytes,
            keep_slots=config.keep_slots,
            write_behind=config.write_behind,
            copies=copies,
            staged=problem.device.type != "cpu",
            io_threads=setting.io_threads,
        )
        self._steps = 0

    def run(self, steps: int) -> float:
        everything = range(len(self._store.buckets))
        started = time.perf_counter()
        for _ in range(steps):
            self._steps += 1
            self._engine.step(everything, lambda bucket, memory: None, step=self._steps)
        self._engine.drain()
        return (time.perf_counter() - started) / steps

    @property
    def records(self) -> list[StepRecord]:
        return self._engine.records

    def close(self) -> None:
        self._engine.close()
        self._store.close(remove_files=True)


def _subdirectory() -> str:
    return f"optstream-bench/pid{os.getpid()}/contender{next(_numbers)}"
