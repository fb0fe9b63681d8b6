"""A failure on one rank of several: everybody's, at once, with its reason; and nobody's files stay."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from optstream.harness.errors import RankError
from optstream.harness.launch import run_ranks

pytestmark = pytest.mark.e2e

# Far longer than any step takes here: who waits for a rank that has gone fails by this, with another error.
COLLECTIVE_TIMEOUT_S = 120.0


@pytest.fixture
def ranks(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import faults_on_ranks

    return faults_on_ranks


@pytest.mark.parametrize(
    ("where", "kind", "message"),
    [
        ("storage", "TransferError", "Input/output error (injected)"),
        ("resident part", "RuntimeError", "the resident part failed"),
    ],
)
def test_a_failure_of_rank_1_ends_both(ranks, tmp_path, where, kind, message):
    args = argparse.Namespace(
        stream_optimizer_state_to_disk=True,
        use_distributed_optimizer=True,
        offload_train_disk_dir=str(tmp_path),
        stream_optimizer_state_bucket_numel=4096,
    )
    here, there = run_ranks(ranks.failing_trainer, 2, args, where, collective_timeout_s=COLLECTIVE_TIMEOUT_S)
    assert there[0] == kind
    assert message in there[1]
    assert here[0] == "RemoteRankError"
    assert here[1].startswith("rank 1 failed")
    assert there[1] in here[1]
    print(f"the failing step ended after {here[2]:.3f} s on rank 0 and {there[2]:.3f} s on rank 1")
    assert max(here[2], there[2]) < COLLECTIVE_TIMEOUT_S
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_is_ended_removes_its_files(ranks, tmp_path):
    with pytest.raises(RankError, match="rank 1 has had enough"):
        run_ranks(ranks.one_fails_one_lingers, 2, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_close_nothing_leave_nothing(ranks, tmp_path):
    run_ranks(ranks.leave_open, 2, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_the_agreement_is_one_small_all_reduce(ranks):
    """Measured for the record; how fast a shared machine is says nothing about the code."""
    costs = run_ranks(ranks.agreement_cost, 2, 200)
    print(f"an agreement of 2 ranks takes {1e6 * max(costs):.0f} us")
    assert all(cost > 0 for cost in costs)
