"""What the simulation answers, and that nothing of it stays. Without Megatron: the shims on torch alone."""

from __future__ import annotations

import inspect
import threading

import pytest
import torch
import torch._dynamo  # decorates some of torch's functions for good when it is first imported

from optstream.harness import simulated_cuda as module
from optstream.harness.simulated_cuda import simulated_cuda

pytestmark = pytest.mark.unit

OWNERS = (torch, torch.cuda, torch.cuda.random, torch.Tensor, torch.accelerator)


@pytest.fixture(autouse=True)
def without_megatron(monkeypatch):
    monkeypatch.setattr(module, "_has_megatron", lambda: False)


def everything() -> dict:
    """Every attribute of the patched places, not only those on the list of shims."""
    return {(owner.__name__, name): value for owner in OWNERS for name, value in vars(owner).items()}


def changed(before: dict) -> set:
    after = everything()
    return {key for key in before | after if before.get(key) is not after.get(key)}


def test_everything_is_put_back():
    before = everything()
    with simulated_cuda():
        assert changed(before) == {(shim.owner.__name__, shim.name) for shim in module.torch_shims()}
    assert changed(before) == set()


def test_everything_is_put_back_after_an_exception():
    before = everything()
    with pytest.raises(KeyError), simulated_cuda():
        raise KeyError
    assert changed(before) == set()


def test_a_shim_that_cannot_be_applied_leaves_nothing(monkeypatch):
    before = everything()
    shims = (*module.torch_shims(), module.Shim(object, "read_only", None, "cannot be set"))
    monkeypatch.setattr(module, "torch_shims", lambda: shims)
    with pytest.raises(TypeError), simulated_cuda():
        pytest.fail("entered")
    assert changed(before) == set()


def test_the_last_exit_undoes_also_when_nested_in_another_thread():
    before = everything()
    inside, leave = threading.Event(), threading.Event()

    def other():
        with simulated_cuda():
            inside.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with simulated_cuda():
        shims = changed(before)
        thread.start()
        inside.wait()
    try:
        assert changed(before) == shims
    finally:
        leave.set()
        thread.join()
    assert changed(before) == set()


def test_every_shim_says_why():
    for shim in module.torch_shims():
        assert shim.why, shim.name


@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda"), torch.device("cuda", 1), 0])
def test_factories_place_on_the_cpu(device):
    with simulated_cuda():
        made = [
            torch.tensor([1.0], device=device),
            torch.zeros(2, device=device),
            torch.empty(2, device=device, pin_memory=True),
            torch.arange(3, device=device),
            torch.ones_like(torch.zeros(2), device=device),
            torch.zeros(1).new_full((2,), 3.0, device=device),
            torch.zeros(2).to(device),
            torch.zeros(2).to(device=device, dtype=torch.bfloat16),
            torch.zeros(2).cuda(device),
            torch.zeros(2).pin_memory(),
            torch.nn.Linear(2, 2).cuda().weight,
            torch.nn.Linear(2, 2).to("cuda").weight,
            torch.zeros(2, device=torch.cuda.current_device()),
        ]
    assert {tensor.device.type for tensor in made} == {"cpu"}
    assert made[7].dtype == torch.bfloat16
    assert not made[9].is_pinned()


def test_other_arguments_pass_unchanged():
    with simulated_cuda():
        assert torch.full((2,), 7, dtype=torch.int16, device="cuda").tolist() == [7, 7]
        assert torch.zeros(2).to(torch.float64).dtype == torch.float64
        assert torch.zeros(2, device="meta").device.type == "meta"
        assert torch.zeros(2, dtype=torch.int8).to(torch.zeros(1)).dtype == torch.float32
        tensor = torch.zeros(2)
        assert tensor.to("cuda") is tensor


def test_type_names_are_those_of_cuda_tensors():
    with simulated_cuda():
        assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
        assert torch.zeros(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
        assert torch.zeros(1).type("torch.cuda.HalfTensor").dtype == torch.float16
        assert torch.zeros(1).type(torch.int32).dtype == torch.int32
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_cuda_random_state_is_that_of_the_generator_in_use():
    with simulated_cuda():
        torch.cuda.manual_seed(5)
        state = torch.cuda.get_rng_state()
        first = torch.rand(4, device="cuda")
        assert torch.equal(torch.rand(4, generator=torch.Generator().manual_seed(5)), first)
        torch.cuda.set_rng_state(state)
        assert torch.equal(torch.rand(4, device="cuda"), first)


def test_streams_and_events():
    with simulated_cuda():
        stream = torch.cuda.Stream(device="cuda", priority=-1)
        assert stream != torch.cuda.current_stream()
        assert torch.cuda.current_stream() is torch.cuda.default_stream()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        with torch.cuda.stream(stream):
            stream.wait_stream(torch.cuda.current_stream())
            torch.zeros(1).record_stream(stream)
            end.record(stream)
        end.synchronize()
        assert end.query()
        assert start.elapsed_time(end) >= 0
        assert stream.record_event().query()
        torch.cuda.synchronize()


def test_compiled_functions_run_as_they_are_written():
    def double(x):
        return 2 * x

    with simulated_cuda():
        assert torch.compile(double) is double
        assert torch.compile(fullgraph=True)(double) is double


def test_a_gpu_is_not_claimed():
    available, count = torch.cuda.is_available(), torch.cuda.device_count()
    with simulated_cuda():
        assert torch.cuda.is_available() is available
        assert torch.cuda.device_count() == count


def test_replacements_keep_the_names_of_what_they_replace():
    with simulated_cuda():
        assert torch.zeros.__name__ == "zeros"
        assert inspect.getattr_static(torch.Tensor, "to").__name__ == "to"
