"""Runs a Megatron training script, as it is, on a machine without a GPU.

    python -m optstream.harness.simulated_training SCRIPT ARGUMENTS...
    torchrun --nproc-per-node 2 -m optstream.harness.simulated_training SCRIPT ARGUMENTS...

On GPUs the same script runs by itself, or under torchrun. Beyond what `simulated_cuda` answers, Megatron's
training loop wants to see a device before it starts, and asks it for memory statistics.
"""

from __future__ import annotations

import contextlib
import runpy
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from optstream.harness.errors import ConfigurationError
from optstream.harness.simulated_cuda import Shim, Stream, apply_shims, quiet_megatron_import, simulated_cuda


def training_shims() -> tuple[Shim, ...]:
    """Shims for `megatron.training`, which comes with 0.17 and later. Imports it."""
    with quiet_megatron_import():
        from megatron.core.datasets import utils as dataset_utils

    cuda = torch.cuda
    initialises = "raises: it would initialise CUDA"
    loader = torch.utils.data.DataLoader

    def unpinned(self, *args, pin_memory: bool = False, **kwargs) -> None:
        init(self, *args, **kwargs)

    init, stream = loader.__init__, Stream()
    return (
        Shim(cuda, "is_available", lambda: True, "Megatron refuses to start: it requires CUDA"),
        # The random generators of tensor-parallel ranks are seeded only where there is a device.
        Shim(cuda, "device_count", lambda: 1, "silent: the RNG tracker stays empty"),
        Shim(torch.accelerator, "current_stream", lambda device=None: stream, initialises),
        Shim(cuda, "empty_cache", lambda: None, initialises),
        Shim(cuda, "memory_stats", lambda device=None: defaultdict(int), initialises),
        *(
            Shim(cuda, name, lambda device=None: 0, initialises)
            for name in (
                *("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"),
                "device_memory_used",
            )
        ),
        Shim(loader, "__init__", unpinned, "pins batches, which needs an accelerator"),
        Shim(
            dataset_utils,
            "compile_helpers",
            lambda: None,
            "runs make in the installed package, whose helper the wheel has compiled",
        ),
    )


@contextlib.contextmanager
def simulated_training() -> Iterator[None]:
    """`simulated_cuda`, and what Megatron's training loop needs besides. Raises ConfigurationError where the
    installed Megatron-Core has no training loop."""
    require_training_loop()
    with simulated_cuda(), apply_shims(training_shims()):
        yield


def require_training_loop() -> None:
    try:
        with quiet_megatron_import():
            import megatron.training  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(
            "Megatron's own training loop cannot run",
            why=f"the installed megatron-core does not ship megatron.training ({error})",
            remedy="Use Python 3.12 with megatron-core 0.17 or newer",
        ) from error


def main(argv: Sequence[str]) -> None:
    """Run a script under the simulation, as `python SCRIPT ARGUMENTS...` would."""
    script, *_ = argv
    with simulated_training():
        sys.argv[:] = argv
        sys.path.insert(0, str(Path(script).parent))
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
