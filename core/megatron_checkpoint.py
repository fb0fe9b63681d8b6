"""Checkpoints of a chain of DistributedOptimizers: one checkpoint for all of them, whole or not at all.

Trainers call `save_to` and `load_from` of each optimizer of the chain in turn. The first call saves all of
them, in one checkpoint that becomes visible at once; the others find theirs done. Loading is by name, each
optimizer taking what it needs, so that a chain of two (dense and expert) loads what a chain of one saved.
"""

from __future__ import annotations

import argparse
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from optstream.core import checkpoint, param_groups
from optstream.core.asleep import refuse_asleep
from optstream.core.checkpoint import Ranks, Saver
from optstream.core.manifest import Manifest
from optstream.core.megatron_placements import LAYERS_TOGETHER, Placements, placements_of
from optstream.core.param_groups import GroupRecord
from optstream.core.publish import CheckpointDirectory
from optstream.core.resident_part import ResidentEntry, ResidentPart, State
from optstream.core.state_part import StatePart
from optstream.core.streamed_part import StreamedPart
from optstream.core.streamer import StateStreamer
from optstream.core.update import Publish, keeps_step_per_parameter


@dataclass(frozen=True)
class Policy:
    """What the trainer says of checkpoints.

    load_optimizer: False accepts a fresh state. keep_schedule: learning rates and weight decay are the
    trainer's, not the checkpoint's. background: saves run behind the steps."""

    load_optimizer: bool = True
    keep_schedule: bool = False
    background: bool = False

    @classmethod
    def of(cls, args: argparse.Namespace) -> Policy:
        """By the flags of Megatron and its trainers; those that `args` lacks are off."""
        return cls(
            load_optimizer=not getattr(args, "no_load_optim", False),
            keep_schedule=bool(getattr(args, "override_opt_param_scheduler", False)),
            background=bool(getattr(args, "async_save", False)),
        )


class Link(ABC):
    """One optimizer of the chain, as a checkpoint sees it."""

    @abstractmethod
    def parts(self, stored: Manifest | None = None) -> list[StatePart]:
        """What is saved or, as `stored` names it, loaded."""

    @abstractmethod
    def groups(self) -> list[dict]: ...

    @abstractmethod
    def group_steps(self) -> list[int]: ...

    @abstractmethod
    def group_names(self) -> list[list[str]]:
        """Names of the parameters in each group of which this rank owns a shard."""

    @abstractmethod
    def restore_group_step(self, group: int, step: int) -> None: ...

    def refuse_asleep(self, what: str) -> None:
        """Raise AsleepError, on every rank, where the trainer is asleep."""
        return

    def restoring(self) -> AbstractContextManager[None]:
        """Around a restore: an error inside it leaves the optimizer refusing to step."""
        return nullcontext()

    def start_afresh(self) -> None:
        """Main params are the model's; nothing was loaded."""
        return


class StubLink(Link):
    """A rank that owns nothing of an optimizer still takes part."""

    def parts(self, stored: Manifest | None = None) -> list[StatePart]:
        return []

    def groups(self) -> list[dict]:
        return []

    def group_steps(self) -> list[int]:
        return []

    def group_names(self) -> list[list[str]]:
        return []

    def restore_group_step(self, group: int, step: int) -> None:
        return None


class MegatronLink(Link):
    """What streamed and resident DistributedOptimizers have in common."""

    def __init__(self, optimizer: DistributedOptimizer) -> None:
        self._megatron = optimizer

    @cached_property
    def placements(self) -> Placements:
        return placements_of(self._megatron)

    def groups(self) -> list[dict]:
        return self._megatron.optimizer.param_groups

    def group_names(self) -> list[list[str]]:
        megatron = self._megatron
        return [
            [placement.key for param in (*native, *half) for placement in self.placements[param]]
            for native, half in zip(megatron.model_fp32_groups, megatron.model_float16_groups, strict=True)
        ]

    def refuse_asleep(self, what: str) -> None:
        refuse_asleep(self._megatron.model_param_gbuf_map, what)

    def placements_for(self, stored: Manifest | None) -> Placements:
        """By the names that a checkpoint has: Megatron's own may keep the layers of a model in one tensor."""
        if stored is None or all(
            f"main/{p.key}" in stored.tensors for ps in self.placements.values() for p in ps
        ):
            return self.placements
        together = placements_of(self._megatron, LAYERS_TOGETHER)
        fits = all(f"main/{p.key}" in stored.tensors for ps in together.values() for p in ps)
        return together if fits else self.placements

    def native_entries(self, placements: Placements) -> list[ResidentEntry]:
        megatron = self._megatron
        return self._entries(placements, megatron.model_fp32_groups, megatron.shard_fp32_groups)

    def half_precision_entries(self, placements: Placements) -> list[ResidentEntry]:
        megatron = self._megatron
        return self._entries(
            placements, megatron.model_float16_groups, megatron.shard_fp32_from_float16_groups
        )

    def start_of(self, param: torch.nn.Parameter) -> int:
        """Where this rank's shard begins in the flattened parameter."""
        return self._megatron._get_model_param_range_map(param)["param"].start

    def _entries(
        self, placements: Placements, params_of_groups: list, mains_of_groups: list
    ) -> list[ResidentEntry]:
        return [
            ResidentEntry(main, placements[param], self.start_of(param), group)
            for group, params, mains in zip(self.groups(), params_of_groups, mains_of_groups, strict=True)
            for param, main in zip(params, mains, strict=True)
        ]


