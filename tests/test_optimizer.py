"""StreamingAdamW against torch.optim.AdamW on fp32 main params, bit for bit."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from optstream.backends.errors import SpaceError, StorageError, TransferError
from optstream.backends.fake import FakeSystem
from optstream.backends.interface import Backend
from optstream.backends.nvme import NvmeBackend
from optstream.core.config import StreamConfig
from optstream.core.errors import AsleepError, OptstreamError, PoisonedError, UnsupportedError
from optstream.core.optimizer import StreamingAdamW
from optstream.core.parking import HostParking
from optstream.core.sleeper import Sleeper
from optstream.harness.faults import FaultPlan, FaultyBackend, Kind, Operation

pytestmark = pytest.mark.unit

MAIN_AND_MOMENTS = ("main", "exp_avg", "exp_avg_sq")
HANG_S = 300


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    """A hang ends the test run with every thread's stack, instead of hanging it. Not a verdict on speed."""
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def fake_backend(**disk) -> Backend:
    return NvmeBackend("/disk", subdirectory="test/optimizer", system=FakeSystem(**disk))


def config(directory: str = "/unused", **fields) -> StreamConfig:
    return StreamConfig(True, (directory,), **{"bucket_numel": 1024, "depth": 2, **fields})


def parameters(sizes: list[int], dtypes: list[torch.dtype], seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.nn.Parameter(torch.randn(size, generator=generator).to(dtype))
        for size, dtype in zip(sizes, dtypes, strict=True)
    ]


def gradient(param: torch.nn.Parameter, seed: int) -> torch.Tensor:
    return torch.randn(param.shape, generator=torch.Generator().manual_seed(seed)).to(param.dtype)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """torch.equal finds NaN unequal to itself, and 0.0 equal to -0.0."""
    integers = {4: torch.int32, 2: torch.int16}[one.element_size()]
    return one.dtype == other.dtype and torch.equal(one.view(integers), other.view(integers))


class Resident:
    """What a trainer does without streaming: torch's own AdamW on fp32 main params (the params themselves,
    where those are fp32), whose values are copied back. Written against torch alone."""

    def __init__(self, groups: list[dict], **adamw) -> None:
        self.main_of: dict[torch.nn.Parameter, torch.Tensor] = {}
        masters = []
        for group in groups:
            for param in group["params"]:
                is_fp32 = param.dtype is torch.float32
                self.main_of[param] = param if is_fp32 else torch.nn.Parameter(param.detach().float())
            masters.append({**group, "params": [self.main_of[param] for param in group["params"]]})
        self.optimizer = torch.optim.AdamW(masters, **adamw)

    def step(self) -> None:
        for param, main in self.main_of.items():
            if main is not param:
                main.grad = None if param.grad is None else param.grad.float()
        self.optimizer.step()
        with torch.no_grad():
            for param, main in self.main_of.items():
                if main is not param and param.grad is not None:
                    param.copy_(main)

    def state_of(self, param: torch.nn.Parameter) -> dict:
        main = self.main_of[param]
        state = self.optimizer.state[main]
        zeros = torch.zeros_like(main.detach())
        return {
            "main": main.detach(),
            "exp_avg": state.get("exp_avg", zeros),
            "exp_avg_sq": state.get("exp_avg_sq", zeros),
            "step": int(state.get("step", 0)),
        }


