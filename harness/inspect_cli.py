"""`optstream inspect`: what a scratch directory, a checkpoint or a folder of checkpoints holds.

Exit 0 if it is complete and, with --verify, every checksum holds; 1 if not; 2 on bad usage.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from optstream.harness.errors import ConfigurationError
from optstream.harness.output import write_json

if TYPE_CHECKING:
    from optstream.core.inspection import Inspection


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "inspect",
        help="say what a checkpoint or a scratch directory holds",
        description="Says what a scratch directory, a checkpoint or a folder of checkpoints (its newest "
        "complete one) holds. Exits with 0 if it is complete and, with --verify, every checksum holds.",
        allow_abbrev=False,
    )
    parser.add_argument("directory", metavar="DIR")
    parser.add_argument("--verify", action="store_true", help="read everything and check every checksum")
    parser.add_argument("--json", metavar="PATH|-", help="write what was found there; - is standard output")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    from optstream.core.inspection import inspect_directory

    if not os.path.isdir(args.directory):
        raise ConfigurationError(
            f"cannot inspect {args.directory}", why="it is no directory", remedy="Name one that exists"
        )
    found = inspect_directory(args.directory, verify=args.verify)
    if args.json:
        write_json(args.json, asdict(found))
    if args.json != "-":
        _print(found)
    return 0 if found.complete and (found.verified or not args.verify) else 1


def _print(found: Inspection) -> None:
    out = Console()
    table = Table(show_header=False)
    for name, value in asdict(found).items():
        if name != "problems":
            shown = (
                ", ".join(f"{key} {each}" for key, each in value.items())
                if isinstance(value, dict)
                else value
            )
            table.add_row(name, f"{shown:,}" if type(shown) is int else str(shown))
    out.print(table)
    for problem in found.problems:
        out.print(f"problem: {problem}", soft_wrap=True, highlight=False, markup=False)
