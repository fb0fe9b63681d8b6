"""Charts as geometry: values in, positions in an SVG of `WIDTH` units out. The template only draws them.

Pure and without a plotting library: a report has few kinds of charts, is read in light and in dark, and gets
its colours from the page's style sheet.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

WIDTH = 960.0
LEFT, RIGHT, TOP, BOTTOM = 76.0, 20.0, 14.0, 46.0
PLOT_HEIGHT = 240.0

LANE_HEIGHT, LANE_GAP, ROW_GAP = 20.0, 3.0, 12.0
# A bar has at least this width, so that it can be seen, and its label only where it fits.
BAR_WIDTH_MIN, LABEL_WIDTH_PER_CHARACTER = 1.5, 9.0
# Bars have one of this many colours, in turn: --c0 and so on in the style sheet.
BAR_COLOURS = 8

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """`style` is the class of its line in the style sheet. stepped: each value holds until the next point.
    filled: down to the axis."""

    name: str
    style: str
    points: Sequence[Point]
    stepped: bool = False
    filled: bool = False


@dataclass(frozen=True)
class Interval:
    """A bar of a timeline, from `start` to `end` in seconds, in one of BAR_COLOURS colours."""

    start: float
    end: float
    label: str
    colour: int


@dataclass(frozen=True)
class Tick:
    at: float
    label: str


@dataclass(frozen=True)
class Line:
    name: str
    style: str
    path: str
    area: str | None


@dataclass(frozen=True)
class LineChart:
    """Lines over a pair of axes, and what to draw them with. All positions are in SVG units."""

    width: float
    height: float
    left: float
    right: float
    top: float
    bottom: float
    x_title: str
    y_title: str
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    lines: list[Line]


@dataclass(frozen=True)
class Bar:
    x: float
    y: float
    width: float
    height: float
    label: str
    tooltip: str
    colour: int


@dataclass(frozen=True)
class Row:
    name: str
    y: float
    height: float
    bars: list[Bar]


@dataclass(frozen=True)
class Timeline:
    """Rows of bars over a time axis. `marker` is the position of a vertical line, if there is one."""

    width: float
    height: float
    left: float
    right: float
    top: float
    bottom: float
    x_title: str
    x_ticks: list[Tick]
    rows: list[Row]
    marker: Tick | None


def line_chart(
    series: Sequence[Series],
    *,
    x_title: str,
    y_title: str,
    unit: tuple[float, str] = (1.0, ""),
    whole_x: bool = False,
) -> LineChart:
    """A chart of `series`. unit: (how many, name) of the y axis. whole_x: x has ticks at whole numbers only.

    Values that are not finite leave gaps. The y axis starts at zero where anything is filled; else it shows
    the range of the values.
    """
    points = [point for each in series for point in each.points if math.isfinite(point[1])]
    xs, ys = [x for x, _ in points] or [0.0], [y for _, y in points] or [0.0]
    from_zero = any(each.filled for each in series)
    x_axis = _Axis(min(xs), max(xs), LEFT, WIDTH - RIGHT)
    room = ((max(ys) - min(ys)) or abs(max(ys)) or 1.0) * 0.06
    y_axis = _Axis(0.0 if from_zero else min(ys) - room, max(ys) + room, TOP + PLOT_HEIGHT, TOP)
    factor, unit_name = unit
    return LineChart(
        width=WIDTH,
        height=TOP + PLOT_HEIGHT + BOTTOM,
        left=LEFT,
        right=WIDTH - RIGHT,
        top=TOP,
        bottom=TOP + PLOT_HEIGHT,
        x_title=x_title,
        y_title=f"{y_title}, {unit_name}" if unit_name else y_title,
        x_ticks=x_axis.ticks(8, step_min=1.0 if whole_x else 0.0),
        y_ticks=y_axis.ticks(7, factor),
        lines=[_line(each, x_axis, y_axis) for each in series],
    )


def timeline(
    rows: Sequence[tuple[str, Sequence[Interval]]],
    *,
    origin: float,
    marker: tuple[float, str] | None = None,
) -> Timeline:
    """Rows of intervals over the time from `origin` to the last end. Needs at least one interval.

    Bars that start before `origin` are cut there; intervals of a row that overlap get lanes of their own.
    marker: (seconds, name) of a vertical line.
    """
    last = max(interval.end for _, intervals in rows for interval in intervals)
    factor, unit_name = (1e-3, "ms") if last - origin < 1.0 else (1.0, "s")
    axis = _Axis(0.0, last - origin, LEFT, WIDTH - RIGHT)
    drawn, y = [], TOP + ROW_GAP
    for name, intervals in rows:
        lanes = _lanes(intervals)
        bars = [
            _bar(interval, name, origin, axis, y + lane * (LANE_HEIGHT + LANE_GAP), factor, unit_name)
            for lane, members in enumerate(lanes)
            for interval in members
        ]
        height = len(lanes) * (LANE_HEIGHT + LANE_GAP) - LANE_GAP
        drawn.append(Row(name, y, height, bars))
        y += height + ROW_GAP
    return Timeline(
        width=WIDTH,
        height=y + BOTTOM,
        left=LEFT,
        right=WIDTH - RIGHT,
        top=TOP,
        bottom=y,
        x_title=f"time, {unit_name}",
        x_ticks=axis.ticks(8, factor),
        rows=drawn,
        marker=None if marker is None else Tick(axis(marker[0] - origin), marker[1]),
    )


def byte_unit(largest: float) -> tuple[float, str]:
    """(bytes, name) of the decimal unit in which `largest` reads best."""
    for factor, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if largest >= factor:
            return factor, name
    return 1.0, "bytes"


def format_bytes(value: float) -> str:
    """For people: three digits and a decimal unit."""
    factor, name = byte_unit(value)
    return f"{value:.0f} {name}" if factor == 1.0 else f"{value / factor:.3g} {name}"


class _Axis:
    """Maps values between `low` and `high` to positions between `start` and `end`."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self.low = low
        self.high = high if high > low else low + 1.0
        self._start = start
        self._per_value = (end - start) / (self.high - self.low)

    def __call__(self, value: float) -> float:
        return round(self._start + (value - self.low) * self._per_value, 2)

    def ticks(self, most: int, factor: float = 1.0, step_min: float = 0.0) -> list[Tick]:
        """At most `most` + 1 round values at least `step_min` apart, labelled in units of `factor`."""
        step = _round_step(max(step_min, (self.high - self.low) / factor / most))
        first = math.ceil(self.low / factor / step - 1e-9)
        last = math.floor(self.high / factor / step + 1e-9)
        return [Tick(self(i * step * factor), f"{i * step:.6g}") for i in range(first, last + 1)]


