"""`optstream deployments`: which deployment needs which flags, shown by running every one of them.

Exit 0 if every row ended as stated and rows that train the same model have the same bits, 1 if not.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from optstream.harness.output import write_json
from optstream.harness.terminal import plain_warnings
from optstream.harness.training_config import require_megatron

if TYPE_CHECKING:
    from optstream.harness.deployments import DeploymentsReport, Row

AS_STATED, OTHERWISE = 0, 1


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "deployments",
        help="run every deployment on one machine: what trains, what runs out of memory, what is refused",
        description="Run the loop of rollout and training under the flags of every deployment, on devices "
        "as small beside the optimizer state as those of the run that optstream was made for.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", metavar="PATH|-", help="write the figures there; - is standard output")
    parser.add_argument(
        "--dir", metavar="DIR", help="where rows that use the disk put files [a temporary one]"
    )
    parser.add_argument("--markdown", action="store_true", help="print the table as docs/choosing.md has it")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """The exit code. Raises typed errors for anything that cannot run."""
    require_megatron()
    from optstream.harness.launch import available_hardware, run_ranks

    with tempfile.TemporaryDirectory(prefix="optstream-deployments-", dir=args.dir) as folder:
        [report] = run_ranks(run_with_progress, 1, folder, hardware=available_hardware())
    if args.json:
        rows = [row.as_dict() for row in report.rows]
        write_json(args.json, {"device_bytes": report.device_bytes, "rows": rows})
    out = Console(stderr=args.json == "-")
    if args.markdown:
        out.print(markdown(report), markup=False, highlight=False, soft_wrap=True)
    else:
        out.print(_table(report))
        out.print(_phases(report))
    for row in report.rows:
        if not row.as_expected:
            out.print(
                f"{row.deployment.name}: {_outcome(row)}, not {row.deployment.expected}",
                style="bold red",
                soft_wrap=True,
            )
    for difference in report.differences:
        out.print(f"different: {difference}", style="bold red", soft_wrap=True)
    if report.holds:
        out.print("every row as stated; equal bits wherever the same model trains", style="bold green")
    return AS_STATED if report.holds else OTHERWISE


def run_with_progress(rank: int, directory: str) -> DeploymentsReport:
    """`run_deployments`, naming the row that runs on standard error. A function for `run_ranks`."""
    with plain_warnings():
        from optstream.harness.deployments import run_deployments

        with Console(stderr=True).status("resident references, without a limit") as status:
            return run_deployments(rank, directory, lambda name, number: status.update(f"{number}: {name}"))


def markdown(report: DeploymentsReport) -> str:
    """The table of docs/choosing.md: figures in kB, since the models are small."""
    lines = [
        "| deployment | flags | what happens | trainer's device, peak | host, peak | moved by one sleep | "
        "read and written a step |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    lines += [f"| {' | '.join(_cells(row))} |" for row in report.rows]
    lines += ["", f"Each device has {_kb(report.device_bytes)}."]
    return "\n".join(lines)


def _table(report: DeploymentsReport) -> Table:
    table = Table(title=f"each device has {_kb(report.device_bytes)}", show_lines=True)
    for heading in ("deployment", "flags", "what happens"):
        table.add_column(heading)
    for heading in ("device peak", "host peak", "moved by one sleep", "read, written a step"):
        table.add_column(heading, justify="right")
    for row in report.rows:
        table.add_row(*_cells(row))
    return table


def _cells(row: Row) -> list[str]:
    if row.outcome == "refused":
        figures = [""] * 4
    else:
        facts = row.as_dict()
        moved = facts["moved_bytes"]["sleep"]
        streamed = f"{_kb(facts['read_bytes'])}, {_kb(facts['written_bytes'])}"
        figures = [
            _kb(facts["device_bytes_peak"]),
            _kb(facts["host_bytes_peak"]),
            _kb(moved) if moved else "nothing",
            streamed if facts["written_bytes"] else "nothing",
        ]
    flags = " ".join(row.deployment.flags) or "none"
    return [row.deployment.name, flags, _outcome(row), *figures]


def _outcome(row: Row) -> str:
    if row.outcome == "oom":
        return f"out of memory in the {row.phase}"
    if row.outcome == "refused":
        return f"refused: {row.rule}"
    return "trains"


def _phases(report: DeploymentsReport) -> Table:
    """Mean seconds of each phase."""
    names = list(dict.fromkeys(phase.name for row in report.rows for phase in row.run.phases))
    table = Table(title="seconds of each phase, mean")
    table.add_column("deployment")
    for name in names:
        table.add_column(name, justify="right")
    for row in report.rows:
        cells = []
        for name in names:
            seconds = [phase.seconds for phase in row.run.phases if phase.name == name]
            cells.append(f"{sum(seconds) / len(seconds):.3f}" if seconds else "")
        table.add_row(row.deployment.name, *cells)
    return table


def _kb(size_bytes: int) -> str:
    return f"{size_bytes / 1e3:,.0f} kB"
