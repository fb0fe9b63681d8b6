"""`optstream bench checkpoint`, `optstream convert`, and foreign checkpoints that are not what they say."""

from __future__ import annotations

import json
import os
import pickle

import pytest
import torch

from optstream.core.config import StreamConfig
from optstream.core.errors import CheckpointError
from optstream.core.optimizer import StreamingAdamW
from optstream.harness.cli import main

pytestmark = pytest.mark.unit


class Evil:
    """Makes a directory when it is unpickled by trust."""

    def __init__(self, path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def optimizer(directory) -> StreamingAdamW:
    params = [torch.nn.Parameter(torch.ones(30, 20)), torch.nn.Parameter(torch.ones(20))]
    return StreamingAdamW(params, StreamConfig(True, (str(directory),), bucket_numel=256))


def step(streamed: StreamingAdamW) -> None:
    for param in streamed.param_groups[0]["params"]:
        param.grad = torch.sin(torch.arange(float(param.numel()))).view(param.shape)
    streamed.step()


@pytest.fixture
def streamed(tmp_path):
    made = optimizer(tmp_path / "scratch")
    step(made)
    yield made
    made.close()


def test_the_benchmark_reports_its_figures_and_leaves_nothing(tmp_path, capsys):
    flags = ["--numel", "2e4", "--dir", str(tmp_path), "--rounds", "1", "--json", "-"]
    assert main(["bench", "checkpoint", *flags]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report.keys() == {"bytes", "save_s", "async_stall_s", "load_s", "floor_s", "host_bytes_peak"}
    assert report["bytes"] == 12 * 20_000
    assert all(report[name] > 0 for name in ("save_s", "load_s", "floor_s"))
    assert list(tmp_path.iterdir()) == []


def test_state_goes_through_the_other_kind_and_back_with_the_same_bits(streamed, tmp_path, capsys):
    state = streamed.full_state()
    streamed.save_to(tmp_path / "one")
    kinds = [("one", "two", "resident"), ("two", "three", "streamed")]
    for source, target, kind in kinds:
        assert main(["convert", str(tmp_path / source), str(tmp_path / target), "--to", kind]) == 0
    assert "2 parameters" in capsys.readouterr().out
    other = optimizer(tmp_path / "other")
    for _ in range(3):
        step(other)
    other.load_from(tmp_path / "three")
    found = other.full_state()
    for name, values in state.items():
        assert values["step"] == found[name]["step"]
        assert all(torch.equal(values[key], found[name][key]) for key in ("main", "exp_avg", "exp_avg_sq"))
    other.close()
    assert not [path for path in tmp_path.iterdir() if "partial" in path.name]


def test_damage_in_the_resident_kind_is_noticed(streamed, tmp_path):
    streamed.save_to(tmp_path / "one")
    assert main(["convert", str(tmp_path / "one"), str(tmp_path / "two"), "--to", "resident"]) == 0
    (data,) = (tmp_path / "two").glob("*.distcp")
    content = bytearray(data.read_bytes())
    content[content.index(b"/data/0") + 200] ^= 1
    data.write_bytes(content)
    with pytest.raises(CheckpointError, match="checksum differs"):
        streamed.load_from(tmp_path / "two")


@pytest.mark.parametrize("name", [".metadata", "common.pt"])
def test_a_foreign_checkpoint_runs_no_code(streamed, tmp_path, name):
    streamed.save_to(tmp_path / "one")
    assert main(["convert", str(tmp_path / "one"), str(tmp_path / "two"), "--to", "resident"]) == 0
    evil, mark = tmp_path / "two" / name, tmp_path / "code was run"
    if name == ".metadata":
        evil.write_bytes(pickle.dumps(Evil(mark)))
    else:
        torch.save({"optimizer": Evil(mark)}, evil)
    with pytest.raises(CheckpointError, match="--no-load-optim"):
        streamed.load_from(tmp_path / "two")
    assert not mark.exists()
    pickle.loads(pickle.dumps(Evil(mark)))
    assert mark.exists(), "by trust, it would have been"


def test_groups_saved_without_names_are_known_by_their_multipliers():
    from optstream.core.param_groups import GroupRecord, match

    saved = [GroupRecord({"wd_mult": 1.0, "lr": 1}, 3, []), GroupRecord({"wd_mult": 0.0, "lr": 2}, 3, [])]
    assert match(saved, {"w"}, {"wd_mult": 0.0}, "somewhere") is saved[1]
    assert match(saved, {"w"}, {"wd_mult": 0.5}, "somewhere") is None


def test_a_group_whose_parameters_are_elsewhere_has_their_settings_and_count():
    """Names of a group are gathered from all ranks; this rank's own shard of it may be empty."""
    from optstream.core.param_groups import GroupRecord, describe, match, merge

    groups = [{"params": [], "lr": 0.5}, {"params": [], "lr": 0.25}]
    ranks = [describe(groups, [4, 4], [["a", "b"], []]), describe(groups, [4, 4], [["c"], ["d"]])]
    saved = merge(record for rank in ranks for record in rank)
    assert saved == [
        GroupRecord({"lr": 0.5}, 4, ["a", "b", "c"]),
        GroupRecord({"lr": 0.25}, 4, ["d"]),
    ]
    assert match(saved, {"d"}, groups[1], "somewhere").step == 4
    assert match(saved, set(), groups[1], "somewhere") is None
