"""The adapter at its edges: all that Megatron, or a trainer, does to an optimizer besides stepping it."""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import math
import os
import resource
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from optstream.core import megatron_fingerprints
from optstream.core.errors import RemoteRankError, StreamConfigError, UnsupportedError
from optstream.core.evicted import is_evicted
from optstream.harness.launch import run_ranks
from optstream.harness.training_config import TrainingConfig

pytestmark = pytest.mark.e2e


@pytest.fixture
def scenarios(monkeypatch):
    """Imported by name, so that ranks can import it, too."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import adapter_scenarios

    return adapter_scenarios


def on_one_rank(test):
    """The test runs inside a simulated world of one rank."""

    @functools.wraps(test)
    def in_world(**fixtures):
        run_ranks(lambda rank: test(**fixtures), 1)

    return in_world


def train(steps: int):
    def scenario(trainer) -> None:
        for _ in range(steps):
            trainer.train_step()

    return scenario


def part_of(trainer):
    (part,) = trainer.optimizer.chained_optimizers
    return part


def files_digest(directory: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        digest.update(str(path).encode() + path.read_bytes())
    return digest.hexdigest()


# ---- construction ------------------------------------------------------------------------------------------


@on_one_rank
def test_main_params_are_born_evicted_and_megatron_is_as_it_was(scenarios, tmp_path):
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    before = dict(vars(DistributedOptimizer))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*main params were on the device.*")
        with scenarios.training(scenarios.stream_args(tmp_path)) as (trainer, _):
            mains = [main for group in part_of(trainer).shard_fp32_from_float16_groups for main in group]
            assert mains
            assert all(is_evicted(main) for main in mains)
    assert dict(vars(DistributedOptimizer)) == before


@on_one_rank
def test_megatron_is_as_it_was_after_an_exception_too(scenarios, tmp_path):
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    before = dict(vars(DistributedOptimizer))

    def interrupted() -> None:
        with scenarios.streaming_construction(scenarios.stream_args(tmp_path)):
            assert dict(vars(DistributedOptimizer)) != before
            raise KeyError

    with pytest.raises(KeyError):
        interrupted()
    assert dict(vars(DistributedOptimizer)) == before
    off = scenarios.stream_args(tmp_path, stream_optimizer_state_to_disk=False)
    with scenarios.streaming_construction(off):
        assert dict(vars(DistributedOptimizer)) == before


@on_one_rank
def test_without_the_context_it_works_and_says_what_that_cost(scenarios, tmp_path):
    with scenarios.training() as (trainer, _):
        train(2)(trainer)
        expected = scenarios.everything(trainer, [])
    args = scenarios.stream_args(tmp_path)
    with (
        warnings.catch_warnings(record=True, action="always") as caught,
        scenarios.training(args, born_evicted=False) as (trainer, stores),
    ):
        train(2)(trainer)
        found = scenarios.everything(trainer, stores)
    mains = sum(value.numel() for name, value in found.items() if name.startswith("main "))
    cost = f"{4 * mains} bytes of main params were on the device during construction"
    assert [one for one in caught if str(one.message).startswith(cost)]
    assert scenarios.differing(expected, found) == []


@on_one_rank
def test_construction_never_holds_all_main_params(scenarios, tmp_path):
    from optstream.harness.ledger import STATE, Ledger

    def peak_bytes(born_evicted: bool) -> int:
        ledger = Ledger()
        with (
            warnings.catch_warnings(),
            ledger.watch_allocations(STATE),
            scenarios.training(args, born_evicted=born_evicted) as (_, stores),
        ):
            bounds.add(stores[0].streamer.engine.device_bytes_bound)
        return ledger.peak_bytes(STATE)

    args, bounds = scenarios.stream_args(tmp_path, stream_optimizer_state_bucket_numel=512), set()
    with scenarios.training() as (trainer, _):
        sizes = [shard.stop - shard.start for shard in scenarios.named_shards(trainer)]
        # Made under the same watch: the model's fp32 gradients.
        gradient_bytes = sum(buffer.grad_data.nbytes for buffer in part_of(trainer).buffers)
    with_bucket, with_all = peak_bytes(born_evicted=True), peak_bytes(born_evicted=False)
    allowed = max(*bounds, 4 * max(sizes))
    assert with_bucket <= gradient_bytes + allowed
    assert allowed < 4 * sum(sizes) <= with_all - gradient_bytes


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux enforces RLIMIT_DATA")
@pytest.mark.parametrize("born_evicted", [True, False])
def test_a_process_that_may_not_hold_all_main_params_can_construct(tmp_path, born_evicted):
    def small_stacks() -> None:
        # Stacks of threads count as data: 8 MiB each by default.
        resource.setrlimit(resource.RLIMIT_STACK, (1 << 20, 1 << 20))

    script = "import sys, adapter_scenarios as s; s.construct_under_a_cap(sys.argv[1], sys.argv[2] == 'True')"
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, str(tmp_path), str(born_evicted)],
        cwd=Path(__file__).parent,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"},
        preexec_fn=small_stacks,
        capture_output=True,
        text=True,
    )
    if born_evicted:
        assert ended.returncode == 0, ended.stderr
    else:
        assert ended.returncode != 0
        assert "allocate" in ended.stderr


# ---- weights from elsewhere --------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["the model", "a state dict"])
@pytest.mark.parametrize("native_fp32_norms", [False, True])
@on_one_rank
def test_a_step_starts_from_weights_that_were_loaded_after_construction(
    scenarios, tmp_path, source, native_fp32_norms
):
    config = dataclasses.replace(scenarios.TINY, native_fp32_norms=native_fp32_norms)

    def scenario(trainer) -> None:
        trainer.train_step()
        params = scenarios.model_params(trainer)
        loaded = {name: torch.full_like(param, 0.01) for name, param in params.items()}
        with torch.no_grad():
            for name, param in params.items():
                param.copy_(loaded[name])
        if source == "a state dict":
            # fp32 values that the model's own precision cannot hold.
            precise = {
                name.removeprefix("chunk0."): torch.full(param.shape, 0.010001)
                for name, param in params.items()
            }
            trainer.optimizer.reload_model_params(state_dict=precise)
        else:
            trainer.optimizer.reload_model_params()
        trainer.train_step()

    resident, streamed = scenarios.resident_and_streamed(tmp_path, scenario, config)
    assert scenarios.differing(resident, streamed) == []
    started_from = 0.010001 if source == "a state dict" else float(torch.tensor(0.01).bfloat16())
    for name, main in streamed.items():
        if name.startswith("main "):
            # Adam moves a parameter by a few learning rates at most.
            assert (main - started_from).abs().max() < 10 * config.lr, name


# ---- hyperparameters, skipped steps, NaN -------------------------------------------------------------------


@on_one_rank
def test_settings_changed_between_steps_take_effect_at_once(scenarios, tmp_path):
    def scenario(trainer) -> None:
        for step in range(4):
            for index, group in enumerate(trainer.optimizer.param_groups):
                group["lr"] = 1e-3 * (step + index + 1)
                group["weight_decay"] = 0.1 * step * (index + 1)
                group["betas"] = (0.8 + 0.02 * step, 0.9 + 0.01 * (step + index))
                group["eps"] = 10.0 ** -(8 - step)
            trainer.train_step()

    resident, streamed = scenarios.resident_and_streamed(tmp_path, scenario)
    assert scenarios.differing(resident, streamed) == []
    constant, _ = scenarios.resident_and_streamed(tmp_path, train(4))
    assert scenarios.differing(constant, resident) != []


def nan_in_last_bucket(trainer, param) -> None:
    """The next step finds a NaN in the gradient of `param`'s last element."""
    original = trainer.optimizer.step

    def step():
        param.main_grad.view(-1)[-1] = math.nan
        del trainer.optimizer.step
        return original()

    trainer.optimizer.step = step


