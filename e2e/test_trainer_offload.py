"""A Megatron trainer that sleeps and wakes: the same objects and bits, and only what is resident moves."""

from __future__ import annotations

import dataclasses
import sys
import types
from pathlib import Path

import pytest
import torch

from optstream.backends import open_backend
from optstream.backends.errors import OptstreamError, StorageError, TransferError
from optstream.core.errors import AsleepError, PoisonedError, RemoteRankError, StreamConfigError
from optstream.core.sleeper import NOTHING
from optstream.core.trainer_offload import trainer_offload, trainer_tensors
from optstream.harness.faults import FaultPlan, FaultyBackend, Injector
from optstream.harness.launch import run_ranks

pytestmark = pytest.mark.e2e

RESIDENT = "resident"
STREAMED = "streamed"
# --offload-train-disk-chunk-mb is in whole MiB, which the tiny model is smaller than.
TARGETS = ["cpu", "disk"]


@pytest.fixture
def scenarios(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import adapter_scenarios

    return adapter_scenarios


def offload_args(scenarios, directory, target: str, streamed: bool = False, **flags):
    return scenarios.stream_args(
        directory,
        stream_optimizer_state_to_disk=streamed,
        offload_train=True,
        offload_train_target=target,
        **flags,
    )


def in_world(test, *arguments):
    return run_ranks(lambda rank: test(*arguments), 1)[0]


@pytest.mark.parametrize("native_fp32_norms", [False, True])
@pytest.mark.parametrize(("state", "target"), [(RESIDENT, "cpu"), (RESIDENT, "disk"), (STREAMED, "disk")])
def test_training_with_sleep_is_training_without_it(scenarios, tmp_path, state, target, native_fp32_norms):
    config = dataclasses.replace(scenarios.TINY, native_fp32_norms=native_fp32_norms)
    args = offload_args(scenarios, tmp_path, target, state == STREAMED)

    def check() -> None:
        with scenarios.training(None, config) as (trainer, _):
            for _ in range(3):
                trainer.train_step()
            expected = scenarios.everything(trainer, [])
        with scenarios.training(args, config) as (trainer, stores):
            assert bool(stores) == (state == STREAMED)
            offload = trainer_offload(args, trainer.model, trainer.optimizer)
            for _ in range(3):
                held = list(trainer_tensors(trainer.model, trainer.optimizer))
                before = [(type(tensor), tensor.detach().clone()) for tensor in held]
                asleep = offload.sleep()
                awake = offload.wake_up()
                assert asleep.bytes == awake.bytes > 0
                for tensor, (kind, values) in zip(held, before, strict=True):
                    assert type(tensor) is kind
                    assert torch.equal(tensor.detach().view(-1), values.view(-1))
                again = list(trainer_tensors(trainer.model, trainer.optimizer))
                assert all(one is other for one, other in zip(held, again, strict=True))
                trainer.train_step()
            assert scenarios.differing(expected, scenarios.everything(trainer, stores)) == []
            offload.close()

    in_world(check)


def test_streamed_state_does_not_move(scenarios, tmp_path):
    def moved(streamed: bool) -> tuple[int, int, int]:
        args = offload_args(scenarios, tmp_path, "disk", streamed, stream_optimizer_state_keep_slots=True)
        with scenarios.training(args) as (trainer, stores):
            offload = trainer_offload(args, trainer.model, trainer.optimizer)
            trainer.train_step()
            moved = offload.sleep()
            assert all(not store.streamer.engine.slots for store in stores), "kept slots are given up, too"
            assert offload.wake_up().bytes == moved.bytes
            trainer.train_step()
            params = list(scenarios.model_params(trainer).values())
            buffers = [buffer for chunk in trainer.model for buffer in chunk.buffers]
            others = sum(tensor.nbytes for chunk in trainer.model for tensor in chunk.module.buffers())
            model = sum(buffer.param_data.nbytes + buffer.grad_data.nbytes for buffer in buffers) + others
            offload.close()
            return moved.bytes, model, sum(param.numel() for param in params)

    def check() -> None:
        resident, model, parameters = moved(streamed=False)
        streamed, *_ = moved(streamed=True)
        assert resident == model + 12 * parameters
        assert streamed == model
        assert resident - streamed == 12 * parameters

    in_world(check)


USES = {
    "a training step": lambda trainer: trainer.train_step(),
    "forward": lambda trainer: trainer.model[0](torch.zeros(1, 4, dtype=torch.long), None, None),
    "an optimizer step": lambda trainer: trainer.optimizer.step(),
    "clearing gradients": lambda trainer: trainer.model[0].zero_grad_buffer(),
    "the model's state dict": lambda trainer: trainer.model[0].state_dict(),
    "reloading": lambda trainer: trainer.optimizer.reload_model_params(),
    "a parameter": lambda trainer: next(iter(trainer.model[0].parameters())).sum(),
}


@pytest.mark.parametrize("state", [RESIDENT, STREAMED])
def test_asleep_every_use_is_a_clear_error(scenarios, tmp_path, state):
    args = offload_args(scenarios, tmp_path, "disk", state == STREAMED)

    def check() -> None:
        with scenarios.training(args) as (trainer, stores):
            offload = trainer_offload(args, trainer.model, trainer.optimizer)
            trainer.train_step()
            before = scenarios.everything(trainer, stores)
            for store in stores:
                store.save_to(tmp_path / "checkpoint")
            offload.sleep()
            assert offload.is_asleep
            for use in USES.values():
                with pytest.raises(AsleepError, match="Call wake_up"):
                    use(trainer)
            for store in stores:
                for use in (store.save_to, store.load_from):
                    with pytest.raises(AsleepError, match="Call wake_up"):
                        use(tmp_path / "checkpoint")
            offload.wake_up()
            assert scenarios.differing(before, scenarios.everything(trainer, stores)) == []
            offload.close()

    in_world(check)


@pytest.mark.parametrize("target", TARGETS)
def test_sleeping_or_waking_twice_does_nothing_the_second_time(scenarios, tmp_path, target):
    args = offload_args(scenarios, tmp_path, target)

    def check() -> None:
        with scenarios.training(args) as (trainer, _):
            offload = trainer_offload(args, trainer.model, trainer.optimizer)
            assert offload.wake_up() == NOTHING
            trainer.train_step()
            before = scenarios.everything(trainer, [])
            assert offload.sleep().bytes > 0
            assert offload.sleep() == NOTHING
            assert offload.wake_up().bytes > 0
            assert offload.wake_up() == NOTHING
            assert scenarios.differing(before, scenarios.everything(trainer, [])) == []
            offload.close()
            offload.close()

    in_world(check)


def test_sleep_ends_the_writes_that_a_step_left_behind(scenarios, tmp_path):
    """Every write is slow; the state in the files afterwards is that of the step all the same."""
    args = offload_args(scenarios, tmp_path, "disk", True, stream_optimizer_state_host_cache_mb=1)

    def slow(directories, *, subdirectory: str):
        backend = open_backend(directories, subdirectory=subdirectory)
        return FaultyBackend(backend, FaultPlan.parse("seed=0 latency@write#1+"))

    def check() -> None:
        with scenarios.training() as (trainer, _):
            for _ in range(2):
                trainer.train_step()
            expected = scenarios.everything(trainer, [])
        with scenarios.training() as (trainer, _):
            stores = scenarios.setup_optimizer_state_streaming(
                args, trainer.optimizer, backend_factory=slow, staged=True
            )
            offload = trainer_offload(args, trainer.model, trainer.optimizer)
            for _ in range(2):
                trainer.train_step()
                offload.sleep()
                written = stores[0].records[-1].written_bytes
                offload.wake_up()
                assert written == 12 * sum(entry.numel for entry in stores[0].streamer.entries)
            assert scenarios.differing(expected, scenarios.everything(trainer, stores)) == []
            offload.close()
            stores[0].close()

    in_world(check)


def test_sleep_during_a_save_in_the_background_spoils_neither(scenarios, tmp_path):
    args = offload_args(scenarios, tmp_path / "scratch", "disk", True)

    def check() -> None:
        with scenarios.training(args) as (trainer, stores):
            offload = trainer_offload(args, trainer.model, trainer.optimizer)
            trainer.train_step()
            stores[0].save_to(tmp_path / "checkpoint", background=True)
            offload.sleep()
            offload.wake_up()
            stores[0].wait_for_save()
            saved = scenarios.everything(trainer, stores)
            trainer.train_step()
            assert scenarios.differing(saved, scenarios.everything(trainer, stores)) != []
            assert stores[0].load_from(tmp_path / "checkpoint")
            found = scenarios.everything(trainer, stores)
            assert [name for name in scenarios.differing(saved, found) if not name.startswith("param ")] == []
            offload.close()

    in_world(check)


def test_a_sleep_that_fails_leaves_the_trainer_awake_and_a_wake_that_fails_asleep(scenarios, tmp_path):
    args = offload_args(scenarios, tmp_path, "disk")
    plan = FaultPlan.parse("seed=0 EIO@write#2 EIO@read#2")

    def faulty(directories, *, subdirectory: str):
        return FaultyBackend(open_backend(directories, subdirectory=subdirectory), plan)

    def check() -> None:
        with scenarios.training() as (trainer, _):
            offload = trainer_offload(args, trainer.model, trainer.optimizer, backend_factory=faulty)
            trainer.train_step()
            before = scenarios.everything(trainer, [])
            with pytest.raises(TransferError):
                offload.sleep()
            assert not offload.is_asleep
            assert scenarios.differing(before, scenarios.everything(trainer, [])) == []
            offload.sleep()
            with pytest.raises(TransferError):
                offload.wake_up()
            assert offload.is_asleep
            with pytest.raises(AsleepError):
                trainer.train_step()
            offload.wake_up()
            assert scenarios.differing(before, scenarios.everything(trainer, [])) == []
            trainer.train_step()
            offload.close()

    in_world(check)


def test_a_store_that_refuses_to_step_refuses_to_sleep(scenarios, tmp_path):
    """Asleep, nobody would look at it until training goes on."""
    args = offload_args(scenarios, tmp_path / "scratch", "disk", True)
    injector = Injector(FaultPlan.parse("seed=0 EIO@read#2"))

    def failing(directories, *, subdirectory: str):
        return FaultyBackend(open_backend(directories, subdirectory=subdirectory), injector)

    def check() -> None:
        with scenarios.training() as (trainer, _):
            stores = scenarios.setup_optimizer_state_streaming(
                args, trainer.optimizer, backend_factory=failing, staged=True
            )
            offload = trainer_offload(args, trainer.model, trainer.optimizer)
            injector.armed = False
            stores[0].save_to(tmp_path / "checkpoint")
            injector.armed = True
            with pytest.raises(StorageError):
                trainer.train_step()
            with pytest.raises(PoisonedError, match="load_from"):
                offload.sleep()
            assert not offload.is_asleep
            assert stores[0].load_from(tmp_path / "checkpoint")
            assert offload.sleep().bytes == offload.wake_up().bytes > 0
            trainer.train_step()
            offload.close()
            stores[0].close()

    in_world(check)


def test_a_closed_offload_says_so(scenarios, tmp_path):
    args = offload_args(scenarios, tmp_path, "disk")

    def check() -> None:
        with scenarios.training(args) as (trainer, _):
            offload = trainer_offload(args, trainer.model, trainer.optimizer)
            offload.close()
            for use in (offload.sleep, offload.wake_up):
                with pytest.raises(OptstreamError, match="closed"):
                    use()

    in_world(check)


def test_ranks_fail_to_sleep_together(scenarios, tmp_path):
    first, second = run_ranks(scenarios.failing_sleep_on_rank, 2, str(tmp_path))
    assert second[0] == "TransferError"
    assert first[0] == RemoteRankError.__name__
    assert second[1] in first[1]
    assert first[2] == second[2] == [False, True], "awake after the failure, asleep after the next try"


def test_without_trainer_offload_there_is_none(scenarios, tmp_path):
    args = scenarios.stream_args(tmp_path)

    def check() -> None:
        with scenarios.training(args) as (trainer, _):
            assert trainer_offload(args, trainer.model, trainer.optimizer) is None

    in_world(check)


def test_streaming_with_offload_to_the_cpu_is_refused(scenarios, tmp_path):
    args = offload_args(scenarios, tmp_path, "cpu", True)
    with pytest.raises(StreamConfigError, match="stream-offload-needs-disk"):
        trainer_offload(args, [], None)


def test_torch_memory_saver_is_used_where_it_is_hooked(scenarios, tmp_path, monkeypatch):
    """Its part is played: it cannot be hooked without CUDA. Contents go while it pauses, as physical memory
    does."""
    from optstream.core import device_memory

    calls, held = [], []

    class Saver:
        enabled = True

        def pause(self, tag: str) -> None:
            calls.append(("pause", tag))
            for storage in held:
                torch.empty(0, dtype=torch.uint8).set_(storage).fill_(255)

        def resume(self, tag: str) -> None:
            calls.append(("resume", tag))

    module = types.ModuleType("torch_memory_saver")
    module.torch_memory_saver = Saver()
    monkeypatch.setitem(sys.modules, "torch_memory_saver", module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(device_memory.importlib.util, "find_spec", lambda name: module)
    assert device_memory.memory_saver_is_hooked()
    chosen = device_memory.device_memory()
    monkeypatch.undo()
    args = offload_args(scenarios, tmp_path, "disk")

    def check() -> None:
        with scenarios.training() as (trainer, _):
            offload = trainer_offload(args, trainer.model, trainer.optimizer, memory=chosen)
            trainer.train_step()
            before = scenarios.everything(trainer, [])
            held.extend(
                {
                    tensor.untyped_storage()
                    for tensor in trainer_tensors(trainer.model, trainer.optimizer)
                    if tensor.untyped_storage().nbytes()
                }
            )
            addresses = [storage.data_ptr() for storage in held]
            offload.sleep()
            offload.wake_up()
            assert [storage.data_ptr() for storage in held] == addresses
            assert scenarios.differing(before, scenarios.everything(trainer, [])) == []
            offload.close()
        assert [call for call, _ in calls] == ["pause", "resume"]

    in_world(check)
