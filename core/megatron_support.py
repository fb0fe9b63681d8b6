"""Which Megatron set-ups can be streamed, judged by the objects that were built and not by flags."""

from __future__ import annotations

import argparse

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer, MixedPrecisionOptimizer

from optstream.core.errors import UnsupportedError
from optstream.core.megatron_fingerprints import unknown_methods


def refuse_unsupported(args: argparse.Namespace, chain: list[MegatronOptimizer]) -> None:
    """Raise UnsupportedError for what streaming would get wrong, naming it."""
    if getattr(args, "log_params_norm", False):
        raise UnsupportedError(
            "--log-params-norm cannot be combined with streaming",
            why="Megatron computes that norm from main params on the device, and they are in files",
            remedy="Drop --log-params-norm",
        )
    for part in chain:
        name = type(part).__name__
        if not isinstance(part, DistributedOptimizer):
            raise UnsupportedError(
                f"{name} cannot be streamed",
                why="only DistributedOptimizer keeps its state in flat shards",
                remedy="Use --use-distributed-optimizer with --optimizer adam",
            )
        if part.is_stub_optimizer:
            continue
        if getattr(part, "_nvme_state_store", None) is not None:
            raise UnsupportedError(f"{name} is already streamed", remedy="Set it up once")
        if part.ddp_config.use_megatron_fsdp:
            raise UnsupportedError("Megatron-FSDP cannot be streamed", why="it has buffers of its own")
        if part.config.use_precision_aware_optimizer:
            raise UnsupportedError(
                "the precision-aware optimizer cannot be streamed", why="it keeps main params itself"
            )
        if getattr(part.config, "reuse_grad_buf_for_mxfp8_param_ag", False) or any(
            _is_quantised(param) for group in part.model_float16_groups for param in group
        ):
            raise UnsupportedError(
                "fp8 and fp4 params cannot be streamed",
                why="they are quantised by one collective over the whole set, not bucket by bucket",
                remedy="Drop --fp8-param-gather",
            )
        inner = type(part.optimizer)
        if not issubclass(inner, torch.optim.Adam) and inner.__name__ != "FusedAdam":
            raise UnsupportedError(f"{inner.__name__} cannot be streamed", why="only Adam and AdamW can")
    unknown = unknown_methods(
        {"DistributedOptimizer": DistributedOptimizer, "MixedPrecisionOptimizer": MixedPrecisionOptimizer}
    )
    if unknown:
        raise UnsupportedError(
            "this release of megatron-core cannot be streamed",
            why=f"it changed {', '.join(unknown)}, which optstream stands in for or relies on",
            remedy="Use megatron-core 0.16 to 0.19, or a newer optstream",
        )


def _is_quantised(param: torch.nn.Parameter) -> bool:
    # TransformerEngine's quantised tensors are subclasses; plain params are Parameter, whatever their dtype.
    return type(param.data) is not torch.Tensor
