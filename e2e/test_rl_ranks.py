"""The loop of generate, train and update weights on several ranks: one model, whichever way it is divided."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from optstream.harness.cli import main
from optstream.harness.deployments import Deployment, flags_of
from optstream.harness.launch import run_ranks
from optstream.harness.rl import RlSettings
from optstream.harness.rl_compare import RlComparison, compare_rl_on_rank, rl_verdict, summarise_rl
from optstream.harness.stream_settings import StreamSettings
from optstream.harness.training_config import TrainingConfig

pytestmark = pytest.mark.e2e

TINY = TrainingConfig(layers=2, hidden=32, heads=2, seq=32, batch=1, lr=3e-3)
SHARED = ("--colocate", "--offload-train-target", "disk", "--stream-optimizer-state-to-disk")
STEPS = 2
TURN = ["rollout", "wake", "train", "step"]

TOPOLOGIES = {
    "dp2": {"ranks": 2},
    "tp2": {"ranks": 2, "tp": 2},
    "ep2": {"ranks": 2, "ep": 2, "experts": 4},
    "pp2": {"ranks": 2, "pp": 2},
    "tp2 x pp2": {"ranks": 4, "tp": 2, "pp": 2},
}
# What the command line does not offer, and the loop takes all the same.
MORE_TOPOLOGIES = {
    "dp2 x pp2, virtual stages": {
        "ranks": 4,
        "pp": 2,
        "virtual_stages": 2,
        "layers": 4,
        "microbatches": 2,
    },
    "ep2 x pp2": {"ranks": 4, "ep": 2, "pp": 2, "experts": 4},
    "pp2, tied embeddings": {"ranks": 2, "pp": 2, "tied_embeddings": True},
}


@pytest.fixture(scope="module")
def scenarios():
    """Imported by name, so that ranks can import it, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        import rollout_scenarios

        yield rollout_scenarios


