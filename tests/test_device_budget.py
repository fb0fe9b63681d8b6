"""A simulated device that can be full: what counts, for how long, and what the error says."""

from __future__ import annotations

import pytest
import torch

from optstream.core.device_memory import Parked
from optstream.core.memory import allocate_host
from optstream.harness.device_budget import OTHER, BudgetedStorages, DeviceBudget
from optstream.harness.errors import DeviceMemoryError

pytestmark = pytest.mark.unit

KB = 1000


def test_storages_count_once_and_as_long_as_anybody_keeps_them():
    budget = DeviceBudget()
    with budget.in_use():
        tensor = torch.zeros(KB, dtype=torch.uint8)
        view = tensor[10:]
        tensor.add_(1)
    assert budget.used_bytes == KB
    del tensor
    assert budget.used_bytes == KB
    del view
    assert budget.used_bytes == 0
    assert budget.peak_bytes == KB


def test_what_is_made_outside_or_on_the_host_does_not_count():
    budget = DeviceBudget()
    outside = torch.zeros(KB)
    with budget.in_use():
        outside.add_(1)
        host = allocate_host(KB)
        host.zero_()
    assert budget.used_bytes == 0
    assert host.numel() == KB


def test_autograd_counts_too():
    budget = DeviceBudget()
    weight = torch.ones(KB, requires_grad=True)
    with budget.in_use():
        (weight * weight).sum().backward()
    assert budget.used_bytes == weight.grad.untyped_storage().nbytes() == 4 * KB
    assert budget.peak_bytes >= 8 * KB


def test_the_allocation_that_does_not_fit_fails_and_names_what_is_there():
    budget = DeviceBudget(10 * KB)
    with budget.in_use():
        weights = torch.zeros(6 * KB, dtype=torch.uint8)
        other = torch.zeros(KB, dtype=torch.uint8)
        budget.name("weights", lambda: [weights])
        with pytest.raises(DeviceMemoryError) as raised:
            torch.zeros(4 * KB, dtype=torch.uint8)
        exactly = torch.zeros(3 * KB, dtype=torch.uint8)
    assert raised.value.resident == {"weights": 6 * KB, OTHER: KB}
    assert "4,000 bytes more do not fit into its 10,000, of which in use: weights 6,000" in str(raised.value)
    assert budget.used_bytes == 10 * KB == sum(each.numel() for each in (weights, other, exactly))
    assert budget.peak_bytes == 10 * KB, "what failed was never there"


def test_the_peak_of_each_phase_is_its_own():
    budget = DeviceBudget()
    with budget.in_use():
        kept = torch.zeros(KB, dtype=torch.uint8)
        torch.zeros(5 * KB, dtype=torch.uint8)
    assert budget.take_peak() == 6 * KB
    assert budget.take_peak() == KB == kept.numel()
    assert budget.peak_bytes == 6 * KB


def test_two_devices_count_apart():
    first, second = DeviceBudget(), DeviceBudget()
    with first.in_use():
        one = torch.zeros(KB, dtype=torch.uint8)
    with second.in_use():
        two = torch.zeros(2 * KB, dtype=torch.uint8)
    assert (first.used_bytes, second.used_bytes) == (one.numel(), two.numel())


def test_storages_that_come_back_must_fit():
    budget = DeviceBudget(10 * KB)
    with budget.in_use():
        trainer = torch.zeros(6 * KB, dtype=torch.uint8)
    memory, parked = BudgetedStorages(budget), [Parked(trainer.untyped_storage(), 6 * KB)]
    memory.release(parked)
    assert budget.used_bytes == 0
    with budget.in_use():
        rollout = torch.zeros(5 * KB, dtype=torch.uint8)
    with pytest.raises(DeviceMemoryError, match="6,000 bytes more"):
        memory.restore(parked)
    assert trainer.untyped_storage().nbytes() == 0
    del rollout
    memory.restore(parked)
    assert budget.used_bytes == 6 * KB
