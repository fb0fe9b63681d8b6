"""Tensors without memory refuse by name, whoever holds them, and are themselves again afterwards."""

from __future__ import annotations

import copy

import pytest
import torch

from optstream.core.asleep import awaken, put_to_sleep
from optstream.core.errors import AsleepError

pytestmark = pytest.mark.unit


@pytest.fixture
def layer():
    """Its weight has no memory, and looks at it would end the process if they reached torch."""
    layer = torch.nn.Linear(3, 3)
    saved = layer.weight.detach().clone()
    storage = layer.weight.untyped_storage()
    storage.resize_(0)
    put_to_sleep(layer.weight)
    yield layer
    storage.resize_(36)
    awaken(layer.weight)
    with torch.no_grad():
        layer.weight.copy_(saved)


USES = {
    "forward": lambda layer: layer(torch.ones(2, 3)),
    "arithmetic": lambda layer: layer.weight + 1,
    "reflected arithmetic": lambda layer: 1 + layer.weight,
    "indexing": lambda layer: layer.weight[0],
    "a view": lambda layer: layer.weight.view(-1),
    "data": lambda layer: layer.weight.data,
    "gradient": lambda layer: layer.weight.grad,
    "zero": lambda layer: layer.weight.zero_(),
    "copied from": lambda layer: torch.ones(3, 3).copy_(layer.weight),
    "copied to": lambda layer: layer.weight.copy_(torch.ones(3, 3)),
    "foreach": lambda layer: torch._foreach_add_([layer.weight], 1),
    "state dict": lambda layer: layer.state_dict(),
    "zero_grad": lambda layer: layer.zero_grad(),
    "an optimizer": lambda layer: torch.optim.SGD(layer.parameters(), lr=0.1).step(),
    "a deep copy": lambda layer: copy.deepcopy(layer.weight),
    "numpy": lambda layer: layer.weight.numpy(),
    "to": lambda layer: layer.to(torch.float64),
}


@pytest.mark.parametrize("use", USES)
def test_every_use_raises_and_says_what_to_do(layer, use):
    with pytest.raises(AsleepError, match=r"^the trainer is asleep: .*wake_up\(\)"):
        USES[use](layer)


def test_what_needs_no_memory_still_answers(layer):
    weight = layer.weight
    assert weight.shape == (3, 3)
    assert (weight.numel(), weight.dim(), weight.dtype) == (9, 2, torch.float32)
    assert weight.requires_grad
    assert isinstance(weight, torch.nn.Parameter)
    assert {weight: "found"}[weight] == "found"
    assert next(iter(layer.parameters())) is weight
    assert repr(weight) == "<asleep Parameter of shape (3, 3)>"


@pytest.mark.parametrize("tensor", [torch.ones(4), torch.nn.Parameter(torch.ones(4))])
def test_awake_it_is_what_it_was(tensor):
    before = type(tensor)
    for _ in range(2):
        put_to_sleep(tensor)
        put_to_sleep(tensor)
        awaken(tensor)
        awaken(tensor)
    assert type(tensor) is before
    assert torch.equal(tensor.detach() + 1, torch.full((4,), 2.0))
