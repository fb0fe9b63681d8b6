"""What a checkpoint is made from and restored into: state in blocks, of which one is in memory at a time.

Streamed state has its buckets for blocks; state that is resident is cut into blocks for the purpose.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from optstream.core.placement import Region

# By segment (main, exp_avg, exp_avg_sq): 1-D tensors on the host, of the dtype that they are stored in.
Values = dict[str, torch.Tensor]


class PartSnapshot(Protocol):
    """State as it was at one moment.

    regions: what there is and where it is held. dtypes: of the segments. steps: updates had, by entry.
    block_bytes: memory that any block fits in.
    """

    regions: Sequence[Region]
    dtypes: Mapping[str, torch.dtype]
    steps: Sequence[int]
    block_bytes: int

    def read(self, block: int, memory: torch.Tensor) -> Values:
        """The values of a block, in `memory` (1-D uint8, `block_bytes` long, from `allocate_host`)."""
        ...

    def release(self, block: int) -> None:
        """The block will not be read again."""
        ...

    def close(self) -> None: ...


class StatePart(ABC):
    """State that can be saved and restored. `regions` covers every element of every entry once."""

    regions: Sequence[Region]

    @abstractmethod
    def snapshot(self) -> PartSnapshot:
        """The state as it is now. Raises PoisonedError where it is not usable."""

    @abstractmethod
    def open_block(self, block: int) -> Values:
        """Room for the values of a block that is restored: views or buffers, to be filled, then flushed."""

    @abstractmethod
    def flush_block(self, block: int, step: int) -> None:
        """Every value of the block that was opened last is right now: put it where it belongs. `step`: the
        largest number of updates that any of it had."""

    @abstractmethod
    def restore_steps(self, steps: Mapping[int, int]) -> None:
        """Entries have had that many updates."""
