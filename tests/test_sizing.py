"""Models that outgrow a device, by arithmetic."""

from __future__ import annotations

import pytest

from optstream.harness.errors import ConfigurationError
from optstream.harness.sizing import beyond_memory

pytestmark = pytest.mark.unit

GB = 10**9
DEVICES = {"8 GB": 8 * GB, "24 GB": 24 * GB, "H200": 141 * GB, "GB300": 276_600_000_000}


@pytest.mark.parametrize("device", DEVICES)
def test_resident_does_not_fit_and_streamed_does_with_room_to_spare(device):
    memory = DEVICES[device]
    model = beyond_memory(memory, free_disk_bytes=10**13)
    assert model.resident_bytes > 1.3 * memory
    assert model.streamed_bytes < 0.6 * memory
    assert model.disk_bytes == 12 * model.parameters


@pytest.mark.parametrize("device", DEVICES)
def test_the_parameters_are_those_of_the_model(device):
    """Counted another way, from Megatron's shapes: qkv, projection, MLP, embedding and output."""
    model = beyond_memory(DEVICES[device], free_disk_bytes=10**13)
    config = model.config
    h = config.hidden
    layer = 3 * h * h + h * h + 2 * (4 * h * h)
    biases_and_norms = 3 * h + h + 4 * h + h + 4 * h
    exact = config.layers * (layer + biases_and_norms) + 2 * 256 * h + 2 * h
    assert model.parameters == pytest.approx(exact, rel=0.01)


def test_a_gb300_takes_a_model_of_about_23_billion_parameters():
    model = beyond_memory(DEVICES["GB300"], free_disk_bytes=10**13)
    assert 22 * GB < model.parameters < 24 * GB
    assert model.config.hidden == 8192


def test_a_disk_that_is_too_small_is_an_error_before_anything_is_built():
    with pytest.raises(ConfigurationError, match="its state takes 280 GB, and 100 GB are free"):
        beyond_memory(DEVICES["GB300"], free_disk_bytes=100 * GB)
