"""Streams the state of Megatron-Core's DistributedOptimizer. In a trainer:

    with streaming_construction(args):
        optimizer = get_megatron_optimizer(config, model)
    setup_optimizer_state_streaming(args, optimizer)

Everything else in the trainer stays as it is. Megatron's own `step_with_ready_grads` still runs, with the
tail that its version has (the parameter all-gather above all); only the inner Adam step and the copy of main
params into model params, which it calls, are replaced. Main params stay where they were, as tensors without
memory (`evicted`), so that gradients and attributes hang on them as before.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer

from optstream.backends import open_backend
from optstream.backends.interface import Backend
from optstream.core.agreement import raise_together
from optstream.core.evicted import BornEvicted
from optstream.core.megatron_checkpoint import Policy, connect_checkpoints
from optstream.core.megatron_store import MegatronStateStore, agree
from optstream.core.megatron_support import refuse_unsupported
from optstream.core.scratch import scratch_subdirectory
from optstream.core.validator import stream_config, validate_arguments

__all__ = ["MegatronStateStore", "setup_optimizer_state_streaming", "streaming_construction"]

# Makes the backend for one optimizer of this rank from the base directories and a path unique to it.
BackendFactory = Callable[..., Backend]


@contextlib.contextmanager
def streaming_construction(args: argparse.Namespace) -> Iterator[None]:
    """Around `get_megatron_optimizer`: main params are born evicted, never allocated.

    Does nothing where `args` do not turn streaming on. Raises StreamConfigError for arguments that do not go
    together, before anything is built. Not needed: without it, `setup_optimizer_state_streaming` evicts main
    params afterwards, at the price of 4 bytes a parameter of device memory meanwhile.
    """
    if not stream_config(validate_arguments(args)).enabled:
        yield
        return
    name = "_build_model_and_main_param_groups"
    original = vars(DistributedOptimizer)[name]

    def build(cls: type, *positional, **keywords):
        with BornEvicted():
            return original.__func__(cls, *positional, **keywords)

    setattr(DistributedOptimizer, name, classmethod(build))
    try:
        yield
    finally:
        setattr(DistributedOptimizer, name, original)


def setup_optimizer_state_streaming(
    args: argparse.Namespace,
    optimizer: MegatronOptimizer,
    *,
    role: str = "actor",
    cell: int = 0,
    backend_factory: BackendFactory = open_backend,
    staged: bool | None = None,
    observe: Callable[[], None] | None = None,
) -> list[MegatronStateStore]:
    """Stream the state of every DistributedOptimizer in `optimizer`, if `args` say so. Collective.

    Call it once, after construction and before a checkpoint is loaded. Each DistributedOptimizer gets its
    store as `_nvme_state_store`; they are also returned, in the order of the chain.

    role: what this model is in the job (actor, critic, ...). cell: which of several independent copies of it,
    each with ranks from 0, this rank belongs to. Both are part of the path of its files.
    backend_factory, staged, observe: for harnesses; see `open_backend` and `Engine`.

    Raises StreamConfigError, UnsupportedError (naming what cannot be streamed) or a storage error; all ranks
    raise together, and nothing is left behind then.
    """
    config = stream_config(validate_arguments(args))
    if not config.enabled:
        return []
    chain = list(getattr(optimizer, "chained_optimizers", [optimizer]))
    refuse_unsupported(args, chain)
    rank = dist.get_rank()
    stores: list[MegatronStateStore] = []
    failure = None
    try:
        for index, part in enumerate(chain):
            if part.is_stub_optimizer:
                continue
            where = scratch_subdirectory(role, cell, rank, index)
            backend = backend_factory(config.directories, subdirectory=where)
            stores.append(MegatronStateStore(part, config, backend=backend, staged=staged, observe=observe))
    except Exception as error:
        failure = error
    try:
        raise_together(failure, None, torch.device("cuda" if dist.get_backend() == "nccl" else "cpu"))
    except Exception:
        for store in stores:
            store.close()
        raise
    for part in chain:
        if part.is_stub_optimizer:
            _join_agreement(part)
    for store in stores:
        store.attach()
    connect_checkpoints(chain, Policy.of(args))
    return stores


def _join_agreement(stub: DistributedOptimizer) -> None:
    """A rank that owns nothing of this optimizer still takes part in its collectives, and so in this one."""
    original = stub.step_with_ready_grads
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")

    def step_with_ready_grads() -> bool:
        agree(stub, None, device)
        return original()

    stub.step_with_ready_grads = step_with_ready_grads
