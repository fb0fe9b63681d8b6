"""Parks a whole Megatron trainer while rollout engines use its device.

    offload = trainer_offload(args, model, optimizer)
    offload.sleep()      # weights, gradients and resident optimizer state leave the device
    ...                  # rollout
    offload.wake_up()    # the same tensors, the same bits

Streamed optimizer state is in files anyway and does not move: streaming answers a step that does not fit,
sleeping answers a device that is shared between steps.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import MegatronOptimizer

from optstream.backends import open_backend
from optstream.backends.interface import Backend
from optstream.core.agreement import raise_together
from optstream.core.config import MIB
from optstream.core.device_memory import DeviceMemory
from optstream.core.evicted import is_evicted
from optstream.core.parking import DiskParking, HostParking, Parking
from optstream.core.scratch import trainer_subdirectory
from optstream.core.sleeper import Moved, Sleeper
from optstream.core.validator import CHUNK, TARGET, TRAIN, disk_directories, validate_arguments


def trainer_offload(
    args: argparse.Namespace,
    model: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    *,
    role: str = "actor",
    cell: int = 0,
    backend_factory: Callable[..., Backend] = open_backend,
    memory: DeviceMemory | None = None,
) -> TrainerOffload | None:
    """The offload that `args` ask for, or None. Collective. Call it after streaming was set up.

    role, cell: as for `setup_optimizer_state_streaming`.

    Raises StreamConfigError for arguments that do not go together, or a storage error; all ranks raise
    together.
    """
    resolved = validate_arguments(args)
    if not resolved[TRAIN]:
        return None
    failure, parking = None, None
    try:
        if resolved[TARGET] == "disk":
            where = trainer_subdirectory(role, cell, dist.get_rank())
            backend = backend_factory(disk_directories(resolved), subdirectory=where)
            parking = DiskParking(backend, chunk_bytes=resolved[CHUNK] * MIB)
        else:
            parking = HostParking()
    except Exception as error:
        failure = error
    try:
        _agree(failure)
    except Exception:
        if parking is not None:
            parking.close()
        raise
    return TrainerOffload(model, optimizer, parking, memory=memory)


class TrainerOffload:
    """`sleep` and `wake_up` of one trainer on this rank. Both are collective, and all ranks fail together.

    model: Megatron's DDP chunks. parking: where the bytes go. memory: how the device's memory is given back.

    Asleep, every use of the trainer's tensors raises AsleepError. Tensors stay the objects that they were.
    """

    def __init__(
        self,
        model: Sequence[DistributedDataParallel],
        optimizer: MegatronOptimizer,
        parking: Parking,
        *,
        memory: DeviceMemory | None = None,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._sleeper = Sleeper(parking, memory=memory, agree=_agree)

    @property
    def is_asleep(self) -> bool:
        return self._sleeper.is_asleep

    @property
    def host_bytes(self) -> int:
        """Host memory that parking has taken, and keeps."""
        return self._sleeper.parking.host_bytes

    def sleep(self) -> Moved:
        """Move everything that is resident off the device. Asleep already: nothing happens.

        Pending writes of streamed state end first; a store that refuses to step refuses to sleep. Where that
        or saving fails on any rank, every rank stays awake, with everything in place, and raises.
        """
        return self._sleeper.sleep(self._resident)

    def wake_up(self) -> Moved:
        """Bring everything back. Awake already: nothing happens.

        Where loading fails on any rank (the device is still full, say), every rank stays asleep and raises;
        it can be tried again.
        """
        return self._sleeper.wake_up()

    def close(self) -> None:
        """Give the parked bytes up: a trainer that is asleep is of no use afterwards. Idempotent."""
        self._sleeper.close()

    def _resident(self) -> Iterator[torch.Tensor]:
        for part in _parts(self._optimizer):
            store = getattr(part, "_nvme_state_store", None)
            if store is not None:
                store.streamer.leave_device()
        return trainer_tensors(self._model, self._optimizer)


def trainer_tensors(
    model: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer
) -> Iterator[torch.Tensor]:
    """Every tensor of the trainer on its device: params and gradients, the buffers that hold them, and the
    optimizer state that is resident. Step counts and loss scales, of one element each, are left out."""
    for chunk in model:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            for holder in (buffer, *buffer.buckets):
                yield from _present(holder.param_data, holder.grad_data)
        for param in chunk.module.parameters():
            yield from _present(param, param.grad, getattr(param, "main_grad", None))
        yield from chunk.module.buffers()
    for part in _parts(optimizer):
        for mains in (*part.shard_fp32_from_float16_groups, *part.shard_fp32_groups):
            for main in mains:
                yield from _present(None if is_evicted(main) else main, main.grad)
        store = getattr(part, "_nvme_state_store", None)
        if store is not None:
            slots = {id(slot) for slot in store.streamer.engine.slots}
            for tensor in store.device_tensors():
                if id(tensor) not in slots and not is_evicted(tensor):
                    yield tensor
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if torch.is_tensor(value) and value.dim())


def _present(*tensors: torch.Tensor | None) -> Iterator[torch.Tensor]:
    return (tensor for tensor in tensors if tensor is not None)


def _parts(optimizer: MegatronOptimizer) -> list:
    chain = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in chain if not part.is_stub_optimizer]


def _agree(failure: Exception | None) -> None:
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    raise_together(failure, None, device)