def last_streamed_param(scenarios, directory: Path, config: TrainingConfig) -> str:
    with scenarios.training(scenarios.stream_args(directory), config) as (trainer, stores):
        *_, (param, *_) = stores[0].states()
        return next(name for name, one in scenarios.model_params(trainer).items() if one is param)


@on_one_rank
def test_a_step_that_fp16_skips_changes_no_byte_on_disk(scenarios, tmp_path):
    config = dataclasses.replace(scenarios.TINY, bf16=False, fp16=True, initial_loss_scale=2.0**8)
    last = last_streamed_param(scenarios, tmp_path / "other", config)
    with scenarios.training(scenarios.stream_args(tmp_path / "state"), config) as (trainer, stores):
        assert trainer.train_step().step_ok
        stores[0].streamer.engine.drain()
        before, records = files_digest(tmp_path / "state"), len(stores[0].records)
        nan_in_last_bucket(trainer, scenarios.model_params(trainer)[last])
        assert not trainer.train_step().step_ok
        stores[0].streamer.engine.drain()
        assert files_digest(tmp_path / "state") == before
        assert len(stores[0].records) == records
        assert trainer.train_step().step_ok
        stores[0].streamer.engine.drain()
        assert files_digest(tmp_path / "state") != before

    def scenario(trainer) -> None:
        trainer.train_step()
        nan_in_last_bucket(trainer, scenarios.model_params(trainer)[last])
        train(2)(trainer)

    resident, streamed = scenarios.resident_and_streamed(tmp_path, scenario, config)
    assert scenarios.differing(resident, streamed) == []


