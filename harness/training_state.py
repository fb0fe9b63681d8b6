"""Names for a trainer's parameter shards, and their resident optimizer state: what comparisons are made over.

A name is `[tpR.][ppR.][epR.]chunkI.<name in the model>`. A rank prefix appears only where the world has that
axis and the tensor differs along it: `tp` for tensor-parallel weights, `pp` for every weight (layers are
numbered per stage), `ep` for expert weights. So equal names on two ranks mean the same tensor, of which each
owns another shard.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from optstream.harness.training import StepResult, Trainer, parallel_state
from optstream.harness.training_config import TrainingConfig


class NamedShard(NamedTuple):
    """The elements [start, stop) of the flattened `model_param`, whose state this rank owns.

    `optimizer` is Megatron's DistributedOptimizer. The shard's main param, native fp32 shards
    included, is its `optimizer.param_groups[group_index]["params"][group_order]`.
    """

    name: str
    model_param: torch.nn.Parameter
    start: int
    stop: int
    optimizer: object
    group_index: int
    group_order: int


def named_shards(trainer: Trainer) -> Iterator[NamedShard]:
    """Every shard this rank owns, over every chained DistributedOptimizer. Reads no optimizer state.

    The places are not those of Megatron's `model_param_group_index_map`: where a group holds fp32 and 16-bit
    params (the local layer spec's norms are fp32), that map counts them in the order of the gradient buffer,
    but the inner optimizer has the fp32 ones first.
    """
    names = {param: name for name, param in model_params(trainer).items()}
    for optimizer in _distributed_optimizers(trainer):
        groups = zip(optimizer.model_fp32_groups, optimizer.model_float16_groups, strict=True)
        for group_index, (native, half) in enumerate(groups):
            for group_order, param in enumerate((*native, *half)):
                shard = optimizer._get_model_param_range_map(param)["param"]
                yield NamedShard(
                    names[param], param, shard.start, shard.end, optimizer, group_index, group_order
                )


def model_params(trainer: Trainer) -> dict[str, torch.nn.Parameter]:
    """Every trained parameter of this rank's model, by name.

    With overlap_param_gather, values are those of the last forward pass until `gather_model_params` is
    called.
    """
    return {
        _canonical_name(trainer, index, name, param): param
        for index, chunk in enumerate(trainer.model)
        for name, param in chunk.module.named_parameters()
        if param.requires_grad
    }


def gather_model_params(trainer: Trainer) -> None:
    """Completes the parameter all-gather that overlap_param_gather leaves to the next forward pass.
    Collective."""
    if trainer.config.overlap_param_gather:
        for chunk in trainer.model:
            chunk.start_param_sync(force_sync=True)


def resident_state(trainer: Trainer) -> dict[str, dict[str, torch.Tensor | float]]:
    """Of each shard, by name: `main`, `exp_avg`, `exp_avg_sq` (1-D fp32, not copied) and `step`.

    For a trainer whose state is resident. Before the first successful step there are no moments: they read as
    zeros.
    """
    state = {}
    for shard in named_shards(trainer):
        inner = shard.optimizer.optimizer
        group = inner.param_groups[shard.group_index]
        main = group["params"][shard.group_order]
        moments = inner.state.get(main, {})
        state[shard.name] = {
            "main": main.detach().view(-1),
            "exp_avg": moments.get("exp_avg", torch.zeros_like(main)).view(-1),
            "exp_avg_sq": moments.get("exp_avg_sq", torch.zeros_like(main)).view(-1),
            # torch's AdamW counts per parameter, TransformerEngine's and Apex's per group.
            "step": float(moments.get("step", group.get("step", 0))),
        }
    return state


class ResidentRun(NamedTuple):
    """What a run leaves behind on one rank; tensors are copies on the CPU, by name.

    `ranges` are the elements of each flattened parameter that this rank owns; `optimizers` counts Megatron's
    DistributedOptimizers on it.
    """

    steps: list[StepResult]
    optimizers: int
    ranges: dict[str, tuple[int, int]]
    initial_params: dict[str, torch.Tensor]
    params: dict[str, torch.Tensor]
    state: dict[str, dict[str, torch.Tensor | float]]


def train_resident(rank: int, config: TrainingConfig) -> ResidentRun:
    """Trains for `config.steps` steps with the ordinary optimizer. A function for `run_ranks`."""
    trainer = Trainer(config, rank=rank)
    try:
        initial_params = _copies(model_params(trainer))
        steps = [trainer.train_step() for _ in range(config.steps)]
        gather_model_params(trainer)
        return ResidentRun(
            steps=steps,
            optimizers=len(_distributed_optimizers(trainer)),
            ranges={shard.name: (shard.start, shard.stop) for shard in named_shards(trainer)},
            initial_params=initial_params,
            params=_copies(model_params(trainer)),
            state={name: _copies(of_shard) for name, of_shard in resident_state(trainer).items()},
        )
    finally:
        trainer.close()


def train_resident_each(rank: int, configs: list[TrainingConfig]) -> list[ResidentRun]:
    """`train_resident`, one configuration after the other in the same processes."""
    return [train_resident(rank, config) for config in configs]


def _copies(values: dict) -> dict:
    return {
        name: value.detach().cpu().clone() if torch.is_tensor(value) else value
        for name, value in values.items()
    }


def _distributed_optimizers(trainer: Trainer) -> list:
    chained = getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer])
    # A stub stands where a rank owns no parameter of a kind.
    return [optimizer for optimizer in chained if not getattr(optimizer, "is_stub_optimizer", False)]


def _canonical_name(trainer: Trainer, chunk_index: int, name: str, param: torch.nn.Parameter) -> str:
    config, prefix = trainer.config, ""
    if config.tp > 1 and getattr(param, "tensor_model_parallel", False):
        prefix += f"tp{parallel_state.get_tensor_model_parallel_rank()}."
    if config.pp > 1:
        prefix += f"pp{parallel_state.get_pipeline_model_parallel_rank()}."
    if config.ep > 1 and not getattr(param, "allreduce", True):  # Megatron's mark of an expert parameter
        prefix += f"ep{parallel_state.get_expert_model_parallel_rank()}."
    return f"{prefix}chunk{chunk_index}.{name.removeprefix('module.')}"
