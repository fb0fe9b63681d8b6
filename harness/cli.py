"""The `optstream` command: one sub-command a module, one line for every error a person can cause.

Sub-commands import what they need when they run, so that `optstream check` answers without torch.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version

from optstream.backends.errors import OptstreamError
from optstream.core.signals import clean_up_on_sigterm
from optstream.harness import (
    bench_cli,
    check,
    convert_cli,
    deployments_cli,
    doctor_cli,
    inspect_cli,
    matrix_cli,
    soak_cli,
    train_cli,
)
from optstream.harness.terminal import plain_warnings

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a sub-command; returns the exit code: 0, 1 where what was checked does not hold, 2 on bad usage."""
    args = build_parser().parse_args(argv)
    try:
        with plain_warnings(), _ended_like_interrupted():
            return args.run(args)
    except OptstreamError as error:
        print(f"optstream: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("optstream: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone; keep the interpreter from complaining about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


@contextlib.contextmanager
def _ended_like_interrupted() -> Iterator[None]:
    """Inside, SIGTERM cleans up as Ctrl-C does."""
    installed = clean_up_on_sigterm()
    try:
        yield
    finally:
        if installed:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="optstream",
        description="Keeps Adam state in files and streams it through the device during the optimizer step.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"optstream {version('optstream')}")
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in (
        train_cli,
        check,
        doctor_cli,
        matrix_cli,
        bench_cli,
        soak_cli,
        deployments_cli,
        inspect_cli,
        convert_cli,
    ):
        command.add_parser(subparsers)
    return parser


if __name__ == "__main__":
    sys.exit(main())
