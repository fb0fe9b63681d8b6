"""The pytest plugin that optstream ships: markers, levels and hypothesis profiles.

Levels are markers: `unit` (CPU, no Megatron), `e2e` (the full Megatron path), `nightly` (the whole argument
matrix and long random runs). With the ini option `optstream_require_level = true` a test that carries none
of them is an error, so that no test can fall out of every run unnoticed.
"""

from __future__ import annotations

import pytest

from optstream.harness.matrix_shard import parse_shard

LEVELS = {
    "unit": "fast, on a CPU, without Megatron",
    "e2e": "the full Megatron path, simulated or on GPUs",
    "nightly": "the whole argument matrix and long random runs",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(
        "optstream_require_level",
        type="bool",
        default=False,
        help="refuse tests that carry none of the markers " + ", ".join(LEVELS),
    )
    parser.addoption(
        "--matrix-shard",
        type=parse_shard,
        metavar="I/N",
        help="of the argument matrix, run only part I of N, so that N runners share it",
    )


def pytest_configure(config: pytest.Config) -> None:
    for name, meaning in LEVELS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # tryfirst: `-m` deselects in this same hook, and would drop the unmarked tests before they are seen.
    if shard := config.getoption("--matrix-shard"):
        kept, dropped = shard.select(items)
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept
    if not config.getini("optstream_require_level"):
        return
    unmarked = [item.nodeid for item in items if not has_level(item)]
    if unmarked:
        listing = "\n  ".join(unmarked)
        raise pytest.UsageError(f"tests without a level marker ({', '.join(LEVELS)}):\n  {listing}")


def has_level(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(level) for level in LEVELS)
