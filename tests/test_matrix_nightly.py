"""The whole argument matrix, in parts that workers and runners share (`-n auto`, `--matrix-shard i/n`)."""

from __future__ import annotations

import pytest

from optstream.harness.brute_force import judge
from optstream.harness.covering import count_coverage, covering_array
from optstream.harness.execution import execute
from optstream.harness.matrix import BRUTE_FORCE_NIGHTLY, executions, part_of, reproduce
from optstream.harness.valid_space import ValidSpace

pytestmark = pytest.mark.nightly

PARTS = 32
in_parts = pytest.mark.parametrize("matrix_part", range(PARTS))


@pytest.fixture(scope="session")
def space() -> ValidSpace:
    return ValidSpace()


@pytest.fixture(scope="session")
def threewise(space) -> list:
    return covering_array(space, 3)


@in_parts
def test_brute_force(matrix_part):
    start, stop = (BRUTE_FORCE_NIGHTLY * edge // PARTS for edge in (matrix_part, matrix_part + 1))
    drawn = judge(start, stop)
    assert [mismatch.describe() for mismatch in drawn.mismatches] == []
    assert drawn.drawn == stop - start


@in_parts
def test_execution(matrix_part, space, threewise):
    chosen = part_of(executions(space, covering_array(space, 2), threewise), matrix_part, PARTS)
    assert {reproduce(each): wrong for each in chosen if (wrong := execute(each))} == {}
    assert len(chosen) > 10


def test_every_allowed_triple_is_covered(space, threewise):
    coverage = count_coverage(threewise, space, 3)
    assert coverage.missing == ()
    assert coverage.covered > 90_000
