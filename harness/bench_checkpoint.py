"""`optstream bench checkpoint`: saving and loading streamed state, against the disk's own time.

The floor reads the live files while it writes and syncs as many bytes into new ones: no names, no checksums,
no manifest. Rounds of it and of saves are interleaved, so that a disk whose speed wanders wanders for both.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from rich.console import Console

from optstream.core.config import DEFAULTS, FLAGS, STREAMING, add_arguments
from optstream.core.validator import stream_config
from optstream.harness.output import write_json

if TYPE_CHECKING:
    from optstream.core.config import StreamConfig
    from optstream.core.optimizer import StreamingAdamW

STREAMING_FLAGS = tuple(
    flag for flag in FLAGS if flag.group == STREAMING and flag.dest != "stream_optimizer_state_to_disk"
)
PARAMETERS = 8
FLOOR_BYTES = 4 << 20
FLOOR_THREADS = 4
SAMPLED_EVERY_S = 0.01


@dataclass
class CheckpointReport:
    """Medians over rounds. bytes: of state. async_stall_s: the wait in `save_to` and what the steps that ran
    meanwhile took longer than others. host_bytes_peak: memory that a save took, at its peak."""

    bytes: int
    save_s: float
    async_stall_s: float
    load_s: float
    floor_s: float
    host_bytes_peak: int


@dataclass
class _Rounds:
    save_s: list[float] = field(default_factory=list)
    stall_s: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)
    floor_s: list[float] = field(default_factory=list)
    host_bytes: list[int] = field(default_factory=list)


def add_parser(what: argparse._SubParsersAction) -> None:
    """Add `checkpoint` to what `optstream bench` measures."""
    parser = what.add_parser(
        "checkpoint",
        help="saving and loading streamed state, against the disk's floor",
        description="Saves streamed optimizer state, in the foreground and behind the steps, and loads it; "
        "and the floor: reading the live files while writing and syncing as many bytes. Medians over rounds.",
        allow_abbrev=False,
    )
    parser.add_argument("--numel", type=_count, default=100_000_000, help="parameters, as 100e6 [100e6]")
    parser.add_argument("--dir", default=".", metavar="DIR", help="on the disk to measure [.]")
    parser.add_argument("--rounds", type=_count, default=3, help="of saves, loads and floors [%(default)s]")
    parser.add_argument("--json", metavar="PATH|-", help="write the report there; - is standard output")
    add_arguments(parser, flags=STREAMING_FLAGS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out `optstream bench checkpoint`. Raises OptstreamError."""
    given = {flag.dest: getattr(args, flag.dest) for flag in STREAMING_FLAGS}
    with Console(stderr=True).status("measuring ..."), _folder(args.dir) as folder:
        disk = {
            "stream_optimizer_state_to_disk": True,
            "offload_train_disk_dir": os.path.join(folder, "scratch"),
        }
        report = measure(args.numel, stream_config(DEFAULTS | given | disk), folder, args.rounds)
    if args.json:
        write_json(args.json, asdict(report))
    out = Console(stderr=args.json == "-")
    out.print(
        f"{report.bytes / 1e9:.2f} GB of state: saved in {report.save_s:.2f} s, "
        f"{report.save_s / report.floor_s:.2f} x the floor of {report.floor_s:.2f} s; behind the steps it "
        f"costs {report.async_stall_s:.2f} s, {report.async_stall_s / report.save_s:.0%} of that; loaded in "
        f"{report.load_s:.2f} s; {report.host_bytes_peak / 1e6:.0f} MB of host memory",
        soft_wrap=True,
        highlight=False,
    )
    return 0