class Pair:
    """A streamed and a resident optimizer over equal params, fed the same gradients."""

    def __init__(self, groups: list[dict], streamed: StreamConfig, *, staged=None, backend=None, **adamw):
        copies = [
            {**group, "params": [torch.nn.Parameter(p.detach().clone()) for p in group["params"]]}
            for group in groups
        ]
        for group, copied in zip(groups, copies, strict=True):
            for param, twin in zip(group["params"], copied["params"], strict=True):
                twin.requires_grad_(param.requires_grad)
        self.params = [param for group in groups for param in group["params"]]
        self.twins = [param for group in copies for param in group["params"]]
        self.resident = Resident(copies, **adamw)
        self.streamed = StreamingAdamW(groups, streamed, staged=staged, backend=backend, **adamw)

    def set_gradients(self, seed: int, without: set[int] = frozenset()) -> None:
        for index, (param, twin) in enumerate(zip(self.params, self.twins, strict=True)):
            has_none = index in without or not param.requires_grad
            param.grad = None if has_none else gradient(param, 1000 * seed + index)
            twin.grad = None if has_none else param.grad.clone()

    def set_hyperparameters(self, **values) -> None:
        for optimizer in (self.streamed, self.resident.optimizer):
            for index, group in enumerate(optimizer.param_groups):
                group.update({key: value[index] for key, value in values.items()})

    def step(self, seed: int, without: set[int] = frozenset()) -> None:
        self.set_gradients(seed, without)
        self.streamed.step()
        self.resident.step()

    def check(self) -> None:
        for param, twin in zip(self.params, self.twins, strict=True):
            assert same_bits(param, twin)
        states = iter(self.streamed.full_state().values())
        for param, twin in zip(self.params, self.twins, strict=True):
            if not param.requires_grad or not param.numel():
                continue
            state, expected = next(states), self.resident.state_of(twin)
            assert state["step"] == expected["step"]
            for name in MAIN_AND_MOMENTS:
                assert state[name].shape == param.shape
                assert same_bits(state[name], expected[name]), name
        assert next(states, None) is None


@contextlib.contextmanager
def pair(groups: list[dict], streamed: StreamConfig | None = None, **options) -> Iterator[Pair]:
    options.setdefault("backend", fake_backend())
    made = Pair(groups, streamed or config(), **options)
    with contextlib.closing(made.streamed):
        yield made


# ---- the same bits -----------------------------------------------------------------------------------------

dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
shapes = st.lists(
    st.tuples(st.one_of(st.integers(1, 200), st.sampled_from([1023, 1024, 4097])), dtypes),
    min_size=1,
    max_size=4,
)
hyperparameters = st.fixed_dictionaries(
    {
        "lr": st.sampled_from([1e-3, 0.1, 0.0]),
        "betas": st.sampled_from([(0.9, 0.999), (0.9, 0.95), (0.0, 0.5)]),
        "eps": st.sampled_from([1e-8, 1e-3]),
        "weight_decay": st.sampled_from([0.0, 0.01, 0.3]),
    }
)
streaming = st.fixed_dictionaries(
    {
        "bucket_numel": st.sampled_from([256, 1000, 4096, 1 << 20]),
        "depth": st.integers(1, 4),
        "host_cache_bytes": st.sampled_from([0, 50_000, 1 << 30]),
        "keep_slots": st.booleans(),
        "write_behind": st.booleans(),
        "read_ahead": st.booleans(),
        "verify": st.booleans(),
        "chunk_bytes": st.sampled_from([4096, 1 << 22]),
    }
)


@given(
    shapes=st.lists(shapes, min_size=1, max_size=2),
    streaming=streaming,
    staged=st.booleans(),
    fused=st.booleans(),
    maximize=st.booleans(),
    data=st.data(),
)
def test_any_configuration_gives_the_resident_bits(shapes, streaming, staged, fused, maximize, data):
    groups = []
    for index, group in enumerate(shapes):
        params = parameters([size for size, _ in group], [dtype for _, dtype in group], seed=index)
        groups.append({"params": params, **data.draw(hyperparameters, label=f"group {index}")})
    with pair(groups, config(**streaming), staged=staged, fused=fused, maximize=maximize) as both:
        for step in range(data.draw(st.integers(1, 4), label="steps")):
            everyone = range(len(both.params))
            without = data.draw(st.just(set()) | st.sets(st.sampled_from(everyone)), label="no gradient")
            if data.draw(st.booleans(), label="read ahead"):
                both.streamed.streamer.read_ahead()
            both.step(step, without)
            if data.draw(st.booleans(), label="new hyperparameters"):
                drawn = [data.draw(hyperparameters) for _ in groups]
                both.set_hyperparameters(**{key: [one[key] for one in drawn] for key in drawn[0]})
            if data.draw(st.booleans(), label="look"):
                both.check()
        both.check()


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("depth", [1, 4])
def test_on_real_files(tmp_path, staged, depth):
    kinds = [torch.float32, torch.bfloat16, torch.float32, torch.bfloat16]
    params = parameters([1, 1023, 4097, 70_000], kinds)
    streamed = config(str(tmp_path), bucket_numel=4096, depth=depth)
    with pair([{"params": params}], streamed, staged=staged, backend=None) as both:
        for step in range(3):
            both.step(step)
        both.check()
        assert [file for file in tmp_path.rglob("bucket-*") if file.is_file()]
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]


