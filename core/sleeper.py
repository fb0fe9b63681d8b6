"""Puts tensors to sleep: their bytes are parked, their memory goes, and whoever holds them keeps them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from optstream.backends.errors import OptstreamError
from optstream.core.asleep import awaken, put_to_sleep
from optstream.core.device_memory import DeviceMemory, Parked, device_memory
from optstream.core.finalizer import Finalizer
from optstream.core.parking import Parking

logger = logging.getLogger(__name__)

# Raises the failure it is given or, where ranks sleep together, that of any rank.
Agree = Callable[[Exception | None], None]


@dataclass(frozen=True)
class Moved:
    """What one `sleep` or `wake_up` moved off or onto the device of this rank."""

    bytes: int
    seconds: float


NOTHING = Moved(0, 0.0)


def raise_alone(failure: Exception | None) -> None:
    """For one process, or ranks that sleep on their own."""
    if failure is not None:
        raise failure


class Sleeper:
    """`sleep` and `wake_up` of tensors. parking: where their bytes go; it is closed with this object, and at
    exit. memory: how the device's memory is given back."""

    def __init__(
        self, parking: Parking, *, memory: DeviceMemory | None = None, agree: Agree = raise_alone
    ) -> None:
        self.parking = parking
        self._memory = memory or device_memory()
        self._agree = agree
        self._asleep: tuple[list[torch.Tensor], list[Parked]] | None = None
        self._finalizer = Finalizer(self, parking.close)

    @property
    def is_asleep(self) -> bool:
        return self._asleep is not None

    def sleep(self, find: Callable[[], Iterable[torch.Tensor]]) -> Moved:
        """Park all the tensors that `find` returns, and whatever shares their storages. Asleep already:
        nothing happens.

        Where `find` or saving fails, on any rank, all of them stay awake with everything in place.
        """
        self._refuse_if_closed()
        if self._asleep is not None:
            return NOTHING
        started = time.perf_counter()
        failure = None
        try:
            tensors = list(find())
            parked = _storages(tensors)
            self._memory.check(parked)
            self.parking.save(parked)
        except Exception as error:
            failure = error
        self._agree(failure)
        # Before the memory goes: interrupted here, they can be woken, and nobody meets a tensor without any.
        self._asleep = tensors, parked
        for tensor in tensors:
            put_to_sleep(tensor)
        self._memory.release(parked)
        return _moved("asleep", parked, started)

    def wake_up(self) -> Moved:
        """Bring everything back. Awake already: nothing happens.

        Where loading fails on any rank (the device is still full, say), all stay asleep; it can be tried
        again.
        """
        self._refuse_if_closed()
        if self._asleep is None:
            return NOTHING
        started = time.perf_counter()
        tensors, parked = self._asleep
        try:
            self._agree(self._load(parked))
        except BaseException:
            self._memory.release(parked)
            raise
        for tensor in tensors:
            awaken(tensor)
        self._asleep = None
        return _moved("awake", parked, started)

    def close(self) -> None:
        """Give the parked bytes up: what is asleep is of no use afterwards. Idempotent."""
        self._finalizer()

    def _load(self, parked: Sequence[Parked]) -> Exception | None:
        try:
            self._memory.restore(parked)
            self.parking.load(parked)
        except Exception as error:
            return error
        return None

    def _refuse_if_closed(self) -> None:
        if not self._finalizer.alive:
            raise OptstreamError(
                "the trainer's offload is closed",
                why="what it had parked was given up",
                remedy="Construct a new one",
            )


def _storages(tensors: Sequence[torch.Tensor]) -> list[Parked]:
    """Each storage under `tensors` once, in their order."""
    found: dict[int, Parked] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found.setdefault(storage.data_ptr(), Parked(storage, storage.nbytes()))
    return list(found.values())


def _moved(state: str, parked: list[Parked], started: float) -> Moved:
    moved = Moved(sum(each.size_bytes for each in parked), time.perf_counter() - started)
    logger.info("trainer %s: %d bytes in %.3f s", state, moved.bytes, moved.seconds)
    return moved
