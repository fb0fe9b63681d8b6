"""The main job: Megatron-Core trains with its Adam state in files, bit for bit as if it were resident."""

from __future__ import annotations

import dataclasses
import os

import pytest

from optstream.harness.compare import Comparison, compare_on_rank
from optstream.harness.launch import run_ranks
from optstream.harness.stream_settings import StreamSettings
from optstream.harness.training_config import TrainingConfig

pytestmark = pytest.mark.e2e

SMALL = TrainingConfig(steps=3, layers=2, hidden=64, heads=4, seq=32, batch=2)

WORLDS = {
    "dense": {},
    "moe": {"experts": 2},
    "dp2": {"ranks": 2},
    "dp3": {"ranks": 3},
    "tp2": {"ranks": 2, "tp": 2},
    "pp2": {"ranks": 2, "pp": 2},
    "ep2": {"ranks": 2, "ep": 2, "experts": 2},
    "native fp32 norms": {"native_fp32_norms": True},
    "native fp32 norms, dp2": {"native_fp32_norms": True, "ranks": 2},
    "accumulation": {"microbatches": 3},
    "overlap": {"ranks": 2, "overlap_grad_reduce": True, "overlap_param_gather": True},
    "bf16 gradients": {"ranks": 2, "grad_reduce_in_fp32": False},
    "fp16 with loss scaling and skipped steps": {"bf16": False, "fp16": True, "steps": 6},
    "tied embeddings": {"tied_embeddings": True},
}

STREAMED = {
    "many buckets": {"stream_optimizer_state_bucket_numel": 5000, "stream_optimizer_state_depth": 3},
    "one bucket": {},
    "depth 1, nothing behind": {
        "stream_optimizer_state_bucket_numel": 20000,
        "stream_optimizer_state_depth": 1,
        "stream_optimizer_state_write_behind": False,
        "stream_optimizer_state_read_ahead": False,
        "stream_optimizer_state_verify": False,
    },
    "kept slots and host cache": {
        "stream_optimizer_state_bucket_numel": 5000,
        "stream_optimizer_state_keep_slots": True,
        "stream_optimizer_state_host_cache_mb": 1,
    },
}


def compare(config: TrainingConfig, directory, *, backend: str = "nvme", **flags) -> list[Comparison]:
    flags |= {
        "stream_optimizer_state_to_disk": True,
        "use_distributed_optimizer": True,
        "offload_train_disk_dir": str(directory),
    }
    settings = StreamSettings(flags, backend=backend)
    return run_ranks(compare_on_rank, config.ranks, config, settings)


def expect_identical(comparisons: list[Comparison]) -> None:
    assert [each.difference for each in comparisons] == [None] * len(comparisons)
    for each in comparisons:
        assert each.max_error == 0.0
        assert each.resident.digest == each.streamed.digest


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    ("streamed", "backend"), [("many buckets", "nvme"), ("one bucket", "fake")], ids=["many", "one"]
)
def test_streamed_is_resident_to_the_last_bit(world, streamed, backend, tmp_path):
    config = dataclasses.replace(SMALL, **WORLDS[world])
    comparisons = compare(config, tmp_path, backend=backend, **STREAMED[streamed])
    expect_identical(comparisons)
    for each in comparisons:
        assert len(each.streamed.records) >= 1, "streaming was engaged"
        assert each.streamed.state_bytes_peak <= each.streamed.state_bytes_bound
    assert not any(files for _, _, files in os.walk(tmp_path)), "files are gone after the run"


@pytest.mark.parametrize("streamed", STREAMED)
def test_every_way_of_streaming_gives_the_same_bits(streamed, tmp_path):
    expect_identical(compare(SMALL, tmp_path, **STREAMED[streamed]))


def test_volume_and_residency_are_the_arithmetic(tmp_path):
    (result,) = compare(SMALL, tmp_path, **STREAMED["many buckets"])
    streamed = result.streamed
    assert streamed.read_bytes == [4 * result.parameters] + [12 * result.parameters] * 2
    assert streamed.written_bytes == [12 * result.parameters] * 3
    assert result.resident.state_bytes_peak == 12 * result.parameters
    assert 0 < streamed.state_bytes_peak <= streamed.state_bytes_bound
    assert streamed.state_bytes_bound < result.resident.state_bytes_peak / 4


def test_ranks_share_the_volume(tmp_path):
    comparisons = compare(dataclasses.replace(SMALL, ranks=2), tmp_path, **STREAMED["many buckets"])
    total = sum(each.streamed.written_bytes[-1] for each in comparisons)
    assert total == 12 * comparisons[0].parameters


def test_bf16_moments_differ_within_their_tolerance(tmp_path):
    flags = {"stream_optimizer_state_moment_dtype": "bf16", **STREAMED["many buckets"]}
    (result,) = compare(SMALL, tmp_path, **flags)
    assert result.difference is not None
    assert 0 < result.main_error <= SMALL.lr * SMALL.steps
    assert result.streamed.read_bytes[1:] == [8 * result.parameters] * 2
    assert result.streamed.written_bytes == [8 * result.parameters] * 3
