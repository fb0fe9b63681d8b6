"""What streaming is for: a model whose optimizer state does not fit the GPU while the step runs."""

from __future__ import annotations

import math
import shutil

import pytest
import torch

from optstream.core.megatron import setup_optimizer_state_streaming, streaming_construction
from optstream.harness.check import parse_flags
from optstream.harness.launch import run_ranks
from optstream.harness.sizing import beyond_memory
from optstream.harness.training import Trainer

pytestmark = [pytest.mark.e2e, pytest.mark.gpu]


def test_a_model_whose_state_does_not_fit_trains_streamed_and_not_resident(tmp_path, record_property):
    memory_bytes = torch.cuda.get_device_properties(0).total_memory
    model = beyond_memory(memory_bytes, shutil.disk_usage(tmp_path).free)
    record_property("parameters", model.parameters)

    def resident(rank: int) -> None:
        trainer = Trainer(model.config, rank=rank)
        try:
            trainer.train_step()
        finally:
            trainer.close()

    def streamed(rank: int) -> None:
        flags = ["--stream-optimizer-state-to-disk", "--use-distributed-optimizer"]
        args = parse_flags([*flags, "--offload-train-disk-dir", str(tmp_path)])
        stores = []
        trainer = Trainer(
            model.config,
            rank=rank,
            construction=lambda: streaming_construction(args),
            after_construction=lambda optimizer: stores.extend(
                setup_optimizer_state_streaming(args, optimizer)
            ),
        )
        try:
            losses = [trainer.train_step().loss for _ in range(model.config.steps)]
            (store,) = stores
            store.streamer.engine.drain()
            assert all(map(math.isfinite, losses))
            assert [record.step for record in store.records] == [1, 2]
            streamed_parameters = sum(entry.numel for entry in store.streamer.entries)
            assert streamed_parameters == pytest.approx(model.parameters, rel=0.01)
            assert [record.written_bytes for record in store.records] == [12 * streamed_parameters] * 2
            record_property("peak bytes on the device", torch.cuda.max_memory_allocated())
        finally:
            for store in stores:
                store.close()
            trainer.close()

    with pytest.raises(torch.OutOfMemoryError):
        run_ranks(resident, 1, hardware="gpu")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run_ranks(streamed, 1, hardware="gpu")
    assert torch.cuda.max_memory_allocated() < memory_bytes
