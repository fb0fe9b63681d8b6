"""Gives device memory back while tensors stay: what sleeping does to the storages under them."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from optstream.core.errors import UnsupportedError


@dataclass(frozen=True)
class Parked:
    """One storage that is asleep or about to be, and its bytes when awake."""

    storage: torch.UntypedStorage
    size_bytes: int

    def as_bytes(self) -> torch.Tensor:
        """All of it as a 1-D uint8 tensor. Only while it has memory."""
        return torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)


class DeviceMemory(Protocol):
    """Takes the memory of storages away and gives them some again; contents are the caller's business."""

    def check(self, parked: Sequence[Parked]) -> None:
        """Raises UnsupportedError for memory that cannot be taken away."""

    def release(self, parked: Sequence[Parked]) -> None: ...

    def restore(self, parked: Sequence[Parked]) -> None:
        """Raises what the device raises where there is none; the caller releases all of them again then."""


class ReleasedStorages:
    """Returns memory to the allocator, and from its cache to the device, so that other processes get it too.

    Addresses are others afterwards: nothing may have remembered one (a captured CUDA graph does).
    """

    def check(self, parked: Sequence[Parked]) -> None:
        for each in parked:
            if not each.storage.resizable():
                raise UnsupportedError(
                    "the trainer cannot sleep",
                    why=f"{each.size_bytes} bytes on {each.storage.device} are memory that torch did not "
                    "allocate",
                    remedy="Install and hook torch-memory-saver, or drop --offload-train",
                )

    def release(self, parked: Sequence[Parked]) -> None:
        for each in parked:
            each.storage.resize_(0)
        for device in {each.storage.device for each in parked if each.storage.device.type != "cpu"}:
            torch.get_device_module(device).empty_cache()

    def restore(self, parked: Sequence[Parked]) -> None:
        for each in parked:
            each.storage.resize_(each.size_bytes)


class MemorySaver:
    """torch-memory-saver: physical memory goes and comes, addresses stay.

    Only what was allocated inside `region()` is released, so the trainer is built there. Storages keep their
    size; those from elsewhere keep their memory, too.
    """

    TAG = "optstream-trainer"

    def __init__(self) -> None:
        from torch_memory_saver import torch_memory_saver

        self._saver = torch_memory_saver

    def region(self):
        """A context: what is allocated in it can be released."""
        return self._saver.region(tag=self.TAG)

    def check(self, parked: Sequence[Parked]) -> None:
        return None

    def release(self, parked: Sequence[Parked]) -> None:
        self._saver.pause(self.TAG)

    def restore(self, parked: Sequence[Parked]) -> None:
        self._saver.resume(self.TAG)


def memory_saver_is_hooked() -> bool:
    """Whether torch-memory-saver is installed and its allocator hook is loaded into this process."""
    if not torch.cuda.is_available() or importlib.util.find_spec("torch_memory_saver") is None:
        return False
    from torch_memory_saver import torch_memory_saver

    return bool(torch_memory_saver.enabled)


def device_memory() -> DeviceMemory:
    """The best there is in this process."""
    return MemorySaver() if memory_saver_is_hooked() else ReleasedStorages()
