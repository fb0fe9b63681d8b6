"""docs/flags.md, made from the tables that the parser and the validator use.

python -m optstream.harness.flags_doc docs/flags.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from optstream.core.config import FLAGS, GROUPS, Flag, Kind
from optstream.core.validator import RULES, STEPS
from optstream.harness.output import write_text


def render() -> str:
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Flags"
    yield ""
    yield "Made from core/config.py and core/validator.py by `python -m optstream.harness.flags_doc`."
    yield "A trainer adds the flags to its parser with `optstream.core.config.add_arguments(parser)` and"
    yield "judges them with `optstream.core.validator.validate_arguments(args)`. On the command line,"
    yield "`optstream check -- FLAGS...` does the same."
    for group, purpose in GROUPS.items():
        yield ""
        yield f"## {group.removeprefix('optstream: ').capitalize()}"
        yield ""
        yield f"{purpose.capitalize()}."
        yield ""
        yield from _table(
            ("flag", "default", "meaning"),
            ((f"`{flag.spelling}`", _default(flag), flag.help) for flag in FLAGS if flag.group == group),
        )
    yield ""
    yield "## How flags resolve"
    yield ""
    yield "In this order:"
    yield ""
    for number, step in enumerate(STEPS, start=1):
        yield f"{number}. {step.text}"
    yield ""
    yield "## What is refused"
    yield ""
    yield "Every broken rule is reported at once, each with what to do about it."
    yield ""
    yield from _table(
        ("rule", "refused", "because", "instead"),
        ((f"`{rule.id}`", rule.refused, rule.why, rule.remedy) for rule in RULES),
    )


def _default(flag: Flag) -> str:
    if flag.is_tristate or flag.default is None:
        return "unset"
    if flag.kind in (Kind.SWITCH, Kind.TOGGLE):
        return "on" if flag.default else "off"
    return f"`{flag.default}`"


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    for cells in (header, ("---",) * len(header), *rows):
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    write_text(sys.argv[1] if len(sys.argv) > 1 else "docs/flags.md", render())
