"""`optstream train --rl-steps N`: the loop of rollout and training, under the flags of a deployment.

The same loop with everything resident runs beside it, and every bit is compared. Exit 0 if they are equal
(streamed in a lossy moment format: within its stated tolerance) and all ranks agree, 1 if not or if a device
is too small, 2 on bad usage.
"""

from __future__ import annotations

import argparse
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from optstream.core.config import FLAG_BY_DEST, FLAGS, add_arguments
from optstream.core.validator import DISK_DIR, refusal, uses_disk, validate
from optstream.harness.errors import ConfigurationError
from optstream.harness.output import write_json
from optstream.harness.stream_settings import StreamSettings
from optstream.harness.terminal import plain_warnings
from optstream.harness.training_config import TrainingConfig

if TYPE_CHECKING:
    from optstream.harness.rl import RlRun, RlSettings
    from optstream.harness.rl_compare import RlComparison
    from optstream.harness.summary import Verdict

EQUAL, DIFFERENT = 0, 1

# Which of a deployment's flags mean something to the loop.
LOOP_FLAGS = tuple(
    FLAG_BY_DEST[dest]
    for dest in ("colocate", "offload", "offload_train", "offload_rollout", "offload_train_target")
)


def add_loop_arguments(parser: argparse.ArgumentParser) -> None:
    loop = parser.add_argument_group(
        "loop of rollout and training", "with --rl-steps; streams only where the flags say so"
    )
    loop.add_argument(
        "--rl-steps", type=_positive, metavar="N", help="generate, train, update weights, N times"
    )
    loop.add_argument(
        "--device-memory",
        type=_positive,
        metavar="BYTES",
        help="of each device; what does not fit fails as out of memory (no limit)",
    )
    add_arguments(parser, flags=LOOP_FLAGS)


def asks_for_loop(args: argparse.Namespace) -> bool:
    """Raises ConfigurationError for flags that mean nothing without the loop."""
    if args.rl_steps is not None:
        return True
    given = [flag.name for flag in LOOP_FLAGS if getattr(args, flag.dest) != flag.default]
    if args.device_memory is not None:
        given.append("--device-memory")
    if given:
        raise ConfigurationError(
            f"{given[0]} has nothing to act on",
            why="without rollouts the trainer has its device to itself",
            remedy="Add --rl-steps N",
        )
    return False


def run_loop(args: argparse.Namespace, config: TrainingConfig, folder: Path) -> int:
    """The exit code. Raises typed errors for anything that cannot run."""
    from optstream.harness.data import check_data
    from optstream.harness.launch import available_hardware, run_ranks
    from optstream.harness.rl import RlSettings
    from optstream.harness.rl_compare import rl_table, rl_verdict, summarise_rl

    stream = _settings(args, folder)
    check_data(config.data)
    settings = RlSettings(args.rl_steps, stream, args.device_memory)
    comparisons = run_ranks(
        compare_with_progress, config.ranks, config, settings, hardware=available_hardware()
    )
    shutil.rmtree(folder / "scratch", ignore_errors=True)
    summary = summarise_rl(config, comparisons)
    outcome = rl_verdict(config, settings, comparisons)
    write_json(str(folder / "summary.json"), summary)
    _write_report(folder / "report.html", config, settings, comparisons, outcome)
    if args.json:
        write_json(args.json, summary)
    out = Console(stderr=args.json == "-")
    out.print(rl_table(config, comparisons))
    for number, sample in enumerate(summary["samples"]):
        out.print(f"sample {number}: {sample!r}", markup=False, highlight=False)
    out.print(f"report: {folder / 'report.html'}", soft_wrap=True, highlight=False)
    out.print(outcome.text, style="bold green" if outcome.passed else "bold red", soft_wrap=True)
    return EQUAL if outcome.passed else DIFFERENT


def compare_with_progress(rank: int, config: TrainingConfig, settings: RlSettings) -> RlComparison:
    """`compare_rl_on_rank`, with each phase on rank 0's standard error. A function for `run_ranks`."""
    with plain_warnings():
        from optstream.harness.rl_compare import compare_rl_on_rank

        if rank:
            return compare_rl_on_rank(rank, config, settings)
        columns = TextColumn("{task.description:>9}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task("build", total=settings.steps)

            def progress(phase: str, step: int) -> None:
                bar.update(task, description=phase, completed=step)

            return compare_rl_on_rank(rank, config, settings, progress)


def _settings(args: argparse.Namespace, folder: Path) -> StreamSettings:
    """Raises StreamConfigError, with every broken rule, before anything exists."""
    flags = {flag.dest: getattr(args, flag.dest) for flag in FLAGS if hasattr(args, flag.dest)}
    flags["use_distributed_optimizer"] = True
    if flags[DISK_DIR] is None and uses_disk(validate(flags).resolved):
        flags[DISK_DIR] = str(folder / "scratch")
    verdict = validate(flags)
    if not verdict.valid:
        raise refusal(verdict.violations)
    return StreamSettings(flags, backend=args.backend)


def _write_report(
    path: Path,
    config: TrainingConfig,
    settings: RlSettings,
    comparisons: list[RlComparison],
    outcome: Verdict,
) -> None:
    """The page, for rank 0."""
    from optstream.harness.report import PhaseBar, RunCurves, SummaryRow, TrainReport, write_report
    from optstream.harness.rl_compare import compared_name, rl_title
    from optstream.harness.train_report import versions

    first = comparisons[0]

    def curves(run: RlRun) -> RunCurves:
        return RunCurves(run.loss, run.state_bytes_timeline, run.state_bytes_peak)

    def row(label: str, value) -> SummaryRow:
        return SummaryRow(label, *(str(value(run)) for run in (first.reference, first.asked)))

    asked = first.asked
    write_report(
        path,
        TrainReport(
            title=rl_title(config, comparisons),
            verdict=outcome.text,
            equal=outcome.passed,
            resident=curves(first.reference),
            compared=curves(asked),
            compared_name=compared_name(first),
            bound_bytes=asked.state_bytes_bound if first.streams else None,
            summary=[
                row("last loss", lambda run: f"{run.loss[-1]:.6f}"),
                row("trainer's device, peak bytes", lambda run: f"{run.device_bytes_peak:,}"),
                row("host, peak bytes", lambda run: f"{run.host_bytes_peak:,}"),
                row("last sample", lambda run: repr(run.samples[-1])),
            ],
            configuration={
                **asdict(config),
                **settings.stream.flags,
                "device_memory": settings.device_memory,
            },
            versions=versions(),
            phases=[PhaseBar(phase.name, phase.seconds, phase.device_bytes_peak) for phase in asked.phases],
        ),
    )


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is no positive whole number")
    return value