def test_a_param_far_larger_than_bucket_and_chunk():
    """The same at every cut: the group's step advances by one, not once a bucket."""
    with pair([{"params": parameters([5 * 4096], [torch.bfloat16])}], config(bucket_numel=4096)) as both:
        assert len(both.streamed.streamer.buckets) == 5
        for step in range(1, 4):
            both.step(step)
            assert both.streamed.streamer.counts.entries == [step]
            assert both.streamed.streamer.counts.groups == [step]
        both.check()


def test_the_largest_odd_entry():
    """14,412,000 elements in buckets of 8 Mi, moments included, for one step."""
    params = parameters([14_412_000], [torch.float32])
    with pair([{"params": params}], config(bucket_numel=8 << 20), fused=True) as both:
        both.step(1)
        both.check()
        (record,) = both.streamed.records
        assert (record.read_bytes, record.written_bytes) == (4 * 14_412_000, 12 * 14_412_000)


def test_several_threads_of_arithmetic():
    """Threads split a tensor elsewhere than buckets do; no cut at 64 elements changes bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for fused in (False, True):
            params = parameters([200_003], [torch.float32])
            with pair([{"params": params}], config(bucket_numel=64 * 777), fused=fused) as both:
                both.step(1)
                both.step(2)
                both.check()
    finally:
        torch.set_num_threads(threads)


def test_a_gradient_every_second_step():
    """Its own step count and bias correction, as the resident optimizer does it."""
    params = parameters([100, 3000, 50], [torch.float32, torch.bfloat16, torch.float32])
    with pair([{"params": params}]) as both:
        for step in range(6):
            both.step(step, without={1} if step % 2 else set())
        both.check()
        assert both.streamed.streamer.counts.entries == [6, 3, 6]


def test_no_gradient_at_all():
    with pair([{"params": parameters([100, 3000], [torch.float32] * 2)}]) as both:
        both.step(1)
        both.step(2, without={0, 1})
        both.step(3)
        both.check()
        assert both.streamed.records[1].read_bytes == 0


def test_frozen_params_are_left_alone():
    params = parameters([100, 3000, 50], [torch.float32] * 3)
    params[1].requires_grad_(False)
    before = params[1].clone()
    with pair([{"params": params}]) as both:
        both.step(1)
        both.check()
        assert torch.equal(params[1], before)
        assert sum(entry.numel for entry in both.streamed.streamer.entries) == 150


def test_a_param_unfrozen_later_is_refused_and_not_forgotten():
    params = parameters([100, 50], [torch.float32] * 2)
    params[1].requires_grad_(False)
    with pair([{"params": params}]) as both:
        params[1].requires_grad_(True)
        params[1].grad = torch.ones(50)
        with pytest.raises(UnsupportedError, match="frozen when the optimizer was constructed"):
            both.streamed.step()
        params[1].grad = None
        both.step(1, without={1})
        assert same_bits(params[0], both.twins[0])


def test_matrices_scalars_and_empty_params():
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in ((3, 5, 7), (), (0,), (64, 65))]
    with pair([{"params": params}]) as both:
        both.step(1)
        both.step(2)
        both.check()


def test_gradients_of_any_layout():
    params = [torch.nn.Parameter(torch.randn(40, 60))]
    with pair([{"params": params}], config(bucket_numel=512)) as both:
        both.set_gradients(1)
        params[0].grad = params[0].grad.t().contiguous().t()
        assert not params[0].grad.is_contiguous()
        both.streamed.step()
        both.resident.step()
        both.check()


def test_alternate_kernels():
    for adamw in ({"foreach": True}, {"foreach": False}, {"lr": torch.tensor(1e-2)}):
        with pair([{"params": parameters([100, 3000], [torch.float32] * 2)}], **adamw) as both:
            both.step(1)
            both.step(2)
            both.check()


@pytest.mark.parametrize("staged", [False, True])
def test_nan_in_the_last_bucket_gives_the_resident_nan_and_no_poison(staged):
    params = parameters([3000, 64], [torch.bfloat16, torch.float32])
    with pair([{"params": params}], staged=staged) as both:
        both.step(1)
        both.set_gradients(2)
        for param in (params[1], both.twins[1]):
            param.grad[-1] = float("nan")
            param.grad[0] = float("inf")
        both.streamed.step()
        both.resident.step()
        both.check()
        assert params[1].isnan().sum() == 2
        both.step(3)
        both.check()


def test_a_skipped_step_changes_no_byte(tmp_path):
    """The trainer that finds a NaN does not call step: read-ahead must not have changed anything."""
    params = parameters([3000, 64], [torch.bfloat16, torch.float32])
    with pair([{"params": params}], config(str(tmp_path)), backend=None) as both:
        both.step(1)
        both.streamed.streamer.engine.drain()
        before = {path: path.read_bytes() for path in tmp_path.rglob("bucket-*")}
        assert before
        both.set_gradients(2)
        params[1].grad[-1] = float("nan")
        both.streamed.streamer.read_ahead()
        both.streamed.streamer.engine.drain()
        assert {path: path.read_bytes() for path in tmp_path.rglob("bucket-*")} == before
        both.step(3)
        both.check()


# ---- torch's own machinery ---------------------------------------------------------------------------------

SCHEDULERS = {
    "LambdaLR": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.7**step),
    "OneCycleLR": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.1, 0.2], total_steps=9),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_attach(name):
    """OneCycleLR changes beta1 as well, at every step."""
    groups = [
        {"params": parameters([100, 3000], [torch.float32] * 2), "lr": 0.1},
        {"params": parameters([50], [torch.bfloat16], seed=1), "lr": 0.2, "weight_decay": 0.0},
    ]
    with pair(groups) as both, warnings.catch_warnings():
        # "lr_scheduler.step() before optimizer.step()" would mean that it does not know our step.
        warnings.simplefilter("error")
        schedulers = [SCHEDULERS[name](o) for o in (both.streamed, both.resident.optimizer)]
        for step in range(6):
            both.step(step)
            for scheduler in schedulers:
                scheduler.step()
        rates = [[group["lr"] for group in both.streamed.param_groups]]
        rates.append([group["lr"] for group in both.resident.optimizer.param_groups])
        assert rates[0] == rates[1] != [0.1, 0.2]
        both.check()


def test_hooks_run_once_a_step_and_not_once_a_bucket():
    calls = []
    with pair([{"params": parameters([5000], [torch.float32])}]) as both:
        both.streamed.register_step_pre_hook(lambda *_: calls.append("before"))
        both.streamed.register_step_post_hook(lambda *_: calls.append("after"))
        both.step(1)
        both.step(2)
        both.check()
    assert calls == ["before", "after"] * 2


def test_a_closure_is_evaluated_with_gradients():
    param = parameters([100], [torch.float32])[0]
    with pair([{"params": [param]}]) as both:

        def closure() -> torch.Tensor:
            both.streamed.zero_grad()
            loss = (param**2).sum()
            loss.backward()
            return loss

        expected = (param.detach() ** 2).sum().item()
        assert both.streamed.step(closure).item() == expected
        both.twins[0].grad = 2 * both.twins[0].detach()
        both.resident.step()
        both.check()


def test_a_real_training_loop():
    torch.manual_seed(0)
    models = [torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Tanh(), torch.nn.Linear(40, 1))]
    models.append(torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Tanh(), torch.nn.Linear(40, 1)))
    models[1].load_state_dict(models[0].state_dict())
    inputs, targets = torch.randn(50, 30), torch.randn(50, 1)
    streamed = StreamingAdamW(
        models[0].parameters(), config(bucket_numel=256), backend=fake_backend(), lr=0.01
    )
    resident = torch.optim.AdamW(models[1].parameters(), lr=0.01)
    losses: list[list[float]] = [[], []]
    with contextlib.closing(streamed):
        for _ in range(10):
            for model, optimizer, log in zip(models, (streamed, resident), losses, strict=True):
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                loss.backward()
                optimizer.step()
                log.append(loss.item())
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0] / 2


@pytest.mark.parametrize("overflow", [False, True])
def test_a_grad_scaler_that_leaves_the_skipping_to_fused_optimizers(overflow):
    """It sets `found_inf` and `grad_scale` on the optimizer; an overflow counts no step."""
    with pair([{"params": parameters([100, 3000], [torch.float32] * 2)}], fused=True) as both:
        scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2)]
        for step in range(4):
            both.set_gradients(step)
            if overflow and step in (0, 2):
                for params in (both.params, both.twins):
                    params[1].grad[7] = float("inf")
            for scaler, optimizer in zip(scalers, (both.streamed, both.resident.optimizer), strict=True):
                scaler.scale(torch.ones(1))
                scaler.step(optimizer)
                scaler.update()
        both.check()
        assert both.streamed.streamer.counts.entries == ([2, 2] if overflow else [4, 4])


# ---- values changed outside --------------------------------------------------------------------------------


def test_weights_loaded_after_construction_are_what_the_next_step_starts_from():
    torch.manual_seed(0)
    model, twin = torch.nn.Linear(30, 40).bfloat16(), torch.nn.Linear(30, 40).bfloat16()
    other = torch.nn.Linear(30, 40).bfloat16()
    streamed = StreamingAdamW(model.parameters(), config(bucket_numel=256), backend=fake_backend())
    for target in (model, twin):
        target.load_state_dict(other.state_dict())
    resident = Resident([{"params": list(twin.parameters())}])
    with contextlib.closing(streamed):
        for step in range(2):
            for param, its_twin in zip(model.parameters(), twin.parameters(), strict=True):
                param.grad = gradient(param, step)
                its_twin.grad = param.grad.clone()
            streamed.step()
            resident.step()
        for param, its_twin in zip(model.parameters(), twin.parameters(), strict=True):
            assert same_bits(param, its_twin)


@pytest.mark.parametrize("how", ["in place", "new data"])
def test_one_changed_param_keeps_the_others_main_params(how):
    """Taking all anew would round the others' main params to bf16 at every such step."""
    params = parameters([300, 3000, 300], [torch.bfloat16] * 3)
    with pair([{"params": params}], config(bucket_numel=700)) as both:
        for step in range(3):
            both.step(step)
            for param in (params[1], both.twins[1]):
                if how == "in place":
                    with torch.no_grad():
                        param.clamp_(-0.5, 0.5)
                else:
                    param.data = param.data.clamp(-0.5, 0.5)
            main = both.resident.main_of[both.twins[1]]
            main.data.copy_(both.twins[1].data)
        both.step(9)
        both.check()


