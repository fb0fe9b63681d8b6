"""`pytest -m unit` collects on a machine without Megatron; there `-m e2e` fails, not passes unnoticed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    wants_unit_only = config.option.markexpr.strip() == "unit"
    if wants_unit_only and importlib.util.find_spec("megatron") is None:
        return True
    return None
