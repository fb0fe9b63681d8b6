"""A device that can be full: memory is counted as it is allocated, and what goes over the limit fails.

    budget = DeviceBudget(limit_bytes)
    budget.name("gradients", roots)
    with budget.in_use():
        ...  # allocations here are on this device

In simulated runs every tensor that a torch operation makes inside `in_use`, on that thread, is on the device,
from the operation on and for as long as anybody keeps its storage; what a kernel allocates internally is not
seen. Host buffers are no torch allocations (`core.memory`) and do not count. `CudaBudget` is the same over
CUDA's own allocator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from optstream.core.device_memory import Parked, ReleasedStorages
from optstream.harness.errors import DeviceMemoryError
from optstream.harness.ledger import strided_tensors

Roots = Callable[[], Iterable[torch.Tensor]]

# What no name accounts for.
OTHER = "activations and temporaries"


class DeviceBudget:
    """limit_bytes: the size of the device; None measures only."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.peak_bytes = 0
        self._recent_peak_bytes = 0
        self._storages: WeakSet[torch.UntypedStorage] = WeakSet()
        self._names: list[tuple[str, Roots]] = []

    def name(self, name: str, roots: Roots) -> None:
        """What `roots` reaches is called `name` in errors. The first name that reaches a storage has it."""
        self._names.append((name, roots))

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """This device is the one that allocations on this thread go to."""
        with _AllocationWatch(self._allocated):
            yield

    @property
    def used_bytes(self) -> int:
        return sum(storage.nbytes() for storage in self._storages)

    def take_peak(self) -> int:
        """The most bytes in use since this was last called."""
        peak, self._recent_peak_bytes = max(self._recent_peak_bytes, self.used_bytes), 0
        return peak

    def reserve(self, size_bytes: int) -> None:
        """Raise DeviceMemoryError if `size_bytes` more do not fit."""
        used = self.used_bytes
        if self.limit_bytes is not None and used + size_bytes > self.limit_bytes:
            raise out_of_memory(size_bytes, self.limit_bytes, self.resident())
        self._note(used + size_bytes)

    def resident(self) -> dict[str, int]:
        """Bytes in use, by name."""
        left = set(self._storages)
        found: dict[str, int] = {}
        for name, roots in self._names:
            held = {tensor.untyped_storage() for tensor in roots()} & left
            left -= held
            if size := sum(storage.nbytes() for storage in held):
                found[name] = found.get(name, 0) + size
        if size := sum(storage.nbytes() for storage in left):
            found[OTHER] = size
        return found

    def _allocated(self, storages: list[torch.UntypedStorage]) -> None:
        # Before they are known: the error says what else there is.
        self.reserve(sum(storage.nbytes() for storage in storages))
        self._storages.update(storages)

    def _note(self, used_bytes: int) -> None:
        self.peak_bytes = max(self.peak_bytes, used_bytes)
        self._recent_peak_bytes = max(self._recent_peak_bytes, used_bytes)


class BudgetedStorages(ReleasedStorages):
    """Storages that come back must fit the device, as any allocation."""

    def __init__(self, budget: DeviceBudget) -> None:
        self._budget = budget

    def restore(self, parked: Sequence[Parked]) -> None:
        self._budget.reserve(sum(each.size_bytes for each in parked))
        super().restore(parked)


class CudaBudget(DeviceBudget):
    """The same over a real GPU: the allocator enforces the limit and measures.

    A device of its own for the rollout engines is played on the same GPU: what others hold there when it
    comes into use is added to its limit and taken off its figures.
    """

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        base = self._base_bytes = torch.cuda.memory_allocated() - self.used_bytes
        total = torch.cuda.get_device_properties().total_memory
        torch.cuda.reset_peak_memory_stats()
        if self.limit_bytes is not None:
            torch.cuda.set_per_process_memory_fraction(min(1.0, (base + self.limit_bytes) / total))
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise DeviceMemoryError(
                "the device is out of memory", why=str(error).splitlines()[0], resident=self.resident()
            ) from error
        finally:
            self._note(torch.cuda.max_memory_allocated() - base)
            self._used_bytes = torch.cuda.memory_allocated() - base
            torch.cuda.set_per_process_memory_fraction(1.0)

    _used_bytes = 0
    _base_bytes = 0

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def take_peak(self) -> int:
        self._note(torch.cuda.max_memory_allocated() - self._base_bytes)
        torch.cuda.reset_peak_memory_stats()
        peak, self._recent_peak_bytes = self._recent_peak_bytes, 0
        return peak

    def reserve(self, size_bytes: int) -> None:
        return None  # the allocator says so itself

    def resident(self) -> dict[str, int]:
        found = {}
        for name, roots in self._names:
            held = {tensor.untyped_storage() for tensor in roots()}
            found[name] = sum(storage.nbytes() for storage in held)
        return found


def out_of_memory(needed_bytes: int, limit_bytes: int, resident: dict[str, int]) -> DeviceMemoryError:
    listing = ", ".join(f"{name} {size:,}" for name, size in sorted(resident.items(), key=lambda r: -r[1]))
    return DeviceMemoryError(
        "the device is out of memory",
        why=f"{needed_bytes:,} bytes more do not fit into its {limit_bytes:,}, of which in use: "
        f"{listing or 'none'}",
        remedy="Stream the optimizer state (--stream-optimizer-state-to-disk), or give it more memory",
        resident=resident,
    )


class _AllocationWatch(TorchDispatchMode):
    """Reports the storages that an operation returned and was not given."""

    def __init__(self, report: Callable[[list[torch.UntypedStorage]], None]) -> None:
        super().__init__()
        self._report = report

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = {tensor.untyped_storage() for tensor in strided_tensors(result)}
        if made:
            made -= {tensor.untyped_storage() for tensor in strided_tensors((args, kwargs))}
            if new := [storage for storage in made if storage.device.type != "meta"]:
                self._report(new)
        return result
