"""What the adapter's tests run on ranks: a trainer or two bare parameters, resident or streamed.

A module of its own, since ranks are processes that must be able to import what they run.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule

from optstream.backends import open_backend
from optstream.core.errors import OptstreamError
from optstream.core.megatron import (
    MegatronStateStore,
    setup_optimizer_state_streaming,
    streaming_construction,
)
from optstream.core.trainer_offload import trainer_offload
from optstream.harness.faults import FaultPlan, FaultyBackend
from optstream.harness.launch import run_ranks
from optstream.harness.training import Trainer, parallel_state
from optstream.harness.training_config import TrainingConfig
from optstream.harness.training_state import model_params, named_shards, resident_state

TINY = TrainingConfig(steps=3, layers=1, hidden=32, heads=2, seq=16, batch=1)
SEGMENTS = ("main", "exp_avg", "exp_avg_sq")


def stream_args(directory: Path | str, **flags) -> argparse.Namespace:
    """A trainer's namespace that turns streaming on, in buckets far smaller than the model."""
    return argparse.Namespace(
        **{
            "stream_optimizer_state_to_disk": True,
            "use_distributed_optimizer": True,
            "offload_train_disk_dir": str(directory),
            "stream_optimizer_state_bucket_numel": 4096,
            **flags,
        }
    )


# ---- a whole trainer ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def training(
    args: argparse.Namespace | None = None,
    config: TrainingConfig = TINY,
    *,
    rank: int = 0,
    born_evicted: bool = True,
) -> Iterator[tuple[Trainer, list[MegatronStateStore]]]:
    """A trainer, streamed if there are `args`, and its stores."""
    stores: list[MegatronStateStore] = []

    def set_up(optimizer: MegatronOptimizer) -> None:
        if args is not None:
            stores.extend(setup_optimizer_state_streaming(args, optimizer, staged=True))

    construction = contextlib.nullcontext
    if args is not None and born_evicted:
        construction = functools.partial(streaming_construction, args)
    trainer = Trainer(config, rank=rank, construction=construction, after_construction=set_up)
    try:
        yield trainer, stores
    finally:
        for store in stores:
            store.close()
        trainer.close()


def everything(trainer: Trainer, stores: list[MegatronStateStore]) -> dict[str, torch.Tensor]:
    """Copies of model params, main params, moments and step counts, by name, resident or streamed alike."""
    found = {f"param {name}": param.detach().clone() for name, param in model_params(trainer).items()}
    if not stores:
        for name, values in resident_state(trainer).items():
            for key, value in values.items():
                found[f"{key} {name}"] = torch.as_tensor(value).clone()
        return found
    shards = {shard.model_param: shard for shard in named_shards(trainer)}
    for store in stores:
        for param, start, stop, values, step in store.states():
            shard = shards[param]
            for segment in SEGMENTS:
                whole = found.setdefault(f"{segment} {shard.name}", torch.empty(shard.stop - shard.start))
                whole[start - shard.start : stop - shard.start] = values[segment]
            found[f"step {shard.name}"] = torch.tensor(float(step))
    return found


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Names of values that are not the same bits."""
    assert one.keys() == other.keys()
    return [name for name, value in one.items() if not torch.equal(_bytes(value), _bytes(other[name]))]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def resident_and_streamed(
    directory: Path, scenario: Callable[[Trainer], object], config: TrainingConfig = TINY, **flags
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """`everything` after `scenario(trainer)`, both ways from the same seed."""
    results = []
    for args in (None, stream_args(directory, **flags)):
        with training(args, config) as (trainer, stores):
            scenario(trainer)
            results.append(everything(trainer, stores))
    return results[0], results[1]


# ---- two bare parameters -----------------------------------------------------------------------------------


class BareParams(MegatronModule):
    """Parameters of given sizes: those called `matrix...` decay, others do not, so there are two groups."""

    def __init__(self, config: TransformerConfig, sizes: dict[str, int]) -> None:
        super().__init__(config)
        for name, numel in sizes.items():
            values = torch.linspace(-1, 1, numel).bfloat16()
            shaped = values.view(1, -1) if name.startswith("matrix") else values
            self.register_parameter(name, torch.nn.Parameter(shaped))

    def forward(self) -> torch.Tensor:
        return sum((param.float() ** 2).sum() for param in self.parameters())


class SmallJob:
    """`BareParams` under Megatron's DDP and distributed optimizer."""

    def __init__(
        self, args: argparse.Namespace | None, sizes: dict[str, int], *, role: str = "actor"
    ) -> None:
        self.model = bare_model(sizes)
        with contextlib.nullcontext() if args is None else streaming_construction(args):
            self.optimizer = get_megatron_optimizer(small_optimizer_config(), [self.model])
        self.stores = []
        if args is not None:
            self.stores = setup_optimizer_state_streaming(args, self.optimizer, role=role, staged=True)

    def step(self) -> None:
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.model().backward()
        self.model.finish_grad_sync()
        self.optimizer.step()

    def params(self) -> list[torch.Tensor]:
        return [param.detach().clone() for param in self.model.module.parameters()]

    def steps(self) -> dict[str, int]:
        """Of each parameter that this rank owns a shard of, how many updates it has had."""
        names = {param: name for name, param in self.model.module.named_parameters()}
        return {names[param]: step for store in self.stores for param, _, _, _, step in store.states()}

    def close(self) -> None:
        for store in self.stores:
            store.close()


