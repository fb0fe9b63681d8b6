"""Main params without memory: they have a shape and carry gradients, and give no old value away."""

from __future__ import annotations

import pytest
import torch

from optstream.core.evicted import BornEvicted, evicted, is_evicted

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")
NUMELS = [1, 2, 1023, 14_412_000]


@pytest.mark.parametrize("numel", NUMELS)
def test_it_has_the_size_of_a_main_param_and_the_memory_of_one_element(numel):
    stand_in = evicted(numel, CPU)
    assert stand_in.shape == (numel,)
    assert stand_in.nelement() == numel
    assert stand_in.dtype is torch.float32
    assert stand_in.untyped_storage().nbytes() == 4
    assert is_evicted(stand_in)


def test_reading_it_gives_nan_and_no_old_value():
    assert torch.isnan(evicted(5, CPU)).all()
    assert torch.isnan(evicted(5, CPU) + 1.0).all()


@pytest.mark.parametrize(
    "write",
    [
        lambda tensor: tensor.copy_(torch.ones(4)),
        lambda tensor: tensor.add_(1),
        lambda tensor: tensor.mul_(0.5),
        lambda tensor: torch._foreach_add_([tensor], 1),
        lambda tensor: tensor.addcdiv_(torch.ones(4), torch.ones(4)),
    ],
    ids=["copy", "add", "mul", "foreach", "adam"],
)
def test_writing_values_to_it_is_an_error(write):
    with pytest.raises(RuntimeError, match="single memory location"):
        write(evicted(4, CPU))


def test_gradients_and_attributes_hang_on_it():
    main = torch.nn.Parameter(torch.ones(6))
    main.data = evicted(6, CPU)
    main.grad = torch.full((6,), 2.0)
    main.tag = "kept"
    assert main.numel() == 6
    assert torch.equal(main.grad, torch.full((6,), 2.0))
    assert main.tag == "kept"
    assert is_evicted(main)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(4),
        torch.ones(1),
        torch.ones(()),
        torch.ones(1).expand(4).clone(),
        torch.ones(2, 1)[:1].expand(4, 3),
        torch.arange(3.0)[1:2].expand(4),  # an expanded view of memory that is somebody's
    ],
)
def test_nothing_else_is_taken_for_it(tensor):
    assert not is_evicted(tensor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_the_mode_a_half_precision_shard_becomes_one(dtype):
    shard = torch.ones(9, dtype=dtype)
    with BornEvicted():
        main = shard.detach().float()
    assert is_evicted(main)
    assert main.numel() == 9


def test_under_the_mode_everything_else_is_as_ever():
    with BornEvicted():
        assert torch.equal(torch.ones(2, 3, dtype=torch.bfloat16).float(), torch.ones(2, 3))
        assert torch.equal(torch.ones(3, dtype=torch.float64).float(), torch.ones(3))
        assert torch.equal(torch.ones(3, dtype=torch.bfloat16) + 1, torch.full((3,), 2.0).bfloat16())
        already = torch.ones(3)
        assert already.float() is already
    assert torch.equal(torch.ones(3, dtype=torch.bfloat16).float(), torch.ones(3))
