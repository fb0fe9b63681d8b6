"""Segment values <-> stored bytes.

A format turns the fp32 values that Adam works on into the bytes that are kept, and back. Main params are
always fp32. Moments may be fp32 (lossless: the values are a view of the stored bytes) or bf16 (a plain
round-to-nearest-even cast, 2 bytes a value).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from optstream.core.errors import UnsupportedError
from optstream.core.plan import SEGMENTS

# Under round-to-nearest, exp_avg_sq in bf16 stalls: a relative decay of 1 - beta2 below half a bf16 ulp
# (2**-9) never shrinks a value. Measured bias under stationary noise: +60% at beta2 = 0.999, +4.6% at 0.99,
# -0.5% at 0.98, none at 0.95.
BF16_SOUND_BETA2 = 0.98


@dataclass(frozen=True)
class Format:
    """How one segment is stored. `lossless` means that decode(encode(x)) has the bits of x."""

    name: str
    dtype: torch.dtype

    @property
    def element_bytes(self) -> int:
        return self.dtype.itemsize

    @property
    def lossless(self) -> bool:
        return self.dtype is torch.float32

    def decode(self, stored: torch.Tensor) -> torch.Tensor:
        """fp32 values of `stored` (1-D, uint8): a view of it where lossless, else a copy on its device."""
        values = stored.view(self.dtype)
        return values if self.lossless else values.float()

    def encode(self, values: torch.Tensor, stored: torch.Tensor) -> None:
        """Put fp32 `values` into `stored` (1-D, uint8), in place. Nothing to do where they are its view."""
        target = stored.view(self.dtype)
        if target.data_ptr() != values.data_ptr():
            target.copy_(values)


FP32 = Format("fp32", torch.float32)
BF16 = Format("bf16", torch.bfloat16)
_MOMENT_FORMATS = {format_.name: format_ for format_ in (FP32, BF16)}


def segment_formats(moment_dtype: str) -> dict[str, Format]:
    """The format of each segment, by name. Raises UnsupportedError for moments that would be unsound."""
    if moment_dtype not in _MOMENT_FORMATS:
        raise UnsupportedError(
            f"moments cannot be stored as {moment_dtype}",
            why="unscaled, exp_avg_sq underflows to zero there and the update explodes",
            remedy=f"use one of {', '.join(_MOMENT_FORMATS)}",
        )
    moments = _MOMENT_FORMATS[moment_dtype]
    return {name: FP32 if name == "main" else moments for name in SEGMENTS}


def moment_warning(moment_dtype: str, beta2: float) -> str | None:
    """What a person should know before training with these moments, or None."""
    if moment_dtype != "bf16" or beta2 <= BF16_SOUND_BETA2:
        return None
    return (
        f"bf16 moments with beta2 = {beta2}: exp_avg_sq decays by less than bf16 can resolve and stays too "
        f"large, so steps come out too small; use --adam-beta2 {BF16_SOUND_BETA2} or lower, or fp32 moments"
    )
