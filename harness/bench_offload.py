"""`optstream bench offload`: a sleeping trainer on its way to disk and back, against the disk's own time.

The floor moves the same bytes between the same file system and buffers that are already there: no device, no
memory to find, no checksums. Which transfers are fastest is found first; rounds of both are interleaved, so
that a disk whose speed wanders wanders for both.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from rich.console import Console

from optstream.core.config import FLAG_BY_DEST, MIB, add_arguments
from optstream.core.validator import CHUNK
from optstream.harness.errors import ConfigurationError
from optstream.harness.output import write_json

if TYPE_CHECKING:
    from optstream.backends.interface import Backend

# (transfers at once, bytes of each) that the floor is looked for among.
FLOOR_TRANSFERS = ((2, 16 * MIB), (4, 4 * MIB), (4, 16 * MIB), (8, 4 * MIB))
# A trainer is a few large buffers; one would hide the cost of going from one to the next.
STORAGES = 4


@dataclass(frozen=True)
class OffloadReport:
    """Medians over rounds. sleep_floor_s, wake_floor_s: the disk alone. host_bytes_peak: of sleep and wake.

    Of a GPU, sleep and wake include giving the memory back and getting it again; a CPU's stays.
    """

    bytes: int
    sleep_s: float
    wake_s: float
    sleep_floor_s: float
    wake_floor_s: float
    host_bytes_peak: int


def add_parser(what: argparse._SubParsersAction) -> None:
    """Add `offload` to what `optstream bench` measures."""
    parser = what.add_parser(
        "offload",
        help="a trainer's sleep to disk and its wake, against the disk's floor",
        description="Parks tensors of the given size in a file and brings them back; and the floor, the same "
        "bytes moved by the disk alone. Medians over interleaved rounds.",
        allow_abbrev=False,
    )
    parser.add_argument("--bytes", type=_bytes, default=10**9, help="to park, as 1e9 [1e9]")
    parser.add_argument("--dir", default=".", metavar="DIR[:DIR...]", help="on the disks to measure [.]")
    parser.add_argument("--rounds", type=_rounds, default=5, help="of sleep, wake and floors [%(default)s]")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="where the tensors are [cuda if there is one]"
    )
    parser.add_argument("--json", metavar="PATH|-", help="write the report there; - is standard output")
    add_arguments(parser, flags=[FLAG_BY_DEST[CHUNK]])
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out `optstream bench offload`. Raises OptstreamError."""
    import torch

    chunk_bytes = getattr(args, CHUNK) * MIB
    if chunk_bytes < 1:
        raise ConfigurationError(
            f"{FLAG_BY_DEST[CHUNK].name} is not positive", why="nothing would move", remedy="Give 1 or more"
        )
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    with Console(stderr=True).status("measuring ..."):
        report = measure(
            args.bytes, args.dir.split(":"), chunk_bytes=chunk_bytes, rounds=args.rounds, device=device
        )
    if args.json:
        write_json(args.json, asdict(report))
    out = Console(stderr=args.json == "-")
    for name, seconds, floor_s in (
        ("sleep", report.sleep_s, report.sleep_floor_s),
        ("wake", report.wake_s, report.wake_floor_s),
    ):
        out.print(
            f"{name}: {seconds:.3f} s for {report.bytes / 1e9:.2f} GB, {seconds / floor_s:.2f} x the disk's "
            f"own {floor_s:.3f} s",
            highlight=False,
            soft_wrap=True,
        )
    out.print(f"host memory: {report.host_bytes_peak / 1e6:.1f} MB at most", highlight=False)
    return 0


