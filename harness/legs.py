"""One leg of a training run, on every rank: start, perhaps from a checkpoint, train, perhaps save.

Legs of any topology, streamed or resident, follow each other in processes of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from optstream.core.megatron import (
    MegatronStateStore,
    setup_optimizer_state_streaming,
    streaming_construction,
)
from optstream.core.megatron_checkpoint import ChainCheckpoints, resident_checkpoints
from optstream.harness.global_state import (
    GlobalState,
    ShardState,
    gather_restored_params,
    install,
    shard_states,
)
from optstream.harness.stream_settings import StreamSettings
from optstream.harness.training import Trainer
from optstream.harness.training_config import TrainingConfig


@dataclass(frozen=True)
class Leg:
    """settings: how to stream; None: resident. load, save: directories of checkpoints. state: what a resident
    leg starts from instead. step: steps done before it. until: the last step. background: save behind
    `steps_meanwhile` more steps, which are not counted in what is returned."""

    settings: StreamSettings | None = None
    load: str | None = None
    state: GlobalState | None = field(default=None, repr=False)
    step: int = 0
    until: int = 0
    save: str | None = None
    background: bool = False
    steps_meanwhile: int = 0


@dataclass(frozen=True)
class LegResult:
    """What one rank had when the leg began and when it ended."""

    losses: list[float]
    before: list[ShardState]
    after: list[ShardState]


def run_leg(rank: int, config: TrainingConfig, leg: Leg) -> LegResult:
    """A function for `run_ranks`."""
    stores: list[MegatronStateStore] = []
    if leg.settings is None:
        trainer = Trainer(config, rank=rank)
    else:
        trainer = _streamed_trainer(rank, config, leg.settings, stores)
    try:
        _begin(trainer, stores, leg)
        held = stores if leg.settings is not None else None
        before = shard_states(trainer, held)
        losses = [trainer.train_step().loss for _ in range(leg.step, leg.until)]
        after = shard_states(trainer, held)
        if leg.save is not None:
            _save(trainer, stores, leg)
        return LegResult(losses, before, after)
    finally:
        for store in stores:
            store.close()
        trainer.close()


def _streamed_trainer(
    rank: int, config: TrainingConfig, settings: StreamSettings, stores: list[MegatronStateStore]
) -> Trainer:
    args = settings.namespace()

    def set_up(optimizer: Any) -> None:
        stores.extend(
            setup_optimizer_state_streaming(
                args, optimizer, backend_factory=settings.open_backend, staged=True
            )
        )

    return Trainer(
        config,
        rank=rank,
        construction=lambda: streaming_construction(args),
        after_construction=set_up,
    )


def chain_of(trainer: Trainer) -> list[Any]:
    return list(getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer]))


def load_checkpoint(trainer: Trainer, base_dir: str, *, streamed: bool) -> None:
    """Restore state and model params. Collective."""
    if streamed:
        for optimizer in chain_of(trainer):
            optimizer._nvme_state_store.load_from(base_dir)
    else:
        checkpoints: ChainCheckpoints = resident_checkpoints(trainer.optimizer)
        for position, optimizer in enumerate(chain_of(trainer)):
            checkpoints.load(base_dir, position=position)
            if not optimizer.is_stub_optimizer:
                optimizer._copy_main_params_to_model_params()
    gather_restored_params(trainer)


def _begin(trainer: Trainer, stores: list[MegatronStateStore], leg: Leg) -> None:
    if leg.state is not None:
        install(trainer, leg.state)
    if leg.load is not None:
        load_checkpoint(trainer, leg.load, streamed=leg.settings is not None)
    trainer.step = leg.step


def _save(trainer: Trainer, stores: list[MegatronStateStore], leg: Leg) -> None:
    if leg.settings is None:
        resident_checkpoints(trainer.optimizer).save(leg.save)
        return
    for optimizer in chain_of(trainer):
        optimizer._nvme_state_store.save_to(leg.save, background=leg.background)
    for _ in range(leg.steps_meanwhile):
        trainer.train_step()
