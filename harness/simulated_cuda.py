"""Lets unmodified Megatron-Core train on a machine without a GPU: host memory stands in for the device.

    with simulated_cuda():
        ...  # build and train with megatron.core; process groups use gloo

Megatron-Core asks `torch.cuda` for the device, streams, events and random state wherever it runs. Each `Shim`
below answers one such question on the CPU and says what breaks without it; `torch_shims()` and
`megatron_shims()` are the whole list. Everything is put back when the outermost context exits, also by an
exception.

What is *not* simulated: `torch.cuda.is_available()` stays False and `device_count()` stays 0, so code that
looks first keeps its CPU path; tensors stay `device="cpu"` with `is_cuda` False; streams run in program
order, so a missing synchronisation is not caught here; the "CUDA" generator is the CPU's default one.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

CPU = torch.device("cpu")

# Every factory by which Megatron places a tensor on device "cuda". One that is missing here fails loudly.
# fmt: off
FACTORIES = (
    "arange", "as_tensor", "empty", "empty_like", "empty_strided", "eye", "full", "full_like",
    "linspace", "ones", "ones_like", "rand", "rand_like", "randint", "randn", "randn_like", "randperm",
    "tensor", "tril_indices", "triu_indices", "zeros", "zeros_like",
)
# fmt: on
TENSOR_FACTORIES = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")


@dataclass(frozen=True)
class Shim:
    """Replaces `owner.name` by `replacement` while the simulation runs. `why` says what breaks without it."""

    owner: object
    name: str
    replacement: object
    why: str


class Stream:
    """Stands in for torch.cuda.Stream. Work runs in program order, so there is never anything to wait for."""

    cuda_stream = 0
    device = CPU

    def __init__(self, device=None, priority: int = 0, **_) -> None:
        self.priority = priority

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)

    def wait_stream(self, stream) -> None:
        pass

    def wait_event(self, event) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event


class Event:
    """Stands in for torch.cuda.Event. `elapsed_time` is in milliseconds of the host's clock."""

    def __init__(self, enable_timing: bool = False, **_) -> None:
        self._recorded_s = 0.0

    def record(self, stream=None) -> None:
        self._recorded_s = time.perf_counter()

    def wait(self, stream=None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end._recorded_s - self._recorded_s)


def _nothing(*args, **kwargs) -> None:
    pass


def _uncompiled(model: Callable | None = None, **_) -> Callable:
    """torch.compile, as a call and as a decorator with options, without the compiling."""
    return model if model is not None else (lambda function: function)


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and (device == "cuda" or device.startswith("cuda:"))


def _on_cpu(function: Callable) -> Callable:
    """`function`, with any CUDA device among its arguments replaced by the CPU and no pinned memory."""

    @functools.wraps(function)
    def placed(*args, **kwargs):
        if "device" in kwargs:
            device = kwargs["device"]
            ordinal = isinstance(device, int)  # device=0 means the first GPU
            kwargs["device"] = CPU if ordinal or _is_cuda(device) else device
        kwargs.pop("pin_memory", None)
        return function(*(CPU if _is_cuda(argument) else argument for argument in args), **kwargs)

    return placed


def _to(original: Callable) -> Callable:
    """`Tensor.to`, where the first argument may also be a device ordinal."""
    placed = _on_cpu(original)

    @functools.wraps(original)
    def to(tensor, *args, **kwargs):
        if args and isinstance(args[0], int):
            args = (CPU, *args[1:])
        return placed(tensor, *args, **kwargs)

    return to


def _cuda(tensor, device=None, non_blocking=False, memory_format=torch.preserve_format):
    return tensor


def _pin_memory(tensor, device=None):
    return tensor


def _type(original: Callable) -> Callable:
    """`Tensor.type`: names are those of CUDA tensors, in answers and in requests."""

    @functools.wraps(original)
    def type_(tensor, dtype=None, non_blocking=False, **kwargs):
        if dtype is None:
            # Under a torch function mode, `original` itself comes back here: the answer may be a CUDA name.
            name = original(tensor).replace("torch.cuda.", "torch.", 1)
            return name.replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.", 1)
        return original(tensor, dtype, non_blocking, **kwargs)

    return type_