class ResidentLink(MegatronLink):
    """A DistributedOptimizer whose state is on the device, as Megatron made it."""

    def parts(self, stored: Manifest | None = None) -> list[StatePart]:
        placements = self.placements_for(stored)
        state: State = self._megatron.optimizer.state
        return [
            ResidentPart(
                [*self.native_entries(placements), *self.half_precision_entries(placements)],
                state,
                counts_per_parameter=keeps_step_per_parameter(self._megatron.optimizer),
                copied=False,
            )
        ]

    def group_steps(self) -> list[int]:
        inner = self._megatron.optimizer
        if not keeps_step_per_parameter(inner):
            return [int(group.get("step", 0)) for group in inner.param_groups]
        # torch counts per parameter only: the group's count is the largest, or that of all where it is empty.
        steps = [
            max((int(inner.state.get(p, {}).get("step", 0)) for p in group["params"]), default=None)
            for group in inner.param_groups
        ]
        largest = max((step for step in steps if step is not None), default=0)
        return [largest if step is None else step for step in steps]

    def restore_group_step(self, group: int, step: int) -> None:
        if not keeps_step_per_parameter(self._megatron.optimizer):
            self.groups()[group]["step"] = step


class StreamedLink(MegatronLink):
    """A DistributedOptimizer whose half-precision params stream. native_state: of the others."""

    def __init__(
        self,
        optimizer: DistributedOptimizer,
        streamer: StateStreamer,
        publish: Publish,
        native_state: State,
    ) -> None:
        super().__init__(optimizer)
        self._streamer, self._publish, self._native_state = streamer, publish, native_state

    def parts(self, stored: Manifest | None = None) -> list[StatePart]:
        placements = self.placements_for(stored)
        params = [param for group in self._megatron.model_float16_groups for param in group]
        streamed = StreamedPart(
            self._streamer,
            [placements[param] for param in params],
            [self.start_of(param) for param in params],
            self._publish,
        )
        native = ResidentPart(
            self.native_entries(placements),
            self._native_state,
            counts_per_parameter=self._streamer.counts_per_parameter,
            copied=True,
        )
        return [streamed, native]

    def group_steps(self) -> list[int]:
        return list(self._streamer.counts.groups)

    def restore_group_step(self, group: int, step: int) -> None:
        self._streamer.counts.groups[group] = step
        if not self._streamer.counts_per_parameter:
            self.groups()[group]["step"] = step

    def restoring(self) -> AbstractContextManager[None]:
        return self._streamer.restoring()

    def start_afresh(self) -> None:
        self._megatron.reload_model_params()


