"""State that is on the device, as something to save and to restore: Megatron's native fp32 params under
streaming, and all state of an optimizer that is not streamed."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass

import torch

from optstream.core.placement import Placement, Region, regions_of
from optstream.core.plan import SEGMENTS
from optstream.core.state_part import StatePart, Values
from optstream.core.update import step_tensor

BLOCK_NUMEL = 8 << 20
MOMENTS = ("exp_avg", "exp_avg_sq")

# An optimizer's `state`: by main param, its moments and, for classes that count there, its `step`.
State = MutableMapping[torch.Tensor, dict]


@dataclass(frozen=True)
class ResidentEntry:
    """A main param (1-D fp32), which is its parameter's elements from `start` on, and its param group."""

    main: torch.Tensor
    placements: Sequence[Placement]
    start: int
    group: dict


class ResidentPart(StatePart):
    """state: where the moments are, and are put. counts_per_parameter: whether steps are counted there.
    copied: snapshots are copies (small state, saved behind the steps), not views."""

    def __init__(
        self,
        entries: Sequence[ResidentEntry],
        state: State,
        *,
        counts_per_parameter: bool,
        copied: bool,
        block_numel: int = BLOCK_NUMEL,
    ) -> None:
        self._entries, self._state = entries, state
        self._counts_per_parameter, self._copied = counts_per_parameter, copied
        # (entry, first, end) of each block.
        self._blocks = [
            (entry, first, min(first + block_numel, each.main.numel()))
            for entry, each in enumerate(entries)
            for first in range(0, each.main.numel(), block_numel)
        ]
        self.regions = [
            region
            for block, (entry, first, end) in enumerate(self._blocks)
            for region in regions_of(
                entries[entry].placements,
                block=block,
                entry=entry,
                start=entries[entry].start + first,
                stop=entries[entry].start + end,
                position=0,
            )
        ]
        self._open: Values = {}

    def snapshot(self) -> ResidentSnapshot:
        tensors = [self._tensors(entry) for entry in self._entries]
        if self._copied:
            tensors = [{name: value.to("cpu", copy=True) for name, value in each.items()} for each in tensors]
        steps = [self._step(entry) for entry in self._entries]
        return ResidentSnapshot(self.regions, self._blocks, tensors, steps)

    def open_block(self, block: int) -> Values:
        _, first, end = self._blocks[block]
        self._open = {name: torch.zeros(end - first) for name in SEGMENTS}
        return self._open

    def flush_block(self, block: int, step: int) -> None:
        index, first, end = self._blocks[block]
        entry = self._entries[index]
        state = self._state.setdefault(entry.main, {})
        for name in MOMENTS:
            if name not in state:
                state[name] = torch.zeros_like(entry.main)
        for name, value in self._tensors(entry).items():
            value[first:end].copy_(self._open[name])

    def restore_steps(self, steps: Mapping[int, int]) -> None:
        self._open = {}
        if not self._counts_per_parameter:
            return
        for index, step in steps.items():
            entry = self._entries[index]
            # A tensor of its own each: Adam advances them in place.
            self._state[entry.main]["step"] = step_tensor(entry.group, step, entry.main)

    def _tensors(self, entry: ResidentEntry) -> Values:
        state = self._state.get(entry.main, {})
        moments = {name: state.get(name, torch.zeros_like(entry.main)) for name in MOMENTS}
        return {name: value.detach().view(-1) for name, value in {"main": entry.main, **moments}.items()}

    def _step(self, entry: ResidentEntry) -> int:
        own = self._state.get(entry.main, {}) if self._counts_per_parameter else entry.group
        return int(own.get("step", 0))


class ResidentSnapshot:
    """A `PartSnapshot` of tensors, as they are when they are read or, copied, as they were."""

    def __init__(
        self,
        regions: Sequence[Region],
        blocks: Sequence[tuple[int, int, int]],
        tensors: Sequence[Values],
        steps: Sequence[int],
    ) -> None:
        self.regions, self.steps = regions, steps
        self.dtypes = dict.fromkeys(SEGMENTS, torch.float32)
        self._blocks, self._tensors = blocks, tensors
        self._numel = max((end - first for _, first, end in blocks), default=0)
        self.block_bytes = self._numel * 4 * len(SEGMENTS)

    def read(self, block: int, memory: torch.Tensor) -> Values:
        entry, first, end = self._blocks[block]
        rows = memory.view(torch.float32).view(len(SEGMENTS), self._numel)
        values = {name: row[: end - first] for name, row in zip(SEGMENTS, rows, strict=True)}
        for name, value in values.items():
            value.copy_(self._tensors[entry][name][first:end])
        return values

    def release(self, block: int) -> None:
        return None

    def close(self) -> None:
        self._tensors = []