def _get_rng_state(device=None) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, device=None, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


def _manual_seed(seed: int) -> None:
    # torch.manual_seed would come back here through torch.cuda.manual_seed_all.
    torch.default_generator.manual_seed(seed)


def _device_properties(device=None) -> SimpleNamespace:
    # Compute capability 8.0: bf16 exists, fp8 does not, as on the CPU.
    return SimpleNamespace(
        name="simulated",
        major=8,
        minor=0,
        multi_processor_count=os.cpu_count() or 1,
        total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    )


def torch_shims() -> tuple[Shim, ...]:
    """Shims on torch itself. Complete only while the simulation is off: wrappers close over the originals."""
    main_stream = Stream()
    cuda, tensor = torch.cuda, torch.Tensor
    initialises = "raises: it would initialise CUDA"
    return (
        *(Shim(torch, name, _on_cpu(getattr(torch, name)), "device='cuda' raises") for name in FACTORIES),
        *(
            Shim(tensor, name, _on_cpu(getattr(tensor, name)), "device='cuda' raises")
            for name in TENSOR_FACTORIES
        ),
        Shim(tensor, "to", _to(tensor.to), "a CUDA device raises"),
        Shim(tensor, "cuda", _cuda, "raises; the model and every batch go through it"),
        Shim(tensor, "pin_memory", _pin_memory, "raises without an accelerator"),
        Shim(tensor, "record_stream", _nothing, "not implemented for CPU tensors"),
        Shim(
            tensor,
            "type",
            _type(tensor.type),
            "optimizers sort params by names: 'torch.cuda.FloatTensor'",
        ),
        # A device and not an ordinal, so that every `device=torch.cuda.current_device()` means the CPU.
        Shim(cuda, "current_device", lambda: CPU, initialises),
        Shim(torch.accelerator, "current_device_index", lambda: 0, initialises),
        Shim(cuda, "set_device", _nothing, initialises),
        Shim(cuda, "get_device_properties", _device_properties, initialises),
        Shim(cuda, "get_device_capability", lambda device=None: (8, 0), initialises),
        Shim(cuda, "synchronize", _nothing, "raises; pipeline communication and checkpoint saves call it"),
        Shim(cuda, "is_current_stream_capturing", lambda: False, "raises without a driver"),
        Shim(cuda, "Stream", Stream, "a dummy base class that cannot be instantiated"),
        Shim(cuda, "Event", Event, "a dummy base class that cannot be instantiated"),
        Shim(cuda, "stream", lambda stream: contextlib.nullcontext(), "reads attributes of a real stream"),
        Shim(cuda, "set_stream", _nothing, "reads attributes of a real stream"),
        Shim(cuda, "current_stream", lambda device=None: main_stream, initialises),
        Shim(cuda, "default_stream", lambda device=None: main_stream, initialises),
        Shim(
            torch,
            "compile",
            _uncompiled,
            "its table of torch's functions trips over stand-ins",
        ),
        Shim(cuda, "get_rng_state", _get_rng_state, initialises),
        Shim(cuda.random, "get_rng_state", _get_rng_state, "Megatron's RNG tracker reads it by this path"),
        Shim(cuda, "set_rng_state", _set_rng_state, "queued until CUDA initialises, which is never"),
        Shim(
            cuda,
            "manual_seed",
            _manual_seed,
            "silent: queued until CUDA initialises, so nothing is seeded",
        ),
    )


