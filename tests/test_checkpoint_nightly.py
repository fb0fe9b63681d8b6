"""Two hundred SIGKILLs of saves."""

from __future__ import annotations

import pytest

from optstream.harness.killed_saves import kill_at_random_moments

pytestmark = pytest.mark.nightly


def test_sigkill_at_random_moments_of_a_save(tmp_path):
    kill_at_random_moments(tmp_path, 200, seed=1)
