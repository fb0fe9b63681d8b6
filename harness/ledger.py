"""How much device memory optimizer state takes, over time, found by following real tensor storages.

Nothing here is declared by the code that is measured. A label has roots, which are walked at every sample for
the tensors that are in place now; each storage met is remembered by weak reference and counts for as long as
*anybody* keeps it alive, whether the roots still reach it or not. So a buffer that its owner dropped and a
stray reference kept is seen.

    ledger = Ledger()
    with ledger.watch_allocations(STATE):
        optimizer = get_megatron_optimizer(...)
    ledger.follow(STATE, resident_roots(optimizer))
    with ledger.watch_allocations(TEMPORARIES):
        optimizer.step()
    ledger.peak_bytes(STATE)

Bytes are those of whole storages, once each, as the program asked for them; what an allocator rounds up or
keeps in a cache is not in them. Under simulated CUDA, host memory is device memory.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from optstream.core.optimizer import StreamingAdamW

if TYPE_CHECKING:  # a unit test needs a ledger and has no Megatron
    from megatron.core.optimizer.optimizer import MegatronOptimizer

    from optstream.core.megatron import MegatronStateStore

Roots = Callable[[], Iterable[torch.Tensor]]

# Labels that the harness uses. STATE is main params and moments, in slots or resident. GRADIENTS are those
# that Megatron upcasts to fp32 all at once, not the model's own. TEMPORARIES is what the update allocates
# besides.
STATE = "state"
GRADIENTS = "gradients"
TEMPORARIES = "adam_temporaries"

_MOMENTS = ("exp_avg", "exp_avg_sq")


class Ledger:
    """Device bytes by label, from construction on. Every storage belongs to one label.

    device: count storages there only (without an index: of that type); None counts them wherever they are.

    Safe to use from several threads. `sample` holds the ledger's lock while it walks the roots, and may
    itself be called under other locks, so roots must not take any.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        # Reentrant: under `watch_allocations`, roots that run torch operations come back here.
        self._lock = threading.RLock()
        self._roots: list[tuple[str, Roots]] = []
        self._storages: dict[str, WeakSet[torch.UntypedStorage]] = {}
        self._timelines: dict[str, list[tuple[float, int]]] = {}
        self._peaks: dict[str, int] = {}
        self._sampled_s = time.perf_counter()

    def follow(self, label: str, roots: Roots) -> None:
        """Count under `label`, from now on, what `roots` reaches at any sample. Adds to earlier roots."""
        with self._lock:
            self._open(label)
            self._roots.append((label, roots))
            self.sample()

    @contextlib.contextmanager
    def watch_allocations(self, label: str) -> Iterator[None]:
        """Count under `label` the fp32 tensors that torch operations on this thread make inside.

        Each is counted from the operation that made it, so that what lives between two samples only is seen.
        Once roots reach its storage, it belongs to their label. Single elements (loss scales, norms, evicted
        main params) are no bulk and are left out, as is what a kernel allocates internally.
        """
        with self._lock:
            self._open(label)
        with _AllocationWatch(lambda storages: self._allocated(label, storages)):
            yield
        self.sample()

    def sample(self) -> None:
        """Note what is alive now. Microseconds for each tensor that roots reach."""
        with self._lock:
            for label, roots in self._roots:
                self._claim(label, roots())
            self._sampled_s = time.perf_counter()
            for label in self._storages:
                self._note(label, self._alive_bytes(label))

    def current_bytes(self, label: str) -> int:
        """Bytes at the last sample."""
        with self._lock:
            timeline = self._timelines.get(label)
            return timeline[-1][1] if timeline else 0

    def peak_bytes(self, label: str) -> int:
        """The most bytes seen at any sample or, while watched, after any operation."""
        with self._lock:
            return self._peaks.get(label, 0)

    def timeline(self, label: str) -> list[tuple[float, int]]:
        """(seconds of `time.perf_counter`, bytes from then on) at every change, and at the last sample."""
        with self._lock:
            points = list(self._timelines.get(label, ()))
            if points and points[-1][0] < self._sampled_s:
                points.append((self._sampled_s, points[-1][1]))
            return points

    def _open(self, label: str) -> None:
        self._storages.setdefault(label, WeakSet())
        self._timelines.setdefault(label, [])
        self._peaks.setdefault(label, 0)

    def _allocated(self, label: str, storages: list[torch.UntypedStorage]) -> None:
        with self._lock:
            self._storages[label].update(filter(self._is_here, storages))
            if self._alive_bytes(label) > self._peaks[label]:
                self.sample()  # Only what roots do not reach by now is a new peak of this label.

    # Storages are held by these methods' own locals only, so that none outlives the lock because of a ledger.

    def _claim(self, label: str, tensors: Iterable[torch.Tensor]) -> None:
        known = self._storages[label]
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage in known or not self._is_here(storage):
                continue
            for others in self._storages.values():
                others.discard(storage)
            known.add(storage)

    def _alive_bytes(self, label: str) -> int:
        return sum(storage.nbytes() for storage in self._storages[label])

    def _note(self, label: str, total_bytes: int) -> None:
        timeline = self._timelines[label]
        if not timeline or timeline[-1][1] != total_bytes:
            timeline.append((self._sampled_s, total_bytes))
        self._peaks[label] = max(self._peaks[label], total_bytes)

    def _is_here(self, storage: torch.UntypedStorage) -> bool:
        device = storage.device
        if self._device is None:
            return device.type != "meta"
        return device.type == self._device.type and self._device.index in (None, device.index)


