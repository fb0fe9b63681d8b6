"""The pytest plugin that optstream ships: levels, hardware, shards of the argument matrix, the report.

Levels are markers: `unit` (CPU, no Megatron), `e2e` (the full Megatron path), `nightly` (the whole argument
matrix and long random runs). With the ini option `optstream_require_level = true` a test that carries none
of them is an error, so that no test can fall out of every run unnoticed.

`--hardware` says what e2e tests run on; they ask for it by the fixture `hardware`. A test of several ranks
says so by the marker `ranks(n)`, and runs where `--ranks-max` is at least that. `--optstream-report` writes a
page about the run (`suite_report`).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from optstream.harness.errors import OptstreamError
from optstream.harness.hardware import CHOICES, RANKS_MAX, Hardware, choose
from optstream.harness.matrix_shard import parse_shard

LEVELS = {
    "unit": "fast, on a CPU, without Megatron",
    "e2e": "the full Megatron path, simulated or on GPUs",
    "nightly": "the whole argument matrix and long random runs",
}
OTHER_MARKERS = {
    "ranks(n)": "takes n ranks: on GPUs, one GPU each (1 where there is no marker)",
    "gpu": "means nothing on simulated hardware, and is left out there",
}
_HARDWARE = pytest.StashKey[Hardware]()
_UNMARKED = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(
        "optstream_require_level",
        type="bool",
        default=False,
        help="refuse tests that carry none of the markers " + ", ".join(LEVELS),
    )
    group = parser.getgroup("optstream")
    group.addoption(
        "--matrix-shard",
        type=parse_shard,
        metavar="I/N",
        help="of the argument matrix, run only part I of N, so that N runners share it",
    )
    group.addoption(
        "--hardware",
        choices=CHOICES,
        help="what e2e tests run on: auto (the default) takes GPUs where there are enough; gpu without them "
        "is an error",
    )
    group.addoption(
        "--optstream-report",
        metavar="FILE.html",
        help="write a page about the run: machine, versions, figures, and how to rerun each test alone",
    )
    group.addoption(
        "--ranks-max",
        type=_positive,
        default=RANKS_MAX,
        metavar="N",
        help=f"leave out tests of more than N ranks ({RANKS_MAX}); with GPUs, how many there must be",
    )


def pytest_configure(config: pytest.Config) -> None:
    for name, meaning in (LEVELS | OTHER_MARKERS).items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    if config.getoption("--hardware"):
        hardware_of(config)  # now, so that a runner without its GPUs fails before anything runs
    if path := config.getoption("--optstream-report"):
        _register_report(config, path)


def _register_report(config: pytest.Config, path: str) -> None:
    try:
        from optstream.harness.suite_report import SuiteReport, is_worker
    except ImportError as error:
        raise pytest.UsageError(
            f"--optstream-report cannot be written: {error}. Run: pip install 'optstream[report]'"
        ) from error
    if is_worker(config):
        return
    if not (folder := Path(path).absolute().parent).is_dir():
        raise pytest.UsageError(f"--optstream-report {path} cannot be written: {folder} is no folder")
    directory = str(Path(config.option.basetemp or tempfile.gettempdir()).absolute())
    arguments = [str(word) for word in config.invocation_params.args]
    report = SuiteReport(path, arguments, str(hardware_of(config)), directory)
    config.pluginmanager.register(report, "optstream-report")


def hardware_of(config: pytest.Config) -> Hardware:
    """Decided when first asked for: it imports torch, which runs that use no hardware need not pay."""
    if _HARDWARE not in config.stash:
        try:
            wanted = config.getoption("--hardware") or "auto"
            config.stash[_HARDWARE] = choose(wanted, config.getoption("--ranks-max"))
        except OptstreamError as error:
            raise pytest.UsageError(str(error)) from error
    return config.stash[_HARDWARE]


def pytest_report_header(config: pytest.Config) -> str | None:
    runs_e2e = config.getini("optstream_require_level") and config.option.markexpr.strip() != "unit"
    if config.getoption("--hardware") or runs_e2e:
        return f"optstream hardware: {hardware_of(config)}"
    return None


@pytest.fixture(scope="session")
def hardware(pytestconfig: pytest.Config) -> str:
    """`simulated` or `gpu`, as `run_ranks` takes it."""
    return hardware_of(pytestconfig).kind


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # tryfirst: `-m` deselects in this same hook, and would drop the unmarked tests before they are seen.
    if shard := config.getoption("--matrix-shard"):
        _keep(config, items, *shard.select(items))
    ranks_max = config.getoption("--ranks-max")
    _keep(config, items, *_split(items, lambda item: ranks_of(item) <= ranks_max))
    for_gpus = [item for item in items if item.get_closest_marker("gpu")]
    if for_gpus and hardware_of(config).kind == "simulated":
        _keep(config, items, *_split(items, lambda item: item not in for_gpus))
    if config.getini("optstream_require_level"):
        for item in items:
            if not has_level(item):
                item.stash[_UNMARKED] = True
                for level in LEVELS:
                    item.add_marker(level)  # so that every run has it, and fails


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    # Here and not while collecting, where a worker of xdist could not say it in words.
    if _UNMARKED in item.stash:
        pytest.fail(
            f"it carries none of the markers {', '.join(LEVELS)}: no run would have it", pytrace=False
        )


def _split(items: list, kept: Callable[[pytest.Item], bool]) -> tuple[list, list]:
    return [item for item in items if kept(item)], [item for item in items if not kept(item)]


def _keep(config: pytest.Config, items: list[pytest.Item], kept: list, dropped: list) -> None:
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


def has_level(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(level) for level in LEVELS)


def ranks_of(item: pytest.Item) -> int:
    marker = item.get_closest_marker("ranks")
    return marker.args[0] if marker else 1


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value
