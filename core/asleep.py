"""Tensors whose memory was given away: the same objects, which refuse to be used until it is back.

torch does not look whether a tensor has memory: an operation on one without crashes the process. So the class
of the object itself is exchanged for one whose every operation raises AsleepError. Whoever holds the object
keeps it; shapes and sizes can still be asked for. Views that somebody made for himself are objects that
nobody here knows: they must not be used meanwhile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from optstream.core.errors import AsleepError

# What needs no memory: descriptions of the tensor, and its storage, which is empty meanwhile.
_ALLOWED = frozenset(
    {
        torch.Tensor.shape.__get__,
        torch.Tensor.dtype.__get__,
        torch.Tensor.device.__get__,
        torch.Tensor.layout.__get__,
        torch.Tensor.ndim.__get__,
        torch.Tensor.requires_grad.__get__,
        torch.Tensor.is_leaf.__get__,
        torch.Tensor.is_cuda.__get__,
        torch.Tensor.dim,
        torch.Tensor.size,
        torch.Tensor.stride,
        torch.Tensor.storage_offset,
        torch.Tensor.numel,
        torch.Tensor.nelement,
        torch.Tensor.element_size,
        torch.Tensor.untyped_storage,
        torch.Tensor.__len__,
    }
)


class _Asleep:
    """Mixed into the class of a tensor. Its objects differ from those of that class in nothing else."""

    @classmethod
    def __torch_function__(
        cls, function: Callable, types: Iterable[type], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if function in _ALLOWED:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        raise _asleep_error(getattr(function, "__name__", function))

    def __repr__(self) -> str:
        return f"<asleep {_awake_class(type(self)).__name__} of shape {tuple(self.shape)}>"


def put_to_sleep(tensor: torch.Tensor) -> None:
    """Every operation on `tensor` raises AsleepError from now on."""
    if not isinstance(tensor, _Asleep):
        tensor.__class__ = _asleep_class(type(tensor))


def refuse_asleep(tensors: Iterable[torch.Tensor], what: str) -> None:
    """Raise AsleepError, before `what` has begun, if any of `tensors` is asleep."""
    if any(isinstance(tensor, _Asleep) for tensor in tensors):
        raise _asleep_error(what)


def awaken(tensor: torch.Tensor) -> None:
    """`tensor` is what it was before `put_to_sleep`."""
    if isinstance(tensor, _Asleep):
        tensor.__class__ = _awake_class(type(tensor))


def _asleep_error(what: object) -> AsleepError:
    return AsleepError(
        "the trainer is asleep",
        why=f"{what} needs memory that the rollout engines have meanwhile",
        remedy="Call wake_up() first",
    )


@functools.cache
def _asleep_class(cls: type) -> type:
    return type(cls)(f"Asleep{cls.__name__}", (_Asleep, cls), {})


def _awake_class(cls: type) -> type:
    return cls.__mro__[cls.__mro__.index(_Asleep) + 1]
