"""`pytest -m unit` needs no Megatron and does not spend seconds importing it; `-m e2e` without it fails."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

# megatron-core 0.17 is the first whose wheel has `megatron.training`. Before that, the suite trains in the
# harness's loop alone.
FIRST_WITH_LOOP = (0, 17)
OF_MEGATRONS_LOOP = "test_megatron_training.py"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if config.option.markexpr.strip() == "unit":
        return True
    return True if collection_path.name == OF_MEGATRONS_LOOP and not ships_loop() else None


def pytest_report_header(config: pytest.Config) -> str | None:
    if config.option.markexpr.strip() == "unit":
        return None
    found = version("megatron-core")
    if ships_loop():
        return f"megatron-core {found}: Megatron's own training loop, and the harness's"
    return f"megatron-core {found} has no megatron.training: the harness's loop, without {OF_MEGATRONS_LOOP}"


def ships_loop() -> bool:
    return tuple(int(part) for part in version("megatron-core").split(".")[:2]) >= FIRST_WITH_LOOP
