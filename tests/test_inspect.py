"""`optstream inspect` says what is there, and is not fooled by what is not."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from optstream.core.config import StreamConfig
from optstream.core.optimizer import StreamingAdamW
from optstream.harness.cli import main

pytestmark = pytest.mark.unit

FIELDS = {
    "kind",
    "path",
    "complete",
    "iteration",
    "topology",
    "entries",
    "formats",
    "bytes",
    "verified",
    "problems",
}


def inspect(directory, capsys, *flags: str) -> tuple[int, dict]:
    code = main(["inspect", str(directory), "--json", "-", *flags])
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == FIELDS
    return code, found


@pytest.fixture
def streamed(tmp_path):
    params = [torch.nn.Parameter(torch.ones(50, 40)), torch.nn.Parameter(torch.ones(40))]
    config = StreamConfig(True, (str(tmp_path / "scratch"),), bucket_numel=1024)
    made = StreamingAdamW(params, config)
    yield made
    made.close()


def step(streamed: StreamingAdamW) -> None:
    for group in streamed.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    streamed.step()
    streamed.streamer.engine.drain()


def flip_a_bit(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_checkpoint(streamed, tmp_path, capsys):
    step(streamed)
    streamed.save_to(tmp_path / "save")
    for directory in (tmp_path / "save", tmp_path / "save" / "optimizer"):
        code, found = inspect(directory, capsys, "--verify")
        assert code == 0
        assert found["kind"] == "checkpoint"
        assert found["path"] == str(tmp_path / "save")
        assert (found["complete"], found["verified"], found["problems"]) == (True, True, [])
        assert (found["iteration"], found["entries"], found["topology"]) == (1, 2, {"ranks": 1})
        assert found["bytes"] == 12 * 2040
        assert found["formats"] == dict.fromkeys(("main", "exp_avg", "exp_avg_sq"), "fp32")
    assert inspect(tmp_path / "save", capsys)[1]["verified"] is False


def test_damage_is_found_only_by_verifying(streamed, tmp_path, capsys):
    streamed.save_to(tmp_path / "save")
    (data,) = (tmp_path / "save" / "optimizer" / "rank00000").iterdir()
    flip_a_bit(data, 100)
    assert inspect(tmp_path / "save", capsys)[0] == 0
    code, found = inspect(tmp_path / "save", capsys, "--verify")
    assert (code, found["complete"], found["verified"]) == (1, True, False)
    assert "checksum differs" in found["problems"][0]


def test_a_short_and_a_missing_file(streamed, tmp_path, capsys):
    streamed.save_to(tmp_path / "save")
    (data,) = (tmp_path / "save" / "optimizer" / "rank00000").iterdir()
    os.truncate(data, 100)
    code, found = inspect(tmp_path / "save", capsys)
    assert (code, found["complete"]) == (1, False)
    assert "cut short" in found["problems"][0]
    data.unlink()
    code, found = inspect(tmp_path / "save", capsys)
    assert code == 1
    assert "missing" in found["problems"][0]


def test_of_a_folder_of_checkpoints_the_newest_complete_one(streamed, tmp_path, capsys):
    for count in (1, 2, 3):
        step(streamed)
        streamed.save_to(tmp_path / "root" / f"iter_{count:07d}")
    (tmp_path / "root" / "iter_0000003" / "optimizer" / "manifest.json").unlink()
    code, found = inspect(tmp_path / "root", capsys, "--verify")
    assert (code, found["iteration"], found["path"]) == (0, 2, str(tmp_path / "root" / "iter_0000002"))


def test_a_folder_without_a_complete_checkpoint(streamed, tmp_path, capsys):
    streamed.save_to(tmp_path / "root" / "iter_0000001")
    (tmp_path / "root" / "iter_0000001" / "optimizer" / "manifest.json").unlink()
    code, found = inspect(tmp_path / "root", capsys)
    assert (code, found["kind"], found["complete"]) == (1, "checkpoint", False)
    assert "never finished" in found["problems"][0]


@pytest.mark.parametrize("steps", [0, 1, 2])
@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_live_files(tmp_path, capsys, steps, moments):
    params = [torch.nn.Parameter(torch.ones(80, 45))]
    config = StreamConfig(True, (str(tmp_path / "scratch"),), bucket_numel=2048, moment_dtype=moments)
    streamed = StreamingAdamW(params, config, betas=(0.9, 0.95))
    for _ in range(steps):
        step(streamed)
    code, found = inspect(tmp_path / "scratch", capsys, "--verify")
    assert (code, found["kind"], found["verified"], found["problems"]) == (0, "scratch", True, [])
    assert (found["iteration"], found["entries"]) == (steps, len(streamed.streamer.buckets))
    assert found["formats"]["main"] == "fp32"
    if steps:
        assert found["formats"]["exp_avg"] == moments
    streamed.close()


def test_live_files_that_were_damaged_or_exchanged(streamed, tmp_path, capsys):
    step(streamed)
    first, second, *_ = sorted((tmp_path / "scratch").rglob("bucket-*"))
    flip_a_bit(first, 10)
    code, found = inspect(tmp_path / "scratch", capsys)
    assert code == 0
    code, found = inspect(tmp_path / "scratch", capsys, "--verify")
    assert (code, len(found["problems"])) == (1, 1)
    flip_a_bit(first, 10)
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)
    code, found = inspect(tmp_path / "scratch", capsys)
    assert (code, len(found["problems"])) == (1, 2)
    assert "exchanged" in found["problems"][0]


def test_nothing_and_no_directory(tmp_path, capsys):
    code, found = inspect(tmp_path, capsys)
    assert (code, found["kind"], found["complete"]) == (1, "nothing", False)
    assert main(["inspect", str(tmp_path / "absent")]) == 2
    assert "no directory" in capsys.readouterr().err


def test_people_get_a_table(streamed, tmp_path, capsys):
    streamed.save_to(tmp_path / "save")
    assert main(["inspect", str(tmp_path / "save")]) == 0
    assert "checkpoint" in capsys.readouterr().out
