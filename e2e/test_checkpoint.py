"""Checkpoints of real Megatron runs: resumed in fresh processes, on any topology, streamed or resident."""

from __future__ import annotations

import dataclasses
import multiprocessing

import pytest
import torch
from megatron.core import dist_checkpointing

from optstream.core.errors import CheckpointError
from optstream.harness.cli import main
from optstream.harness.global_state import GlobalState, ShardState, assemble, shard_states
from optstream.harness.launch import run_ranks
from optstream.harness.legs import Leg, LegResult, chain_of, run_leg
from optstream.harness.stream_settings import StreamSettings
from optstream.harness.training import Trainer
from optstream.harness.training_config import TrainingConfig

pytestmark = pytest.mark.e2e

SMALL = TrainingConfig(layers=2, hidden=32, heads=2, seq=16, batch=2)
SAVED_AT, END = 2, 4

WORLDS = {
    "dp1": {},
    "dp2": {"ranks": 2},
    "dp3": {"ranks": 3},
    "tp2": {"ranks": 2, "tp": 2},
    "pp2": {"ranks": 2, "pp": 2},
    "experts, ep1": {"experts": 2},
    "experts, ep2": {"experts": 2, "ranks": 2, "ep": 2},
    "native fp32 norms, dp2": {"native_fp32_norms": True, "ranks": 2},
    "native fp32 norms, dp1": {"native_fp32_norms": True},
    "tied embeddings, pp2": {"tied_embeddings": True, "ranks": 2, "pp": 2},
    "tied embeddings, dp1": {"tied_embeddings": True},
}


def world(name: str) -> TrainingConfig:
    return dataclasses.replace(SMALL, **WORLDS[name])


def streaming(directory, **flags) -> StreamSettings:
    return StreamSettings(
        {
            "stream_optimizer_state_to_disk": True,
            "use_distributed_optimizer": True,
            "offload_train_disk_dir": str(directory),
            "stream_optimizer_state_bucket_numel": 3000,
            **flags,
        }
    )


def run(config: TrainingConfig, leg: Leg) -> list[LegResult]:
    return run_ranks(run_leg, config.ranks, config, leg)


def expect_equal(one: GlobalState, other: GlobalState) -> None:
    assert one.keys() == other.keys()
    for name, values in one.items():
        assert values["step"] == other[name]["step"], name
        for segment in ("main", "exp_avg", "exp_avg_sq"):
            left, right = values[segment].contiguous(), other[name][segment].contiguous()
            assert torch.equal(left.view(torch.int32), right.view(torch.int32)), f"{segment} of {name}"


@pytest.mark.parametrize("name", ["dp2", "experts, ep2", "native fp32 norms, dp2"])
def test_the_same_topology_goes_on_as_if_nothing_had_been(name, tmp_path):
    config, checkpoint = world(name), str(tmp_path / "checkpoint")
    scratch = streaming(tmp_path / "scratch")
    straight = run(config, Leg(scratch, until=END))
    first = run(config, Leg(scratch, until=SAVED_AT, save=checkpoint))
    then = run(config, Leg(scratch, load=checkpoint, step=SAVED_AT, until=END))
    assert straight[0].losses == first[0].losses + then[0].losses
    expect_equal(assemble([r.after for r in first]), assemble([r.before for r in then]))
    expect_equal(assemble([r.after for r in straight]), assemble([r.after for r in then]))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("dp2", "dp1"),
        ("dp2", "dp3"),
        ("tp2", "dp1"),
        ("dp1", "tp2"),
        ("pp2", "dp1"),
        ("experts, ep2", "experts, ep1"),
        ("native fp32 norms, dp2", "native fp32 norms, dp1"),
        ("tied embeddings, pp2", "tied embeddings, dp1"),
    ],
)
def test_another_topology_has_the_same_state_and_trains_on_as_a_resident_run_would(old, new, tmp_path):
    checkpoint, scratch = str(tmp_path / "checkpoint"), tmp_path / "scratch"
    saved = run(world(old), Leg(streaming(scratch), until=SAVED_AT, save=checkpoint))
    state = assemble([result.after for result in saved])
    other = streaming(scratch, stream_optimizer_state_bucket_numel=5000, stream_optimizer_state_depth=2)
    streamed = run(world(new), Leg(other, load=checkpoint, step=SAVED_AT, until=END))
    expect_equal(state, assemble([result.before for result in streamed]))
    resident = run(world(new), Leg(state=state, step=SAVED_AT, until=END))
    assert resident[0].losses == streamed[0].losses
    expect_equal(assemble([r.after for r in resident]), assemble([r.after for r in streamed]))


def test_a_resident_run_saves_what_a_streamed_one_loads_and_the_other_way_round(tmp_path):
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    settings = streaming(tmp_path / "scratch")
    resident = run(world("dp2"), Leg(until=SAVED_AT, save=one))
    state = assemble([result.after for result in resident])
    streamed = run(world("dp1"), Leg(settings, load=one, step=SAVED_AT, until=SAVED_AT, save=two))
    expect_equal(state, assemble([result.after for result in streamed]))
    back = run(world("dp2"), Leg(load=two, step=SAVED_AT, until=SAVED_AT))
    expect_equal(state, assemble([result.before for result in back]))


