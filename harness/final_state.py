"""What a run leaves on one rank: every param, main param, moment and step count, compared bit by bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from optstream.harness.training import Trainer
from optstream.harness.training_state import (
    gather_model_params,
    model_params,
    named_shards,
    resident_state,
)

if TYPE_CHECKING:
    from optstream.core.megatron import MegatronStateStore

SEGMENTS = ("main", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Final:
    """Copies on the host, by name: model params, and of each shard its state as `resident_state` gives it."""

    params: dict[str, torch.Tensor]
    state: dict[str, dict[str, Any]]


def final_of(trainer: Trainer, stores: list[MegatronStateStore] | None = None) -> Final:
    """Of a trainer whose state is resident, or streamed by `stores`. Collective."""
    gather_model_params(trainer)
    state = _copied(resident_state(trainer)) if stores is None else streamed_state(trainer, stores)
    return Final(_on_host(model_params(trainer)), state)


def streamed_state(trainer: Trainer, stores: list[MegatronStateStore]) -> dict[str, dict[str, Any]]:
    """The pieces of every store put together to shards, by name, as `resident_state` gives them."""
    shards = {shard.model_param: shard for shard in named_shards(trainer)}
    state: dict[str, dict[str, Any]] = {}
    for store in stores:
        for param, start, stop, values, step in store.states():
            shard = shards[param]
            whole = state.setdefault(
                shard.name, {name: torch.empty(shard.stop - shard.start) for name in SEGMENTS}
            )
            for name in SEGMENTS:
                whole[name][start - shard.start : stop - shard.start] = values[name]
            whole["step"] = float(step)
    return state


def first_difference(
    resident_loss: list[float], streamed_loss: list[float], resident: Final, streamed: Final
) -> str | None:
    """The first value, in words, that is not the same bits; None if there is none."""
    for step, (one, other) in enumerate(zip(resident_loss, streamed_loss, strict=True), start=1):
        if not _same_bits(one, other):
            return f"the loss of step {step}"
    if resident.params.keys() != streamed.params.keys() or resident.state.keys() != streamed.state.keys():
        return "the names of parameters"
    for name, param in resident.params.items():
        if not _same_bits(param, streamed.params[name]):
            return f"model param {name}"
    for name, values in resident.state.items():
        for key, value in values.items():
            if not _same_bits(value, streamed.state[name][key]):
                return f"{key} of {name}"
    return None


def _same_bits(one: Any, other: Any) -> bool:
    if not torch.is_tensor(one):
        one, other = torch.tensor(one, dtype=torch.float64), torch.tensor(other, dtype=torch.float64)
    # Bytes, not values: NaN is equal to the same NaN, and 0.0 is not -0.0.
    return one.dtype == other.dtype and torch.equal(_bytes(one), _bytes(other))


def largest_error(resident: Final, streamed: Final, segment: str) -> float:
    """The largest absolute difference in any shard's `segment`."""
    return max(
        (
            (values[segment] - streamed.state[name][segment]).abs().max().item()
            for name, values in resident.state.items()
        ),
        default=0.0,
    )


def digest_of(final: Final) -> str:
    """One hash over all params, mains, moments and step counts, by name."""
    digest = xxhash.xxh3_128()
    named = {f"param/{name}": param for name, param in final.params.items()}
    for name, values in final.state.items():
        named |= {f"{key}/{name}": value for key, value in values.items()}
    for name in sorted(named):
        value = named[name]
        digest.update(name.encode())
        digest.update(_bytes(value if torch.is_tensor(value) else torch.tensor(value)).numpy())
    return digest.hexdigest()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


def _on_host(params: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: param.detach().cpu().clone() for name, param in params.items()}


def _copied(state: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        name: {
            key: value.detach().cpu().clone() if torch.is_tensor(value) else value
            for key, value in values.items()
        }
        for name, values in state.items()
    }
