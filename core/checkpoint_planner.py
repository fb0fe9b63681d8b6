"""What is saved and loaded, item by item: planners for torch.distributed.checkpoint.

Every item is a rectangle of a global tensor, `main/<name>`, `exp_avg/<name>` or `exp_avg_sq/<name>`. Items
are in the order of the blocks that hold them, so that a block is read once, is followed by the next, and is
written back when its last item has come.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, LoadPlan, LoadPlanner, SavePlan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    ReadItem,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from optstream.core import param_groups
from optstream.core.errors import CheckpointError
from optstream.core.manifest import check_coverage
from optstream.core.memory import allocate_host
from optstream.core.param_groups import GroupRecord
from optstream.core.placement import ITEM_NUMEL, Item, Region
from optstream.core.plan import SEGMENTS
from optstream.core.state_part import PartSnapshot, StatePart, Values
from optstream.core.tasks import start
from optstream.core.workers import Workers

Block = tuple[int, int]  # the part's index, and the block's in it


@dataclass(frozen=True)
class _Held:
    """Where an item is held."""

    block: Block
    segment: str
    item: Item
    step: int


class StateSavePlanner(DefaultSavePlanner):
    """Saves snapshots. groups: this rank's param groups. item_numel: the most elements of an item."""

    def __init__(
        self,
        parts: Sequence[PartSnapshot],
        groups: Sequence[GroupRecord],
        *,
        item_numel: int = ITEM_NUMEL,
    ) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._parts, self._groups, self._item_numel = parts, list(groups), item_numel
        self._held: dict[MetadataIndex, _Held] = {}
        self._reader: _BlockReader | None = None

    def create_local_plan(self) -> SavePlan:
        items = []
        for number, part in enumerate(self._parts):
            for region in part.regions:
                if region.placement.owner:
                    items += self._items(number, part, region)
        blocks = dict.fromkeys(held.block for held in self._held.values())
        self._reader = _BlockReader(self._parts, list(blocks))
        return SavePlan(items, planner_data=self._groups)

    def _items(self, number: int, part: PartSnapshot, region: Region) -> list[WriteItem]:
        items = []
        for item in region.items(self._item_numel):
            for segment in SEGMENTS:
                index = MetadataIndex(f"{segment}/{item.key}", item.offsets)
                data = TensorWriteData(
                    ChunkStorageMetadata(torch.Size(item.offsets), torch.Size(item.sizes)),
                    TensorProperties(dtype=part.dtypes[segment]),
                    torch.Size(item.global_shape),
                )
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
                self._held[index] = _Held((number, region.block), segment, item, part.steps[region.entry])
        return items

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Raises CheckpointError unless all ranks together hold every element of every tensor once."""
        try:
            plans, metadata = super().create_global_plan(all_plans)
            for name, tensor in metadata.state_dict_metadata.items():
                check_coverage(name, tensor.size, tensor.chunks)
        except ValueError as error:
            raise CheckpointError(
                "the state cannot be saved", why=f"its parts do not make whole tensors: {error}"
            ) from error
        metadata.planner_data = param_groups.merge(g for plan in all_plans for g in plan.planner_data)
        return plans, metadata

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        held = self._held[write_item.index]
        values = self._reader.values(held.block)[held.segment]
        return values[held.item.position : held.item.position + held.item.numel].view(held.item.sizes)

    def step_of(self, index: MetadataIndex) -> int:
        """Updates that the item's elements have had."""
        return self._held[index].step

    def close(self) -> None:
        """Stop reading ahead. Idempotent."""
        if self._reader is not None:
            self._reader.close()


class _BlockReader:
    """Reads blocks in a known order, the next one while the last one is being written."""

    def __init__(self, parts: Sequence[PartSnapshot], order: list[Block]) -> None:
        self._parts = parts
        self._order = order
        self._current = -1
        size = max((parts[part].block_bytes for part, _ in order), default=0)
        self._memory = [allocate_host(size) for _ in range(min(2, len(order)))]
        self._workers = Workers(1, "optstream-read-ahead")
        self._values: Values = {}
        self._next: Future | None = self._start(0)

    def values(self, block: Block) -> Values:
        if self._current < 0 or block != self._order[self._current]:
            self._advance()
            if block != self._order[self._current]:
                raise RuntimeError(f"block {block} was asked for out of order")
        return self._values

    def close(self) -> None:
        self._workers.close()

    def _advance(self) -> None:
        self._values = self._next.result()
        self._current += 1
        self._next = self._start(self._current + 1)

    def _start(self, position: int) -> Future | None:
        if position >= len(self._order):
            return None
        return start(self._workers, self._read, position)

    def _read(self, position: int) -> Values:
        part, block = self._order[position]
        snapshot = self._parts[part]
        memory = self._memory[position % 2][: snapshot.block_bytes]
        values = snapshot.read(block, memory)
        # Its bytes are in memory now; the file may go.
        snapshot.release(block)
        return values


@dataclass
class _Open:
    """The block that is being restored, and which of its elements have come."""

    block: Block
    values: Values
    came: dict[str, torch.Tensor]
    step: int = 0