def test_a_reload_on_request_takes_all():
    params = parameters([300, 3000], [torch.bfloat16] * 2)
    with pair([{"params": params}]) as both:
        both.step(1)
        for param, twin in zip(params, both.twins, strict=True):
            param.data.mul_(2)  # Unseen, as the docstring says.
            twin.data.mul_(2)
            both.resident.main_of[twin].data.copy_(twin.data)
        both.streamed.reload_model_params()
        both.step(2)
        both.check()


def test_new_data_elsewhere_in_the_same_storage_is_seen():
    storage = torch.randn(6000, generator=torch.Generator().manual_seed(1)).bfloat16()
    params = parameters([3000], [torch.bfloat16])
    params[0].data = storage[:3000]
    with pair([{"params": params}]) as both:
        both.step(1)
        params[0].data = storage[3000:]
        both.twins[0].data = storage[3000:].clone()
        both.resident.main_of[both.twins[0]].data.copy_(storage[3000:])
        both.step(2)
        both.check()


def test_a_sleep_is_no_outside_change():
    """Awake again, the values are where they never were, and what they were."""
    params = parameters([300, 3000], [torch.bfloat16] * 2)
    sleeper = Sleeper(HostParking())
    with pair([{"params": params}]) as both:
        for step in range(3):
            both.step(step)
            keep_addresses_apart = [torch.empty_like(param) for param in params]
            sleeper.sleep(lambda: params)
            with pytest.raises(AsleepError):
                both.streamed.step()
            sleeper.wake_up()
            del keep_addresses_apart
        both.check()


