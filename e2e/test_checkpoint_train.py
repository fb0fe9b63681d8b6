"""`optstream train --save` and `--load`: a run in two halves is the run in one."""

from __future__ import annotations

import json

import pytest

from optstream.harness.cli import main

pytestmark = pytest.mark.e2e

TINY = ["--layers", "2", "--hidden", "32", "--heads", "2", "--seq", "16", "--batch", "2"]
TINY += ["--bucket-numel", "3000"]


def train(capsys, *flags: str) -> tuple[int, dict]:
    code = main(["train", *TINY, *flags, "--json", "-"])
    return code, json.loads(capsys.readouterr().out)


def test_two_halves_are_one_whole(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, straight = train(capsys, "--steps", "5")
    code, first = train(capsys, "--steps", "3", "--save", "saves", "--save-interval", "2")
    assert code == 0
    assert sorted(path.name for path in (tmp_path / "saves").iterdir()) == ["iter_0000002", "iter_0000003"]
    code, then = train(capsys, "--steps", "5", "--load", "saves")
    assert (code, then["bit_identical"]) == (0, True)
    assert first["loss"] + then["loss"] == straight["loss"]
    assert then["steps"] == 5
    assert then["streamed"]["digest"] == straight["streamed"]["digest"]
    code, other = train(capsys, "--steps", "4", "--load", "saves/iter_0000002", "--ranks", "2")
    assert (code, other["bit_identical"], len(other["loss"])) == (0, True, 2)


def test_bad_usage_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(capsys, "--steps", "1", "--save", "saves")
    for flags, said in (
        (["--load", "nothing"], "holds no streamed optimizer state"),
        (["--load", "saves", "--steps", "1"], "there is nothing to train"),
        (["--save-interval", "2"], "--save is missing"),
        (["--save", "x", "--save-interval", "0"], "not positive"),
    ):
        assert main(["train", *TINY, *flags]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert "Traceback" not in error
