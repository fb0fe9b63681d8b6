"""`optstream check -- FLAGS...`: do these flags go together, and what do they resolve to?

Answers without torch, in a fraction of a second: exit 0 and the resolved configuration, or exit 2 and every
violation with its remedy.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from rich.console import Console
from rich.table import Table
from rich.text import Text

from optstream.core.config import FLAGS, add_arguments
from optstream.core.validator import Verdict, validate
from optstream.harness.errors import ConfigurationError
from optstream.harness.output import write_json

VALID, REFUSED = 0, 2
PIPE_COLUMNS = 200


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "check",
        help="say whether a trainer's flags go together, and what they resolve to",
        description="Exit 0 and the resolved configuration, or exit 2 and every violation with its remedy.",
        usage="optstream check [--json PATH|-] -- FLAGS...",
    )
    parser.add_argument("--json", metavar="PATH|-", help="write the verdict as JSON to a file, or to stdout")
    parser.add_argument(
        "flags",
        nargs="*",
        metavar="FLAGS",
        help="the trainer's flags, after --; see `optstream check -- --help`",
    )
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """The exit code. Raises ConfigurationError for flags that no parser takes and unwritable files."""
    verdict = validate(vars(parse_flags(args.flags)))
    if args.json:
        write_json(args.json, as_json(verdict))
    if args.json != "-":
        # Into a pipe nothing is folded at 80 columns: a path must stay in one piece for who looks for it.
        show(verdict, Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS), Console(stderr=True))
    return VALID if verdict.valid else REFUSED


def parse_flags(words: Sequence[str]) -> argparse.Namespace:
    """Raises ConfigurationError for an unknown flag or a value that it cannot have."""
    parser = _FlagParser(prog="optstream check --", allow_abbrev=False)
    return add_arguments(parser).parse_args(words)


def as_json(verdict: Verdict) -> dict:
    return {
        "valid": verdict.valid,
        "violations": [
            {"rule": each.rule, "flags": list(each.flags), "message": each.message, "remedy": each.remedy}
            for each in verdict.violations
        ],
        "resolved": dict(verdict.resolved),
    }


def show(verdict: Verdict, out: Console, err: Console) -> None:
    """The resolved configuration on `out`, or the violations on `err`."""
    for each in verdict.violations:
        # Text, not markup: the brackets around a rule id would be taken for a style.
        line = Text.assemble((f"[{each.rule}] ", "bold red"), f"{each.message}. {each.remedy}.")
        err.print(line, soft_wrap=True)
    if verdict.valid:
        out.print(_table(verdict))


def _table(verdict: Verdict) -> Table:
    table = Table(title="resolved configuration", title_justify="left")
    table.add_column("flag")
    table.add_column("value", overflow="fold")
    table.add_column("")
    for flag in FLAGS:
        value = verdict.resolved[flag.dest]
        shown = "unset" if value is None else str(value)
        is_default = value == flag.default
        table.add_row(
            flag.name, shown, "default" if is_default else "", style="dim" if is_default else "bold"
        )
    return table


class _FlagParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(message, remedy="`optstream check -- --help` lists the flags")
