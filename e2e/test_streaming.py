"""The main job: Megatron-Core trains with its Adam state in files, bit for bit as if it were resident."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import weakref
from statistics import median

import pytest

from optstream.core.megatron import setup_optimizer_state_streaming
from optstream.harness.charts import format_bytes
from optstream.harness.compare import Comparison, compare_on_rank
from optstream.harness.launch import run_ranks
from optstream.harness.stream_settings import StreamSettings
from optstream.harness.training import Trainer
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
    "tied embeddings, pp2": {"ranks": 2, "pp": 2, "tied_embeddings": True},
    "virtual stages": {"ranks": 2, "pp": 2, "virtual_stages": 2, "layers": 4, "microbatches": 2},
    "two optimizer instances": {"ranks": 2, "optimizer_instances": 2},
    "clipped gradients": {"clip_grad": 1e-3},
    "groups with and without weight decay": {"weight_decay": 0.5},
}


def at_ranks(world: str):
    return pytest.param(world, marks=pytest.mark.ranks(WORLDS[world].get("ranks", 1)))


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


@pytest.fixture
def compare(hardware, tmp_path, record_property):
    """Trains resident and streamed on this test run's hardware: a comparison a rank. Records figures."""

    def run(config: TrainingConfig, *, backend: str = "nvme", **flags) -> list[Comparison]:
        flags |= {
            "stream_optimizer_state_to_disk": True,
            "use_distributed_optimizer": True,
            "offload_train_disk_dir": str(tmp_path),
        }
        settings = StreamSettings(flags, backend=backend)
        comparisons = run_ranks(compare_on_rank, config.ranks, config, settings, hardware=hardware)
        for name, value in figures(comparisons[0]).items():
            record_property(name, value)
        return comparisons

    return run


def figures(of_rank: Comparison) -> dict[str, str]:
    """For the report of a test run."""
    resident, streamed = of_rank.resident, of_rank.streamed
    return {
        "last loss": f"{streamed.loss[-1]:.6f}",
        "state on the device, resident": format_bytes(resident.state_bytes_peak),
        "streamed": format_bytes(streamed.state_bytes_peak),
        "read a step": format_bytes(streamed.read_bytes[-1]),
        "written a step": format_bytes(streamed.written_bytes[-1]),
        "seconds a step, resident": f"{median(resident.step_s):.3f}",
        "seconds a step, streamed": f"{median(streamed.step_s):.3f}",
    }


def expect_identical(comparisons: list[Comparison]) -> None:
    assert [each.difference for each in comparisons] == [None] * len(comparisons)
    for each in comparisons:
        assert each.max_error == 0.0
        assert each.resident.digest == each.streamed.digest


@pytest.mark.parametrize("world", map(at_ranks, WORLDS))
@pytest.mark.parametrize(
    ("streamed", "backend"), [("many buckets", "nvme"), ("one bucket", "fake")], ids=["many", "one"]
)
def test_streamed_is_resident_to_the_last_bit(compare, world, streamed, backend, tmp_path):
    config = dataclasses.replace(SMALL, **WORLDS[world])
    comparisons = compare(config, backend=backend, **STREAMED[streamed])
    expect_identical(comparisons)
    for each in comparisons:
        streamed_steps = len(each.streamed.written_bytes)
        if config.fp16:
            assert 0 < streamed_steps < config.steps, "some steps are skipped, and the others streamed"
        else:
            assert streamed_steps == config.steps, "every step streamed"
        assert all(written > 0 for written in each.streamed.written_bytes)
        assert each.streamed.state_bytes_peak <= each.streamed.state_bytes_bound
    assert not any(files for _, _, files in os.walk(tmp_path)), "files are gone after the run"


@pytest.mark.parametrize("streamed", STREAMED)
def test_every_way_of_streaming_gives_the_same_bits(compare, streamed):
    expect_identical(compare(SMALL, **STREAMED[streamed]))


def test_volume_and_residency_are_the_arithmetic(compare):
    (result,) = compare(SMALL, **STREAMED["many buckets"])
    streamed = result.streamed
    assert streamed.read_bytes == [4 * result.parameters] + [12 * result.parameters] * 2
    assert streamed.written_bytes == [12 * result.parameters] * 3
    assert result.resident.state_bytes_peak == 12 * result.parameters
    assert 0 < streamed.state_bytes_peak <= streamed.state_bytes_bound
    assert streamed.state_bytes_bound < result.resident.state_bytes_peak / 4


@pytest.mark.ranks(2)
def test_ranks_share_the_volume(compare):
    comparisons = compare(dataclasses.replace(SMALL, ranks=2), **STREAMED["many buckets"])
    total = sum(each.streamed.written_bytes[-1] for each in comparisons)
    assert total == 12 * comparisons[0].parameters


def test_bf16_moments_differ_within_their_tolerance(compare):
    flags = {"stream_optimizer_state_moment_dtype": "bf16", **STREAMED["many buckets"]}
    (result,) = compare(SMALL, **flags)
    assert result.difference is not None
    assert 0 < result.main_error <= SMALL.lr * SMALL.steps
    assert result.streamed.read_bytes[1:] == [8 * result.parameters] * 2
    assert result.streamed.written_bytes == [8 * result.parameters] * 3


def test_weight_decay_reaches_some_parameters_and_not_others(compare):
    """Else the world of two groups above would compare one group with itself."""
    digests = {
        compare(dataclasses.replace(SMALL, weight_decay=weight_decay))[0].streamed.digest
        for weight_decay in (0.0, 0.5)
    }
    assert len(digests) == 2


def test_clipping_engages(compare):
    digests = {
        compare(dataclasses.replace(SMALL, clip_grad=clip_grad))[0].streamed.digest
        for clip_grad in (0.0, 1e-3)
    }
    assert len(digests) == 2


@pytest.mark.ranks(2)
def test_each_optimizer_instance_streams_all_of_the_state(compare):
    config = dataclasses.replace(SMALL, ranks=2, optimizer_instances=2)
    comparisons = compare(config, **STREAMED["many buckets"])
    expect_identical(comparisons)
    for each in comparisons:
        assert each.streamed.written_bytes == [12 * each.parameters] * SMALL.steps


def test_a_closed_store_and_its_trainer_are_forgotten(tmp_path):
    """Autograd's hooks keep what they hold alive, and with it the optimizer, its groups and their threads."""
    args = argparse.Namespace(
        stream_optimizer_state_to_disk=True,
        use_distributed_optimizer=True,
        offload_train_disk_dir=str(tmp_path),
    )

    def train_and_close(rank: int) -> weakref.ref:
        stores = []
        trainer = Trainer(
            SMALL,
            rank=rank,
            after_construction=lambda built: stores.extend(setup_optimizer_state_streaming(args, built)),
        )
        trainer.train_step()
        for store in stores:
            store.close()
        trainer.close()
        return weakref.ref(trainer)

    (trainer,) = run_ranks(train_and_close, 1)
    gc.collect()
    assert trainer() is None