@on_one_rank
def test_a_nan_that_is_not_skipped_is_the_resident_one(scenarios, tmp_path):
    last = last_streamed_param(scenarios, tmp_path, scenarios.TINY)

    def scenario(trainer) -> None:
        trainer.train_step()
        nan_in_last_bucket(trainer, scenarios.model_params(trainer)[last])
        train(2)(trainer)  # not poisoned: the step after it runs

    resident, streamed = scenarios.resident_and_streamed(tmp_path, scenario)
    assert any(torch.isnan(value).any() for value in streamed.values())
    assert scenarios.differing(resident, streamed) == []


# ---- the trainer's own checkpoint --------------------------------------------------------------------------


def tensors_in(tree) -> list[torch.Tensor]:
    from torch.utils._pytree import tree_leaves

    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("fp16", [False, True])
@pytest.mark.parametrize("native_fp32_norms", [False, True])
@on_one_rank
def test_the_state_dict_makes_a_round_trip(scenarios, tmp_path, steps, fp16, native_fp32_norms):
    config = dataclasses.replace(
        scenarios.TINY,
        bf16=not fp16,
        fp16=fp16,
        native_fp32_norms=native_fp32_norms,
        initial_loss_scale=2.0**9,
    )
    args = scenarios.stream_args(tmp_path)
    with scenarios.training(args, config) as (trainer, _):
        train(steps)(trainer)
        for group in trainer.optimizer.param_groups:
            group["lr"] = 3e-3
        saved = trainer.optimizer.state_dict()
        sharded = trainer.optimizer.sharded_state_dict(trainer.model[0].sharded_state_dict())
        scale = trainer.optimizer.get_loss_scale().item()
    assert all(tensor.numel() == 1 for tensor in tensors_in(saved) + tensors_in(sharded))
    assert {group["step"] for group in saved["optimizer"]["param_groups"]} == {steps}

    fresh = dataclasses.replace(config, initial_loss_scale=2.0**5)
    with scenarios.training(args, fresh) as (trainer, stores):
        trainer.optimizer.load_state_dict(saved)
        assert {group["lr"] for group in trainer.optimizer.param_groups} == {3e-3}
        assert trainer.optimizer.get_loss_scale().item() == (scale if fp16 else 1.0)
        assert {step for *_, step in stores[0].states()} == {steps}
        assert not part_of(trainer).optimizer.state, "Megatron allocated state of its own"
        trainer.train_step()
        assert {step for *_, step in stores[0].states()} == {steps + 1}
        again = trainer.optimizer.state_dict()
        assert {group["step"] for group in again["optimizer"]["param_groups"]} == {steps + 1}


