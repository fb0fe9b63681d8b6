"""report.html: what a run did, on one page that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from optstream.core.records import StepRecord
from optstream.core.schedule import Stage
from optstream.harness.charts import (
    BAR_COLOURS,
    Interval,
    LineChart,
    Point,
    Series,
    Timeline,
    byte_unit,
    format_bytes,
    line_chart,
    timeline,
)
from optstream.harness.output import write_text


@dataclass(frozen=True)
class RunCurves:
    """One run. loss: of each step. memory: (seconds, device bytes of optimizer state from then on), as
    `Ledger.timeline` gives them."""

    loss: Sequence[float]
    memory: Sequence[tuple[float, int]]
    state_bytes_peak: int


class PhaseBar(NamedTuple):
    """One phase of a loop of rollout and training; phases follow each other without gaps."""

    name: str
    seconds: float
    device_bytes_peak: int


class SummaryRow(NamedTuple):
    """One figure of both runs, as text; empty where a run has none."""

    label: str
    resident: str
    compared: str


@dataclass(frozen=True)
class TrainReport:
    """What the page shows. All texts are escaped.

    equal: whether the runs are equal as far as was asked; verdict: that in words.
    compared: the run beside the resident one, and compared_name: what it is.
    bound_bytes: what its state may take on the device; None where it does not stream and nothing bounds it.
    configuration, versions: shown as tables, in their order.
    step: the streamed step whose buckets are drawn (see `typical_step`); None, or without spans, for none.
    phases: of a loop of rollout and training, in their order.
    """

    title: str
    verdict: str
    equal: bool
    resident: RunCurves
    compared: RunCurves
    bound_bytes: int | None
    summary: Sequence[SummaryRow]
    compared_name: str = "streamed"
    configuration: Mapping[str, object] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    step: StepRecord | None = None
    phases: Sequence[PhaseBar] = ()


def write_report(path: str | Path, report: TrainReport) -> None:
    """Write `report` as one self-contained HTML file. Raises ConfigurationError where it cannot be."""
    environment = Environment(
        loader=PackageLoader("optstream.harness"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["bytes"] = format_bytes
    page = environment.get_template("report.html").render(
        report=report,
        bar_colours=BAR_COLOURS,
        loss=_loss_chart(report),
        memory=_memory_chart(report),
        buckets=_step_chart(report.step) if report.step else None,
        phases=_phase_charts(report.phases) if report.phases else None,
    )
    write_text(str(path), page)


def typical_step(records: Sequence[StepRecord]) -> StepRecord | None:
    """The step of median duration among those whose spans were kept; the first step, which reads no moments,
    only if there is no other."""
    drawable = [record for record in records if record.spans]
    by_duration = sorted(
        [record for record in drawable if record.step > 1] or drawable, key=lambda record: record.total_s
    )
    return by_duration[len(by_duration) // 2] if by_duration else None


def _loss_chart(report: TrainReport) -> LineChart:
    def points(run: RunCurves) -> list[Point]:
        return [(float(step), loss) for step, loss in enumerate(run.loss, 1)]

    return line_chart(
        [
            Series("resident", "resident wide", points(report.resident)),
            Series(report.compared_name, "compared", points(report.compared)),
        ],
        x_title="step",
        y_title="loss",
        whole_x=True,
    )


def _memory_chart(report: TrainReport) -> LineChart:
    runs = [_from_zero(report.resident.memory), _from_zero(report.compared.memory)]
    end = max((seconds for run in runs for seconds, _ in run), default=0.0)
    largest = max((size for run in runs for _, size in run), default=0)
    series = [
        Series("resident", "resident", runs[0], stepped=True, filled=True),
        Series(report.compared_name, "compared", runs[1], stepped=True, filled=True),
    ]
    if report.bound_bytes is not None:
        bound = [(0.0, report.bound_bytes), (end, report.bound_bytes)]
        series.append(Series("bound of the streamed run", "bound", bound))
    return line_chart(
        series,
        x_title="seconds since the run began",
        y_title="state on the device",
        unit=byte_unit(max(largest, report.bound_bytes or 0)),
    )


def _from_zero(points: Sequence[tuple[float, int]]) -> list[Point]:
    return [(seconds - points[0][0], size) for seconds, size in points]


@dataclass(frozen=True)
class _StepChart:
    """read_ahead: buckets that had been read before the step began, and so are not drawn as reads."""

    timeline: Timeline
    read_ahead: int


def _step_chart(step: StepRecord) -> _StepChart | None:
    updates = [span.end_s for span in step.spans if span.stage is Stage.UPDATE]
    if not updates:
        return None
    # Read-ahead starts as early as backward does: over all of that time, the step itself would be a sliver.
    # What `step` does after the last update makes this start too early, never too late.
    began_s = max(updates) - step.total_s
    drawn = [span for span in step.spans if span.end_s > began_s]
    rows = [
        (
            stage.value,
            [
                Interval(span.start_s, span.end_s, str(span.bucket), span.bucket)
                for span in drawn
                if span.stage is stage
            ],
        )
        for stage in Stage
    ]
    chart = timeline(
        [(name, intervals) for name, intervals in rows if intervals],
        origin=max(began_s, min(span.start_s for span in drawn)),
        marker=(max(updates), "last update"),
    )
    return _StepChart(chart, read_ahead=len(step.spans) - len(drawn))


@dataclass(frozen=True)
class _PhaseCharts:
    timeline: Timeline
    memory: LineChart


def _phase_charts(phases: Sequence[PhaseBar]) -> _PhaseCharts:
    names = list(dict.fromkeys(phase.name for phase in phases))
    rows: dict[str, list[Interval]] = {name: [] for name in names}
    memory: list[Point] = []
    now = 0.0
    for phase in phases:
        nth = len(rows[phase.name]) + 1
        rows[phase.name].append(Interval(now, now + phase.seconds, str(nth), names.index(phase.name)))
        memory.append((now, phase.device_bytes_peak))
        now += phase.seconds
    memory.append((now, phases[-1].device_bytes_peak))
    return _PhaseCharts(
        timeline(list(rows.items()), origin=0.0),
        line_chart(
            [Series("peak of each phase", "compared", memory, stepped=True, filled=True)],
            x_title="seconds since the loop began",
            y_title="device memory",
            unit=byte_unit(max(phase.device_bytes_peak for phase in phases)),
        ),
    )