def measure(
    size_bytes: int, directories: list[str], *, chunk_bytes: int, rounds: int, device
) -> OffloadReport:
    """Raises ConfigurationError if what comes back is not what was parked."""
    import torch

    from optstream.backends import open_backend
    from optstream.core.device_memory import Parked, ReleasedStorages
    from optstream.core.parking import DiskParking

    # A CPU's memory stays: finding fresh pages takes longer than filling them from a fast disk, and a device
    # with an allocator of its own need not do that.
    memory = ReleasedStorages() if device.type != "cpu" else None
    share = -(-size_bytes // STORAGES)
    held = [
        torch.randint(256, (min(share, size_bytes - start),), dtype=torch.uint8, device=device)
        for start in range(0, size_bytes, share)
    ]
    parked = [Parked(tensor.untyped_storage(), tensor.numel()) for tensor in held]
    sums = [int(tensor.sum()) for tensor in held]
    floor = _Floor(open_backend(directories, subdirectory="optstream/bench/floor"), size_bytes)
    try:
        parking = DiskParking(
            open_backend(directories, subdirectory="optstream/bench/trainer"), chunk_bytes=chunk_bytes
        )
    except BaseException:
        floor.close()
        raise

    def sleep() -> None:
        parking.save(parked)
        if memory is not None:
            memory.release(parked)

    def wake() -> None:
        if memory is not None:
            memory.restore(parked)
        parking.load(parked)

    times: dict[str, list[float]] = {"sleep": [], "wake": [], "write": [], "read": []}
    try:
        sleep()  # the first one creates the file
        wake()
        for _ in range(rounds):
            for name, task in (
                ("sleep", sleep),
                ("write", floor.write),
                ("wake", wake),
                ("read", floor.read),
            ):
                times[name].append(_seconds(task))
        if [int(tensor.sum()) for tensor in held] != sums:
            raise ConfigurationError("the benchmark is wrong", why="other bytes came back than were parked")
        median = {name: statistics.median(values) for name, values in times.items()}
        return OffloadReport(
            size_bytes, median["sleep"], median["wake"], median["write"], median["read"], parking.host_bytes
        )
    finally:
        parking.close()
        floor.close()


class _Floor:
    """The same bytes, by the fastest transfers, between a file and buffers that are there already."""

    def __init__(self, backend: Backend, size_bytes: int) -> None:
        from optstream.core.plan import round_up

        self._backend = backend
        self._size_bytes = round_up(size_bytes, backend.filesystem.alignment_bytes)
        try:
            backend.create("floor.bin", self._size_bytes).close()
            self._move(*FLOOR_TRANSFERS[0], write=True)  # so that none of them finds blocks never written
            self._writes = min(
                FLOOR_TRANSFERS, key=lambda each: _seconds(lambda: self._move(*each, write=True))
            )
            self._reads = min(
                FLOOR_TRANSFERS, key=lambda each: _seconds(lambda: self._move(*each, write=False))
            )
        except BaseException:
            self.close()
            raise

    def write(self) -> None:
        self._move(*self._writes, write=True)

    def read(self) -> None:
        self._move(*self._reads, write=False)

    def close(self) -> None:
        self._backend.close(remove_files=True)

    def _move(self, threads: int, transfer_bytes: int, *, write: bool) -> None:
        from optstream.core.memory import allocate_host, bytes_of

        buffers = [bytes_of(allocate_host(transfer_bytes).fill_(1)) for _ in range(threads)]
        with self._backend.open("floor.bin") as file, ThreadPoolExecutor(threads) as pool:

            def share(number: int) -> None:
                for offset in range(number * transfer_bytes, self._size_bytes, threads * transfer_bytes):
                    memory = buffers[number][: min(transfer_bytes, self._size_bytes - offset)]
                    if write:
                        file.write_from(offset, memory)
                    else:
                        file.read_into(offset, memory)

            list(pool.map(share, range(threads)))


def _seconds(task: Callable[[], None]) -> float:
    started = time.perf_counter()
    task()
    return time.perf_counter() - started


def _bytes(text: str) -> int:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if value < STORAGES or not value.is_integer():
        raise argparse.ArgumentTypeError(f"{text} is no number of bytes, as 1e9")
    return int(value)


def _rounds(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is no positive whole number")
    return value
