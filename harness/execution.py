"""Run one allowed combination of flags for real: a few optimizer steps on the fake filesystem.

With plain torch parameters, since laptops have no Megatron; `megatron_execution` is the same through
Megatron-Core.

What streams must give the bits of a resident AdamW, and must have streamed: every step went through the
buckets, their files lie in the directories that the flags name and nowhere else, and go when it is closed.
With bf16 moments, a plain round-to-nearest cast, the reference is a resident AdamW whose moments are rounded
so after every step: its bits, too. What does not stream must not engage anything.
"""

from __future__ import annotations

import warnings
from unittest import mock

import torch

from optstream.backends.fake import open_fake
from optstream.core import streamer
from optstream.core.config import StreamConfig
from optstream.core.optimizer import StreamingAdamW
from optstream.core.validator import MOMENT_DTYPE, STREAM, stream_config, validate_arguments
from optstream.harness.check import parse_flags
from optstream.harness.domains import Combination, command_line
from optstream.harness.engagement import FakeScratch, expect, expect_bits, expect_streamed, fake_scratch

STEPS = 4  # the first has no moments to read, and the bucket order may alternate after it
_SHAPES = (((13, 10), torch.float32), ((67,), torch.bfloat16), ((1,), torch.float32))
_SETTINGS = ({"lr": 1e-2, "weight_decay": 0.1}, {"lr": 1e-3, "betas": (0.8, 0.95)}, {})


def execute(combination: Combination) -> str | None:
    """None, or what went wrong."""
    try:
        _execute(combination)
    except Exception as error:
        # One broken combination must not end a run over thousands; it is reported with its command.
        return f"{type(error).__name__}: {error}"
    return None


def _execute(combination: Combination) -> None:
    args = parse_flags(command_line(combination))
    config = stream_config(validate_arguments(args))
    expect("streaming", config.enabled, combination[STREAM])
    if not config.enabled:
        expect("directories", config.directories, ())
        return
    with fake_scratch(combination) as scratch:
        with mock.patch.object(streamer, "open_backend", wraps=open_fake) as opener:
            _stream(combination, config, scratch)
        opened = [call.args[0] for call in opener.call_args_list]
        expect("directories opened", opened, [scratch.directories])


def _stream(combination: Combination, config: StreamConfig, scratch: FakeScratch) -> None:
    random = torch.Generator().manual_seed(1)
    params = [torch.nn.Parameter(torch.randn(shape, generator=random).to(dtype)) for shape, dtype in _SHAPES]
    numel = sum(param.numel() for param in params)
    reference = _Resident(params, moment_dtype=combination[MOMENT_DTYPE])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # bf16 moments warn by beta2, and are meant here
        optimizer = StreamingAdamW(_groups(params), config)
    try:
        for _ in range(STEPS):
            for param in params:
                param.grad = torch.randn(param.shape, generator=random).to(param.dtype)
            reference.step([param.grad for param in params])
            optimizer.step()
        state = optimizer.full_state()
        for index, param in enumerate(params):
            expect_bits(f"param {index}", param.detach(), reference.params[index])
        for index, found in enumerate(state.values()):
            for key, value in reference.state(index).items():
                expect_bits(f"{key} of param {index}", found[key], value)
        expect_streamed(combination, optimizer.records, steps=STEPS, numel=numel)
        scratch.expect_files(numel=numel, buckets=optimizer.records[0].buckets)
    finally:
        optimizer.close()
    scratch.expect_no_files()


def _groups(params: list) -> list[dict]:
    return [{"params": [param], **setting} for param, setting in zip(params, _SETTINGS, strict=True)]


class _Resident:
    """AdamW with everything in memory: fp32 main params, copied into `params` after each step."""

    def __init__(self, params: list[torch.nn.Parameter], *, moment_dtype: str) -> None:
        self.params = [param.detach().clone() for param in params]
        self._mains = [torch.nn.Parameter(param.detach().float().clone()) for param in params]
        self._optimizer = torch.optim.AdamW(_groups(self._mains))
        self._stored_as = {"fp32": torch.float32, "bf16": torch.bfloat16}[moment_dtype]

    def step(self, gradients: list[torch.Tensor]) -> None:
        for main, gradient in zip(self._mains, gradients, strict=True):
            main.grad = gradient.float()
        self._optimizer.step()
        for param, main in zip(self.params, self._mains, strict=True):
            param.copy_(main.detach())
            for moment in ("exp_avg", "exp_avg_sq"):
                value = self._optimizer.state[main][moment]
                value.copy_(value.to(self._stored_as))

    def state(self, index: int) -> dict[str, torch.Tensor]:
        main = self._mains[index]
        moments = self._optimizer.state[main]
        return {"main": main.detach(), "exp_avg": moments["exp_avg"], "exp_avg_sq": moments["exp_avg_sq"]}