def test_own_updates_are_no_outside_change():
    """Else every step of a half-precision model would round its main params."""
    with pair([{"params": parameters([3000], [torch.bfloat16])}]) as both:
        for step in range(4):
            both.step(step)
        both.check()
        assert both.streamed._changed_outside() == []
        assert [record.read_bytes for record in both.streamed.records] == [12_000] + [36_000] * 3


# ---- bytes and memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("moments", ["fp32", "bf16"])
@pytest.mark.parametrize("alignment", [4096, 65536])
def test_volume_is_the_arithmetic(moments, alignment):
    """4 bytes an element read and 12 written at first, 12 and 12 then (bf16 moments: 8); never padding."""
    sizes = [1, 1023, 4097, 20_000]
    total, each = sum(sizes), 12 if moments == "fp32" else 8
    backend = fake_backend(alignment_bytes=alignment)
    groups = [{"params": parameters(sizes, [torch.bfloat16] * 4), "betas": (0.9, 0.95)}]
    with pair(groups, config(bucket_numel=4096, moment_dtype=moments), backend=backend) as both:
        for step in range(3):
            both.step(step)
        both.streamed.streamer.engine.drain()
        records = both.streamed.records
        assert [record.read_bytes for record in records] == [4 * total, each * total, each * total]
        assert [record.written_bytes for record in records] == [each * total] * 3
        assert all(record.padding_bytes > 0 for record in records)
        for layout in both.streamed.streamer.store.layouts:
            assert layout.size_bytes % alignment == 0


