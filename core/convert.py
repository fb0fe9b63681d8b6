"""Optimizer state from one kind of checkpoint into the other, offline, item by item.

A streamed checkpoint becomes one of Megatron's `torch_dist` kind, of optimizer state alone (the model is
loaded from where it is), and the other way round. Names and bits stay; memory holds a few items.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from optstream.backends.errors import DirectoryError
from optstream.core.checkpoint import Ranks, Saver, Source, find, own_errors, without_torchs_warning
from optstream.core.checkpoint_storage import OpenFiles, read_item
from optstream.core.errors import UnsupportedError
from optstream.core.manifest import Manifest
from optstream.core.publish import CheckpointDirectory
from optstream.core.stored_part import StoredPart
from optstream.core.torch_dist import MEGATRON_SEGMENTS, PREFIX, SHARDING


def convert_to_streamed(source: str, target: str) -> Manifest:
    """Save what `source` holds as a streamed checkpoint below `target`; returns its manifest."""
    found = find(CheckpointDirectory(source))
    directory = CheckpointDirectory(target)
    saver = Saver(Ranks(topology=found.manifest.topology or {"ranks": 1}))
    saver.save([StoredPart(found)], found.manifest.groups, directory, iteration=found.manifest.iteration)
    return find(directory).manifest


def convert_to_resident(source: str, target: str) -> Manifest:
    """Write what `source` holds as Megatron's own kind of checkpoint, the new directory `target`.

    Raises UnsupportedError for state that that kind cannot express, and DirectoryError if `target` exists."""
    found = find(CheckpointDirectory(source))
    step = _common_step(found)
    if found.manifest.topology.get("ep", 1) > 1:
        raise UnsupportedError(
            f"{found.path} cannot become a resident checkpoint offline",
            why="with expert parallelism its form depends on Megatron's chain of optimizers",
            remedy="Load it into a resident run with optstream.core.megatron_checkpoint.resident_checkpoints",
        )
    final = Path(target).absolute()
    if final.exists():
        raise DirectoryError(
            f"{final} cannot be written", why="it exists", remedy="Name a new directory", path=str(final)
        )
    partial = final.with_name(f"{final.name[:200]}.partial-{secrets.token_hex(4)}")
    try:
        partial.mkdir(parents=True)
        _write_resident(found, step, partial)
        os.rename(partial, final)
        _sync(final.parent)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise DirectoryError(
            f"{final} cannot be written",
            why=error.strerror or str(error),
            remedy="Choose a directory that this user can write, with room for the checkpoint",
            path=str(final),
            operation="write",
        ) from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return found.manifest


def _write_resident(found: Source, step: int, folder: Path) -> None:
    planner = _ResidentPlanner(found)
    writer = dcp.FileSystemWriter(folder, thread_count=1, sync_files=True)
    try:
        with own_errors(0), without_torchs_warning():
            dcp.save({}, storage_writer=writer, planner=planner, no_dist=True)
    finally:
        planner.close()
    groups = [
        {**{key: _as_megatron(key, value) for key, value in each.settings.items()}, "step": float(step)}
        for each in found.manifest.groups
    ]
    for group in groups:
        group["is_expert_parallel"] = False
    optimizer = {"optimizer": {"param_groups": groups}, "param_state_sharding_type": SHARDING}
    torch.save({"optimizer": optimizer, "iteration": found.manifest.iteration}, folder / "common.pt")
    (folder / "metadata.json").write_text(
        json.dumps(
            {
                "sharded_backend": "torch_dist",
                "sharded_backend_version": 1,
                "common_backend": "torch",
                "common_backend_version": 1,
            }
        )
    )
    for name in ("common.pt", "metadata.json"):
        _sync(folder / name)
    _sync(folder)


class _ResidentPlanner(DefaultSavePlanner):
    """Each stored item under Megatron's name, in fp32."""

    def __init__(self, found: Source) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._found, self._files = found, OpenFiles(found.reader)
        self._ours: dict[MetadataIndex, MetadataIndex] = {}

    def create_local_plan(self) -> SavePlan:
        items = []
        for name, tensor in self._found.manifest.tensors.items():
            segment, _, key = name.partition("/")
            for chunk in tensor.chunks:
                index = MetadataIndex(f"{PREFIX}{MEGATRON_SEGMENTS[segment]}.{key}", chunk.offsets)
                data = TensorWriteData(chunk, TensorProperties(dtype=torch.float32), tensor.size)
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
                self._ours[index] = MetadataIndex(name, chunk.offsets)
        return SavePlan(items)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        index = self._ours[write_item.index]
        manifest = self._found.manifest
        item = manifest.items[index]
        stored = read_item(self._files.open(item.file), index.fqn, item)
        dtype = manifest.tensors[index.fqn].properties.dtype
        return stored.view(dtype).view(write_item.tensor_data.chunk.sizes).float()

    def close(self) -> None:
        self._files.close()


def _common_step(found: Source) -> int:
    steps = {item.step for item in found.manifest.items.values()}
    if len(steps) > 1:
        raise UnsupportedError(
            f"{found.path} cannot become a resident checkpoint",
            why=f"its parameters have had different numbers of updates, {sorted(steps)}; that kind has one",
        )
    return steps.pop() if steps else 0


def _as_megatron(key: str, value: Any) -> Any:
    return tuple(value) if key == "betas" else value


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
