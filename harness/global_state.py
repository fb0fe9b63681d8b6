"""The optimizer state of all ranks put together to whole tensors, by names that no topology has a part in.

Written on what Megatron's parallel axes mean (which dimension of a weight is cut, how layers and experts are
numbered), and on nothing that checkpoints are made of: so it can judge them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from optstream.core.megatron import MegatronStateStore
from optstream.harness.training import Trainer, parallel_state
from optstream.harness.training_config import TrainingConfig
from optstream.harness.training_state import NamedShard, named_shards, resident_state

SEGMENTS = ("main", "exp_avg", "exp_avg_sq")

# By global name: main, exp_avg, exp_avg_sq of the whole parameter, and its step.
GlobalState = dict[str, dict[str, Any]]


class ShardState(NamedTuple):
    """Elements [start, stop) of the flattened local tensor, of shape `local_shape`, of parameter `name`; of
    `tp` tensor-parallel ranks' tensors, joined along `dim` (None: all hold the same), it is number `tp_rank`.
    """

    name: str
    local_shape: tuple[int, ...]
    dim: int | None
    tp: int
    tp_rank: int
    start: int
    stop: int
    values: dict[str, torch.Tensor]
    step: float


def shard_states(trainer: Trainer, stores: Sequence[MegatronStateStore] | None) -> list[ShardState]:
    """This rank's state, streamed in `stores` or resident (None); copies on the host."""
    if stores is None:
        states = resident_state(trainer)
        return [
            _located(
                trainer,
                shard,
                {name: states[shard.name][name].cpu().clone() for name in SEGMENTS},
                states[shard.name]["step"],
            )
            for shard in named_shards(trainer)
        ]
    shards = {shard.model_param: shard for shard in named_shards(trainer)}
    return [
        _located(
            trainer,
            shards[param]._replace(start=start, stop=stop),
            {name: values[name].cpu().clone() for name in SEGMENTS},
            float(step),
        )
        for store in stores
        for param, start, stop, values, step in store.states()
    ]


def assemble(of_ranks: Sequence[Sequence[ShardState]]) -> GlobalState:
    """Whole tensors. Raises ValueError where an element is missing, or two ranks disagree on one."""
    locals_: dict[tuple[str, int], dict[str, torch.Tensor]] = {}
    example: dict[str, ShardState] = {}
    steps: dict[str, float] = {}
    for shard in (shard for shards in of_ranks for shard in shards):
        example[shard.name] = shard
        if steps.setdefault(shard.name, shard.step) != shard.step:
            raise ValueError(f"steps of {shard.name} differ: {steps[shard.name]} and {shard.step}")
        numel = torch.Size(shard.local_shape).numel()
        held = locals_.setdefault(
            (shard.name, shard.tp_rank),
            {"came": torch.zeros(numel, dtype=torch.bool), **{n: torch.zeros(numel) for n in SEGMENTS}},
        )
        span = slice(shard.start, shard.stop)
        if held["came"][span].any() and any(
            not torch.equal(held[name][span].view(torch.int32), shard.values[name].view(torch.int32))
            for name in SEGMENTS
        ):
            raise ValueError(f"ranks disagree on {shard.name}")
        held["came"][span] = True
        for name in SEGMENTS:
            held[name][span] = shard.values[name]
    whole: GlobalState = {}
    for name, shard in example.items():
        of_tp = [locals_[name, tp_rank] for tp_rank in range(shard.tp)]
        if not all(bool(held["came"].all()) for held in of_tp):
            raise ValueError(f"elements of {name} are missing")
        whole[name] = {"step": steps[name]}
        for segment in SEGMENTS:
            tensors = [held[segment].view(shard.local_shape) for held in of_tp]
            if shard.dim is None and any(not torch.equal(tensor, tensors[0]) for tensor in tensors):
                raise ValueError(f"copies of {segment} of {name} differ")
            whole[name][segment] = tensors[0] if shard.dim is None else torch.cat(tensors, dim=shard.dim)
    return whole


def install(trainer: Trainer, state: GlobalState) -> None:
    """Make a trainer with resident state continue from `state`: mains, moments, steps and model params."""
    for shard in named_shards(trainer):
        where = _located(trainer, shard, {}, 0.0)
        whole = state[where.name]
        inner = shard.optimizer.optimizer
        main = inner.param_groups[shard.group_index]["params"][shard.group_order]
        values = {}
        for name in SEGMENTS:
            tensor = whole[name]
            if where.dim is not None:
                tensor = tensor.chunk(where.tp, dim=where.dim)[where.tp_rank]
            values[name] = tensor.reshape(-1)[shard.start : shard.stop].to(main.device)
        main.data.copy_(values["main"])
        inner.state[main] = {
            "step": torch.tensor(whole["step"]),
            **{name: values[name].clone() for name in SEGMENTS[1:]},
        }
    for optimizer in _optimizers(trainer):
        optimizer._copy_main_params_to_model_params()
    gather_restored_params(trainer)


def gather_restored_params(trainer: Trainer) -> None:
    """Every rank has its own shards of restored params: give all ranks all of them. Collective."""
    for chunk in trainer.model:
        chunk.start_param_sync(force_sync=True)


def _optimizers(trainer: Trainer) -> Iterator[Any]:
    seen = []
    for shard in named_shards(trainer):
        if not any(shard.optimizer is one for one in seen):
            seen.append(shard.optimizer)
    return iter(seen)


def _located(trainer: Trainer, shard: NamedShard, values: dict[str, torch.Tensor], step: float) -> ShardState:
    param, config = shard.model_param, trainer.config
    cut = config.tp > 1 and getattr(param, "tensor_model_parallel", False)
    return ShardState(
        _global_name(trainer, shard.name),
        tuple(param.shape),
        param.partition_dim if cut else None,
        config.tp if cut else 1,
        parallel_state.get_tensor_model_parallel_rank() if cut else 0,
        shard.start,
        shard.stop,
        values,
        step,
    )


def _global_name(trainer: Trainer, name: str) -> str:
    config = trainer.config
    name = name[name.index("chunk0.") :]
    name = numbered_over_stages(config, name)
    if config.experts:
        first = parallel_state.get_expert_model_parallel_rank() * (config.experts // config.ep)
        name = _shifted(name, r"(?<=\blocal_experts\.)\d+", first)
    if config.tied_embeddings:  # The last stage's copy is the same parameter.
        name = name.replace("output_layer.weight", "embedding.word_embeddings.weight")
    return name


def numbered_over_stages(config: TrainingConfig, name: str, virtual_stage: int = 0) -> str:
    """The name of a parameter of this pipeline stage, its layers numbered over the whole model."""
    place = virtual_stage * config.pp + parallel_state.get_pipeline_model_parallel_rank()
    first_layer = place * (config.layers // (config.pp * config.virtual_stages))
    return _shifted(name, r"(?<=\blayers\.)\d+", first_layer)


def _shifted(name: str, number: str, by: int) -> str:
    """`name` with `by` added to the number that the pattern finds."""
    return re.sub(number, lambda found: str(int(found[0]) + by), name)
