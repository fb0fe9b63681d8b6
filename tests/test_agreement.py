"""Ranks fail together, over gloo: what each of two processes raises when none, one or both have failed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from optstream.backends.errors import TransferError
from optstream.core.agreement import raise_together

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")
ROUNDS = ["none", "rank 0", "rank 1", "both", "none"]

RANK = """
import json, sys
import torch
import torch.distributed as dist
from optstream.backends.errors import TransferError
from optstream.core.agreement import raise_together

rank, store_path, rounds = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
dist.init_process_group("gloo", store=dist.FileStore(store_path, 2), rank=rank, world_size=2)
outcomes = []
for group in (None, dist.new_group([0, 1])):
    for failing in rounds:
        failed = failing in (f"rank {rank}", "both")
        own = TransferError(f"disk {rank} is gone", operation="read") if failed else None
        try:
            raise_together(own, group, torch.device("cpu"))
            outcomes.append(None)
        except Exception as error:
            outcomes.append([type(error).__name__, str(error), error is own, getattr(error, "rank", None)])
print(json.dumps(outcomes))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> list[list]:
    """Of each rank, what it raised in every round: first over the world, then over a group."""
    folder = tmp_path_factory.mktemp("agreement")
    script = folder / "rank.py"
    script.write_text(RANK)
    command = [sys.executable, "-W", "ignore", str(script)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(folder / "store"), json.dumps(ROUNDS)],
            env={"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    reports = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    return [json.loads(report) for report in reports]


@pytest.mark.parametrize("group", [0, 1], ids=["world", "group"])
def test_every_rank_raises_what_the_first_failing_rank_did(outcomes, group):
    rounds = slice(group * len(ROUNDS), (group + 1) * len(ROUNDS))
    own = [["TransferError", f"disk {rank} is gone", True, None] for rank in range(2)]
    first, second = (rank[rounds] for rank in outcomes)
    assert first[0] is second[0] is None
    assert first[1] == own[0]
    assert second[2] == own[1]
    assert (first[3], second[3]) == (own[0], own[1]), "a rank that failed itself raises its own error"
    assert first[4] is second[4] is None, "an agreed failure leaves nothing behind in the group"
    for told, failing in ((second[1], 0), (first[2], 1)):
        kind, message, is_own, rank = told
        assert (kind, is_own, rank) == ("RemoteRankError", False, failing)
        assert message.startswith(f"rank {failing} failed: disk {failing} is gone. ")


def test_alone_a_failure_is_raised_as_it_is():
    failure = TransferError("disk is gone", operation="read")
    with pytest.raises(TransferError) as raised:
        raise_together(failure, None, CPU)
    assert raised.value is failure
    raise_together(None, None, CPU)
