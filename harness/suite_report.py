"""The page that `pytest --optstream-report FILE.html` writes: what ran on what, its figures, how to rerun it.

A pytest plugin of its own, registered where that option is given. Tests hand in figures with pytest's
`record_property`; they travel from xdist's workers, and are in the junit file, too.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field

import pytest
from jinja2 import Environment, PackageLoader, StrictUndefined

from optstream.harness import doctor
from optstream.harness.output import write_text

# Of a test's phases, the worst is its outcome.
_RANK = {"passed": 0, "skipped": 1, "failed": 2}


@dataclass
class TestRow:
    """One test. `figures` by name, as text; `command` reruns it alone."""

    __test__ = False  # pytest: this is no test class

    name: str
    command: str
    outcome: str = "passed"
    seconds: float = 0.0
    figures: dict[str, str] = field(default_factory=dict)
    failure: str = ""


class SuiteReport:
    """Collects outcomes while the tests run, and writes the page at the end.

    directory: where the tests keep their files; what it sits on is shown.
    """

    def __init__(self, path: str, arguments: list[str], hardware: str, directory: str) -> None:
        self._path, self._directory = path, directory
        self._configuration = {"command": shlex.join(["pytest", *arguments]), "hardware": hardware}
        self._rerun = ["pytest", *rerun_options(arguments)]
        self._rows: dict[str, TestRow] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        row = self._rows.setdefault(
            report.nodeid, TestRow(report.nodeid, shlex.join([*self._rerun, report.nodeid]))
        )
        row.outcome = max(row.outcome, report.outcome, key=_RANK.__getitem__)
        row.seconds += report.duration
        row.figures |= {name: str(value) for name, value in report.user_properties}
        if report.failed:
            row.failure = str(report.longreprtext)

    def pytest_sessionfinish(self) -> None:
        write_text(self._path, self.render())

    def render(self) -> str:
        environment = Environment(
            loader=PackageLoader("optstream.harness"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        rows = sorted(self._rows.values(), key=lambda row: -_RANK[row.outcome])
        counts = {outcome: sum(row.outcome == outcome for row in rows) for outcome in _RANK}
        return environment.get_template("suite.html").render(
            rows=rows,
            counts=counts,
            # A run of nothing proves nothing.
            good=bool(counts["passed"]) and not counts["failed"],
            figures=list(dict.fromkeys(name for row in rows for name in row.figures)),
            configuration=self._configuration,
            findings=list(doctor.examine((self._directory,))),
            bar_colours=0,  # no bars of buckets here
        )


def rerun_options(arguments: list[str]) -> list[str]:
    """Of a command line, the words that decide what a test runs on."""
    kept = []
    words = iter(arguments)
    for word in words:
        name, _, value = word.partition("=")
        if name in ("--hardware", "--ranks-max", "--basetemp"):
            kept.append(f"{name}={value or next(words)}")
    return kept


def is_worker(config: pytest.Config) -> bool:
    """Whether this process is one of xdist's: the page is its controller's business."""
    return hasattr(config, "workerinput")
