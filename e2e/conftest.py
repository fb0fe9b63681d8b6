"""`pytest -m unit` needs no Megatron and does not spend seconds importing it; `-m e2e` without it fails."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if config.option.markexpr.strip() == "unit" else None