def test_steps_during_a_save_in_the_background_are_not_in_it(tmp_path):
    config, checkpoint = world("experts, ep2"), str(tmp_path / "checkpoint")
    settings = streaming(tmp_path / "scratch")
    leg = Leg(settings, until=SAVED_AT, save=checkpoint, background=True, steps_meanwhile=2)
    saved = run(config, leg)
    loaded = run(config, Leg(settings, load=checkpoint, step=SAVED_AT, until=SAVED_AT))
    expect_equal(assemble([r.after for r in saved]), assemble([r.before for r in loaded]))


def test_a_checkpoint_without_optimizer_state_names_the_flag_that_accepts_it(tmp_path):
    settings = streaming(tmp_path / "scratch")
    with pytest.raises(CheckpointError, match="--no-load-optim"):
        run(world("dp1"), Leg(settings, load=str(tmp_path / "nothing")))
    accepted = streaming(tmp_path / "scratch", no_load_optim=True)
    (fresh,) = run(world("dp1"), Leg(accepted, load=str(tmp_path / "nothing")))
    assert all(shard.step == 0 for shard in fresh.after)


LAYERS = {"one name a layer": {"non_homogeneous_layers": True}, "layers in one tensor": {}}


def fully_reshardable(layers: str) -> dict:
    """What Megatron's trainer asks for with --dist-ckpt-optim-fully-reshardable."""
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        **LAYERS[layers],
    }


def save_as_megatron(rank: int, config: TrainingConfig, directory: str, layers: str) -> list[ShardState]:
    trainer = Trainer(config, rank=rank)
    try:
        for _ in range(SAVED_AT):
            trainer.train_step()
        metadata = fully_reshardable(layers)
        model = trainer.model[0].module.sharded_state_dict(metadata=metadata)
        optimizer = trainer.optimizer.sharded_state_dict(model, metadata=metadata)
        # Megatron writes in child processes, which a rank that is a daemon may not have.
        multiprocessing.current_process()._config["daemon"] = False
        dist_checkpointing.save({"model": model, "optimizer": optimizer}, directory)
        return shard_states(trainer, None)
    finally:
        trainer.close()


def load_as_megatron(rank: int, config: TrainingConfig, directory: str) -> list[ShardState]:
    """Resident state loaded by Megatron alone. It takes torch's `step` for a tensor of the checkpoint, which
    it is not: what the optimizer has from the param groups is put in its place."""
    trainer = Trainer(config, rank=rank)
    try:
        trainer.train_step()  # Its state_dict fails before the first step.
        metadata = fully_reshardable("one name a layer")
        model = trainer.model[0].module.sharded_state_dict(metadata=metadata)
        wanted = {
            "optimizer": trainer.optimizer.sharded_state_dict(model, is_loading=True, metadata=metadata)
        }
        for optimizer in chain_of(trainer):
            _set_without_step(optimizer)
        trainer.optimizer.load_state_dict(dist_checkpointing.load(wanted, directory)["optimizer"])
        return shard_states(trainer, None)
    finally:
        trainer.close()


def _set_without_step(optimizer) -> None:
    original = optimizer._set_main_param_and_optimizer_states

    def set_states(param, tensors):
        own = optimizer._get_main_param_and_optimizer_states(param)
        original(param, {"step": own["step"].clone(), **tensors})

    optimizer._set_main_param_and_optimizer_states = set_states


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize(("old", "new"), [("dp1", "dp2"), ("dp2", "dp1")])
def test_streaming_goes_on_from_megatrons_own_checkpoint(old, new, layers, tmp_path):
    directory = tmp_path / "resident"
    directory.mkdir()
    saved = run_ranks(save_as_megatron, world(old).ranks, world(old), str(directory), layers)
    state = assemble(saved)
    settings = streaming(tmp_path / "scratch")
    streamed = run(world(new), Leg(settings, load=str(directory), step=SAVED_AT, until=END))
    expect_equal(state, assemble([result.before for result in streamed]))
    resident = run(world(new), Leg(state=state, step=SAVED_AT, until=END))
    assert resident[0].losses == streamed[0].losses


def test_conversion_there_and_back(tmp_path, capsys):
    streamed_kind, resident_kind, back = (str(tmp_path / name) for name in ("streamed", "resident", "back"))
    settings = streaming(tmp_path / "scratch")
    saved = run(world("dp2"), Leg(settings, until=SAVED_AT, save=streamed_kind))
    state = assemble([result.after for result in saved])
    assert main(["convert", streamed_kind, resident_kind, "--to", "resident"]) == 0
    expect_equal(state, assemble(run_ranks(load_as_megatron, 1, world("dp1"), resident_kind)))
    assert main(["convert", resident_kind, back, "--to", "streamed"]) == 0
    loaded = run(world("dp1"), Leg(settings, load=back, step=SAVED_AT, until=SAVED_AT))
    expect_equal(state, assemble([result.after for result in loaded]))
    assert main(["convert", streamed_kind, resident_kind, "--to", "resident"]) == 2
    assert "it exists" in capsys.readouterr().err
