"""Streaming in Megatron's own training loop (`megatron.training`). In a pretraining script:

    args = parse_and_validate_args(add_arguments)
    with streaming_pretraining(args):
        pretrain(...)

Megatron builds its optimizer, loads and saves inside `pretrain`, and has no hook there. For the time of the
context, three names that its training module calls stand for functions of this module: the making of the
optimizer, and the loading and saving of checkpoints. Each calls Megatron's own function. The streamed state
of a checkpoint lies in that checkpoint's directory, and comes and goes with it.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from megatron.core.optimizer.optimizer import MegatronOptimizer

from optstream.core.errors import UnsupportedError
from optstream.core.megatron import (
    MegatronStateStore,
    setup_optimizer_state_streaming,
    streaming_construction,
)
from optstream.core.validator import stream_config, validate_arguments


@contextlib.contextmanager
def streaming_pretraining(
    args: argparse.Namespace, *, role: str = "actor", cell: int = 0
) -> Iterator[list[MegatronStateStore]]:
    """Around `pretrain`: the optimizer streams, and its state is saved and loaded with the checkpoints.

    args: Megatron's own, as `parse_and_validate_args` returns them. role, cell: as for
    `setup_optimizer_state_streaming`. Yields the stores, a list that is empty until the optimizer is built,
    and stays so where `args` do not turn streaming on. On exit the files of the run are removed.

    Raises StreamConfigError or UnsupportedError for arguments that cannot be streamed, before anything is
    built.
    """
    stores: list[MegatronStateStore] = []
    if not stream_config(validate_arguments(args)).enabled:
        yield stores
        return
    _refuse_unsupported_checkpoints(args)
    # Imported here: it takes seconds, and is not there before 0.17.
    from megatron.training import checkpointing, training

    loop = _Loop(args, {"role": role, "cell": cell}, stores, training, checkpointing)
    try:
        with loop.in_place():
            yield stores
    finally:
        for store in stores:
            store.close()


class _Loop:
    """What stands in for three functions that Megatron's training module calls."""

    def __init__(
        self,
        args: argparse.Namespace,
        place: dict[str, Any],
        stores: list[MegatronStateStore],
        training: ModuleType,
        checkpointing: ModuleType,
    ) -> None:
        self._args, self._place, self._stores = args, place, stores
        self._training, self._checkpointing = training, checkpointing
        self._originals: dict[str, Callable] = {}
        # Beside `stores` those of the optimizers that this rank owns nothing of: checkpoints are collective.
        self._chain: list = []

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        replacements = {
            "get_megatron_optimizer": self._get_megatron_optimizer,
            "load_checkpoint": self._load_checkpoint,
            "save_checkpoint": self._save_checkpoint,
        }
        self._originals = {name: getattr(self._training, name) for name in replacements}
        for name, replacement in replacements.items():
            setattr(self._training, name, replacement)
        try:
            yield
        finally:
            for name, original in self._originals.items():
                setattr(self._training, name, original)

    def _get_megatron_optimizer(self, *positional, **keywords) -> MegatronOptimizer:
        with streaming_construction(self._args):
            optimizer = self._originals["get_megatron_optimizer"](*positional, **keywords)
        self._stores.extend(setup_optimizer_state_streaming(self._args, optimizer, **self._place))
        parts = getattr(optimizer, "chained_optimizers", [optimizer])
        self._chain = [part._nvme_state_store for part in parts]
        return optimizer

    def _load_checkpoint(self, *positional, load_arg: str = "load", **keywords) -> tuple[int, int]:
        loaded = self._originals["load_checkpoint"](*positional, load_arg=load_arg, **keywords)
        iteration, _ = loaded
        # `finetune` is also what Megatron sets where it falls back to a pretrained checkpoint.
        if iteration and not (self._args.finetune or self._args.no_load_optim):
            directory = self._directory(getattr(self._args, load_arg), iteration)
            for store in self._chain:
                store.load_from(directory)
        return loaded

    def _save_checkpoint(self, iteration: int, *positional, **keywords) -> None:
        if not self._args.no_save_optim:
            directory = self._directory(self._args.save, iteration)
            # Megatron's save ends by naming this checkpoint the latest one, which must be whole by then.
            for store in self._chain:
                store.save_to(directory, iteration=iteration, background=False)
        self._originals["save_checkpoint"](iteration, *positional, **keywords)

    def _directory(self, base: str, iteration: int) -> str:
        return self._checkpointing.get_checkpoint_name(base, iteration, return_base_dir=True)


def _refuse_unsupported_checkpoints(args: argparse.Namespace) -> None:
    if (args.save or args.load) and args.ckpt_format != "torch_dist":
        raise UnsupportedError(
            f"--ckpt-format {args.ckpt_format} cannot be combined with streaming",
            why="its optimizer file is gathered from tensors on the device",
            remedy="Use --ckpt-format torch_dist",
        )
    if args.non_persistent_save_interval:
        raise UnsupportedError(
            "--non-persistent-save-interval cannot be combined with streaming",
            why="Megatron removes the previous checkpoint of that kind before the next one is whole",
            remedy="Drop it; --save-interval may be as small",
        )