class _AllocationWatch(TorchDispatchMode):
    """Reports the storages of fp32 tensors that an operation returned and was not given."""

    def __init__(self, report: Callable[[list[torch.UntypedStorage]], None]) -> None:
        super().__init__()
        self._report = report

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [tensor.untyped_storage() for tensor in strided_tensors(result) if _is_bulk_fp32(tensor)]
        if made:
            given = {tensor.untyped_storage() for tensor in strided_tensors((args, kwargs))}
            if new := [storage for storage in made if storage not in given]:
                self._report(new)
        return result


def strided_tensors(tree: Any) -> Iterator[torch.Tensor]:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            yield leaf


def _is_bulk_fp32(tensor: torch.Tensor) -> bool:
    return tensor.dtype is torch.float32 and tensor.untyped_storage().nbytes() > tensor.element_size()


# ---- roots -----------------------------------------------------------------------------------------


def resident_roots(optimizer: MegatronOptimizer) -> Roots:
    """Main params and moments of every DistributedOptimizer in `optimizer`.

    Of native fp32 params only the moments: they are their own main params, views of the model's memory.
    """

    def roots() -> Iterator[torch.Tensor]:
        for part in _distributed_optimizers(optimizer):
            for mains in part.shard_fp32_from_float16_groups:
                yield from mains
            yield from _moments(part.optimizer)

    return roots


def gradient_roots(optimizer: MegatronOptimizer) -> Roots:
    """The fp32 gradients that hang on the main params of `optimizer` and are no part of a gradient buffer.

    There are none where gradients are reduced in fp32: then they are views of the buffer. To be called by the
    thread that trains.
    """
    trains = threading.current_thread()

    def roots() -> Iterator[torch.Tensor]:
        if threading.current_thread() is not trains:
            # Reading `.grad` while another thread sets it to None crashes the process. Nothing is missed:
            # gradients come on the training thread, and the ledger knows those it has seen for as long as
            # they live.
            return
        for part in _distributed_optimizers(optimizer):
            buffers = {buffer.grad_data.untyped_storage() for buffer in part.buffers}
            for mains in part.shard_fp32_from_float16_groups:
                for main in mains:
                    if main.grad is not None and main.grad.untyped_storage() not in buffers:
                        yield main.grad

    return roots


def streamed_roots(stores: Sequence[MegatronStateStore]) -> Roots:
    """Slots, main params (evicted: one element each) and resident moments of streamed Megatron optimizers."""

    def roots() -> Iterator[torch.Tensor]:
        for store in stores:
            yield from store.device_tensors()

    return roots


def torch_roots(optimizer: torch.optim.Optimizer) -> Roots:
    """The moments of a plain torch optimizer, or the slots of a StreamingAdamW.

    Where a StreamingAdamW works in place, on a CPU and not `staged`, its host buffers are its slots and the
    bound is `engine.host_bytes_bound`, in whole mappings.
    """
    if isinstance(optimizer, StreamingAdamW):
        engine = optimizer.streamer.engine
        return lambda: engine.slots
    return lambda: _moments(optimizer)


def _moments(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for state in list(optimizer.state.values()):
        for name in _MOMENTS:
            if name in state:
                yield state[name]


def _distributed_optimizers(optimizer: MegatronOptimizer) -> list[Any]:
    chain = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in chain if not part.is_stub_optimizer]
