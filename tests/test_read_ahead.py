"""Reads that start from backward: once a step, at the first gradient, and without keeping anything alive."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from optstream.backends.fake import FakeSystem
from optstream.backends.nvme import NvmeBackend
from optstream.core.config import StreamConfig
from optstream.core.optimizer import StreamingAdamW
from optstream.core.read_ahead import BackwardHook

pytestmark = pytest.mark.unit


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))


def backward(model: torch.nn.Module) -> None:
    model(torch.ones(1, 64)).sum().backward()


def test_it_starts_at_the_first_gradient_and_once_until_rearmed():
    model = network()
    with_gradient_when_called = []

    def start() -> None:
        with_gradient_when_called.append(sum(param.grad is not None for param in model.parameters()))

    hook = BackwardHook(model.parameters(), start)
    backward(model)
    backward(model)
    assert with_gradient_when_called == [1]
    model.zero_grad()
    hook.rearm()
    backward(model)
    assert with_gradient_when_called == [1, 1]


def test_removed_it_never_starts():
    model, calls = network(), []
    hook = BackwardHook(model.parameters(), lambda: calls.append(1))
    hook.remove()
    hook.remove()
    backward(model)
    assert calls == []


def test_parameters_do_not_keep_it_alive():
    model, calls = network(), []
    hook = BackwardHook(model.parameters(), lambda: calls.append(1))
    gone = weakref.ref(hook)
    del hook
    gc.collect()
    assert gone() is None
    backward(model)
    assert calls == []


class CountingSystem(FakeSystem):
    reads = 0

    def preadv(self, descriptor, buffers, offset):
        self.reads += 1
        return super().preadv(descriptor, buffers, offset)


@pytest.mark.parametrize("read_ahead", [True, False])
def test_backward_fetches_the_first_buckets_and_the_step_reads_no_more_for_it(read_ahead):
    system, model = CountingSystem(), network()
    config = StreamConfig(True, ("/unused",), bucket_numel=1024, depth=2, read_ahead=read_ahead)
    backend = NvmeBackend("/disk", subdirectory="test/read_ahead", system=system)
    optimizer = StreamingAdamW(model.parameters(), config, backend=backend)
    for _ in range(2):
        before = system.reads
        backward(model)
        optimizer.streamer.engine.settle()
        assert (system.reads > before) is read_ahead
        optimizer.step()
        optimizer.zero_grad()
    numel = sum(param.numel() for param in model.parameters())
    assert [record.read_bytes for record in optimizer.records] == [4 * numel, 12 * numel]
    assert [record.cache_hits for record in optimizer.records] == [0, 0]
    optimizer.close()
    settled = system.reads
    backward(model)
    assert system.reads == settled