@pytest.fixture(scope="module")
def disk(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def loops(hardware, scenarios, disk) -> Callable[[str], list[RlComparison]]:
    """The comparisons of all ranks, by topology."""
    return by_topology(hardware, TOPOLOGIES, scenarios.compare_loops, settings_in(disk))


@pytest.fixture(scope="module")
def losses(hardware, scenarios) -> Callable[[str], list[tuple[float, float]]]:
    return by_topology(hardware, TOPOLOGIES | MORE_TOPOLOGIES, scenarios.losses_of_each)


def by_topology(
    hardware: str, topologies: dict[str, dict], function: Callable, *args
) -> Callable[[str], list]:
    """What `function` gives on every rank; topologies of as many ranks share one start of them."""

    @functools.cache
    def of_ranks(ranks: int) -> dict[str, list]:
        configs = {name: config_of(name) for name in topologies if topologies[name]["ranks"] == ranks}
        results = run_ranks(function, ranks, list(configs.values()), *args, hardware=hardware)
        return dict(zip(configs, zip(*results, strict=True), strict=True))

    return lambda name: of_ranks(topologies[name]["ranks"])[name]


def at_ranks(topology: str):
    ranks = (TOPOLOGIES | MORE_TOPOLOGIES)[topology]["ranks"]
    return pytest.param(topology, marks=pytest.mark.ranks(ranks))


def config_of(topology: str) -> TrainingConfig:
    return dataclasses.replace(TINY, **(TOPOLOGIES | MORE_TOPOLOGIES)[topology])


def settings_in(folder: Path, flags: tuple[str, ...] = SHARED) -> RlSettings:
    small_buckets = ("--stream-optimizer-state-bucket-numel", "2048")
    deployment = Deployment("", (*flags, *small_buckets), "trained")
    return RlSettings(STEPS, StreamSettings(flags_of(deployment, str(folder))))


@pytest.mark.parametrize("topology", map(at_ranks, TOPOLOGIES))
def test_all_ranks_sample_the_same_and_streaming_keeps_every_bit(topology, loops, disk):
    config, ranks = config_of(topology), loops(topology)
    first = ranks[0].asked
    assert len(first.samples) == STEPS + 1
    assert first.samples[0] != first.samples[-1], "greedy samples change as the model learns"
    for each in ranks:
        assert each.difference is None
        assert each.reference.digest == each.asked.digest
        assert each.asked.samples == each.reference.samples == first.samples
        assert each.asked.loss == each.reference.loss == first.loss
        assert each.asked.state_bytes_peak <= each.asked.state_bytes_bound
        assert each.reference.state_bytes_peak > each.asked.state_bytes_peak
        # Every rank parks what it has, and none of the state: that is in files.
        assert len(each.asked.sleep_s) == len(each.asked.wake_s) == STEPS + 1
        assert 0 < each.asked.sleep_bytes[-1] == each.asked.wake_bytes[-1] < 7 * each.asked.parameters
    assert list(disk.iterdir()) == []
    summary = summarise_rl(config, ranks)
    assert summary["bit_identical"] is True
    assert summary["ranks"] == config.ranks
    assert summary["samples"] == first.samples
    gather = ["gather"] if config.pp > 1 else []
    names = [phase["name"] for phase in summary["phases"]]
    assert names == ["build", *gather, "sleep", *[*TURN, *gather, "sleep"] * STEPS, "rollout", "wake"]
    assert rl_verdict(config, settings_in(disk), ranks).passed


@pytest.mark.parametrize("topology", map(at_ranks, TOPOLOGIES | MORE_TOPOLOGIES))
def test_the_engine_has_the_trainers_model(topology, losses):
    for of_trainer, of_engine in losses(topology):
        assert of_engine == pytest.approx(of_trainer, rel=1e-6)


@pytest.mark.ranks(2)
def test_the_engine_gets_params_whose_gather_overlaps_the_next_forward(hardware, scenarios):
    config = dataclasses.replace(TINY, ranks=2)
    for at_once, late in run_ranks(scenarios.loops_with_and_without_overlap, 2, config, hardware=hardware):
        assert late.loss == at_once.loss
        assert late.samples == at_once.samples


@pytest.fixture(scope="module")
def resident(hardware, disk) -> tuple[TrainingConfig, RlSettings, RlComparison]:
    """A loop in which nothing streams, though a lossy moment format is set."""
    config = dataclasses.replace(TINY, layers=1)
    settings = settings_in(disk, ("--stream-optimizer-state-moment-dtype", "bf16"))
    [comparison] = run_ranks(compare_rl_on_rank, 1, config, settings, hardware=hardware)
    return config, settings, comparison


def test_what_does_not_stream_must_be_equal_whatever_the_moment_format(resident):
    config, settings, one = resident
    assert rl_verdict(config, settings, [one]).passed
    other = dataclasses.replace(one, difference="the loss of step 1")
    assert not rl_verdict(config, settings, [other]).passed
    assert rl_verdict(config, settings, [dataclasses.replace(other, streams=True)]).passed


def test_ranks_that_disagree_fail_the_command(resident):
    config, settings, one = resident
    assert rl_verdict(config, settings, [one, one]).passed
    for change, text in (
        ({"samples": [*one.asked.samples[:-1], "else"]}, "the samples of rank 1 are not those of rank 0"),
        ({"loss": [*one.asked.loss[:-1], 0.0]}, "the losses of rank 1 are not those of rank 0"),
    ):
        other = dataclasses.replace(one, asked=dataclasses.replace(one.asked, **change))
        verdict = rl_verdict(config, settings, [one, other])
        assert (verdict.passed, verdict.text) == (False, f"different: {text}")
        assert summarise_rl(config, [one, other])["bit_identical"] is False


LOOP = ["train", "--rl-steps", "2", "--layers", "1", "--hidden", "32", "--heads", "2", "--seq", "32"]


@pytest.mark.ranks(2)
def test_the_command_on_two_ranks(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*LOOP, "--ranks", "2", *SHARED, "--bucket-numel", "8192", "--json", "summary.json"]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["ranks"] == 2
    assert summary["bit_identical"] is True
    assert summary["resident"]["digest"] == summary["streamed"]["digest"]
    assert len(summary["sleep_s"]) == len(summary["wake_s"]) == len(summary["samples"]) == STEPS + 1
    assert set(summary["moved_bytes"]) == {"sleep", "wake"}
    assert all(set(phase) == {"name", "seconds", "device_bytes_peak"} for phase in summary["phases"])
    assert "rank 0 of 2" in capsys.readouterr().out
    [folder] = (tmp_path / "runs").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["report.html", "summary.json"]


@pytest.mark.ranks(2)
def test_a_rank_out_of_memory_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*LOOP, "--ranks", "2", *SHARED, "--device-memory", "300000"]) == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if "optstream: error:" in line]
    assert len(errors) == 1
    assert re.search(r"rank \d: phase \w+: the device is out of memory", errors[0])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "name", "bound"),
    [
        (SHARED, "streamed", True),
        (("--colocate",), "parked in turns", False),
        ((), "as asked", False),
    ],
)
def test_the_page_calls_streamed_what_streams(tmp_path, monkeypatch, flags, name, bound):
    monkeypatch.chdir(tmp_path)
    assert main([*LOOP, *flags]) == 0
    [page] = (tmp_path / "runs").rglob("report.html")
    text = page.read_text()
    assert f"<h2>Resident beside {name}</h2>" in text
    assert f'<th scope="col">{name}</th>' in text
    assert ("Bound of the streamed run" in text) is bound
    assert ("<dt>State on the device, streamed</dt>" in text) is bound


def test_streamed_lossy_moments_are_judged_by_their_tolerance(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = ["--stream-optimizer-state-to-disk", "--stream-optimizer-state-moment-dtype", "bf16"]
    assert main([*LOOP, *flags]) == 0
    assert "the tolerance, lr x steps, is 0.002" in capsys.readouterr().out
