"""Where Megatron's parameters lie in the model's global tensors, by the model's own sharded state dict."""

from __future__ import annotations

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from optstream.core.errors import UnsupportedError
from optstream.core.placement import Placement

# One name a layer, not one tensor over all layers: then a name has one param group and one step count.
LAYERS_APART = {"non_homogeneous_layers": True}
LAYERS_TOGETHER: dict[str, bool] = {}

# By model parameter, the boxes of global tensors that it is made of.
Placements = dict[torch.nn.Parameter, list[Placement]]


def placements_of(optimizer: DistributedOptimizer, metadata: dict[str, bool] = LAYERS_APART) -> Placements:
    """metadata: what to ask the model's sharded state dict for; names may depend on it.

    Raises UnsupportedError for parameters that are no views of boxes of global tensors."""
    found: dict[int, list[ShardedTensor]] = {}
    for chunk in optimizer.model_chunks:
        # The wrappers put their own names in front, so each is asked for what it wraps.
        sharded = chunk.module.sharded_state_dict(metadata=metadata)
        for value in nested_values(sharded):
            if isinstance(value, ShardedTensorFactory):
                found[id(value.data)] = [
                    v for v in nested_values(value.build()) if isinstance(v, ShardedTensor)
                ]
            elif isinstance(value, ShardedTensor):
                found[id(value.data)] = [value]
    instance = getattr(optimizer, "distributed_optimizer_instance_id", 0)
    groups = (*optimizer.model_float16_groups, *optimizer.model_fp32_groups)
    return {
        param: [_placement(param, part, instance) for part in _parts(found, param)]
        for group in groups
        for param in group
    }


def _parts(found: dict[int, list[ShardedTensor]], param: torch.nn.Parameter) -> list[ShardedTensor]:
    if id(param) not in found:
        raise UnsupportedError(
            f"a parameter of shape {tuple(param.shape)} cannot be saved",
            why="the model's sharded_state_dict does not have it, or has a copy",
            remedy="Give its module a sharded_state_dict that hands out the parameter itself",
        )
    parts = found[id(param)]
    if sum(part.data.numel() for part in parts) != param.numel():
        raise UnsupportedError(
            f"{parts[0].key} cannot be saved",
            why=f"the model's sharded_state_dict does not have all of its {param.numel()} elements",
        )
    return sorted(parts, key=lambda part: part.data.storage_offset())


def _placement(param: torch.nn.Parameter, part: ShardedTensor, instance: int) -> Placement:
    data = part.data
    if data.untyped_storage().data_ptr() != param.untyped_storage().data_ptr() or not data.is_contiguous():
        raise UnsupportedError(
            f"{part.key} cannot be saved",
            why="the model's sharded_state_dict has a rearranged copy of it, not a view",
        )
    return Placement(
        part.key,
        tuple(part.global_shape),
        tuple(part.global_offset),
        (1,) * part.prepend_axis_num + tuple(part.local_shape),
        start=data.storage_offset() - param.storage_offset(),
        owner=_is_owner(part.replica_id, instance),
    )


def _is_owner(replica: int | tuple[int, ...], instance: int) -> bool:
    """Whether this rank saves its shard. Copies on tensor- and pipeline-parallel ranks are saved once; along
    the data-parallel axis, the last of a replica's numbers, ranks own different shards instead of copies."""
    if isinstance(replica, int):
        return replica == 0 and instance == 0
    return not any(replica[:-1]) and instance == 0