def measure(numel: int, config: StreamConfig, folder: str, rounds: int) -> CheckpointReport:
    """Raises storage errors; leaves nothing in `folder` but what was there."""
    import torch

    from optstream.core.optimizer import StreamingAdamW

    each = max(1, numel // PARAMETERS)
    params = [torch.nn.Parameter(torch.zeros(each)) for _ in range(PARAMETERS)]
    for param in params:
        param.grad = torch.full_like(param, 0.1)
    found = _Rounds()
    with closing(StreamingAdamW(params, config, fused=True)) as streamed:
        streamed.step()
        streamed.step()
        streamed.streamer.engine.drain()
        for number in range(rounds):
            base = os.path.join(folder, f"checkpoint{number}")
            found.floor_s.append(_floor(streamed, folder))
            with _memory_watched(found.host_bytes):
                found.save_s.append(_seconds(lambda base=base: streamed.save_to(base)))
            found.load_s.append(_seconds(lambda base=base: streamed.load_from(base)))
            found.stall_s.append(_stall(streamed, os.path.join(folder, f"background{number}")))
    return CheckpointReport(
        bytes=12 * PARAMETERS * each,
        save_s=statistics.median(found.save_s),
        async_stall_s=statistics.median(found.stall_s),
        load_s=statistics.median(found.load_s),
        floor_s=statistics.median(found.floor_s),
        host_bytes_peak=max(found.host_bytes),
    )


def _stall(streamed: StreamingAdamW, base: str) -> float:
    """Steps with a gap as long as a step, without a save and then with one behind them."""

    def step() -> float:
        return _seconds(streamed.step)

    usual = []
    for _ in range(4):
        usual.append(step())
        time.sleep(usual[-1])
    alone = statistics.median(usual)
    stall = _seconds(lambda: streamed.save_to(base, background=True))
    while streamed.saving:
        stall += max(0.0, step() - alone)
        time.sleep(alone)
    streamed.wait_for_save()
    return stall


def _floor(streamed: StreamingAdamW, folder: str) -> float:
    """Read every byte of the live files, and write and sync as many into new files, both at once."""
    from optstream.backends import open_backend

    store = streamed.streamer.store
    with open_backend([folder], subdirectory="floor/files", keep=True) as target, ExitStack() as stack:
        buffers = threading.local()
        files = []
        for bucket, (name, _) in zip(store.buckets, store.backend.list(), strict=True):
            size = store.layouts[bucket.index].state_bytes
            source = stack.enter_context(store.backend.open(name))
            files.append((source, stack.enter_context(target.create(name, size)), size))

        def move(job: tuple) -> None:
            transfer, offset, size = job
            transfer(offset, _buffer(buffers)[:size])

        chunks = [
            (source, copy, offset, min(FLOOR_BYTES, size - offset))
            for source, copy, size in files
            for offset in range(0, size, FLOOR_BYTES)
        ]
        reads = [(source.read_into, offset, size) for source, _, offset, size in chunks]
        writes = [(copy.write_from, offset, size) for _, copy, offset, size in chunks]
        readers = stack.enter_context(ThreadPoolExecutor(FLOOR_THREADS))
        writers = stack.enter_context(ThreadPoolExecutor(FLOOR_THREADS))

        def everything() -> None:
            reading, writing = readers.map(move, reads), writers.map(move, writes)
            for _ in (*reading, *writing):
                continue
            for _, copy, _ in files:
                copy.sync()

        seconds = _seconds(everything)
        for name, _ in list(target.list()):
            target.remove(name)
        return seconds


def _buffer(buffers: threading.local) -> memoryview:
    from optstream.core.memory import allocate_host, bytes_of

    if not hasattr(buffers, "memory"):
        buffers.memory = bytes_of(allocate_host(FLOOR_BYTES).zero_())
    return buffers.memory


@contextmanager
def _memory_watched(peaks: list[int]) -> Iterator[None]:
    """Adds how much this process's resident memory grew meanwhile, at most."""
    ended = threading.Event()
    before = _resident_bytes()
    largest = [before]

    def watch() -> None:
        while not ended.wait(SAMPLED_EVERY_S):
            largest[0] = max(largest[0], _resident_bytes())

    thread = threading.Thread(target=watch, name="optstream-memory")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        peaks.append(largest[0] - before)


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:  # No such file on macOS: the high-water mark has to do, in bytes there.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _seconds(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


@contextmanager
def _folder(directory: str) -> Iterator[str]:
    """A private folder on the disk that is measured, gone afterwards."""
    os.makedirs(directory, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="optstream-bench-", dir=directory) as folder:
        yield folder


def _count(text: str) -> int:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if value < 1 or not value.is_integer():
        raise argparse.ArgumentTypeError(f"{text} is no positive whole number")
    return int(value)