def test_caches_save_exactly_what_they_keep():
    sizes = [4096] * 6
    per_bucket = 12 * 4096
    for cached, keep_slots in ((2, False), (6, False), (1, True)):
        streamed = config(bucket_numel=4096, depth=2)
        probe = StreamingAdamW(parameters(sizes, [torch.float32] * 6), streamed, backend=fake_backend())
        place_bytes = probe.streamer.store.place_bytes
        probe.close()
        streamed = config(
            bucket_numel=4096, depth=2, host_cache_bytes=cached * place_bytes, keep_slots=keep_slots
        )
        with pair([{"params": parameters(sizes, [torch.float32] * 6)}], streamed) as both:
            for step in range(4):
                both.step(step)
            both.streamed.streamer.engine.settle()
            kept = cached + (2 if keep_slots else 0)
            records = both.streamed.records
            assert [r.read_bytes for r in records[1:]] == [(6 - kept) * per_bucket] * 3
            assert [r.written_bytes for r in records] == [(6 - kept) * per_bucket] * 4
            both.check()


def test_64_kib_alignment_gives_the_same_bits():
    backend = fake_backend(alignment_bytes=65536)
    params = parameters([1, 1023, 4097], [torch.float32, torch.bfloat16, torch.float16])
    with pair([{"params": params}], backend=backend) as both:
        assert backend.filesystem.alignment_bytes == 65536
        for step in range(3):
            both.step(step)
        both.check()


# ---- bf16 moments ------------------------------------------------------------------------------------------


def test_bf16_moments_differ_within_their_rounding():
    """One step from zero moments: what is stored is the resident moment, rounded once (relative 2**-8)."""
    params = parameters([3000], [torch.bfloat16])
    groups = [{"params": params, "betas": (0.9, 0.95), "lr": 1e-2}]
    with pair(groups, config(moment_dtype="bf16")) as both:
        both.step(1)
        (state,) = both.streamed.full_state().values()
        expected = both.resident.state_of(both.twins[0])
        assert same_bits(state["main"], expected["main"])
        for name in ("exp_avg", "exp_avg_sq"):
            assert not same_bits(state[name], expected[name])
            assert same_bits(state[name], expected[name].bfloat16().float())
        for step in range(2, 30):
            both.step(step)
        (state,) = both.streamed.full_state().values()
        expected = both.resident.state_of(both.twins[0])
        # Adam moves a param by about lr a step; moments of 8 bits change a small part of that.
        assert 0 < (state["main"] - expected["main"]).abs().max() < 0.05 * 1e-2 * 29


def test_bf16_moments_warn_by_beta2_of_each_group():
    groups = [
        {"params": parameters([10], [torch.float32]), "betas": (0.9, 0.95)},
        {"params": parameters([10], [torch.float32], seed=1), "betas": (0.9, 0.999)},
    ]
    with pytest.warns(UserWarning, match=r"bf16 moments with beta2 = 0\.999") as caught:
        StreamingAdamW(groups, config(moment_dtype="bf16"), backend=fake_backend()).close()
    assert len(caught) == 1
    assert caught[0].filename == __file__


