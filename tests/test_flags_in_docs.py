"""Flags are told of in three places, `--help`, docs/flags.md and the pages for people, and these agree."""

from __future__ import annotations

import argparse
import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from optstream.core.config import FLAGS, add_arguments
from optstream.harness import pytest_plugin
from optstream.harness.cli import build_parser

pytestmark = pytest.mark.unit

REPOSITORY = Path(__file__).parent.parent
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
# Whole ones: `--no-offload-...` stands for several.
FLAG = re.compile(r"(?<![\w-])--[a-z0-9]+(?:-[a-z0-9]+)*(?![\w-])")
# Of other commands that the pages have lines of.
OF_OTHERS = {
    *("--basetemp", "--junitxml"),  # pytest
    *("--nnodes", "--nproc-per-node", "--rdzv-backend", "--rdzv-endpoint"),  # torchrun
}


def find_parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from find_parsers(command)


PARSERS = {parser.prog: parser for parser in find_parsers(build_parser())}
# What `optstream check -- --help` and a trainer's own --help show.
PARSERS["a trainer"] = add_arguments(argparse.ArgumentParser(prog="a trainer"))


class Collected:
    """Stands for pytest's parser and collects the options that our plugin adds."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def addini(self, *args, **options) -> None:
        pass

    def getgroup(self, *args, **options) -> Collected:
        return self

    def addoption(self, name: str, **options) -> None:
        self.names.add(name)


def known_flags() -> set[str]:
    collected = Collected()
    pytest_plugin.pytest_addoption(collected)
    of_commands = {name for parser in PARSERS.values() for name in parser._option_string_actions}
    return of_commands | collected.names | OF_OTHERS


def documented() -> dict[str, str]:
    """What docs/flags.md says of each flag, by its name."""
    text = (REPOSITORY / "docs" / "flags.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `--(?:\[no-\])?([a-z0-9-]+)[^`]*` \| .*? \| (.*) \|$", text, re.MULTILINE)
    return {f"--{name}": meaning.replace("\\|", "|") for name, meaning in rows}


def helps(parser: argparse.ArgumentParser, monkeypatch) -> dict[str, str]:
    """The text that `--help` prints for each option, by its last spelling that is no `--no-`."""
    monkeypatch.setenv("COLUMNS", "10000")
    found = {}
    for entry in re.split(r"\n  (?=-)", parser.format_help())[1:]:
        invocation, _, text = entry.split("\n\n")[0].partition("  ")
        invocation, _, below = invocation.partition("\n")
        # argparse itself adds the default of a --[no-] flag.
        text = re.sub(r" \(default: \w+\)$", "", " ".join(f"{below} {text}".split()))
        for name in FLAG.findall(invocation):
            found[name] = text
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_flag_that_a_page_names_exists(page):
    assert set(FLAG.findall(page.read_text(encoding="utf-8"))) - known_flags() == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_on_a_page_is_one_that_the_parser_takes(page):
    for line in commands_of(page.read_text(encoding="utf-8")):
        try:
            build_parser().parse_args(shlex.split(line, comments=True)[1:])
        except SystemExit:
            pytest.fail(f"{page.name}: {line}")


def test_the_pages_have_commands():
    """The test above parses nothing where it finds none."""
    lines = [line for page in PAGES for line in commands_of(page.read_text(encoding="utf-8"))]
    assert "optstream bench checkpoint" in lines
    assert any(line.startswith("optstream train --rl-steps") for line in lines)


def commands_of(text: str) -> Iterator[str]:
    """Whole lines of code, and code within a line; `{a,b}` stands for each of them."""
    found = re.findall(r"^ {4}(optstream .*)$|`(optstream [^`]*)`", text.replace("\\\n", " "), re.MULTILINE)
    for line in (whole or within for whole, within in found):
        parts = re.split(r"\{([^}]*)\}", line)
        parts = [part.split(",") if number % 2 else [part] for number, part in enumerate(parts)]
        yield from ("".join(chosen) for chosen in itertools.product(*parts))


def test_docs_flags_md_has_every_flag_and_what_it_means():
    assert documented() == {flag.name: flag.help for flag in FLAGS}


@pytest.mark.parametrize("name", PARSERS)
def test_help_says_of_each_flag_what_docs_flags_md_says(name, monkeypatch):
    texts, stated = helps(PARSERS[name], monkeypatch), documented()
    ours = PARSERS[name]._option_string_actions.keys() & stated.keys()
    assert {flag: texts[flag] for flag in ours} == {flag: stated[flag] for flag in ours}


def test_the_commands_that_train_and_measure_have_flags_of_the_core():
    """The test above compares nothing where a command has none."""
    stated = documented().keys()
    counts = {name: len(parser._option_string_actions.keys() & stated) for name, parser in PARSERS.items()}
    assert counts["a trainer"] == len(FLAGS)
    with_core_flags = {name.removeprefix("optstream ") for name, count in counts.items() if count}
    assert with_core_flags == {"a trainer", "train", "bench step", "bench checkpoint", "bench offload"}
