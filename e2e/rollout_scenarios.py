"""What the tests of rollout and training run on ranks; a module of its own, since ranks must import it."""

from __future__ import annotations

from dataclasses import replace

import torch

from optstream.harness.device_budget import DeviceBudget
from optstream.harness.rl import RlRun, RlSettings, run_rl
from optstream.harness.rl_compare import REFERENCE, RlComparison, compare_rl_on_rank
from optstream.harness.rollout import RolloutEngine
from optstream.harness.training import Trainer, parallel_state
from optstream.harness.training_config import TrainingConfig


def compare_loops(rank: int, configs: list[TrainingConfig], settings: RlSettings) -> list[RlComparison]:
    """`compare_rl_on_rank`, one configuration after the other in the same processes."""
    return [compare_rl_on_rank(rank, config, settings) for config in configs]


def losses_of_each(rank: int, configs: list[TrainingConfig]) -> list[tuple[float, float]]:
    return [losses_of_trainer_and_engine(rank, config) for config in configs]


def losses_of_trainer_and_engine(rank: int, config: TrainingConfig) -> tuple[float, float]:
    """Of the second step's batch, before its update: the trainer's own, by way of its pipeline, and that of
    the engine, whose weights came by `update_weights`."""
    trainer = Trainer(config, rank=rank)
    try:
        trainer.train_step()  # norms and biases begin as ones and zeros, which would hide a swap
        engine = RolloutEngine(config, DeviceBudget())
        engine.update_weights(trainer)
        positions = torch.arange(config.seq).expand(config.batch, config.seq).cuda()
        with torch.no_grad(), engine._on_device(config.batch) as model:
            losses = [
                model(tokens, positions, None, labels=labels).float().mean()
                for tokens, labels in trainer._batches()
            ]
        of_engine = torch.stack(losses).mean()
        torch.distributed.all_reduce(of_engine, group=parallel_state.get_data_parallel_group())
        return trainer.train_step().loss, of_engine.item() / config.dp
    finally:
        trainer.close()


def loops_with_and_without_overlap(rank: int, config: TrainingConfig) -> list[RlRun]:
    """The resident loop where Megatron gathers updated params at once, and where it leaves that to the next
    forward pass."""
    settings = RlSettings(2, REFERENCE)
    late = replace(config, overlap_grad_reduce=True, overlap_param_gather=True)
    return [replace(run_rl(rank, each, settings), final=None) for each in (config, late)]
