"""The argument matrix through Megatron-Core: what is allowed streams as its flags say, what is refused leaves
nothing behind."""

from __future__ import annotations

import os

import pytest
import torch

from optstream.core.config import DEFAULTS
from optstream.core.errors import StreamConfigError
from optstream.core.megatron import setup_optimizer_state_streaming, streaming_construction
from optstream.core.validator import DISK_DIR, STREAM
from optstream.harness import megatron_execution, oracle
from optstream.harness.brute_force import draw
from optstream.harness.check import parse_flags
from optstream.harness.covering import count_coverage, covering_array
from optstream.harness.domains import command_line
from optstream.harness.final_state import streamed_state
from optstream.harness.launch import run_ranks
from optstream.harness.matrix import ACTED_ON, executions, part_of, reproduce
from optstream.harness.megatron_execution import MODEL, execute_each
from optstream.harness.training import Trainer
from optstream.harness.valid_space import ValidSpace

STREAMING_ALONE = DEFAULTS | {
    STREAM: True,
    "use_distributed_optimizer": True,
    "stream_optimizer_state_bucket_numel": 64,
}
NIGHTLY_PARTS = 64


@pytest.fixture
def failures(hardware):
    """Runs combinations. Of each that went wrong, its flags and what happened."""

    def run(combinations: list) -> dict[str, str]:
        outcomes = zip(combinations, execute_each(combinations, hardware), strict=True)
        return {reproduce(each): wrong for each, wrong in outcomes if wrong is not None}

    return run


# ---- what is allowed ---------------------------------------------------------------------------------------


@pytest.mark.e2e
def test_a_pairwise_set_over_all_that_streams_runs(failures):
    space = ValidSpace().restricted(STREAM, True)
    rows = covering_array(space, 2)
    # Rows that differ in other flags alone would stream the same way.
    distinct = list({tuple(row[dest] for dest in ACTED_ON): row for row in rows}.values())
    acted_on = {dest: space.domains[dest] for dest in ACTED_ON}
    missing = count_coverage(distinct, space, 2).missing
    assert [pair for pair in missing if all(dest in acted_on for dest, _ in pair)] == []
    assert failures(distinct) == {}


@pytest.mark.e2e
def test_nothing_engages_where_the_flags_do_not_stream(failures):
    space = ValidSpace().restricted(STREAM, False)
    needing_what_is_not_here = (
        {"optimizer": "muon"},
        {"lora_rank": 1},
        {"multi_lora_n_adapters": 1},
        {"train_backend": "fsdp"},
        {"use_precision_aware_optimizer": True},
        {"use_megatron_fsdp": True},
    )
    rows = [space.complete(flags) for flags in needing_what_is_not_here]
    assert failures([*rows, DEFAULTS]) == {}


@pytest.mark.e2e
def test_the_run_that_could_not_start_streams(hardware, failures, tmp_path, monkeypatch):
    """Disaggregated, DP1, streaming alone: no trainer offload, and no directory given. On a real disk."""
    monkeypatch.setenv("SCRATCH", str(tmp_path))
    home = tmp_path / f"miles_train_offload_{os.getuid()}"

    def run(rank: int) -> None:
        args = parse_flags(["--stream-optimizer-state-to-disk", "--use-distributed-optimizer"])
        stores = []
        trainer = Trainer(
            MODEL,
            rank=rank,
            construction=lambda: streaming_construction(args),
            after_construction=lambda optimizer: stores.extend(
                setup_optimizer_state_streaming(args, optimizer)
            ),
        )
        (store,) = stores
        try:
            for _ in range(MODEL.steps):
                trainer.train_step()
            store.streamer.engine.drain()
            assert [record.step for record in store.records] == list(range(1, MODEL.steps + 1))
            assert all(record.written_bytes > 0 for record in store.records)
            files = [path for path in home.rglob("*.bin") if path.is_file()]
            assert sum(path.stat().st_size for path in files) >= store.records[0].written_bytes
            assert [path for path in tmp_path.iterdir() if path != home] == []
        finally:
            store.close()
            trainer.close()

    run_ranks(run, 1, hardware=hardware)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert failures([STREAMING_ALONE]) == {}


# ---- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.e2e
def test_refused_combinations_leave_no_file_and_no_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("SCRATCH", str(tmp_path / "scratch"))
    refused = [each for each in draw(1, 400) if oracle.violated(each) and each[STREAM]]
    assert len(refused) > 150

    def refuse_each(rank: int) -> None:
        trainer = Trainer(MODEL, rank=rank)
        (part,) = trainer.optimizer.chained_optimizers
        before = dict(vars(part))
        for combination in refused:
            below = dict(combination)
            if combination[DISK_DIR] is not None:
                below[DISK_DIR] = combination[DISK_DIR].replace("/scratch", str(tmp_path))
            with pytest.raises(StreamConfigError), streaming_construction(parse_flags(command_line(below))):
                pass
            with pytest.raises(StreamConfigError):
                setup_optimizer_state_streaming(parse_flags(command_line(below)), trainer.optimizer)
        assert vars(part) == before
        trainer.close()

    run_ranks(refuse_each, 1)
    assert list(tmp_path.iterdir()) == []


# ---- a run that is not what its flags say is found ---------------------------------------------------------


@pytest.mark.e2e
def test_a_trainer_that_forgets_the_set_up_is_found(monkeypatch):
    monkeypatch.setattr(megatron_execution, "setup_optimizer_state_streaming", lambda *_, **__: [])
    (wrong,) = execute_each([STREAMING_ALONE])
    assert "optimizers that stream: 0, not 1" in wrong


@pytest.mark.e2e
def test_streaming_that_was_not_asked_for_is_found(monkeypatch, tmp_path):
    def stream_anyway(args, optimizer, **settings):
        args.stream_optimizer_state_to_disk = args.use_distributed_optimizer = True
        args.offload_train_disk_dir = str(tmp_path)
        return setup_optimizer_state_streaming(args, optimizer, staged=True)

    monkeypatch.setattr(megatron_execution, "setup_optimizer_state_streaming", stream_anyway)
    (wrong,) = execute_each([DEFAULTS])
    assert "attributes of the optimizer" in wrong


@pytest.mark.e2e
def test_one_bit_that_differs_is_found(monkeypatch):
    def with_one_bit_flipped(trainer, stores):
        state = streamed_state(trainer, stores)
        *_, values = state.values()
        values["exp_avg"].view(torch.int32)[-1] ^= 1
        return state

    monkeypatch.setattr(megatron_execution, "streamed_state", with_one_bit_flipped)
    (wrong,) = execute_each([STREAMING_ALONE])
    assert "exp_avg of" in wrong
    assert "differs from resident" in wrong


# ---- the whole of it ---------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def allowed() -> list:
    space = ValidSpace()
    return executions(space, covering_array(space, 2), covering_array(space, 3))


@pytest.mark.nightly
@pytest.mark.parametrize("matrix_part", range(NIGHTLY_PARTS))
def test_every_allowed_setting_runs(failures, matrix_part, allowed):
    chosen = part_of(allowed, matrix_part, NIGHTLY_PARTS)
    assert len(chosen) > 10
    assert failures(chosen) == {}
