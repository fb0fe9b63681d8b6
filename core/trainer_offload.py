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
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import MegatronOptimizer

from optstream.backends import open_backend
from optstream.backends.interface import Backend
from optstream.core.agreement import raise_together
from optstream.core.asleep import awaken, put_to_sleep
from optstream.core.config import MIB
from optstream.core.device_memory import DeviceMemory, Parked, device_memory
from optstream.core.evicted import is_evicted
from optstream.core.parking import DiskParking, HostParking, Parking
from optstream.core.scratch import trainer_subdirectory
from optstream.core.validator import CHUNK, TARGET, TRAIN, disk_directories, validate_arguments

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Moved:
    """What one `sleep` or `wake_up` moved off or onto the device of this rank."""

    bytes: int
    seconds: float


NOTHING = Moved(0, 0.0)


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
        raise_together(failure, None, _agreement_device())
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
        self._parking = parking
        self._memory = memory or device_memory()
        self._asleep: tuple[list[torch.Tensor], list[Parked]] | None = None

    @property
    def is_asleep(self) -> bool:
        return self._asleep is not None

    @property
    def host_bytes(self) -> int:
        """Host memory that parking has taken, and keeps."""
        return self._parking.host_bytes

    def sleep(self) -> Moved:
        """Move everything that is resident off the device. Asleep already: nothing happens.

        Pending writes of streamed state end first. Where saving fails on any rank, every rank stays awake,
        with everything in place, and raises.
        """
        if self._asleep is not None:
            return NOTHING
        started = time.perf_counter()
        failure = None
        try:
            self._settle_streams()
            tensors = list(trainer_tensors(self._model, self._optimizer))
            parked = _storages(tensors)
            self._parking.save(parked)
        except Exception as error:
            failure = error
        raise_together(failure, None, _agreement_device())
        self._memory.release(parked)
        for tensor in tensors:
            put_to_sleep(tensor)
        self._asleep = tensors, parked
        return self._moved("asleep", parked, started)

    def wake_up(self) -> Moved:
        """Bring everything back. Awake already: nothing happens.

        Where loading fails on any rank (the device is still full, say), every rank stays asleep and raises;
        it can be tried again.
        """
        if self._asleep is None:
            return NOTHING
        started = time.perf_counter()
        tensors, parked = self._asleep
        failure = None
        try:
            self._memory.restore(parked)
            self._parking.load(parked)
        except Exception as error:
            failure = error
        try:
            raise_together(failure, None, _agreement_device())
        except Exception:
            self._memory.release(parked)
            raise
        for tensor in tensors:
            awaken(tensor)
        self._asleep = None
        return self._moved("awake", parked, started)

    def close(self) -> None:
        """Give the parked bytes up: a trainer that is asleep is of no use afterwards. Idempotent."""
        self._parking.close()

    def _settle_streams(self) -> None:
        """Streamed state is in its files, and none of it on the device."""
        for part in _parts(self._optimizer):
            store = getattr(part, "_nvme_state_store", None)
            if store is None:
                continue
            engine = store.streamer.engine
            engine.drain()
            if engine.staged and engine.slots:
                engine.reset()  # slots that were kept for the next step; it reads their buckets again

    def _moved(self, state: str, parked: list[Parked], started: float) -> Moved:
        moved = Moved(sum(each.size_bytes for each in parked), time.perf_counter() - started)
        logger.info("trainer %s: %d bytes in %.3f s", state, moved.bytes, moved.seconds)
        return moved


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


def _storages(tensors: Sequence[torch.Tensor]) -> list[Parked]:
    """Each storage under `tensors` once, in their order."""
    found: dict[int, Parked] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found.setdefault(storage.data_ptr(), Parked(storage, storage.nbytes()))
    return list(found.values())


def _parts(optimizer: MegatronOptimizer) -> list:
    chain = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in chain if not part.is_stub_optimizer]


def _agreement_device() -> torch.device:
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
