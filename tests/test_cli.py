"""The command line around its sub-commands: exit codes, one line an error, no torch where none is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from optstream.backends.errors import OptstreamError, SpaceError
from optstream.harness import cli

pytestmark = pytest.mark.unit


def run_with(monkeypatch, action) -> int:
    """`main`, with a sub-command that does `action`."""

    class Parser:
        def parse_args(self, argv):
            return type("Args", (), {"run": staticmethod(action)})

    monkeypatch.setattr(cli, "build_parser", Parser)
    return cli.main([])


def raising(error: BaseException):
    def action(args):
        raise error

    return action


def test_the_exit_code_is_the_commands(monkeypatch):
    assert run_with(monkeypatch, lambda args: 1) == 1


def test_a_typed_error_is_one_line_and_its_exit_code(monkeypatch, capsys):
    error = SpaceError("disk is full", why="10 > 5", remedy="Free some", needed_bytes=10, free_bytes=5)
    assert run_with(monkeypatch, raising(error)) == 2
    assert capsys.readouterr().err == "optstream: error: disk is full: 10 > 5. Free some\n"


def test_an_interrupt_is_one_line(monkeypatch, capsys):
    assert run_with(monkeypatch, raising(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == "optstream: interrupted\n"


def test_a_bug_is_not_hidden(monkeypatch):
    with pytest.raises(ZeroDivisionError):
        run_with(monkeypatch, raising(ZeroDivisionError()))


@pytest.mark.parametrize("words", [[], ["no-such-command"], ["train", "--step", "3"]], ids=" ".join)
def test_bad_usage_exits_with_2(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(words)
    assert stopped.value.code == 2


def test_help_and_check_need_no_torch():
    script = (
        "import sys; from optstream.harness.cli import main\n"
        "code = main(['check', '--', '--stream-optimizer-state-to-disk', '--use-distributed-optimizer'])\n"
        "sys.exit(code or ('torch' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_error_survives_the_way_between_processes():
    import pickle

    error = SpaceError("full", why="x", remedy="y", needed_bytes=10, free_bytes=5, path="/p", offset=3)
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, OptstreamError)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
