"""The plain in-memory AdamW that a streamed one must equal to the last bit. Knows torch and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class ReferenceAdamW:
    """`torch.optim.AdamW` on fp32 main params that start from `params` (of any float dtype). Can be
    deep-copied: that is its checkpoint."""

    def __init__(self, params: Sequence[torch.Tensor], **settings: Any) -> None:
        self._dtypes = [param.dtype for param in params]
        self._mains = [torch.nn.Parameter(param.detach().clone().float()) for param in params]
        self._adamw = torch.optim.AdamW(self._mains, **settings)

    def step(self, gradients: Sequence[torch.Tensor | None]) -> None:
        for main, gradient in zip(self._mains, gradients, strict=True):
            main.grad = None if gradient is None else gradient.float()
        self._adamw.step()

    def set_hyperparameters(self, **values: Any) -> None:
        for group in self._adamw.param_groups:
            group.update(values)

    def has_hyperparameters(self, group: dict[str, Any]) -> bool:
        """Whether a param group of another optimizer says the same."""
        own = self._adamw.param_groups[0]
        return all(group[name] == own[name] for name in ("lr", "betas", "eps", "weight_decay"))

    def reload(self, params: Sequence[torch.Tensor]) -> None:
        """Main params start again from `params`; moments and step counts stay."""
        with torch.no_grad():
            for main, param in zip(self._mains, params, strict=True):
                main.copy_(param)

    def params(self) -> list[torch.Tensor]:
        """What the model's own parameters hold, each in its dtype."""
        return [main.detach().to(dtype) for main, dtype in zip(self._mains, self._dtypes, strict=True)]

    def state(self) -> list[dict[str, torch.Tensor | int]]:
        """main, exp_avg, exp_avg_sq and step of each parameter."""
        found = []
        for main in self._mains:
            known = self._adamw.state.get(main, {})
            zeros = torch.zeros_like(main)
            moments = {name: known.get(name, zeros).detach() for name in ("exp_avg", "exp_avg_sq")}
            found.append({"main": main.detach(), **moments, "step": int(known.get("step", 0))})
        return found


def same_bits(one: Any, other: Any) -> bool:
    """Bytes, not values: NaN equals the same NaN, and 0.0 is not -0.0."""
    if not torch.is_tensor(one):
        return one == other
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