@contextlib.contextmanager
def quiet_megatron_import() -> Iterator[None]:
    """Holds back the warnings, one per module and rank, that Megatron runs without TransformerEngine and
    Apex."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(Transformer Engine|Apex|absl).*")
        yield


def megatron_shims() -> tuple[Shim, ...]:
    """Shims on Megatron-Core, the same for 0.16 to 0.19. Imports it."""
    with quiet_megatron_import():
        from megatron.core import jit
        from megatron.core.tensor_parallel import random
        from megatron.core.transformer.moe import moe_utils, shared_experts, token_dispatcher

    dispatcher = token_dispatcher.MoEAlltoAllTokenDispatcher

    @functools.wraps(moe_utils.maybe_move_tensor_to_cpu)
    def move_to_cpu(tensor, as_numpy=False, record_stream=False):
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    shims = [
        Shim(
            random,
            "_set_cuda_rng_state",
            _set_rng_state,
            "silent: leaving a forked RNG is queued until CUDA initialises, so every later draw differs",
        ),
        Shim(
            token_dispatcher,
            "maybe_move_tensor_to_cpu",
            move_to_cpu,
            "as_numpy is ignored for CPU tensors, and all-to-all with EP > 1 gets its splits as tensors",
        ),
        Shim(
            jit,
            "jit_fuser",
            jit.noop_decorator,
            "is torch.compile, for modules imported from here on",
        ),
        # Both classes cache a stream in themselves. The stand-in must not outlive the simulation.
        Shim(dispatcher, "cuda_dtoh_stream", Stream(), "keeps a stand-in stream"),
        Shim(shared_experts.SharedExpertMLP, "stream", Stream(), "keeps a stand-in stream"),
    ]
    if not hasattr(moe_utils, "te_general_gemm"):
        shims.append(
            Shim(
                moe_utils,
                "te_general_gemm",
                None,
                "0.16 leaves it undefined without TransformerEngine: NameError",
            )
        )
    return tuple(shims)


def _has_megatron() -> bool:
    # find_spec("megatron.core") itself raises where the parent package is missing.
    return (
        importlib.util.find_spec("megatron") is not None
        and importlib.util.find_spec("megatron.core") is not None
    )


_ABSENT: Any = object()


@contextlib.contextmanager
def apply_shims(shims: Iterable[Shim]) -> Iterator[None]:
    """Each in its turn; all are undone on exit."""
    with contextlib.ExitStack() as stack:
        for shim in shims:
            stack.callback(_apply(shim))
        yield


def _apply(shim: Shim) -> Callable[[], None]:
    """Applies one shim and returns what undoes it. Inherited and missing attributes are deleted, not set
    back."""
    before = vars(shim.owner).get(shim.name, _ABSENT)
    setattr(shim.owner, shim.name, shim.replacement)
    if before is _ABSENT:
        return lambda: delattr(shim.owner, shim.name)
    return lambda: setattr(shim.owner, shim.name, before)


class _NotTheSharedGenerator(logging.Filter):
    """Drops the tracker's warning that the CPU generator moved: here it *is* the generator in use."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "CPU RNG state changed within GPU RNG context" not in record.getMessage()


_lock = threading.Lock()
_depth = 0
_undo = contextlib.ExitStack()


def _start() -> contextlib.ExitStack:
    with contextlib.ExitStack() as stack:
        # First, since it imports torch's compiler, which trips over stand-ins. It is for what was compiled
        # before: Megatron's fusions, each of which would start a C++ compiler on the CPU.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        # Megatron is imported before torch is touched, so that its modules do not keep stand-ins.
        shims = (*(megatron_shims() if _has_megatron() else ()), *torch_shims())
        stack.enter_context(apply_shims(shims))
        rng_logger, rng_filter = (
            logging.getLogger("megatron.core.tensor_parallel.random"),
            _NotTheSharedGenerator(),
        )
        rng_logger.addFilter(rng_filter)
        stack.callback(rng_logger.removeFilter, rng_filter)
        return stack.pop_all()


@contextlib.contextmanager
def simulated_cuda() -> Iterator[None]:
    """Runs its body with host memory in the place of a GPU (see the module's docstring).

    May be nested, also across threads: the outermost entry applies the shims and the last exit undoes them.
    """
    global _depth, _undo
    with _lock:
        if _depth == 0:
            _undo = _start()
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                _undo.close()