@dataclass
class StateLoadPlanner(LoadPlanner):
    """Restores parts, block by block, and counts: every element comes exactly once.

    path: what messages call the checkpoint."""

    parts: Sequence[StatePart]
    path: str
    item_numel: int = ITEM_NUMEL
    _held: dict[MetadataIndex, _Held] = field(default_factory=dict)
    _regions: dict[Block, list[Region]] = field(default_factory=dict)
    _steps: list[dict[int, int]] = field(default_factory=list)
    _open: _Open | None = None
    _restored: set[Block] = field(default_factory=set)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        wanted: dict[str, list[Item]] = {}
        entries: dict[tuple[str, tuple[int, ...]], tuple[int, int]] = {}
        for number, part in enumerate(self.parts):
            self._steps.append({})
            for region in part.regions:
                block = (number, region.block)
                self._regions.setdefault(block, []).append(region)
                for item in region.items(self.item_numel):
                    wanted.setdefault(item.key, []).append(item)
                    entries[item.key, item.offsets] = (number, region.entry)
                    for segment in SEGMENTS:
                        index = MetadataIndex(f"{segment}/{item.key}", item.offsets)
                        self._held[index] = _Held(block, segment, item, step=0)
        reads: list[ReadItem] = []
        for key, items in wanted.items():
            for segment in SEGMENTS:
                reads += self._reads(f"{segment}/{key}", items)
        for read in reads:
            key = read.dest_index.fqn.partition("/")[2]
            number, entry = entries[key, tuple(read.dest_index.offset)]
            self._note_step(number, entry, self._metadata.storage_data[read.storage_index].step, key)
        # In the order of their places, so that a stored item is read once for all that a block takes of it.
        places = self._metadata.storage_data
        reads.sort(
            key=lambda read: (
                self._held[read.dest_index].block,
                places[read.storage_index].file,
                places[read.storage_index].offset,
            )
        )
        return LoadPlan(reads)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise RuntimeError("a checkpoint of state holds tensors only")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        held = self._held[read_item.dest_index]
        if self._open is None or self._open.block != held.block:
            self._flush()
            self._begin(held.block)
        return self._view(self._open.values, read_item)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        came = self._view(self._open.came, read_item)
        if came.numpy().any():  # numpy's, on booleans, are many times as fast as torch's.
            raise self._unfit(f"some elements of {read_item.dest_index.fqn} are in it twice")
        came.fill_(True)
        self._open.step = max(self._open.step, self._metadata.storage_data[read_item.storage_index].step)

    def finish(self) -> None:
        """All items have come: flush the last block, and tell the parts how many updates they have had.

        Raises CheckpointError unless every element came."""
        self._flush()
        if missing := self._regions.keys() - self._restored:
            raise self._unfit(f"nothing came for {len(missing)} blocks")
        for part, steps in zip(self.parts, self._steps, strict=True):
            part.restore_steps(steps)

    def _reads(self, name: str, items: list[Item]) -> list[ReadItem]:
        if name not in self._metadata.state_dict_metadata:
            raise self._unfit(f"it holds no {name}")
        stored = self._metadata.state_dict_metadata[name]
        if tuple(stored.size) != items[0].global_shape:
            raise self._unfit(
                f"{name} has shape {tuple(stored.size)} there and {items[0].global_shape} in this model"
            )
        chunks = [ChunkStorageMetadata(torch.Size(i.offsets), torch.Size(i.sizes)) for i in items]
        return create_read_items_for_chunk_list(name, stored, chunks)

    def _note_step(self, number: int, entry: int, step: int, key: str) -> None:
        if self._steps[number].setdefault(entry, step) != step:
            raise self._unfit(f"the parts of {key} have had different numbers of updates")

    def _begin(self, block: Block) -> None:
        number, index = block
        if block in self._restored:
            raise RuntimeError(f"block {block} came in two parts")
        values = self.parts[number].open_block(index)
        came = {name: torch.zeros(len(values[name]), dtype=torch.bool) for name in SEGMENTS}
        self._open = _Open(block, values, came)

    def _flush(self) -> None:
        opened, self._open = self._open, None
        if opened is None:
            return
        for region in self._regions[opened.block]:
            for segment in SEGMENTS:
                if not opened.came[segment][region.span].numpy().all():
                    raise self._unfit(f"some elements of {segment}/{region.placement.key} are not in it")
        number, index = opened.block
        self.parts[number].flush_block(index, opened.step)
        self._restored.add(opened.block)

    def _view(self, values: Values, read: ReadItem) -> torch.Tensor:
        held = self._held[read.dest_index]
        item = held.item
        view = values[held.segment][item.position : item.position + item.numel].view(item.sizes)
        for dim, (offset, length) in enumerate(zip(read.dest_offsets, read.lengths, strict=True)):
            view = view.narrow(dim, offset, length)
        return view

    def _unfit(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path} does not fit this optimizer",
            why=why,
            remedy="Load it into the model that it was saved from, or another checkpoint",
            path=self.path,
        )
