"""`--save`, `--save-interval` and `--load` of `optstream train`: where a run begins, and when it saves."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from optstream.harness.errors import ConfigurationError

if TYPE_CHECKING:
    from optstream.harness.training import Trainer


@dataclass(frozen=True)
class Resume:
    """load: the checkpoint that both runs continue; None to begin. step: steps done in it. save: the folder
    that the streamed run saves to, every `interval` steps and after the last one."""

    load: str | None = None
    step: int = 0
    save: str | None = None
    interval: int = 0

    def begin(self, trainer: Trainer, *, streamed: bool) -> None:
        """Put a new trainer where the checkpoint was saved. Collective."""
        if self.load is None:
            return
        from optstream.harness.legs import load_checkpoint

        load_checkpoint(trainer, self.load, streamed=streamed)
        trainer.step = self.step

    def save_if_due(self, trainer: Trainer) -> None:
        """After a step of the streamed run. Collective."""
        if self.save is None:
            return
        at_interval = self.interval and trainer.step % self.interval == 0
        if at_interval or trainer.step == trainer.config.steps:
            from optstream.harness.legs import chain_of

            folder = os.path.join(self.save, f"iter_{trainer.step:07d}")
            for optimizer in chain_of(trainer):
                optimizer._nvme_state_store.save_to(folder, iteration=trainer.step)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("checkpoints")
    group.add_argument("--save", metavar="DIR", help="save the streamed run's state to DIR/iter_<step>")
    group.add_argument(
        "--save-interval", type=int, metavar="N", help="save every N steps, not only after the last"
    )
    group.add_argument(
        "--load", metavar="DIR", help="continue from this checkpoint, or the newest complete one below DIR"
    )


def resume_of(args: argparse.Namespace) -> Resume:
    """Raises ConfigurationError or CheckpointError for what cannot be continued or saved."""
    if args.save_interval is not None and args.save is None:
        raise ConfigurationError(
            "--save-interval has nothing to do", why="--save is missing", remedy="Add --save DIR"
        )
    if args.save_interval is not None and args.save_interval < 1:
        raise ConfigurationError(f"--save-interval {args.save_interval} cannot be", why="it is not positive")
    load, step = (None, 0) if args.load is None else _found(args.load)
    if args.load is not None and step >= args.steps:
        raise ConfigurationError(
            f"there is nothing to train from {load}",
            why=f"--steps {args.steps} is the total, and {step} steps are done there",
            remedy="Give more --steps",
        )
    save = None if args.save is None else os.path.abspath(args.save)
    return Resume(load, step, save, args.save_interval or 0)


def _found(directory: str) -> tuple[str, int]:
    from optstream.core.checkpoint import find
    from optstream.core.inspection import newest_checkpoint
    from optstream.core.publish import CheckpointDirectory

    where = CheckpointDirectory(os.path.abspath(directory))
    if where.manifest() is None and (newest := newest_checkpoint(where.base)) is not None:
        where = CheckpointDirectory(newest)
    return where.base, find(where).manifest.iteration
