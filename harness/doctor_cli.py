"""`optstream doctor`: is this machine, its torch, its Megatron and a directory fit for streaming?

Line by line, with what to do: exit 0 if fit (warnings included), 1 if not, 2 on bad usage.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from optstream.core.validator import default_directory
from optstream.harness.doctor import Finding, Status, examine
from optstream.harness.errors import ConfigurationError
from optstream.harness.output import write_json

FIT, UNFIT = 0, 1
_STYLES = {Status.OK: "green", Status.WARNING: "yellow", Status.FAILURE: "bold red"}


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "doctor",
        help="say whether this machine is fit for streaming, line by line",
        description="Look at this machine, torch, Megatron-Core and a directory, and say what to do. "
        "Exit 0 if they are fit, 1 if not.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--dir",
        default=default_directory(),
        metavar="DIR[:DIR...]",
        help="where optimizer state would be kept (where streaming keeps it by default)",
    )
    parser.add_argument("--json", metavar="PATH|-", help="write the findings to a file, or to stdout")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """The exit code. Raises ConfigurationError for no directory and unwritable files."""
    directories = tuple(
        os.path.abspath(os.path.expanduser(path)) for path in args.dir.split(os.pathsep) if path
    )
    if not directories:
        raise ConfigurationError(
            f"--dir {args.dir!r} names no directory", remedy="Name one, or several as A:B"
        )
    out = Console(stderr=args.json == "-")
    findings = list(_shown(examine(directories), out))
    fit = all(finding.status is not Status.FAILURE for finding in findings)
    out.print(Text("fit for streaming" if fit else "not fit for streaming", style="bold"))
    if args.json:
        write_json(args.json, {"fit": fit, "findings": [dataclasses.asdict(each) for each in findings]})
    return FIT if fit else UNFIT


def _shown(findings: Iterator[Finding], out: Console) -> Iterator[Finding]:
    for finding in findings:
        line = Text.assemble(
            (f"{finding.status:<8}", _STYLES[finding.status]), (finding.subject, "bold"), f": {finding.found}"
        )
        out.print(line, soft_wrap=True)
        if finding.remedy:
            out.print(Text(f"{'':<8}-> {finding.remedy}"), soft_wrap=True)
        yield finding