class ChainCheckpoints:
    """Saves and loads a whole chain; collective over all ranks, which build it in the same order."""

    def __init__(self, links: Sequence[Link], policy: Policy | None = None) -> None:
        self._links, self._policy = list(links), policy or Policy()
        # Ranks of their own to speak over, on the CPU: a save in the background must not get between the
        # collectives of the steps.
        self._ranks = Ranks(dist.new_group(backend="gloo"), topology())
        self._saver = Saver(self._ranks)
        self._saved_for: tuple[str, set[int]] | None = None

    def save(
        self,
        base_dir: str | os.PathLike,
        *,
        position: int = 0,
        iteration: int | None = None,
        background: bool | None = None,
        **directory: object,
    ) -> None:
        """Save the chain below `base_dir`, unless that was done for a sibling of link `position` just now."""
        for link in self._links:
            link.refuse_asleep("saving")
        path = os.path.abspath(base_dir)
        if self._saved_for is not None and self._saved_for[0] == path and position in self._saved_for[1]:
            self._saved_for[1].remove(position)
            return
        self._saver.save(
            [part for link in self._links for part in link.parts()],
            self._records(),
            CheckpointDirectory(base_dir, **directory),
            iteration=self._iteration() if iteration is None else iteration,
            background=self._policy.background if background is None else background,
        )
        self._saved_for = path, set(range(len(self._links))) - {position}

    def load(self, base_dir: str | os.PathLike, *, position: int = 0, **directory: object) -> bool:
        """Restore link `position`. True if it was; False if the trainer accepts a fresh state.

        Raises CheckpointError for a missing, incomplete, damaged or unfitting checkpoint; all ranks raise."""
        link = self._links[position]
        link.refuse_asleep("loading")
        self.forget()
        self.wait()
        if not self._policy.load_optimizer:
            link.start_afresh()
            return False
        where = CheckpointDirectory(base_dir, **directory)
        failure, source = None, None
        try:
            source = checkpoint.find(where)
        except Exception as error:
            failure = error
        self._ranks.raise_together(failure)
        names = self._names_everywhere(link)
        with link.restoring():
            try:
                records = [
                    param_groups.match(source.manifest.groups, held, group, source.path)
                    for held, group in zip(names, link.groups(), strict=True)
                ]
                checkpoint.load(link.parts(source.manifest), source)
                self._restore_groups(link, records)
            except Exception as error:
                failure = error
            self._ranks.raise_together(failure)
        return True

    def wait(self) -> None:
        """Return when no save is running; raises the failure of one in the background."""
        self._saver.wait()

    @property
    def progress(self) -> tuple[int, int]:
        return self._saver.progress

    def forget(self) -> None:
        """The state has changed, or is about to: the next `save` of any link saves the chain anew."""
        self._saved_for = None

    def _records(self) -> list[GroupRecord]:
        return [
            record
            for link in self._links
            for record in param_groups.describe(link.groups(), link.group_steps(), link.group_names())
        ]

    def _iteration(self) -> int:
        steps = [step for link in self._links for step in link.group_steps()]
        most = torch.tensor([max(steps, default=0)])
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._ranks.group)
        return int(most.item())

    def _names_everywhere(self, link: Link) -> list[set[str]]:
        """The names in each group on all ranks: a group whose shards are elsewhere has settings, too."""
        of_ranks: list[list[list[str]]] = [[] for _ in range(self._ranks.size)]
        dist.all_gather_object(of_ranks, link.group_names(), group=self._ranks.group)
        count = len(link.groups())
        return [{name for names in of_ranks if names for name in names[index]} for index in range(count)]

    def _restore_groups(self, link: Link, records: Sequence[GroupRecord | None]) -> None:
        keep = param_groups.SCHEDULED if self._policy.keep_schedule else ()
        for index, record in enumerate(records):
            if record is not None:
                param_groups.restore(link.groups()[index], record, keep=keep)
                link.restore_group_step(index, record.step)


def topology() -> dict[str, int]:
    """Sizes of Megatron's parallel groups, as a manifest records them."""
    return {
        "ranks": dist.get_world_size(),
        "dp": parallel_state.get_data_parallel_world_size(),
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "ep": parallel_state.get_expert_model_parallel_world_size(),
    }


class StubStore:
    """Stands where a rank owns nothing of an optimizer: saving and loading are collective."""

    def __init__(self, checkpoints: ChainCheckpoints, position: int) -> None:
        self.checkpoints, self.position = checkpoints, position

    def save_to(
        self, base_dir: str | os.PathLike, *, iteration: int | None = None, background: bool | None = None
    ) -> None:
        self.checkpoints.save(base_dir, position=self.position, iteration=iteration, background=background)

    def load_from(self, base_dir: str | os.PathLike) -> bool:
        return self.checkpoints.load(base_dir, position=self.position)

    def wait_for_save(self) -> None:
        self.checkpoints.wait()


def connect_checkpoints(chain: Sequence[DistributedOptimizer], policy: Policy) -> None:
    """Give the stores of a chain their common checkpoints, and stubs a store. Collective."""
    links = [StubLink() if part.is_stub_optimizer else part._nvme_state_store.link for part in chain]
    checkpoints = ChainCheckpoints(links, policy)
    for position, part in enumerate(chain):
        if part.is_stub_optimizer:
            part._nvme_state_store = StubStore(checkpoints, position)
        else:
            part._nvme_state_store.checkpoints = checkpoints
            part._nvme_state_store.position = position


def resident_checkpoints(optimizer: object, policy: Policy | None = None) -> ChainCheckpoints:
    """For an optimizer that is not streamed: its state, in and from the checkpoints of streamed ones."""
    chain = getattr(optimizer, "chained_optimizers", [optimizer])
    return ChainCheckpoints(
        [StubLink() if part.is_stub_optimizer else ResidentLink(part) for part in chain], policy
    )