def bare_model(sizes: dict[str, int]) -> DistributedDataParallel:
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    config = TransformerConfig(
        num_layers=1, hidden_size=2, num_attention_heads=1, bf16=True, params_dtype=torch.bfloat16
    )
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    return DistributedDataParallel(config=config, ddp_config=ddp_config, module=BareParams(config, sizes))


def small_optimizer_config(**settings) -> OptimizerConfig:
    return OptimizerConfig(
        **{
            "optimizer": "adam",
            "lr": 1e-2,
            "weight_decay": 0.1,
            "bf16": True,
            "params_dtype": torch.bfloat16,
            "use_distributed_optimizer": True,
            **settings,
        }
    )


def small_sizes_on_rank(rank: int, directory: str, models: list[dict[str, int]]) -> list[dict]:
    """Of each model: whether its params end as the resident ones, the step counts of this rank's shards, and
    those in `state_dict`."""
    outcomes = []
    for sizes in models:
        resident, streamed = SmallJob(None, sizes), SmallJob(stream_args(directory), sizes)
        for _ in range(3):
            resident.step()
            streamed.step()
        pairs = zip(resident.params(), streamed.params(), strict=True)
        groups = streamed.optimizer.state_dict()["optimizer"]["param_groups"]
        outcomes.append(
            {
                "equal": all(torch.equal(one, other) for one, other in pairs),
                "steps": streamed.steps(),
                "saved": {float(group["step"]) for group in groups},
            }
        )
        streamed.close()
    return outcomes


# ---- under a memory cap ------------------------------------------------------------------------------------


def construct_under_a_cap(directory: str, born_evicted: bool) -> None:
    """192 MiB of main params, the largest of them 16, in a process that may take 96 MiB more. Linux only."""

    def construct(rank: int) -> None:
        args = stream_args(
            directory, stream_optimizer_state_bucket_numel=1 << 20, stream_optimizer_state_depth=1
        )
        model = bare_model({f"matrix{index}": 4 << 20 for index in range(12)})
        status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
        cap = 1024 * int(status["VmData"].split()[0]) + (96 << 20)
        resource.setrlimit(resource.RLIMIT_DATA, (cap, cap))
        with streaming_construction(args) if born_evicted else contextlib.nullcontext():
            optimizer = get_megatron_optimizer(small_optimizer_config(), [model])
        (store,) = setup_optimizer_state_streaming(args, optimizer, staged=True)
        assert sum(entry.numel for entry in store.streamer.entries) == 12 * (4 << 20)
        store.close()

    run_ranks(construct, 1)


# ---- failures on one rank ----------------------------------------------------------------------------------


def faulty_on_rank_1(rank: int, plan: str) -> Callable:
    def factory(directories, *, subdirectory: str):
        backend = open_backend(directories, subdirectory=subdirectory)
        return FaultyBackend(backend, FaultPlan.parse(plan)) if rank == 1 else backend

    return factory


def failing_setup_on_rank(rank: int, directory: str) -> tuple[str, str, list[str]]:
    """Rank 1 cannot create its second file. The error's type and message, and what was set on the
    optimizer."""
    args = stream_args(directory)
    args.stream_optimizer_state_bucket_numel = 64
    job = SmallJob(None, {"matrix": 500})
    try:
        setup_optimizer_state_streaming(
            args, job.optimizer, backend_factory=faulty_on_rank_1(rank, "seed=0 EIO@create#2")
        )
    except OptstreamError as error:
        (part,) = job.optimizer.chained_optimizers
        taken_over = [name for name in ("state_dict", "_nvme_state_store") if name in vars(part)]
        return type(error).__name__, str(error), taken_over
    return "nothing", "", []


def failing_step_on_rank(rank: int, directory: str) -> list[tuple[str, str]]:
    """Rank 1's disk fails in the second step. The errors of that step and of the one after it."""
    args = stream_args(directory, stream_optimizer_state_write_behind=False)
    job = SmallJob(None, {"matrix": 500})
    job.stores = setup_optimizer_state_streaming(
        args, job.optimizer, backend_factory=faulty_on_rank_1(rank, "seed=0 EIO@read#2+"), staged=True
    )
    job.step()
    errors = []
    for _ in range(2):
        try:
            job.step()
        except OptstreamError as error:
            errors.append((type(error).__name__, str(error)))
    job.close()
    return errors


def uneven_failure_on_rank(rank: int, directory: str) -> tuple[list, list, float]:
    """`failing_setup_on_rank`, then `failing_step_on_rank`, and the seconds both took."""
    started = time.monotonic()
    setup = failing_setup_on_rank(rank, directory)
    return list(setup), failing_step_on_rank(rank, directory), time.monotonic() - started


def failing_sleep_on_rank(rank: int, directory: str) -> tuple[str, str, list[bool]]:
    """Rank 1's disk fails the first sleep. The error, and whether this rank sleeps after it and after the
    next try."""
    args = argparse.Namespace(
        offload_train=True, offload_train_target="disk", offload_train_disk_dir=directory
    )
    job = SmallJob(None, {"matrix": 500})
    offload = trainer_offload(
        args,
        [job.model],
        job.optimizer,
        backend_factory=faulty_on_rank_1(rank, "seed=0 EIO@write#1"),
    )
    outcome = ("nothing", "")
    try:
        offload.sleep()
    except OptstreamError as error:
        outcome = type(error).__name__, str(error)
    asleep = [offload.is_asleep]
    offload.sleep()
    asleep.append(offload.is_asleep)
    offload.wake_up()
    job.step()
    offload.close()
    return *outcome, asleep
