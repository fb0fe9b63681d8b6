"""`optstream bench step`: the streamed step against the resident one, the serial one, and the disk's floor.

How it keeps itself honest:
- Everything is measured in one process, in rounds that interleave the contenders, in another order each
  round, since disks and neighbours change their minds.
- The floor is the best of a sweep, measured again in the rounds: a slow engine cannot flatter itself.
- Every launch is a process of its own, because where buffers land in memory varies from launch to launch.
- Before any timing, all contenders make a step, and their params must have the same bits.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from statistics import median

import torch

from optstream.core.config import StreamConfig
from optstream.core.errors import OptstreamError
from optstream.core.records import StepRecord
from optstream.harness.bench_contenders import (
    Contender,
    Floor,
    FloorSetting,
    Problem,
    Resident,
    Serial,
    Streamed,
    floor_settings,
)

# How many settings of the sweep are measured again in the rounds.
FLOOR_FINALISTS = 2


class BenchError(OptstreamError):
    """There is nothing to report: the contenders disagree about the result, or a launch died."""


@dataclass(frozen=True)
class BenchSettings:
    """What to measure: `numel` params, `launches` processes of `rounds` rounds of `steps` steps each.

    flags: the words on the command line that `config` was made from, for the report.
    """

    numel: int
    config: StreamConfig
    gap_s: float = 0.0
    launches: int = 3
    rounds: int = 3
    steps: int = 4
    fused: bool = True
    device: str = "cpu"
    flags: tuple[str, ...] = ()


@dataclass
class Launch:
    """What one process measured.

    seconds: a step's, by contender, one value a round. records: of the last round's steps with gaps, in the
    steady state. floor: the setting that was best in the rounds. sweep: seconds a step of every setting.
    """

    seconds: dict[str, list[float]]
    records: list[StepRecord]
    host_bytes_peak: int
    floor: FloorSetting
    sweep: dict[FloorSetting, float]

    def medians(self) -> dict[str, float]:
        return {name: median(values) for name, values in self.seconds.items()}


@dataclass(frozen=True)
class BenchReport:
    """Medians over launches of each launch's medians."""

    settings: BenchSettings
    launches: list[Launch]

    def seconds(self, name: str) -> float | None:
        """Seconds a step, or None for a contender that did not run."""
        found = [launch.medians()[name] for launch in self.launches if name in launch.seconds]
        return median(found) if found else None

    def spread(self, name: str) -> tuple[float, float] | None:
        """The fastest and the slowest round of any launch."""
        found = [value for launch in self.launches for value in launch.seconds.get(name, [])]
        return (min(found), max(found)) if found else None

    @property
    def record(self) -> StepRecord:
        """A typical step with gaps: the one of median duration. Its bytes are those of the steady state."""
        # Not the last step of a launch: what the cache holds after it was written by the drain, and counts.
        records = [record for launch in self.launches for record in launch.records[:-1]]
        return sorted(records, key=lambda record: record.total_s)[len(records) // 2]

    @property
    def limit_s(self) -> float:
        """No streamed step can be faster than Adam alone, nor than the disk alone."""
        return max(self.seconds("floor"), self.seconds("resident"))

    @property
    def streamed_over_limit(self) -> float:
        return self.seconds("streamed") / self.limit_s

    @property
    def serial_over_streamed(self) -> float:
        return self.seconds("serial") / self.seconds("streamed")

    @property
    def verification_share(self) -> float | None:
        """What verification adds to the streamed step, as a share of it; None if it was off."""
        unverified = self.seconds("unverified")
        return None if unverified is None else 1 - unverified / self.seconds("streamed")

    def as_dict(self) -> dict:
        """The report as JSON has it. Seconds are per step, bytes per step in the steady state."""
        names = ("resident", "serial", "streamed", "unverified", "floor", "exposed")
        return {
            "numel": self.settings.numel,
            "read_bytes": self.record.read_bytes,
            "written_bytes": self.record.written_bytes,
            "resident_s": self.seconds("resident"),
            "serial_s": self.seconds("serial"),
            "streamed_s": self.seconds("streamed"),
            "exposed_s": self.seconds("exposed"),
            "floor_s": self.seconds("floor"),
            "streamed_over_limit": self.streamed_over_limit,
            "serial_over_streamed": self.serial_over_streamed,
            "host_bytes_peak": max(launch.host_bytes_peak for launch in self.launches),
            "unverified_s": self.seconds("unverified"),
            "verification_share": self.verification_share,
            "exposed_profile_s": {
                "update": self.record.update_s,
                "waited_for_reads": self.record.waited_read_s,
                "waited_for_writes": self.record.waited_write_s,
            },
            "spread_s": {name: self.spread(name) for name in names},
            "launch_medians_s": [launch.medians() for launch in self.launches],
            "floor_settings": [str(launch.floor) for launch in self.launches],
            "floor_sweep_s": [{str(key): s for key, s in launch.sweep.items()} for launch in self.launches],
            "settings": asdict(self.settings),
            "machine": {
                "cpus": os.cpu_count(),
                "platform": platform.platform(),
                "torch": torch.__version__,
                "torch_threads": torch.get_num_threads(),
            },
        }


def run_bench(settings: BenchSettings, *, progress: Callable[[str], None] = lambda text: None) -> BenchReport:
    """Measure in fresh processes, one after the other; `progress` hears which. Raises what the contenders
    raise, or BenchError."""
    context = multiprocessing.get_context("spawn")
    launches = []
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        for number in range(1, settings.launches + 1):
            progress(f"launch {number} of {settings.launches}")
            try:
                launches.append(pool.submit(measure_launch, settings).result())
            except BrokenProcessPool as error:
                raise BenchError(
                    f"launch {number} of {settings.launches} ended without a result",
                    why="its process died, most likely for want of memory",
                    remedy="Measure a smaller --numel",
                ) from error
    return BenchReport(settings, launches)


def measure_launch(settings: BenchSettings) -> Launch:
    """One launch, in this process."""
    device = torch.device(settings.device)
    problem = Problem(settings.numel, device, fused=settings.fused)
    config = settings.config
    for directory in config.directories:
        os.makedirs(directory, exist_ok=True)
    with ExitStack() as stack:
        contenders: dict[str, Contender] = {}

        def enter(name: str, contender: Contender) -> None:
            contenders[name] = stack.enter_context(closing(contender))

        enter("resident", Resident(problem))
        enter("serial", Serial(problem, config))
        enter("streamed", Streamed(problem, config))
        if config.verify:
            enter("unverified", Streamed(problem, replace(config, verify=False)))
        _warm_up_and_compare(contenders)
        sweep = _sweep_floor(problem, config)
        for setting in sorted(sweep, key=sweep.get)[:FLOOR_FINALISTS]:
            enter(str(setting), Floor(problem, config, setting))
            contenders[str(setting)].run(1)
        return _measure_rounds(contenders, settings, sweep)


def _warm_up_and_compare(contenders: dict[str, Contender]) -> None:
    """The first step writes the moments and faults memory in; it is also the test that all do the same."""
    for contender in contenders.values():
        contender.run(1)
    expected = contenders["resident"].model.params
    for name, contender in contenders.items():
        if not all(map(torch.equal, expected, contender.model.params)):
            raise BenchError(
                f"the {name} step gives other params than the resident step",
                remedy="Do not trust this machine or this build: run the tests",
            )


def _sweep_floor(problem: Problem, config: StreamConfig) -> dict[FloorSetting, float]:
    seconds = {}
    for setting in floor_settings(problem.device):
        with closing(Floor(problem, config, setting)) as floor:
            floor.run(1)
            seconds[setting] = floor.run(2)
    return seconds


def _measure_rounds(
    contenders: dict[str, Contender], settings: BenchSettings, sweep: dict[FloorSetting, float]
) -> Launch:
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    exposed: list[float] = []
    streamed = contenders["streamed"]
    names = list(contenders)
    for number in range(settings.rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            seconds[name].append(contenders[name].run(settings.steps))
        # The first step after a drain finds the caches empty: it is not the steady state.
        records = streamed.run_with_gaps(settings.steps + 2, settings.gap_s)[1:]
        exposed.append(median(record.total_s for record in records))
    floors = {name: contender for name, contender in contenders.items() if isinstance(contender, Floor)}
    best = min(floors, key=lambda name: median(seconds[name]))
    kept = {name: values for name, values in seconds.items() if name not in floors}
    return Launch(
        seconds=kept | {"floor": seconds[best], "exposed": exposed},
        records=records,
        host_bytes_peak=streamed.host_bytes,
        floor=floors[best].setting,
        sweep=sweep,
    )
