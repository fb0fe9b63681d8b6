"""What e2e/test_faults_ranks.py runs on ranks. A module of its own, since ranks must be able to import it."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist

from optstream.backends import open_backend
from optstream.core.agreement import raise_together
from optstream.core.config import StreamConfig
from optstream.core.errors import OptstreamError
from optstream.core.megatron import setup_optimizer_state_streaming, streaming_construction
from optstream.core.optimizer import StreamingAdamW
from optstream.harness.faults import FaultPlan, FaultyBackend
from optstream.harness.training import Trainer
from optstream.harness.training_config import TrainingConfig

TINY = TrainingConfig(steps=3, layers=1, hidden=32, heads=2, seq=16, batch=1, ranks=2)


def failing_trainer(rank: int, args, where: str) -> tuple[str, str, float]:
    """A trainer of two ranks whose second step fails on rank 1: what this rank raised, and the seconds from
    the start of that step."""
    stores = []

    def backend_factory(directories, *, subdirectory: str):
        backend = open_backend(directories, subdirectory=subdirectory)
        struck = rank == 1 and where == "storage"
        return FaultyBackend(backend, FaultPlan.parse("seed=0 EIO@read#6+")) if struck else backend

    def set_up(optimizer) -> None:
        stores.extend(
            setup_optimizer_state_streaming(args, optimizer, staged=True, backend_factory=backend_factory)
        )

    trainer = Trainer(
        TINY, rank=rank, construction=lambda: streaming_construction(args), after_construction=set_up
    )
    started = time.monotonic()
    try:
        trainer.train_step()
        if where == "resident part" and rank == 1:
            stores[0]._resident.step = _fail
        started = time.monotonic()
        trainer.train_step()
    except (OptstreamError, RuntimeError) as error:
        return type(error).__name__, str(error), time.monotonic() - started
    finally:
        for store in stores:
            store.close()
        trainer.close()
    return "nothing", "", time.monotonic() - started


def _fail(counts: list[int]) -> None:
    raise RuntimeError("the resident part failed")


def one_fails_one_lingers(rank: int, directory: str) -> None:
    """Rank 0 has live files and closes nothing; rank 1 waits for them and fails."""
    if rank == 0:
        param = torch.nn.Parameter(torch.ones(3000))
        optimizer = StreamingAdamW([param], StreamConfig(True, (directory,), bucket_numel=1024))
        param.grad = torch.ones(3000)
        optimizer.step()
        Path(directory, "ready").touch()
        while True:
            time.sleep(0.05)
    while not Path(directory, "ready").exists():
        time.sleep(0.05)
    Path(directory, "ready").unlink()
    raise ValueError("rank 1 has had enough")


def leave_open(rank: int, directory: str) -> None:
    """Each rank ends well, and closes nothing."""
    param = torch.nn.Parameter(torch.ones(3000))
    kept.append(StreamingAdamW([param], StreamConfig(True, (directory,), bucket_numel=1024)))


kept: list[StreamingAdamW] = []


def agreement_cost(rank: int, times: int) -> float:
    """Seconds of one agreement of all ranks that nothing failed."""
    group, device = dist.group.WORLD, torch.device("cpu")
    raise_together(None, group, device)
    started = time.monotonic()
    for _ in range(times):
        raise_together(None, group, device)
    return (time.monotonic() - started) / times
