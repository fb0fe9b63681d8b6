"""The command line of `optstream soak`."""

from __future__ import annotations

import argparse
import math
import secrets
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from optstream.harness.output import write_json

if TYPE_CHECKING:
    from optstream.harness.soak import SoakReport

SOUND, UNSOUND = 0, 1
SHOWN_FAILURES = 10


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "soak",
        help="random lives under injected faults: nothing silently wrong, nothing left, nothing hangs",
        description="Lives random lives of a streamed optimizer on storage that fails in every way it can, "
        "on real files and in memory, and compares each with a plain AdamW. Exit 0 if every fault was "
        "detected or did no harm, 1 if not; then `optstream soak --minutes 0 --seed SEED` repeats a life.",
        allow_abbrev=False,
    )
    parser.add_argument("--minutes", type=_minutes, default=5.0, metavar="M", help="how long [5]")
    parser.add_argument("--seed", type=int, metavar="S", help="of the first life [a new one each time]")
    parser.add_argument("--json", metavar="PATH|-", help="write the counts there; - is standard output")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """The exit code. Raises ConfigurationError for an unwritable file."""
    from optstream.harness.soak import soak

    seed = secrets.randbits(31) if args.seed is None else args.seed
    with Console(stderr=True).status(f"seed {seed}") as status:

        def progress(report: SoakReport) -> None:
            status.update(
                f"seed {seed}: {len(report.seeds)} lives, {report.verdict.injected.total()} faults, "
                f"{len(report.failures)} failures"
            )

        report = soak(args.minutes, seed, progress=progress)
    out = Console(stderr=args.json == "-")
    show(report, out)
    if args.json:
        write_json(args.json, report.as_json())
    return SOUND if report.sound else UNSOUND


def show(report: SoakReport, out: Console) -> None:
    counts = report.as_json()
    table = Table(show_header=False)
    for name, value in counts.items():
        if name == "faults_by_kind":
            value = ", ".join(f"{kind} {count}" for kind, count in value.items())
        elif name == "seeds":
            value = f"{value[0]} to {value[-1]}"
        table.add_row(name, str(value))
    out.print(table)
    for failure in report.failures[:SHOWN_FAILURES]:
        out.print(failure, style="red", markup=False, highlight=False, soft_wrap=True)


def _minutes(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text} is no number of minutes")
    return value
