"""The streamed state of one DistributedOptimizer, and that optimizer's entry points over it."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.utils.hooks import RemovableHandle

from optstream.backends.interface import Backend
from optstream.core.agreement import raise_together
from optstream.core.config import StreamConfig
from optstream.core.errors import UnsupportedError
from optstream.core.evicted import evicted, is_evicted
from optstream.core.formats import moment_warning
from optstream.core.megatron_checkpoint import ChainCheckpoints, StreamedLink
from optstream.core.megatron_native_fp32 import NativeFp32Params
from optstream.core.plan import Entry, Piece
from optstream.core.records import StepRecord
from optstream.core.streamer import StateStreamer

logger = logging.getLogger(__name__)

# A key that no parameter can be, under which a streamed optimizer tells Megatron's state_dict its step count.
_STEP_KEY = "optstream"


@dataclass(frozen=True)
class _Shard:
    """The shard of one model param that this rank owns: elements [start, stop) of the flat param."""

    name: str
    model_param: torch.nn.Parameter
    main: torch.Tensor
    start: int
    stop: int


class MegatronStateStore:
    """The streamed state of one DistributedOptimizer, and that optimizer's entry points over it.

    Half-precision params stream; native fp32 params, which are their own main params, stay resident under a
    small optimizer of the same class.
    """

    def __init__(
        self,
        optimizer: DistributedOptimizer,
        config: StreamConfig,
        *,
        backend: Backend,
        staged: bool | None = None,
        observe: Callable[[], None] | None = None,
    ) -> None:
        self._megatron = optimizer
        self._inner = optimizer.optimizer
        self._shards = _half_precision_shards(optimizer)
        self._resident = NativeFp32Params(optimizer)
        # Of the whole chain; set when all of its stores are there.
        self.checkpoints: ChainCheckpoints | None = None
        self.position = 0
        self._hook: RemovableHandle | None = None
        self._device = _device_of(optimizer)
        for beta2 in {float(group["betas"][1]) for group in self._inner.param_groups}:
            if message := moment_warning(config.moment_dtype, beta2):
                warnings.warn(message, stacklevel=2)
        groups = _group_of_main(optimizer)
        self.streamer = StateStreamer(
            config,
            self._inner,
            [Entry(shard.name, shard.stop - shard.start, groups[id(shard.main)]) for shard in self._shards],
            self._initial_main,
            device=self._device,
            staged=staged,
            backend=backend,
            observe=observe,
        )
        self.link = StreamedLink(optimizer, self.streamer, self._publish, self._resident.state)

    # ---- what a harness or a person looks at -------------------------------------------------------------

    @property
    def records(self) -> list[StepRecord]:
        """What each streamed step moved and how long it took."""
        return self.streamer.engine.records

    @property
    def resident_bytes(self) -> int:
        """Device bytes of optimizer state that stays resident by design: the moments of native fp32 params,
        and the one element that stands in for each evicted main param."""
        return self._resident.state_bytes + 4 * len(self._shards)

    def device_tensors(self) -> Iterator[torch.Tensor]:
        """What is on the device now: slots, main params (evicted or not) and resident moments. Takes no lock,
        as `Engine.slots`."""
        yield from self.streamer.engine.slots
        for shard in self._shards:
            yield shard.main
        yield from self._resident.moments()

    def states(self) -> Iterator[tuple[torch.nn.Parameter, int, int, dict[str, torch.Tensor], int]]:
        """(model param, start, stop, {main, exp_avg, exp_avg_sq}, step) of every piece of state.

        Streamed pieces come bucket by bucket, then the resident ones. [start, stop) is within the flat param;
        tensors are 1-D fp32."""
        for part in self.streamer.state():
            shard, piece = self._shards[part.piece.entry], part.piece
            values = {"main": part.main, "exp_avg": part.exp_avg, "exp_avg_sq": part.exp_avg_sq}
            step = self.streamer.counts.entries[piece.entry]
            yield shard.model_param, shard.start + piece.start, shard.start + piece.stop, values, step
        yield from self._resident.states()

    # ---- checkpoints -------------------------------------------------------------------------------------

    def save_to(
        self, base_dir: str | os.PathLike, *, iteration: int | None = None, background: bool | None = None
    ) -> None:
        """Save the state of the whole chain as one checkpoint below `base_dir`. Collective; trainers call it
        of each optimizer of the chain, and the first call does it.

        iteration: the trainer's count of steps; by default the optimizer's. background: return as soon as the
        state of this moment is sure to be what is saved; by default as --async-save says."""
        self.checkpoints.save(base_dir, position=self.position, iteration=iteration, background=background)

    def load_from(self, base_dir: str | os.PathLike) -> bool:
        """Restore the state from what `save_to` has saved below `base_dir`, on any topology; model params get
        this rank's shards of it. Collective. Mends a store that refuses because of an earlier failure.

        False, and nothing but main params taken from the model, under --no-load-optim. Raises CheckpointError
        for a checkpoint without optimizer state, an incomplete, a damaged one or one of another model."""
        return self.checkpoints.load(base_dir, position=self.position)

    @property
    def save_progress(self) -> tuple[int, int]:
        """(bytes written, bytes in all) on this rank, of the save that is running or was the last."""
        return self.checkpoints.progress

    def wait_for_save(self) -> None:
        """Return when no save runs in the background. Raises its failure."""
        self.checkpoints.wait()

    def close(self) -> None:
        """Stop streaming and remove the files. The optimizer is of no use afterwards. Idempotent.

        A save in the background is waited for, and its failure raised."""
        try:
            if self.checkpoints is not None:
                self.checkpoints.wait()
        finally:
            if self._hook is not None:
                self._hook.remove()
                self._hook = None
            self.streamer.close()

    # ---- standing in for Megatron's methods --------------------------------------------------------------

    def attach(self) -> None:
        """Evict what is not evicted yet, and take the optimizer's entry points over."""
        materialised = sum(4 * shard.main.numel() for shard in self._shards if not is_evicted(shard.main))
        if materialised:
            warnings.warn(
                f"{materialised} bytes of main params were on the device during construction; build the "
                f"optimizer inside `with streaming_construction(args):` to spare them",
                stacklevel=3,
            )
        for shard in self._shards:
            shard.main.data = evicted(shard.main.numel(), self._device)
        megatron = self._megatron
        self._originals = {
            name: getattr(megatron, name)
            for name in (
                "_copy_main_params_to_model_params",
                "_copy_model_params_to_main_params",
                "state_dict",
                "load_state_dict",
            )
        }
        self._inner.step = self._step
        megatron._copy_main_params_to_model_params = self._copy_main_params_to_model_params
        megatron._copy_model_params_to_main_params = self._copy_model_params_to_main_params
        megatron.state_dict = self._state_dict
        megatron.load_state_dict = self._load_state_dict
        megatron.sharded_state_dict = self._sharded_state_dict
        megatron._nvme_state_store = self
        self._read_ahead_from_backward()
        logger.info(
            "streaming %d parameters in %d buckets to %s",
            sum(entry.numel for entry in self.streamer.entries),
            len(self.streamer.buckets),
            self.streamer.store.backend.root,
        )

    def _step(self, closure: Callable | None = None) -> None:
        """In place of the inner optimizer's `step`. Collective: all ranks fail together."""
        self._state_changes()
        failure = None
        try:
            self._resident.step(self.streamer.counts.groups)
            updated = [entry for entry, shard in enumerate(self._shards) if shard.main.grad is not None]
            self.streamer.step(self._gradient, self._publish, updated)
        except Exception as error:
            failure = error
        try:
            agree(self._megatron, failure, self._device)
        except Exception as error:
            # Also where this rank's own storage is fine: its state is now a step ahead of the others'.
            self.streamer.engine.poison(error)
            raise
        if not self.streamer.counts_per_parameter:
            for group, count in zip(self._inner.param_groups, self.streamer.counts.groups, strict=True):
                group["step"] = count

    def _copy_main_params_to_model_params(self) -> None:
        # Streamed params were copied as their bucket was updated; Megatron's own code does the fp32 ones.
        with self._streamed_hidden():
            self._originals["_copy_main_params_to_model_params"]()

    def _copy_model_params_to_main_params(self, state_dict: dict | None = None) -> None:
        self._state_changes()
        sources = {shard.model_param: shard.model_param for shard in self._shards}
        if state_dict is not None:
            sources = self._megatron._build_model_param_to_state_dict_param_map(state_dict)

        # All of them before the first is written: one that cannot be read must not leave half of a reload.
        owned = [
            sources[shard.model_param].detach().view(-1)[shard.start : shard.stop] for shard in self._shards
        ]
        self.streamer.reload(lambda piece: owned[piece.entry][piece.start : piece.stop])
        with self._streamed_hidden():
            self._originals["_copy_model_params_to_main_params"](state_dict=state_dict)

    def _state_dict(self) -> dict:
        """Megatron's own: param groups with the step count, and the loss scaler. No tensors of state."""
        with self._step_count_shown():
            return self._originals["state_dict"]()

    def _state_changes(self) -> None:
        if self.checkpoints is not None:
            self.checkpoints.forget()

    def _load_state_dict(self, state_dict: dict) -> None:
        self._state_changes()
        if "param_state" in state_dict:
            raise UnsupportedError(
                "a resident optimizer checkpoint cannot be loaded into a streamed optimizer",
                why="its tensors would all be on the device at once",
                remedy="Load the model alone with --no-load-optim",
            )
        with self._step_count_shown():
            # The state is not empty then, so that Megatron allocates none of its own.
            self._originals["load_state_dict"](state_dict)
            step = int(self._inner.state[_STEP_KEY]["step"])
        if not self.streamer.counts_per_parameter:
            step = int(self._inner.param_groups[0].get("step", 0))
        self.streamer.counts.restart_at(step)
        self._resident.restart_at(step)

    def _sharded_state_dict(self, *positional, **keywords) -> dict:
        """What belongs into the trainer's own checkpoint: `state_dict`. The tensors have their own files."""
        return self._megatron.state_dict()

    @contextlib.contextmanager
    def _streamed_hidden(self) -> Iterator[None]:
        """Megatron's copy loops see no half-precision params meanwhile."""
        megatron = self._megatron
        saved = megatron.shard_fp32_from_float16_groups, megatron.model_float16_groups
        megatron.shard_fp32_from_float16_groups = [[] for _ in saved[0]]
        megatron.model_float16_groups = [[] for _ in saved[1]]
        try:
            yield
        finally:
            megatron.shard_fp32_from_float16_groups, megatron.model_float16_groups = saved

    @contextlib.contextmanager
    def _step_count_shown(self) -> Iterator[None]:
        """The inner optimizer's state shows a step count meanwhile, and nothing else."""
        step = max(self.streamer.counts.entries, default=self.streamer.steps)
        self._inner.state[_STEP_KEY] = {"step": torch.tensor(float(step))}
        try:
            yield
        finally:
            self._inner.state.clear()

    def _read_ahead_from_backward(self) -> None:
        """The first gradient of a backward pass starts the reads of the step that will follow."""
        if self._shards and self.streamer.config.read_ahead:
            # Gradient buffers are laid out in the order in which backward reaches the params.
            first = self._shards[0].model_param
            # Weakly: autograd keeps the hook alive where the garbage collector cannot see it, and with the
            # store the whole optimizer and its process groups would live on.
            streamer = weakref.ref(self.streamer)

            def read_ahead(grad: torch.Tensor) -> None:
                if (alive := streamer()) is not None:
                    alive.read_ahead()

            self._hook = first.register_hook(read_ahead)

    # ---- where parameters and gradients are --------------------------------------------------------------

    def _initial_main(self, piece: Piece) -> torch.Tensor:
        shard = self._shards[piece.entry]
        if is_evicted(shard.main):
            flat = shard.model_param.detach().view(-1)
            return flat[shard.start + piece.start : shard.start + piece.stop]
        return shard.main[piece.start : piece.stop]

    def _gradient(self, piece: Piece) -> torch.Tensor | None:
        grad = self._shards[piece.entry].main.grad
        return None if grad is None else grad[piece.start : piece.stop]

    def _publish(self, piece: Piece, main: torch.Tensor) -> None:
        # As Megatron's `copy_group_params`: into the param buffer, at this rank's range.
        shard, megatron = self._shards[piece.entry], self._megatron
        offset = megatron._get_model_param_range_map(shard.model_param)["gbuf_world_in_bucket"].start
        buffer_index, _, bucket_index = megatron.model_param_gbuf_map[shard.model_param]
        flat = megatron.buffers[buffer_index].buckets[bucket_index].param_data.view(-1)
        flat[offset + piece.start : offset + piece.stop].copy_(main)


def _half_precision_shards(optimizer: DistributedOptimizer) -> list[_Shard]:
    names = {
        # Float16Module puts another "module." in front.
        param: f"chunk{index}.{name.removeprefix('module.')}"
        for index, chunk in enumerate(optimizer.model_chunks)
        for name, param in chunk.module.named_parameters()
    }
    shards = []
    for params, mains in zip(
        optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups, strict=True
    ):
        for param, main in zip(params, mains, strict=True):
            owned = optimizer._get_model_param_range_map(param)["param"]
            shards.append(_Shard(names[param], param, main, owned.start, owned.end))
    return shards


def _group_of_main(optimizer: DistributedOptimizer) -> dict[int, int]:
    return {
        id(main): index
        for index, mains in enumerate(optimizer.shard_fp32_from_float16_groups)
        for main in mains
    }


def _device_of(optimizer: DistributedOptimizer) -> torch.device:
    return optimizer.buffers[0].grad_data.device


def agree(optimizer: DistributedOptimizer, failure: Exception | None, device: torch.device) -> None:
    # The group over which gradient statistics are reduced: every rank that steps this optimizer is in it.
    raise_together(failure, optimizer.get_grad_stats_parallel_group(), device)
