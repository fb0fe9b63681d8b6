"""The command line of `optstream bench`, and how its report is printed."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from optstream.core.config import DEFAULTS, FLAGS, STREAMING, add_arguments
from optstream.core.validator import stream_config
from optstream.harness import bench_checkpoint, bench_offload
from optstream.harness.output import write_json

if TYPE_CHECKING:
    from optstream.harness.bench import BenchReport, BenchSettings

# `bench` is about streaming: whether to stream is no question here, how to is.
STREAMING_FLAGS = tuple(
    flag for flag in FLAGS if flag.group == STREAMING and flag.dest != "stream_optimizer_state_to_disk"
)


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Add `bench` to the subcommands of `optstream`; `run` carries it out."""
    parser = subparsers.add_parser("bench", help="measure the streamed step, or offload, on this machine")
    what = parser.add_subparsers(dest="bench", required=True, metavar="WHAT")
    bench_offload.add_parser(what)
    bench_checkpoint.add_parser(what)
    step = what.add_parser(
        "step",
        help="the streamed optimizer step against the resident one, the serial one and the disk's floor",
        description="Times one optimizer step: resident, streamed serially, and streamed as it ships; and "
        "the floor, the same bytes moved without an update. Medians over rounds and launches.",
    )
    step.add_argument("--numel", type=_count, default=100_000_000, help="parameters, as 100e6 [%(default)s]")
    step.add_argument("--dir", default=".", metavar="DIR[:DIR...]", help="on the disks to measure [.]")
    step.add_argument("--gap-s", type=_seconds, default=0.0, help="pause between steps for exposed_s [0]")
    step.add_argument("--launches", type=_count, default=3, help="processes, one after another [%(default)s]")
    step.add_argument("--rounds", type=_count, default=3, help="interleaved rounds a launch [%(default)s]")
    step.add_argument("--steps", type=_count, default=4, help="steps a round, back to back [%(default)s]")
    step.add_argument(
        "--fused",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="torch's fused AdamW, the fastest, resident and streamed alike [fused]",
    )
    step.add_argument("--device", choices=("cpu", "cuda"), help="where updates run [cuda if there is one]")
    step.add_argument("--json", metavar="PATH|-", help="write the report there; - is standard output")
    step.add_argument("--trace", metavar="FILE", help="write some of the streamed steps as a Perfetto trace")
    step.add_argument("--markdown", action="store_true", help="print the table as the README has it")
    add_arguments(step, flags=STREAMING_FLAGS)
    step.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Carry out `optstream bench step`. Raises OptstreamError."""
    from optstream.harness.bench import run_bench
    from optstream.harness.trace import write_trace

    with Console(stderr=True).status("measuring ...") as status:
        report = run_bench(settings_of(args), progress=status.update)
    if args.json:
        write_json(args.json, report.as_dict())
    if args.trace:
        write_trace(args.trace, report.launches[-1].records)
    out = Console(stderr=args.json == "-")
    if args.markdown:
        out.print(markdown(report), soft_wrap=True, markup=False, highlight=False)
    else:
        out.print(_table(report))
    return 0


def settings_of(args: argparse.Namespace) -> BenchSettings:
    """What was asked for. Raises StreamConfigError for flags that do not go together."""
    import torch

    from optstream.harness.bench import BenchSettings

    given = {flag.dest: getattr(args, flag.dest) for flag in STREAMING_FLAGS}
    changed = [flag for flag in STREAMING_FLAGS if given[flag.dest] != flag.default]
    disk = {"stream_optimizer_state_to_disk": True, "offload_train_disk_dir": args.dir}
    return BenchSettings(
        numel=args.numel,
        config=stream_config(DEFAULTS | given | disk),
        gap_s=args.gap_s,
        launches=args.launches,
        rounds=args.rounds,
        steps=args.steps,
        fused=args.fused,
        device=args.device or ("cuda" if torch.cuda.is_available() else "cpu"),
        flags=tuple(word for flag in changed for word in flag.as_arguments(given[flag.dest])),
    )


def markdown(report: BenchReport) -> str:
    """The report as a table for a README, with the conditions under it."""
    lines = ["| step | seconds | fastest to slowest | compared |", "|---|---:|---:|---|"]
    lines += [f"| {' | '.join(row)} |" for row in _rows(report)]
    return "\n".join([*lines, "", _conditions(report)])


def _table(report: BenchReport) -> Table:
    table = Table(title="optimizer step", caption=_conditions(report))
    table.add_column("step")
    table.add_column("seconds", justify="right")
    table.add_column("fastest to slowest", justify="right")
    table.add_column("compared")
    for row in _rows(report):
        table.add_row(*row)
    return table


def _rows(report: BenchReport) -> Iterator[tuple[str, str, str, str]]:
    share, record = report.verification_share, report.record
    remarks = {
        "resident": "all state on the device",
        "serial": f"{report.serial_over_streamed:.2f} x the streamed step",
        "streamed": f"{report.streamed_over_limit:.2f} x the limit, the larger of floor and resident",
        "unverified": "" if share is None else f"verification is {share:.0%} of the streamed step",
        "floor": f"the same bytes and no update, best of a sweep: {report.launches[-1].floor}",
        "exposed": f"what the caller of step() waits with {report.settings.gap_s:g} s between steps: "
        f"{record.update_s:.3f} updating, {record.waited_read_s:.3f} for reads, "
        f"{record.waited_write_s:.3f} for writes",
    }
    for name, remark in remarks.items():
        seconds = report.seconds(name)
        if seconds is not None:
            low, high = report.spread(name)
            yield name, f"{seconds:.3f}", f"{low:.3f} to {high:.3f}", remark


def _conditions(report: BenchReport) -> str:
    facts = report.as_dict()
    settings = report.settings
    return (
        f"{settings.numel / 1e6:g} million params, {'fused ' if settings.fused else ''}AdamW, "
        f"{facts['read_bytes'] / 1e9:.2f} GB read and {facts['written_bytes'] / 1e9:.2f} GB written a step, "
        f"{facts['host_bytes_peak'] / 1e9:.2f} GB of host buffers, {facts['machine']['cpus']} CPUs; "
        f"medians of {settings.launches} launches, {settings.rounds} rounds of {settings.steps} steps each"
        + "".join(f" {word}" for word in settings.flags)
    )


def _count(text: str) -> int:
    """A positive whole number, also as 100e6."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if value < 1 or not value.is_integer():
        raise argparse.ArgumentTypeError(f"{text} is no positive whole number")
    return int(value)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds")
    return value