# ---- refusals and failures ---------------------------------------------------------------------------------


def test_state_dict_does_not_pretend():
    with pair([{"params": parameters([10], [torch.float32])}]) as both:
        both.step(1)
        assert not both.streamed.state
        with pytest.raises(UnsupportedError, match="no state_dict"):
            both.streamed.state_dict()
        with pytest.raises(UnsupportedError, match="cannot load a state_dict"):
            both.streamed.load_state_dict(both.resident.optimizer.state_dict())
        with pytest.raises(UnsupportedError, match="param group cannot be added"):
            both.streamed.add_param_group({"params": parameters([3], [torch.float32])})
        both.step(2)
        both.check()


@pytest.mark.parametrize(
    ("params", "adamw", "message"),
    [
        ([torch.nn.Parameter(torch.ones(3, dtype=torch.float64))], {}, "float64"),
        ([torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))], {}, "complex64"),
        ([torch.nn.Parameter(torch.ones(4, 3).t())], {}, "not contiguous"),
        ([torch.nn.Parameter(torch.ones(3), requires_grad=False)], {}, "nothing to stream"),
        ([torch.nn.Parameter(torch.ones(3))], {"amsgrad": True}, "amsgrad=True.*third moment"),
        ([torch.nn.Parameter(torch.ones(3))], {"differentiable": True}, "differentiable=True"),
        (
            [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3, device="meta"))],
            {},
            "cpu, meta",
        ),
    ],
)
def test_what_cannot_be_streamed_is_refused_and_leaves_nothing(tmp_path, params, adamw, message):
    with pytest.raises(UnsupportedError, match=message):
        StreamingAdamW(params, config(str(tmp_path)), **adamw)
    assert list(tmp_path.iterdir()) == []


def test_sparse_gradients_are_refused_before_anything_happens():
    with pair([{"params": [torch.nn.Parameter(torch.ones(10, 3))]}]) as both:
        both.params[0].grad = torch.ones(10, 3).to_sparse()
        with pytest.raises(UnsupportedError, match=r"sparse gradients.*group0\.param0"):
            both.streamed.step()
        both.step(1)
        both.check()


def test_no_room_is_an_error_before_the_first_step_and_leaves_nothing():
    system = FakeSystem(capacity_bytes=100_000)
    backend = NvmeBackend("/disk", subdirectory="test/optimizer", system=system)
    with pytest.raises(SpaceError, match="bytes are needed"):
        StreamingAdamW(parameters([50_000], [torch.float32]), config(), backend=backend)
    assert system.open_descriptors() == 0
    NvmeBackend("/disk", subdirectory="test/optimizer", system=system).close()


def test_a_failed_construction_leaves_no_thread_file_or_claim():
    """At whichever write, of whichever bucket."""
    before = set(threading.enumerate())
    for nth in range(1, 100):
        system = FakeSystem()
        plan = FaultPlan.single(Kind.EIO, Operation.WRITE, nth)
        inner = NvmeBackend("/disk", subdirectory="test/optimizer", system=system)
        faulty = FaultyBackend(inner, plan)
        with contextlib.suppress(TransferError), plan.explained("pytest tests/test_optimizer.py"):
            StreamingAdamW(parameters([3000], [torch.float32]), config(), backend=faulty).close()
        assert set(threading.enumerate()) <= before
        assert system.open_descriptors() == 0
        if not faulty.injector.injected:
            break
    assert nth > 3


def test_a_failed_reload_poisons():
    """Some buckets start from the new values and some from the old: nothing to go on with."""
    backend = FaultyBackend(fake_backend(), FaultPlan.single(Kind.EIO, Operation.WRITE, 6))
    params = parameters([3000], [torch.float32])
    streamed = StreamingAdamW(params, config(bucket_numel=2048), backend=backend)
    with contextlib.closing(streamed):
        with torch.no_grad():
            params[0].mul_(2)
        params[0].grad = torch.ones(3000)
        with pytest.raises(StorageError, match="injected"):
            streamed.step()
        with pytest.raises(PoisonedError, match="injected"):
            streamed.step()


