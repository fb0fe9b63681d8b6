"""Main params that exist in files only: tensors with a shape but without memory.

Megatron hangs gradients and attributes on its main params and asks for their size, so something must stand in
for one whose values are elsewhere. It is a single NaN expanded to the shape: reading it gives NaN and not an
old value, writing values to it (a copy, an update) is an error, and it takes no memory however large it is.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_HALF_PRECISION = (torch.bfloat16, torch.float16)


def evicted(numel: int, device: torch.device) -> torch.Tensor:
    """A 1-D fp32 stand-in of `numel` elements on `device`, backed by one element."""
    return torch.full((), math.nan, dtype=torch.float32, device=device).expand(numel)


def is_evicted(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is such a stand-in."""
    return tensor.dim() == 1 and tensor.stride() == (0,) and tensor.untyped_storage().nbytes() == 4


class BornEvicted(TorchFunctionMode):
    """Answers `.float()` of a 1-D half-precision tensor with an evicted one.

    That is how Megatron makes a main param from a shard of a model param; under this mode none is ever
    allocated. Enter it only around that code.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.Tensor.float and args[0].dim() == 1 and args[0].dtype in _HALF_PRECISION:
            return evicted(args[0].numel(), args[0].device)
        return func(*args, **(kwargs or {}))
