"""The params of a half-precision model that are fp32 themselves: they stay where they are."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from optstream.core.resident_part import State
from optstream.core.update import keeps_step_per_parameter, step_tensor, worker_of


class NativeFp32Params:
    """Native fp32 params: main params of their own, updated whole by a worker of the inner optimizer's class.

    Only their moments are extra memory (8 bytes a parameter): routers and the like, a sliver of a model.
    """

    def __init__(self, optimizer: DistributedOptimizer) -> None:
        self._megatron = optimizer
        self._worker = worker_of(optimizer.optimizer, type(optimizer.optimizer))

    @property
    def state(self) -> State:
        """By main param, its moments and step count, as the worker keeps them."""
        return self._worker.state

    @property
    def state_bytes(self) -> int:
        return sum(moment.nbytes for moment in self.moments())

    def moments(self) -> Iterator[torch.Tensor]:
        for state in list(self._worker.state.values()):
            for name in ("exp_avg", "exp_avg_sq"):
                if name in state:
                    yield state[name]

    def step(self, group_counts: list[int]) -> None:
        """One update with the hyperparameters that the master groups have now."""
        inner, groups = self._megatron.optimizer, []
        for master, shards, count in zip(
            inner.param_groups, self._megatron.shard_fp32_groups, group_counts, strict=True
        ):
            if shards:
                settings = {key: value for key, value in master.items() if key not in ("params", "step")}
                groups.append({**settings, "params": list(shards), "step": count})
        self._worker.param_groups = groups
        if groups:
            self._worker.step()

    def restart_at(self, step: int) -> None:
        """Every param has had `step` updates. Moments that are not there yet start from zero."""
        if not keeps_step_per_parameter(self._worker):
            return
        inner = self._megatron.optimizer
        for group, shards in zip(inner.param_groups, self._megatron.shard_fp32_groups, strict=True):
            for main in shards:
                state = self._worker.state[main]
                for name in ("exp_avg", "exp_avg_sq"):
                    state.setdefault(name, torch.zeros_like(main))
                state["step"] = step_tensor(group, step, main)

    def states(self) -> Iterator[tuple[torch.nn.Parameter, int, int, dict[str, torch.Tensor], int]]:
        megatron = self._megatron
        for group, params in enumerate(megatron.model_fp32_groups):
            for param, main in zip(params, megatron.shard_fp32_groups[group], strict=True):
                shard = megatron._get_model_param_range_map(param)["param"]
                state = self._worker.state.get(main, {})
                values = {
                    "main": main.detach().view(-1),
                    **{
                        name: state.get(name, torch.zeros_like(main)).view(-1)
                        for name in ("exp_avg", "exp_avg_sq")
                    },
                }
                step = int(state.get("step", megatron.optimizer.param_groups[group].get("step", 0)))
                yield param, shard.start, shard.end, values, step
