"""Worlds and models that cannot run are refused before anything starts."""

from __future__ import annotations

import subprocess
import sys

import pytest

from optstream.harness.errors import ConfigurationError
from optstream.harness.training_config import TrainingConfig

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"ranks": 2},
        {"ranks": 8, "tp": 2, "pp": 2, "layers": 4},
        {"ranks": 2, "ep": 2, "experts": 4},
        {"fp16": True, "bf16": False},
        {"fp16": False, "bf16": False},
        {"overlap_grad_reduce": True, "overlap_param_gather": True},
        {"ranks": 2, "pp": 2, "virtual_stages": 2, "layers": 4, "microbatches": 4},
        {"ranks": 4, "optimizer_instances": 2},
    ],
)
def test_accepted(arguments):
    config = TrainingConfig(**arguments)
    assert config.dp * config.tp * config.pp == config.ranks


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ranks": 3, "tp": 2}, r"3 ranks cannot be divided: --tp 2 x --pp 1 x --ep 1 takes groups of 2"),
        ({"ranks": 1, "pp": 2}, r"1 ranks cannot be divided.*multiple of 2"),
        ({"ranks": 6, "ep": 4, "experts": 4}, r"6 ranks cannot be divided"),
        ({"ranks": 3, "tp": 3}, r"heads 4 cannot be divided by --tp 3"),
        ({"hidden": 66}, r"hidden 66 cannot be divided by --heads 4"),
        ({"ranks": 3, "pp": 3}, r"layers 2 cannot be divided by --pp 3"),
        ({"ranks": 3, "tp": 3, "heads": 3, "hidden": 66}, r"vocabulary 256 cannot be divided by --tp 3"),
        ({"hidden": 12}, r"a head of 3 cannot run.*must be even"),
        ({"ranks": 2, "ep": 2}, r"--ep 2 has nothing to divide: the model is dense"),
        ({"ranks": 2, "ep": 2, "experts": 3}, r"3 experts cannot be divided by --ep 2"),
        ({"ranks": 2, "tp": 2, "experts": 2}, r"experts cannot be combined with --tp"),
        ({"steps": 0}, r"--steps 0 cannot run: it must be at least 1"),
        ({"experts": -1}, r"--experts -1 cannot run: it must be at least 0"),
        ({"seed": -1}, r"--seed -1 cannot run: it must be at least 0"),
        ({"fp16": True}, r"bf16 and fp16 exclude each other"),
        ({"virtual_stages": 2}, r"virtual_stages cannot run without --pp"),
        (
            {"ranks": 2, "pp": 2, "virtual_stages": 2},
            r"2 layers cannot be divided: --pp 2 x 2 virtual_stages",
        ),
        (
            {"ranks": 2, "pp": 2, "virtual_stages": 2, "layers": 4, "microbatches": 3},
            r"3 microbatches cannot be divided by --pp 2",
        ),
        ({"ranks": 3, "optimizer_instances": 2}, r"2 optimizer_instances cannot run.*the 3 data-parallel"),
        (
            {"ranks": 2, "ep": 2, "experts": 2, "optimizer_instances": 2},
            r"2 optimizer_instances cannot run.*the 1 data-parallel",
        ),
        ({"overlap_param_gather": True}, r"overlap_param_gather cannot run alone"),
    ],
)
def test_refused_in_one_line(arguments, message):
    with pytest.raises(ConfigurationError, match=message) as caught:
        TrainingConfig(**arguments)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_checking_a_configuration_imports_no_torch():
    code = "import sys; import optstream.harness.training_config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
