"""Optimizer state on the device of a real Megatron trainer, from the construction of the optimizer on."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch

from optstream.core.megatron import setup_optimizer_state_streaming, streaming_construction
from optstream.harness.compare import compare_on_rank
from optstream.harness.launch import run_ranks
from optstream.harness.ledger import GRADIENTS, STATE, Ledger, gradient_roots, resident_roots, streamed_roots
from optstream.harness.stream_settings import StreamSettings
from optstream.harness.training import Trainer
from optstream.harness.training_config import TrainingConfig
from optstream.harness.training_state import model_params

pytestmark = pytest.mark.e2e

# Norms are native fp32, so that both kinds of state are there.
CONFIG = TrainingConfig(steps=3, layers=2, hidden=64, heads=4, seq=32, batch=2, native_fp32_norms=True)
DEPTH = 2


class Measured(NamedTuple):
    """Bytes of one run. `half` and `native`: elements of half-precision and of fp32 params."""

    half: int
    native: int
    construction_peak: int
    peak: int
    end: int
    bound: int | None
    gradients_peak: int


def elements(trainer: Trainer) -> tuple[int, int]:
    params = model_params(trainer).values()
    half = sum(param.numel() for param in params if param.dtype is torch.bfloat16)
    return half, sum(param.numel() for param in params) - half


def resident(rank: int, config: TrainingConfig) -> Measured:
    ledger = Ledger()
    trainer = Trainer(config, rank=rank, construction=lambda: ledger.watch_allocations(STATE))
    try:
        ledger.follow(STATE, resident_roots(trainer.optimizer))
        ledger.follow(GRADIENTS, gradient_roots(trainer.optimizer))
        construction_peak = ledger.peak_bytes(STATE)
        for _ in range(config.steps):
            trainer.train_step()
            ledger.sample()
        return Measured(
            *elements(trainer),
            construction_peak,
            ledger.peak_bytes(STATE),
            ledger.current_bytes(STATE),
            None,
            ledger.peak_bytes(GRADIENTS),
        )
    finally:
        trainer.close()


def streamed(
    rank: int,
    config: TrainingConfig,
    directory: str,
    *,
    born_evicted: bool = True,
    keep_a_slot: bool = False,
    checkpoint: str | None = None,
) -> Measured:
    flags = {
        "stream_optimizer_state_to_disk": True,
        "use_distributed_optimizer": True,
        "offload_train_disk_dir": directory,
        "stream_optimizer_state_bucket_numel": 5000,
        "stream_optimizer_state_depth": DEPTH,
    }
    args = StreamSettings(flags).namespace()
    ledger, stores, kept = Ledger(), [], []

    def observe() -> None:
        if keep_a_slot and not kept:
            kept.extend(stores[0].streamer.engine.slots[:1])
        ledger.sample()

    @contextlib.contextmanager
    def construction() -> Iterator[None]:
        born = streaming_construction(args) if born_evicted else contextlib.nullcontext()
        with born, ledger.watch_allocations(STATE):
            yield

    def set_up(optimizer) -> None:
        with ledger.watch_allocations(STATE):
            stores.extend(setup_optimizer_state_streaming(args, optimizer, staged=True, observe=observe))
        ledger.follow(STATE, streamed_roots(stores))
        ledger.follow(GRADIENTS, gradient_roots(optimizer))

    trainer = Trainer(config, rank=rank, construction=construction, after_construction=set_up)
    try:
        construction_peak = ledger.peak_bytes(STATE)
        for _ in range(config.steps):
            trainer.train_step()
            ledger.sample()
        if checkpoint is not None:
            for call in (stores[0].save_to, stores[0].load_from):
                call(checkpoint)
                ledger.sample()
        bound = sum(store.streamer.engine.device_bytes_bound + store.resident_bytes for store in stores)
        return Measured(
            *elements(trainer),
            construction_peak,
            ledger.peak_bytes(STATE),
            ledger.current_bytes(STATE),
            bound,
            ledger.peak_bytes(GRADIENTS),
        )
    finally:
        for store in stores:
            store.close()
        trainer.close()


def run(function, *args, **keywords) -> Measured:
    (measured,) = run_ranks(lambda rank: function(rank, *args, **keywords), 1)
    return measured


def test_resident_state_is_twelve_bytes_a_parameter_and_eight_of_native_fp32_ones():
    measured = run(resident, CONFIG)
    assert measured.native > 0
    assert measured.construction_peak == 4 * measured.half
    assert measured.peak == measured.end == 12 * measured.half + 8 * measured.native


def test_streamed_state_stays_within_the_bound_from_construction_on(tmp_path):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*main params were on the device")
        measured = run(streamed, CONFIG, str(tmp_path))
    assert measured.bound < 4 * measured.half, "this model is too small to tell"
    assert measured.construction_peak <= measured.bound
    # All slots at once, so the bound is reached and not only kept.
    assert measured.peak == measured.bound
    assert 8 * measured.native < measured.end < 8 * measured.native + 1000


def test_without_streaming_construction_main_params_are_seen_and_a_warning_says_what_they_cost(tmp_path):
    with pytest.warns(UserWarning, match="main params were on the device during construction") as caught:
        measured = run(streamed, CONFIG, str(tmp_path), born_evicted=False)
    assert measured.construction_peak >= 4 * measured.half
    assert measured.peak > measured.bound
    assert measured.end < measured.bound
    said = next(str(each.message) for each in caught if "main params were on the device" in str(each.message))
    assert said.startswith(f"{4 * measured.half} bytes")


def test_a_slot_that_somebody_keeps_shows_above_the_bound(tmp_path):
    measured = run(streamed, CONFIG, str(tmp_path), keep_a_slot=True)
    assert measured.peak > measured.bound


def test_a_save_and_a_load_leave_the_device_as_it_was(tmp_path):
    without = run(streamed, CONFIG, str(tmp_path / "without"))
    saved = run(streamed, CONFIG, str(tmp_path / "with"), checkpoint=str(tmp_path / "checkpoint"))
    assert (saved.peak, saved.end) == (without.peak, without.end)


def test_gradients_reduced_in_bf16_are_upcast_all_at_once_when_resident():
    assert run(resident, CONFIG).gradients_peak == 0
    upcast = run(resident, dataclasses.replace(CONFIG, grad_reduce_in_fp32=False))
    assert upcast.gradients_peak == 4 * upcast.half


def test_two_ranks_share_the_state_and_each_keeps_its_bound(tmp_path):
    config = dataclasses.replace(CONFIG, ranks=2, native_fp32_norms=False)
    flags = {
        "stream_optimizer_state_to_disk": True,
        "use_distributed_optimizer": True,
        "offload_train_disk_dir": str(tmp_path),
        "stream_optimizer_state_bucket_numel": 5000,
    }
    ranks = run_ranks(compare_on_rank, 2, config, StreamSettings(flags))
    assert sum(each.resident.state_bytes_peak for each in ranks) == 12 * ranks[0].parameters
    for each in ranks:
        assert 0 < each.streamed.state_bytes_peak <= each.streamed.state_bytes_bound
        assert each.streamed.state_bytes_bound < each.resident.state_bytes_peak
        assert each.resident.temporary_bytes_peak > 0
        assert each.streamed.temporary_bytes_peak > 0
