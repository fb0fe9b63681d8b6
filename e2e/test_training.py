"""The harness's trainer with resident state, in every topology it offers: the reference for all
comparisons."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from optstream.harness.launch import run_ranks
from optstream.harness.training_config import TrainingConfig
from optstream.harness.training_state import ResidentRun, train_resident_each

pytestmark = pytest.mark.e2e

STEPS = 6
CONFIGS = {
    "dense": TrainingConfig(steps=STEPS),
    "moe": TrainingConfig(steps=STEPS, experts=4),
    "accumulation": TrainingConfig(steps=STEPS, microbatches=3),
    "tied": TrainingConfig(steps=STEPS, tied_embeddings=True),
    "fp32": TrainingConfig(steps=STEPS, bf16=False),
    "dp2": TrainingConfig(steps=STEPS, ranks=2),
    "dp2_overlap": TrainingConfig(steps=STEPS, ranks=2, overlap_grad_reduce=True, overlap_param_gather=True),
    "tp2": TrainingConfig(steps=STEPS, ranks=2, tp=2),
    "pp2": TrainingConfig(steps=STEPS, ranks=2, pp=2, microbatches=2),
    "pp2_tied": TrainingConfig(steps=STEPS, ranks=2, pp=2, tied_embeddings=True),
    "ep2": TrainingConfig(steps=STEPS, ranks=2, ep=2, experts=4),
}
PARALLEL = [name for name, config in CONFIGS.items() if config.ranks > 1]


@pytest.fixture(scope="module")
def runs() -> dict[str, tuple[list[ResidentRun], list[ResidentRun]]]:
    """Of each configuration two runs, each a list over ranks. One launch per world size: starting costs
    most."""
    by_name = {}
    for ranks in (1, 2):
        names = [name for name, config in CONFIGS.items() if config.ranks == ranks]
        twice = [CONFIGS[name] for _ in range(2) for name in names]
        per_rank = run_ranks(train_resident_each, ranks, twice)
        for index, name in enumerate(names):
            first, second = index, index + len(names)
            by_name[name] = ([rank[first] for rank in per_rank], [rank[second] for rank in per_rank])
    return by_name


def assert_same(left: dict, right: dict) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        if isinstance(value, dict):
            assert_same(value, right[name])
        elif torch.is_tensor(value):
            assert torch.equal(value, right[name]), name
        else:
            assert value == right[name], name


@pytest.mark.parametrize("name", CONFIGS)
def test_the_loss_falls_and_is_known_on_every_rank(runs, name):
    first, _ = runs[name]
    losses = [step.loss for step in first[0].steps]
    assert losses[0] == pytest.approx(5.5, abs=0.4)  # a model that knows nothing: ln 256 = 5.55
    assert losses[-1] < losses[0] - 0.1
    assert all(step.step_ok and step.grad_norm > 0 for step in first[0].steps)
    for rank in first:
        assert rank.steps == first[0].steps


@pytest.mark.parametrize("name", CONFIGS)
def test_a_second_run_from_the_same_seed_is_the_same_to_the_last_bit(runs, name):
    for first, second in zip(*runs[name], strict=True):
        assert_same(first.initial_params, second.initial_params)
        assert first.steps == second.steps
        assert_same(first.params, second.params)
        assert_same(first.state, second.state)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_ranks_shards_are_the_parameters(runs, name):
    first, _ = runs[name]
    owned: dict[str, list[tuple[int, int]]] = {}
    shapes: dict[str, int] = {}
    for run in first:
        shapes |= {param: value.numel() for param, value in run.params.items()}
        for param, (start, stop) in run.ranges.items():
            owned.setdefault(param, []).append((start, stop))
            state = run.state[param]
            assert state["main"].numel() == state["exp_avg"].numel() == stop - start
            assert state["step"] == STEPS
            # The model's parameter is the main one, rounded.
            shard = run.params[param].view(-1)[start:stop]
            assert torch.equal(state["main"].to(shard.dtype), shard), param
    # Replicas along tensor parallelism each own the whole tensor.
    covered = {param: sorted(set(ranges)) for param, ranges in owned.items()}
    assert covered.keys() == shapes.keys()
    for param, ranges in covered.items():
        ends = [0, *(stop for _, stop in ranges)]
        assert [start for start, _ in ranges] == ends[:-1], param
        assert ends[-1] == shapes[param]


def test_training_moves_every_parameter(runs):
    run = runs["dense"][0][0]
    for name, param in run.params.items():
        assert not torch.equal(param, run.initial_params[name]), name


@pytest.mark.parametrize("name", PARALLEL)
def test_tensors_of_one_name_start_equal_and_others_apart(runs, name):
    left, right = runs[name][0]
    for param in left.initial_params.keys() & right.initial_params.keys():
        assert torch.equal(left.initial_params[param], right.initial_params[param]), param
        assert torch.equal(left.params[param], right.params[param]), param
    here = {"tp2": "tp0.", "ep2": "ep0."}.get(name)
    if here is not None:
        weights = [param for param in left.initial_params if param.startswith(here) and "weight" in param]
        assert weights
        for param in weights:
            other = right.initial_params[param.replace("0.", "1.", 1)]
            assert not torch.equal(left.initial_params[param], other), param


def test_names_say_what_differs_between_ranks(runs):
    def prefixes(name: str) -> list[set[str]]:
        return [{param.split("chunk0.")[0] for param in run.params} for run in runs[name][0]]

    assert prefixes("dense") == [{""}]
    assert prefixes("dp2") == [{""}, {""}]
    assert prefixes("tp2") == [{"", "tp0."}, {"", "tp1."}]
    assert prefixes("pp2") == [{"pp0."}, {"pp1."}]
    assert prefixes("ep2") == [{"", "ep0."}, {"", "ep1."}]


def test_experts_are_chained_as_a_second_optimizer(runs):
    assert [run.optimizers for run in runs["ep2"][0]] == [2, 2]
    assert [run.optimizers for run in runs["moe"][0]] == [1]
    assert [run.optimizers for run in runs["dp2"][0]] == [1, 1]


def test_overlap_changes_no_bit(runs):
    for plain, overlapped in zip(runs["dp2"][0], runs["dp2_overlap"][0], strict=True):
        assert plain.steps == overlapped.steps
        assert_same(plain.params, overlapped.params)
        assert_same(plain.state, overlapped.state)


def test_tied_embeddings_stay_tied_across_stages(runs):
    first_stage, last_stage = runs["pp2_tied"][0]
    embedding = first_stage.params["pp0.chunk0.embedding.word_embeddings.weight"]
    assert torch.equal(embedding, last_stage.params["pp1.chunk0.output_layer.weight"])


def test_fp16_skips_steps_that_overflow():
    config = TrainingConfig(steps=8, bf16=False, fp16=True, initial_loss_scale=2.0**17)
    [[run]] = run_ranks(train_resident_each, 1, [config])
    skipped = [not step.step_ok for step in run.steps]
    assert any(skipped)
    assert not all(skipped)
    assert {state["step"] for state in run.state.values()} == {skipped.count(False)}


def test_weight_decay_spares_biases_and_norms():
    def last_params(weight_decay: float) -> dict[str, torch.Tensor]:
        # One step: afterwards every gradient differs.
        config = dataclasses.replace(CONFIGS["dense"], steps=1, bf16=False, weight_decay=weight_decay)
        return run_ranks(train_resident_each, 1, [config])[0][0].params

    with_decay, without = last_params(0.5), last_params(0.0)
    for name, param in without.items():
        decayed = not torch.equal(with_decay[name], param)
        assert decayed == (param.dim() > 1), name
