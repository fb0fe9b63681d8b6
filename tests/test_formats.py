"""Values <-> stored bytes, against an oracle that works on the bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from optstream.core.config import StreamConfig
from optstream.core.errors import StreamConfigError, UnsupportedError
from optstream.core.formats import BF16, FP32, moment_warning, segment_formats

pytestmark = pytest.mark.unit

any_fp32 = npst.arrays(np.uint32, st.integers(1, 200), elements=st.integers(0, 2**32 - 1)).map(
    lambda bits: bits.view(np.float32)
)
# Exact halves between two bf16 values, where rounding to even and rounding up part ways.
TIES = np.array([0x3F808000, 0x3F818000, 0xBF808000, 0xBF818000, 0x7F7F8000, 0x00008000], np.uint32)


def bf16_bits(values: np.ndarray) -> np.ndarray:
    """Round-to-nearest-even to the upper 16 bits, in integers; NaN stays some NaN."""
    bits = values.view(np.uint32).astype(np.uint64)
    upper, lower = bits >> 16, bits & 0xFFFF
    up = (lower > 0x8000) | ((lower == 0x8000) & (upper & 1 == 1))
    return (upper + up).astype(np.uint16)


@given(any_fp32)
def test_bf16_is_rounded_to_nearest_even(values):
    check_bf16(values)


def test_bf16_ties_go_to_even():
    check_bf16(TIES.view(np.float32))


def check_bf16(values: np.ndarray) -> None:
    stored = torch.zeros(2 * len(values), dtype=torch.uint8)
    BF16.encode(torch.from_numpy(values.copy()), stored)
    nan = np.isnan(values)
    assert (stored.numpy().view(np.uint16)[~nan] == bf16_bits(values)[~nan]).all()
    decoded = BF16.decode(stored).numpy()
    assert decoded.dtype == np.float32
    assert (decoded.view(np.uint32)[~nan] == bf16_bits(values)[~nan].astype(np.uint32) << 16).all()
    assert np.isnan(decoded[nan]).all()


@given(any_fp32)
def test_what_was_rounded_once_stays(values):
    """A moment that no step touches goes through decode and encode without a change."""
    stored = torch.zeros(2 * len(values), dtype=torch.uint8)
    BF16.encode(torch.from_numpy(values.copy()), stored)
    again = stored.clone()
    BF16.encode(BF16.decode(stored), again)
    assert torch.equal(again, stored)


@given(any_fp32)
def test_fp32_is_a_view_with_every_bit(values):
    stored = torch.from_numpy(values.copy()).view(torch.uint8)
    decoded = FP32.decode(stored)
    assert decoded.data_ptr() == stored.data_ptr()
    assert (decoded.numpy().view(np.uint32) == values.view(np.uint32)).all()
    FP32.encode(decoded, stored)
    assert (stored.numpy().view(np.uint32) == values.view(np.uint32)).all()
    elsewhere = torch.zeros_like(stored)
    FP32.encode(decoded, elsewhere)
    assert torch.equal(elsewhere, stored)


def test_main_params_are_fp32_whatever_the_moments():
    assert segment_formats("bf16") == {"main": FP32, "exp_avg": BF16, "exp_avg_sq": BF16}
    assert segment_formats("fp32") == dict.fromkeys(("main", "exp_avg", "exp_avg_sq"), FP32)
    assert (FP32.element_bytes, BF16.element_bytes) == (4, 2)
    assert (FP32.lossless, BF16.lossless) == (True, False)


@pytest.mark.parametrize("dtype", ["fp16", "fp8e4m3", "fp8e5m2", "int8"])
def test_unsound_moments_are_refused(dtype, tmp_path):
    with pytest.raises(UnsupportedError, match=f"{dtype}: .*underflows.*use one of fp32, bf16"):
        segment_formats(dtype)
    with pytest.raises(StreamConfigError, match="underflows"):
        StreamConfig(True, (str(tmp_path),), moment_dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_why_they_are_refused(dtype):
    """A gradient of 1e-4 is common. Its square, times 1 - beta2, is zero there: the update explodes."""
    gradient = torch.full((4,), 1e-4)
    exp_avg_sq = (gradient.square() * (1 - 0.95)).to(dtype).float()
    assert (exp_avg_sq == 0).all()
    assert (gradient / (exp_avg_sq.sqrt() + 1e-8) > 1000).all()
    sound = (gradient.square() * (1 - 0.95)).bfloat16().float()
    assert (gradient / (sound.sqrt() + 1e-8) < 5).all()


def test_bf16_moments_warn_where_they_stall():
    assert moment_warning("fp32", 0.999) is None
    assert moment_warning("bf16", 0.95) is None
    assert moment_warning("bf16", 0.98) is None
    for beta2 in (0.99, 0.999):
        assert f"beta2 = {beta2}" in moment_warning("bf16", beta2)


def test_the_stall_that_is_warned_of():
    """Under pure decay exp_avg_sq never shrinks in bf16 at beta2 = 0.999, and does at 0.95."""
    values = torch.rand(1000) + 0.5
    for beta2, shrinks in ((0.999, False), (0.95, True)):
        stored = values.bfloat16()
        decayed = (stored.float() * beta2).bfloat16()
        assert (decayed < stored).all() == shrinks
        assert (decayed < stored).any() == shrinks
