"""The simulation with the installed Megatron-Core: nothing of it stays, and its random numbers are the real
ones."""

from __future__ import annotations

import inspect

import pytest
import torch

from optstream.harness import simulated_cuda as module
from optstream.harness.launch import run_ranks
from optstream.harness.simulated_cuda import simulated_cuda
from optstream.harness.training_config import TrainingConfig
from optstream.harness.training_state import train_resident

pytestmark = pytest.mark.e2e

MISSING = object()


def patched_places() -> dict:
    shims = (*module.torch_shims(), *module.megatron_shims())
    return {
        (shim.owner, shim.name): (
            inspect.getattr_static(shim.owner, shim.name, MISSING),
            shim.name in vars(shim.owner),
        )
        for shim in shims
    }


def test_megatron_and_torch_are_put_back_after_training():
    before = patched_places()
    with pytest.raises(KeyError), simulated_cuda():
        raise KeyError
    run_ranks(train_resident, 1, TrainingConfig(steps=1, experts=2))
    for (owner, name), (value, own) in before.items():
        assert inspect.getattr_static(owner, name, MISSING) is value, name
        assert (name in vars(owner)) == own, name


def test_no_stand_in_stays_in_a_megatron_module():
    """Also not in modules that were imported, or cached something, while the simulation ran."""
    run_ranks(train_resident, 1, TrainingConfig(steps=1, experts=2))
    import sys

    stand_ins = {module.Stream, module.Event}
    for name, loaded in list(sys.modules.items()):
        if not name.startswith("megatron."):
            continue
        for attribute, value in list(vars(loaded).items()):
            assert value not in stand_ins if isinstance(value, type) else True, f"{name}.{attribute}"
            assert not isinstance(value, tuple(stand_ins)), f"{name}.{attribute}"
            if isinstance(value, type):
                for inner, cached in list(vars(value).items()):
                    assert not isinstance(cached, tuple(stand_ins)), f"{name}.{attribute}.{inner}"


def test_leaving_a_forked_generator_restores_the_one_outside():
    """The silent trap: queued until CUDA initialises, the restore never happens and all later weights
    differ."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    with simulated_cuda():
        tracker = CudaRNGStatesTracker()
        torch.cuda.manual_seed(1)
        tracker.add("forked", seed=2)
        outside = torch.rand(3, device="cuda")
        with tracker.fork("forked"):
            first = torch.rand(3, device="cuda")
        outside_after = torch.rand(3, device="cuda")
        with tracker.fork("forked"):
            second = torch.rand(3, device="cuda")

    stream_outside = torch.rand(6, generator=torch.Generator().manual_seed(1))
    stream_forked = torch.rand(6, generator=torch.Generator().manual_seed(2))
    assert torch.equal(torch.cat([outside, outside_after]), stream_outside)
    assert torch.equal(torch.cat([first, second]), stream_forked)


def test_the_generators_of_a_megatron_world_are_quiet_and_forked_apart(caplog):
    run = run_ranks(train_resident, 1, TrainingConfig(steps=1))[0]
    assert "CPU RNG state changed" not in caplog.text
    weights = [param for name, param in run.initial_params.items() if name.endswith("linear_fc1.weight")]
    assert len(weights) == 2
    # Megatron draws weights from a normal distribution of standard deviation 0.02.
    for weight in weights:
        assert weight.float().std().item() == pytest.approx(0.02, rel=0.05)
    assert not torch.equal(*weights)
