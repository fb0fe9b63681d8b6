"""Run one allowed combination of flags through Megatron-Core: the small trainer, with the set-up call that a
trainer makes, on the fake filesystem.

The same proofs as in `execution`: the bits of a resident run, counted streamed steps, exact volume, files
where the flags say and nowhere else; and nothing at all where the flags do not stream.
"""

from __future__ import annotations

import argparse
import functools
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from unittest import mock

import torch

from optstream.backends.fake import open_fake
from optstream.core.megatron import (
    MegatronStateStore,
    setup_optimizer_state_streaming,
    streaming_construction,
)
from optstream.core.validator import MOMENT_DTYPE, STREAM
from optstream.harness.check import parse_flags
from optstream.harness.domains import Combination, command_line
from optstream.harness.engagement import FakeScratch, expect, expect_bits, expect_streamed, fake_scratch
from optstream.harness.final_state import streamed_state
from optstream.harness.launch import Hardware, run_ranks
from optstream.harness.training import Trainer
from optstream.harness.training_config import TrainingConfig
from optstream.harness.training_state import model_params, resident_state

# 5000 parameters: a bucket of 64 elements still makes a step of 80 buckets.
MODEL = TrainingConfig(steps=3, layers=1, hidden=8, heads=2, seq=8, batch=1)
_STORED_AS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def execute_each(combinations: Iterable[Combination], hardware: Hardware = "simulated") -> list[str | None]:
    """Of each combination None, or what went wrong; one after the other on one rank."""
    return run_ranks(_execute_on_rank, 1, list(combinations), hardware=hardware)[0]


def _execute_on_rank(rank: int, combinations: list[Combination]) -> list[str | None]:
    return [_reported(combination) for combination in combinations]


def _reported(combination: Combination) -> str | None:
    try:
        _execute(combination)
    except Exception as error:
        # One broken combination must not end a run over thousands; it is reported with its command.
        return f"{type(error).__name__}: {error}"
    return None


def _execute(combination: Combination) -> None:
    args = parse_flags(command_line(combination))
    if combination[STREAM]:
        with fake_scratch(combination) as scratch:
            _stream(args, scratch)
    else:
        _do_not_stream(args)


def _stream(args: argparse.Namespace, scratch: FakeScratch) -> None:
    resident = _resident(scratch.combination[MOMENT_DTYPE])  # before: one trainer a process at a time
    stores: list[MegatronStateStore] = []
    opener = mock.Mock(wraps=open_fake)

    def set_up(optimizer) -> None:
        # Staged: the path of a device that has memory of its own.
        stores.extend(setup_optimizer_state_streaming(args, optimizer, backend_factory=opener, staged=True))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # bf16 moments warn by beta2, and are meant here
        trainer = Trainer(
            MODEL, rank=0, construction=lambda: streaming_construction(args), after_construction=set_up
        )
    try:
        expect("optimizers that stream", len(stores), len(trainer.optimizer.chained_optimizers))
        losses = [trainer.train_step().loss for _ in range(MODEL.steps)]
        streamed = _Outcome(losses, model_params(trainer), streamed_state(trainer, stores))
        _expect_same(streamed, resident)
        (store,) = stores
        numel = sum(param.numel() for param in model_params(trainer).values())
        expect_streamed(scratch.combination, store.records, steps=MODEL.steps, numel=numel)
        scratch.expect_files(numel=numel, buckets=store.records[0].buckets)
        expect("directories opened", [call.args[0] for call in opener.call_args_list], [scratch.directories])
    finally:
        for store in stores:
            store.close()
        trainer.close()
    scratch.expect_no_files()


def _do_not_stream(args: argparse.Namespace) -> None:
    opener = mock.Mock(wraps=open_fake)
    found: list[MegatronStateStore] = []

    def set_up(optimizer) -> None:
        before = {name: vars(part).copy() for name, part in enumerate(optimizer.chained_optimizers)}
        found.extend(setup_optimizer_state_streaming(args, optimizer, backend_factory=opener))
        after = {name: vars(part) for name, part in enumerate(optimizer.chained_optimizers)}
        expect("attributes of the optimizer", after, before)

    trainer = Trainer(
        MODEL, rank=0, construction=lambda: streaming_construction(args), after_construction=set_up
    )
    try:
        trainer.train_step()
        expect("optimizers that stream", found, [])
        expect("directories opened", opener.call_args_list, [])
        expect("parameters with resident moments", _resident_moments(trainer), len(model_params(trainer)))
    finally:
        trainer.close()


def _resident_moments(trainer: Trainer) -> int:
    return sum(len(part.optimizer.state) for part in trainer.optimizer.chained_optimizers)


@dataclass(frozen=True)
class _Outcome:
    losses: list[float]
    params: dict[str, torch.Tensor]
    state: dict[str, dict[str, object]]


def _expect_same(streamed: _Outcome, resident: _Outcome) -> None:
    expect("losses", streamed.losses, resident.losses)
    expect("names of params", streamed.params.keys(), resident.params.keys())
    expect("names of shards", streamed.state.keys(), resident.state.keys())
    for name, param in streamed.params.items():
        expect_bits(f"param {name}", param.detach(), resident.params[name])
    for name, values in streamed.state.items():
        for segment in ("main", "exp_avg", "exp_avg_sq"):
            expect_bits(f"{segment} of {name}", values[segment], resident.state[name][segment])
        expect(f"step of {name}", values["step"], resident.state[name]["step"])


@functools.cache
def _resident(moment_dtype: str) -> _Outcome:
    """What the ordinary optimizer makes of the same model. Moments are rounded after each step as they are
    stored: the reference of a format that is a plain cast."""
    trainer = Trainer(MODEL, rank=0)
    try:
        losses = []
        for _ in range(MODEL.steps):
            losses.append(trainer.train_step().loss)
            for values in resident_state(trainer).values():
                for moment in ("exp_avg", "exp_avg_sq"):
                    values[moment].copy_(values[moment].to(_STORED_AS[moment_dtype]))
        params = {name: param.detach().clone() for name, param in model_params(trainer).items()}
        state = {
            name: {key: _copy(value) for key, value in values.items()}
            for name, values in resident_state(trainer).items()
        }
        return _Outcome(losses, params, state)
    finally:
        trainer.close()


def _copy(value: object) -> object:
    return value.detach().clone() if torch.is_tensor(value) else value
