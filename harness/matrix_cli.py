"""`optstream matrix`: the argument matrix outside pytest.

Without flags it goes through everything, as the nightly tests do. With flags after `--` it takes that one
combination, which is how each failure is seen again.
"""

from __future__ import annotations

import argparse
import os

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from optstream.core.validator import validate
from optstream.harness import check
from optstream.harness.matrix import BRUTE_FORCE_NIGHTLY, Execute, MatrixReport, run_matrix, run_one
from optstream.harness.matrix_report import counts, write_report
from optstream.harness.output import write_json

PASSED, FAILED = 0, 1
_FAILURES_SHOWN = 20


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "matrix",
        help="judge every combination of flags, and run the allowed ones",
        description="Hold the validator against an independent oracle over the whole product of flags, count "
        "coverage, and run every allowed setting of what streams on a fake filesystem. Exit 1 on a failure.",
        usage="optstream matrix [options] [-- FLAGS...]",
    )
    parser.add_argument("--json", metavar="PATH|-", help="write the figures as JSON to a file, or to stdout")
    parser.add_argument("--report", metavar="FILE.html", help="write a page with rules, counts and failures")
    parser.add_argument(
        "--brute-force",
        type=_count,
        default=BRUTE_FORCE_NIGHTLY,
        metavar="N",
        help=f"combinations to draw and judge whole (default {BRUTE_FORCE_NIGHTLY:,})",
    )
    parser.add_argument("--seed", type=int, default=0, help="which combinations are drawn (default 0)")
    parser.add_argument(
        "--workers", type=_positive, default=os.cpu_count() or 1, help="processes (default: one a core)"
    )
    parser.add_argument("flags", nargs="*", metavar="FLAGS", help="one combination only, after --")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """The exit code: 0 if nothing failed, 1 otherwise. Raises ConfigurationError for unusable arguments."""
    # Imported here: it brings torch, and the parser of every command must not wait for that.
    from optstream.harness.execution import execute

    # On stderr, so that JSON on stdout stays JSON.
    console = Console(stderr=args.json == "-")
    if args.flags:
        combination = vars(check.parse_flags(args.flags))
        if args.json != "-":
            check.show(validate(combination), console, console)
        report = run_one(combination, execute=execute)
    else:
        report = _run_all(args, execute, console)
    show(report, console)
    if args.report:
        write_report(args.report, report)
    if args.json:
        write_json(args.json, report.as_json())
    return PASSED if report.passed else FAILED


def show(report: MatrixReport, console: Console) -> None:
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in counts(report):
        table.add_row(name, value)
    console.print(table)
    for failure in report.failures[:_FAILURES_SHOWN]:
        console.print(f"{failure.kind}: {failure.what}", style="red", markup=False, soft_wrap=True)
        console.print(f"  {failure.command}", markup=False, soft_wrap=True)
    if len(report.failures) > _FAILURES_SHOWN:
        console.print(f"and {len(report.failures) - _FAILURES_SHOWN:,} more: see --json or --report")


def _run_all(args: argparse.Namespace, execute: Execute, console: Console) -> MatrixReport:
    columns = (TextColumn("{task.description:14}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bars:
        stages: dict[str, int] = {}

        def progress(stage: str, done: int, total: int) -> None:
            if stage not in stages:
                stages[stage] = bars.add_task(stage)
            bars.update(stages[stage], completed=done, total=total)

        return run_matrix(
            brute_force=args.brute_force,
            seed=args.seed,
            execute=execute,
            workers=args.workers,
            progress=progress,
        )


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no count: give 0 or more")
    return int(text)


def _positive(text: str) -> int:
    if _count(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not positive")
    return int(text)