@on_one_rank
def test_a_resident_checkpoint_with_tensors_is_refused(scenarios, tmp_path):
    with scenarios.training(scenarios.stream_args(tmp_path)) as (trainer, _):
        saved = trainer.optimizer.state_dict()
        with pytest.raises(UnsupportedError, match="resident optimizer checkpoint"):
            trainer.optimizer.load_state_dict({**saved, "param_state": {}})


# ---- refusals ----------------------------------------------------------------------------------------------


def change_config(part, **settings) -> None:
    part.config = copy.copy(part.config)
    for name, value in settings.items():
        setattr(part.config, name, value)


def change_ddp(part, **settings) -> None:
    part.ddp_config = copy.copy(part.ddp_config)
    for name, value in settings.items():
        setattr(part.ddp_config, name, value)


REFUSED = {
    "Megatron-FSDP": lambda part: change_ddp(part, use_megatron_fsdp=True),
    "the precision-aware optimizer": lambda part: change_config(part, use_precision_aware_optimizer=True),
    "fp8 and fp4 params": lambda part: change_config(part, reuse_grad_buf_for_mxfp8_param_ag=True),
    "SGD": lambda part: setattr(part, "optimizer", torch.optim.SGD(part.optimizer.param_groups, lr=0.1)),
}


@pytest.mark.parametrize("name", REFUSED)
@on_one_rank
def test_what_cannot_be_streamed_is_refused_by_name(scenarios, tmp_path, name):
    with scenarios.training() as (trainer, _):
        REFUSED[name](part_of(trainer))
        with pytest.raises(UnsupportedError, match=f"^{name} cannot be streamed"):
            scenarios.setup_optimizer_state_streaming(scenarios.stream_args(tmp_path), trainer.optimizer)
        assert "state_dict" not in vars(part_of(trainer))
    assert os.listdir(tmp_path) == []


@on_one_rank
def test_an_optimizer_that_is_not_distributed_is_refused_by_name(scenarios, tmp_path):
    job = scenarios.SmallJob(None, {"matrix": 10, "vector": 2})
    config = scenarios.small_optimizer_config(use_distributed_optimizer=False)
    plain = scenarios.get_megatron_optimizer(config, [job.model])
    with pytest.raises(UnsupportedError, match="Float16OptimizerWithFloat16Params cannot be streamed"):
        scenarios.setup_optimizer_state_streaming(scenarios.stream_args(tmp_path), plain)
    scenarios.parallel_state.destroy_model_parallel()


@on_one_rank
def test_the_params_norm_and_a_second_set_up_are_refused(scenarios, tmp_path):
    args = scenarios.stream_args(tmp_path)
    with scenarios.training(args) as (trainer, stores):
        with pytest.raises(UnsupportedError, match="already streamed"):
            scenarios.setup_optimizer_state_streaming(args, trainer.optimizer)
        assert part_of(trainer)._nvme_state_store is stores[0]
        trainer.train_step()
    args.log_params_norm = True
    with pytest.raises(UnsupportedError, match="--log-params-norm"), scenarios.training(args):
        pass


@on_one_rank
def test_arguments_that_do_not_go_together_are_refused_before_anything_is_built(scenarios, tmp_path):
    args = scenarios.stream_args(tmp_path, optimizer="sgd")
    with pytest.raises(StreamConfigError, match="stream-needs-adam"), scenarios.training(args):
        pass
    assert os.listdir(tmp_path) == []


def known_classes() -> dict[str, type]:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer

    return {"DistributedOptimizer": DistributedOptimizer, "MixedPrecisionOptimizer": MixedPrecisionOptimizer}


def test_every_method_of_the_installed_megatron_is_known():
    assert megatron_fingerprints.unknown_methods(known_classes()) == []


@pytest.mark.parametrize(("owner", "method"), megatron_fingerprints.KNOWN)
def test_a_method_that_a_release_changed_is_named(monkeypatch, owner, method):
    def changed(self):
        return "something else"

    monkeypatch.setattr(known_classes()[owner], method, changed)
    assert megatron_fingerprints.unknown_methods(known_classes()) == [f"{owner}.{method}"]