def _round_step(least: float) -> float:
    """The smallest of 1, 2, 5, 10, 20, ... (times any power of ten) that is not less than `least`."""
    magnitude = 10.0 ** math.floor(math.log10(least))
    return next(
        multiple * magnitude for multiple in (1, 2, 5, 10) if multiple * magnitude >= least * (1 - 1e-9)
    )


def _line(series: Series, x_axis: _Axis, y_axis: _Axis) -> Line:
    runs = [
        [(x_axis(x), y_axis(y)) for x, y in run]
        for run in _finite_runs(_thinned(series.points, x_axis, int(WIDTH)))
    ]
    bottom = y_axis(y_axis.low)
    return Line(
        series.name,
        series.style,
        path=" ".join(_path(run, series.stepped) for run in runs),
        area=" ".join(f"{_path(run, series.stepped)}V{bottom:g}H{run[0][0]:g}Z" for run in runs)
        if series.filled
        else None,
    )


def _path(run: Sequence[Point], stepped: bool) -> str:
    (x, y), *rest = run
    # A line to the point itself makes a dot of a run of one.
    start = f"M{x:g} {y:g}h0"
    return start + "".join(f"H{x:g}V{y:g}" if stepped else f"L{x:g} {y:g}" for x, y in rest)


def _finite_runs(points: Iterable[Point]) -> list[list[Point]]:
    runs: list[list[Point]] = [[]]
    for point in points:
        if math.isfinite(point[1]):
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _thinned(points: Sequence[Point], x_axis: _Axis, columns: int) -> list[Point]:
    """At most four points a column: the first, lowest, highest and last, so that no peak is lost."""
    if len(points) <= 4 * columns:
        return list(points)
    by_column: dict[int, list[Point]] = {}
    for point in points:
        by_column.setdefault(int(x_axis(point[0])), []).append(point)
    kept: list[Point] = []
    for column in by_column.values():
        lowest, highest = min(column, key=lambda point: point[1]), max(column, key=lambda point: point[1])
        kept += sorted({column[0], lowest, highest, column[-1]})
    return kept


def _lanes(intervals: Sequence[Interval]) -> list[list[Interval]]:
    """Each interval in the first lane that is free when it starts."""
    lanes: list[list[Interval]] = []
    for interval in sorted(intervals, key=lambda each: (each.start, each.end)):
        free = next((lane for lane in lanes if lane[-1].end <= interval.start), None)
        if free is None:
            lanes.append(free := [])
        free.append(interval)
    return lanes


def _bar(
    interval: Interval, row: str, origin: float, axis: _Axis, y: float, factor: float, unit_name: str
) -> Bar:
    x, end = max(LEFT, axis(interval.start - origin)), axis(interval.end - origin)
    width = max(BAR_WIDTH_MIN, round(end - x, 2))
    start_text, length_text = (
        f"{value / factor:.3f} {unit_name}"
        for value in (interval.start - origin, interval.end - interval.start)
    )
    return Bar(
        x,
        y,
        width,
        LANE_HEIGHT,
        label=interval.label if width >= LABEL_WIDTH_PER_CHARACTER * len(interval.label) else "",
        tooltip=f"{row} {interval.label}: {length_text} from {start_text}",
        colour=interval.colour % BAR_COLOURS,
    )
