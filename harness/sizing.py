"""The smallest useful model whose optimizer state does not fit a device, though everything else does.

By arithmetic, before anything is allocated: of a parameter, bf16 weights and fp32 gradients stay on the
device (6 bytes); resident Adam state adds 12, streamed state a few buckets.
"""

from __future__ import annotations

from dataclasses import dataclass

from optstream.harness.errors import ConfigurationError
from optstream.harness.training_config import VOCABULARY, TrainingConfig

WEIGHTS_AND_GRADIENTS_BYTES = 6
STATE_BYTES = 12
# Resident then needs 18 / 12 = 1.5 devices, and streamed half of one, with room for activations and buckets.
DEVICE_BYTES_PER_PARAMETER = 12
HEAD = 128
HIDDEN_MAX = 8192
LAYERS_MIN = 8


@dataclass(frozen=True)
class BeyondMemory:
    """A model for one device. Bytes are of all of it: on the device in each kind of run, and on disk."""

    config: TrainingConfig
    parameters: int

    @property
    def resident_bytes(self) -> int:
        return self.parameters * (WEIGHTS_AND_GRADIENTS_BYTES + STATE_BYTES)

    @property
    def streamed_bytes(self) -> int:
        return self.parameters * WEIGHTS_AND_GRADIENTS_BYTES

    @property
    def disk_bytes(self) -> int:
        return self.parameters * STATE_BYTES


def beyond_memory(device_bytes: int, free_disk_bytes: int) -> BeyondMemory:
    """Raises ConfigurationError where the disk cannot hold the state of such a model."""
    wanted = device_bytes // DEVICE_BYTES_PER_PARAMETER
    hidden = HIDDEN_MAX
    while hidden > HEAD and LAYERS_MIN * _layer_parameters(hidden) > wanted:
        hidden //= 2
    layers = max(1, round(wanted / _layer_parameters(hidden)))
    config = TrainingConfig(
        steps=2, layers=layers, hidden=hidden, heads=hidden // HEAD, seq=64, batch=1, microbatches=1
    )
    model = BeyondMemory(config, layers * _layer_parameters(hidden) + 2 * VOCABULARY * hidden)
    if model.disk_bytes > free_disk_bytes:
        needed_gb, free_gb = model.disk_bytes / 1e9, free_disk_bytes / 1e9
        raise ConfigurationError(
            "the disk cannot hold a model that the device cannot",
            why=f"its state takes {needed_gb:.0f} GB, and {free_gb:.0f} GB are free",
            remedy="Free some, or name another disk with --basetemp",
        )
    return model


def _layer_parameters(hidden: int) -> int:
    """Attention (4 h^2) and an MLP of 4 h (8 h^2); biases and norms are a sliver."""
    return 12 * hidden * hidden
