"""What `optstream train` shows on its report.html."""

from __future__ import annotations

import platform
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from optstream.harness.compare import Comparison, RunResult
from optstream.harness.report import RunCurves, SummaryRow, TrainReport, typical_step, write_report
from optstream.harness.stream_settings import StreamSettings
from optstream.harness.summary import Verdict, figures, title
from optstream.harness.training_config import TrainingConfig


def write_train_report(
    path: Path,
    config: TrainingConfig,
    settings: StreamSettings,
    comparisons: list[Comparison],
    outcome: Verdict,
) -> None:
    """Write the page for rank 0. Raises ConfigurationError where the file cannot be written."""
    first = comparisons[0]
    write_report(
        path,
        TrainReport(
            title=title(config, comparisons),
            verdict=outcome.text,
            equal=outcome.passed,
            resident=_curves(first.resident),
            compared=_curves(first.streamed),
            bound_bytes=first.streamed.state_bytes_bound,
            summary=[SummaryRow(*row) for row in figures(comparisons)],
            configuration={**asdict(config), **settings.flags, "backend": settings.backend},
            versions=versions(),
            step=typical_step(first.streamed.records),
        ),
    )


def versions() -> dict[str, str]:
    """Of what decides the numbers, by name; "absent" for what is not installed."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in ("optstream", "torch", "megatron-core", "transformer-engine"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    return found


def _curves(run: RunResult) -> RunCurves:
    return RunCurves(run.loss, run.state_bytes_timeline, run.state_bytes_peak)