@on_one_rank
def test_an_unknown_release_is_refused_by_the_methods_name(scenarios, tmp_path, monkeypatch):
    def step_with_ready_grads(self):
        return True

    with scenarios.training() as (trainer, _):
        monkeypatch.setattr(
            known_classes()["DistributedOptimizer"], "step_with_ready_grads", step_with_ready_grads
        )
        with pytest.raises(UnsupportedError, match=r"changed DistributedOptimizer\.step_with_ready_grads"):
            scenarios.setup_optimizer_state_streaming(scenarios.stream_args(tmp_path), trainer.optimizer)


# ---- several ranks, several models -------------------------------------------------------------------------


def test_a_group_that_is_empty_on_one_rank_keeps_step_with_the_others(scenarios, tmp_path):
    # 10 + 2: each rank owns one of the two parameters. 10 alone: rank 1 owns nothing.
    models = [{"matrix": 10, "vector": 2}, {"matrix": 10}]
    first, second = run_ranks(scenarios.small_sizes_on_rank, 2, str(tmp_path), models)
    both, alone = zip(first, second, strict=True)
    assert [each["equal"] for each in both + alone] == [True] * 4
    assert [each["saved"] for each in both + alone] == [{3.0}] * 4
    assert sorted((each["steps"] for each in both), key=str) == [{"matrix": 3}, {"vector": 3}]
    assert [each["steps"] for each in alone] == [{"matrix": 3}, {}]


def test_a_failure_on_one_rank_is_everybodys_and_names_it(scenarios, tmp_path):
    (setup_0, steps_0, _), (setup_1, steps_1, _) = run_ranks(
        scenarios.uneven_failure_on_rank, 2, str(tmp_path), collective_timeout_s=120
    )
    kind, message, taken_over = setup_1
    assert kind == "StorageError"
    assert "bucket-00001.bin" in message
    assert taken_over == []
    assert setup_0[0] == RemoteRankError.__name__
    assert setup_0[1].startswith("rank 1 failed")
    assert message in setup_0[1]
    assert setup_0[2] == []

    assert [kind for kind, _ in steps_1] == ["TransferError", "PoisonedError"]
    assert [kind for kind, _ in steps_0] == [RemoteRankError.__name__, "PoisonedError"]
    assert steps_1[0][1] in steps_0[0][1]
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@on_one_rank
def test_actor_and_critic_stream_into_one_directory_at_the_same_time(scenarios, tmp_path):
    args = scenarios.stream_args(tmp_path, stream_optimizer_state_bucket_numel=128)
    small, large = {"matrix": 500, "vector": 3}, {"matrix": 900, "vector": 5}
    actor = scenarios.SmallJob(args, small, role="actor")
    critic = scenarios.SmallJob(args, large, role="critic")
    resident = [scenarios.SmallJob(None, small), scenarios.SmallJob(None, large)]
    for _ in range(3):
        for job in (actor, critic, *resident):
            job.step()
    for streamed, reference in zip((actor, critic), resident, strict=True):
        for one, other in zip(streamed.params(), reference.params(), strict=True):
            assert torch.equal(one, other)
    for job in (actor, critic):
        job.close()
    scenarios.parallel_state.destroy_model_parallel()


@on_one_rank
def test_streaming_alone_needs_no_offload_and_no_directory(scenarios, tmp_path, monkeypatch):
    monkeypatch.setenv("SCRATCH", str(tmp_path))
    args = scenarios.stream_args("")
    del args.offload_train_disk_dir
    with scenarios.training(args) as (trainer, stores):
        assert args.offload_train is False
        trainer.train_step()
        stores[0].streamer.engine.drain()
        assert Path(stores[0].streamer.store.backend.root).is_relative_to(tmp_path)
        assert stores[0].records[0].written_bytes == 12 * sum(
            param.numel() for param in scenarios.model_params(trainer).values()
        )