def test_an_interrupt_between_the_step_and_its_count_poisons(monkeypatch):
    with pair([{"params": parameters([3000], [torch.float32])}]) as both:
        both.step(1)

        def interrupted(updated) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(both.streamed.streamer.counts, "advance", interrupted)
        with pytest.raises(KeyboardInterrupt):
            both.streamed.step()
        monkeypatch.undo()
        with pytest.raises(PoisonedError, match="KeyboardInterrupt"):
            both.streamed.step()


def test_closed_is_closed():
    streamed = StreamingAdamW(parameters([10], [torch.float32]), config(), backend=fake_backend())
    streamed.close()
    streamed.close()
    with pytest.raises(OptstreamError, match="the optimizer is closed"):
        streamed.step()


@pytest.mark.parametrize("ending", ["after a step", "after a failure"])
def test_a_dropped_optimizer_takes_its_files_along(tmp_path, ending):
    """Hundreds of gigabytes a rank: a notebook that builds the next one must not keep the last one's."""
    params = parameters([3000], [torch.float32])
    params[0].grad = torch.ones(3000)
    streamed = StreamingAdamW(params, config(str(tmp_path)))
    streamed.step()
    if ending == "after a failure":

        def fail(piece, main) -> None:
            raise ValueError(piece)

        streamed._publish = fail
        with pytest.raises(ValueError, match="Piece"):
            streamed.step()
    alive = weakref.ref(streamed.streamer)
    assert list(tmp_path.rglob("bucket-*"))
    del streamed
    gc.collect()
    assert alive() is None
    assert not list(tmp_path.rglob("bucket-*"))


def test_collection_on_an_engine_thread_does_not_wait_for_itself(tmp_path):
    """The garbage collector runs on whichever thread allocates, also on one that close would wait for."""
    params = parameters([3000], [torch.float32])
    params[0].grad = torch.ones(3000)
    streamed = StreamingAdamW(params, config(str(tmp_path)))
    streamed.step()
    engine, finalizer = streamed.streamer.engine, streamed.streamer._finalizer
    ran = threading.Event()

    def collect() -> None:
        finalizer()
        ran.set()

    next(iter(engine._workers.values())).submit(collect)
    ran.wait()
    for thread in threading.enumerate():
        if thread.name == "optstream-close":
            thread.join()
    assert not list(tmp_path.rglob("bucket-*"))
    assert not any(engine.runs(thread) for thread in threading.enumerate())


def test_a_forked_child_leaves_files_and_pending_writes_to_its_parent(tmp_path):
    """It has none of the threads that it would wait for."""
    params = parameters([3000], [torch.float32])
    params[0].grad = torch.ones(3000)
    streamed = StreamingAdamW(params, config(str(tmp_path), depth=4))
    store, forked = streamed.streamer.store, threading.Event()
    write_chunk = store.write_chunk

    def write_after_the_fork(*arguments) -> None:
        forked.wait()
        write_chunk(*arguments)

    store.write_chunk = write_after_the_fork
    with contextlib.closing(streamed):
        streamed.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Forking with threads is the point.
            child = os.fork()
        if child == 0:
            code = 1
            try:
                streamed.close()
                code = 0
            finally:
                os._exit(code)  # Whatever happens, this must not become a second pytest.
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        forked.set()
        assert list(tmp_path.rglob("bucket-*"))
        streamed.step()


ENDS_WITHOUT_CLOSING = """
import sys, time, torch
from optstream.backends.nvme_file import NvmeFile
from optstream.core.config import StreamConfig
from optstream.core.optimizer import StreamingAdamW

param = torch.nn.Parameter(torch.ones(20_000))
optimizer = StreamingAdamW([param], StreamConfig(True, (sys.argv[1],), bucket_numel=4096, chunk_bytes=4096))
write_from = NvmeFile.write_from

def write_slowly(file, offset, buffer):
    time.sleep(0.05)
    write_from(file, offset, buffer)

NvmeFile.write_from = write_slowly
param.grad = torch.ones(20_000)
optimizer.step()
assert optimizer.streamer.engine._schedule.outstanding, "nothing is pending"
"""


def test_a_process_that_ends_with_writes_pending_ends_and_leaves_nothing(tmp_path):
    """Nobody called close: the exit must neither hang on the pending writes nor forget the files."""
    ended = subprocess.run(
        [sys.executable, "-c", ENDS_WITHOUT_CLOSING, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
