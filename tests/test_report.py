"""The report: one page that needs nothing but itself, says the numbers, and survives hostile texts."""

from __future__ import annotations

import dataclasses
import math
import re
from html.parser import HTMLParser

import pytest

from optstream.core.records import Span, StepRecord
from optstream.core.schedule import Stage
from optstream.harness.charts import (
    PLOT_HEIGHT,
    TOP,
    WIDTH,
    Interval,
    Series,
    byte_unit,
    format_bytes,
    line_chart,
    timeline,
)
from optstream.harness.errors import ConfigurationError
from optstream.harness.report import RunCurves, SummaryRow, TrainReport, typical_step, write_report

pytestmark = pytest.mark.unit

# Elements that HTML never closes.
VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """Checks that every element is closed where it should be, and collects what a browser would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.counts: dict[str, int] = {}
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self._seen(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self._seen(tag, attrs)

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style",) and data.strip():
            self.texts.append(data.strip())

    def _seen(self, tag, attrs):
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.references += [value for name, value in attrs if name in ("src", "href", "xlink:href", "data")]


def a_step(buckets: int = 3) -> StepRecord:
    spans = []
    for bucket in range(buckets):
        for order, stage in enumerate(Stage):
            start = 50.0 + 0.01 * bucket + 0.02 * order
            spans.append(Span(stage, bucket, start, start + 0.02))
    return StepRecord(7, spans=spans, total_s=0.1)


def a_report(**changes) -> TrainReport:
    return dataclasses.replace(
        TrainReport(
            title="A small model",
            verdict="equal to the last bit",
            equal=True,
            resident=RunCurves([5.5, 4.25, 4.0], [(10.0, 0), (11.0, 12_000_000)], 12_000_000),
            compared=RunCurves([5.5, 4.25, 4.0], [(20.0, 0), (20.5, 3_000_000), (21.0, 0)], 3_000_000),
            bound_bytes=3_200_000,
            summary=[
                SummaryRow("last loss", "4.000000", "4.000000"),
                SummaryRow("bytes read", "", "987,654"),
            ],
            configuration={"layers": 2, "data": None},
            versions={"torch": "2.0"},
            step=a_step(),
        ),
        **changes,
    )


def page_of(report: TrainReport, tmp_path) -> tuple[str, Page]:
    path = tmp_path / "report.html"
    write_report(path, report)
    text = path.read_text(encoding="utf-8")
    return text, Page(text)


class TestPage:
    def test_it_fetches_nothing(self, tmp_path):
        text, page = page_of(a_report(), tmp_path)
        assert page.references == []
        assert not re.search(r"https?:|@import|url\(|<script|<link|<iframe", text)
        assert "default-src 'none'" in text
        assert text.lstrip().startswith("<!doctype html>")

    def test_it_says_the_numbers(self, tmp_path):
        _, page = page_of(a_report(), tmp_path)
        for text in (
            "12 MB",
            "3 MB",
            "3.2 MB",
            "4 ×",
            "4.000000",
            "987,654",
            "layers",
            "None",
            "torch",
            "2.0",
        ):
            assert text in page.texts, text
        assert "The buckets of step 7" in page.texts

    def test_a_run_that_does_not_stream_is_not_called_streamed(self, tmp_path):
        name = "parked while it does not train"
        text, page = page_of(a_report(compared_name=name, bound_bytes=None, step=None), tmp_path)
        assert "streamed" not in text.lower()
        heading, columns = page.texts.index(f"Resident beside {name}"), ["resident", name]
        assert page.texts[heading + 1 : heading + 3] == columns
        assert [one for one in page.texts if one in columns][2:] == columns * 4, (
            "titles and legends of both charts"
        )

    def test_every_span_is_a_bar_with_its_figures(self, tmp_path):
        text, page = page_of(a_report(step=a_step(buckets=4)), tmp_path)
        assert page.counts["rect"] == 4 * len(Stage)
        assert "write 3: 20.000 ms from 110.000 ms" in text

    def test_texts_are_escaped(self, tmp_path):
        hostile = "<script>alert('&\"')</script>"
        text, page = page_of(
            a_report(
                title=hostile,
                verdict=hostile,
                summary=[SummaryRow(hostile, hostile, hostile)],
                configuration={hostile: hostile},
                versions={hostile: hostile},
            ),
            tmp_path,
        )
        assert "<script" not in text
        assert page.texts.count(hostile) == 2 + 1 + 3 + 4

    def test_a_difference_looks_different(self, tmp_path):
        good, _ = page_of(a_report(), tmp_path)
        bad, _ = page_of(a_report(equal=False, verdict="different: loss of step 2"), tmp_path)
        assert 'class="verdict good"' in good
        assert 'class="verdict bad"' in bad
        assert "different: loss of step 2" in bad

    def test_what_was_read_ahead_is_counted_and_does_not_stretch_the_time_axis(self, tmp_path):
        step = a_step(buckets=4)
        step.spans += [Span(Stage.READ, 8, 30.0, 30.5), Span(Stage.READ, 9, 40.0, 50.01)]
        text, page = page_of(a_report(step=step), tmp_path)
        assert page.counts["rect"] == 4 * len(Stage) + 1
        assert any("were being computed: 1." in text for text in page.texts)
        assert "time, ms" in page.texts
        assert "read 9: 10010.000 ms from" in text

    @pytest.mark.parametrize("step", [None, StepRecord(1)])
    def test_without_spans_there_is_no_timeline(self, tmp_path, step):
        _, page = page_of(a_report(step=step), tmp_path)
        assert "rect" not in page.counts

    def test_a_run_of_one_step_with_a_loss_that_is_not_a_number(self, tmp_path):
        empty = RunCurves([math.nan], [], 0)
        text, page = page_of(a_report(resident=empty, compared=empty, bound_bytes=0), tmp_path)
        assert not re.search(r'="[^"]*(nan|inf)\b', text)
        assert page.counts["path"] > 0

    def test_where_it_cannot_be_written_the_error_says_so(self, tmp_path):
        with pytest.raises(ConfigurationError, match=r"cannot write .*missing.report\.html"):
            write_report(tmp_path / "missing" / "report.html", a_report())


class TestTypicalStep:
    def records(self, *seconds: float) -> list[StepRecord]:
        return [StepRecord(step, total_s=s, spans=a_step().spans) for step, s in enumerate(seconds, 1)]

    def test_it_is_the_median_of_the_later_steps(self):
        assert typical_step(self.records(9.0, 3.0, 1.0, 2.0)).step == 4

    def test_the_first_only_if_there_is_no_other(self):
        assert typical_step(self.records(9.0)).step == 1

    def test_steps_without_spans_are_left_out(self):
        records = self.records(1.0, 1.0, 2.0)
        records[1].spans = []
        assert typical_step(records).step == 3
        assert typical_step([StepRecord(1)]) is None


class TestLineChart:
    def positions(self, path: str) -> list[tuple[float, float]]:
        return [(float(x), float(y)) for x, y in re.findall(r"[ML]([\d.]+) ([\d.]+)", path)]

    def test_a_curve_runs_from_left_to_right_and_higher_values_are_higher(self):
        chart = line_chart([Series("a", "a", [(1, 5.0), (2, 3.0), (3, 4.0)])], x_title="x", y_title="y")
        (x1, y1), (x2, y2), (x3, y3) = self.positions(chart.lines[0].path)
        assert (x1, x3) == (chart.left, chart.right)
        assert x2 == pytest.approx((x1 + x3) / 2)
        assert TOP < y1 < y3 < y2 < TOP + PLOT_HEIGHT
        assert y3 - y1 == pytest.approx(y2 - y3, abs=0.02)

    def test_ticks_lie_where_their_labels_say(self):
        points = [(0.0, 0.0), (50.0, 8.0e6)]
        chart = line_chart(
            [Series("a", "a", points, filled=True)], x_title="x", y_title="y", unit=(1e6, "MB")
        )
        scale = {float(tick.label): tick.at for tick in chart.y_ticks}
        assert chart.y_title == "y, MB"
        assert scale[0.0] == chart.bottom
        assert chart.lines[0].path.endswith(f"L{chart.right:g} {scale[8.0]:g}")

    def test_steps_have_whole_numbers_for_ticks(self):
        chart = line_chart(
            [Series("a", "a", [(1, 1.0), (2, 2.0), (3, 3.0)])], x_title="x", y_title="y", whole_x=True
        )
        assert [tick.label for tick in chart.x_ticks] == ["1", "2", "3"]

    def test_stepped_values_hold_until_the_next_point(self):
        chart = line_chart(
            [Series("a", "a", [(0, 0.0), (1, 4.0), (2, 4.0)], stepped=True)], x_title="x", y_title="y"
        )
        assert re.fullmatch(r"M\S+ \S+h0H\S+V\S+H\S+V\S+", chart.lines[0].path)

    def test_values_that_are_not_finite_leave_a_gap(self):
        points = [(1, 1.0), (2, math.nan), (3, math.inf), (4, 1.0), (5, 2.0)]
        chart = line_chart([Series("a", "a", points)], x_title="x", y_title="y")
        assert chart.lines[0].path.count("M") == 2

    def test_thinning_keeps_every_peak(self):
        points = [(float(x), 0.0) for x in range(100_000)]
        points[77_777] = (77_777.0, 9.0)
        chart = line_chart([Series("a", "a", points)], x_title="x", y_title="y")
        drawn = self.positions(chart.lines[0].path)
        assert len(drawn) <= 4 * WIDTH
        highest = min(drawn, key=lambda position: position[1])
        at = chart.left + 77_777 / 99_999 * (chart.right - chart.left)
        assert highest[0] == pytest.approx(at, abs=0.01)
        assert sum(y == highest[1] for _, y in drawn) == 1


class TestTimeline:
    def test_what_overlaps_gets_lanes_and_what_follows_shares_one(self):
        intervals = [Interval(0, 2, "0", 0), Interval(1, 3, "1", 1), Interval(2, 4, "2", 2)]
        (row,) = timeline([("read", intervals)], origin=0).rows
        lane = {bar.tooltip.split(":")[0]: bar.y for bar in row.bars}
        assert lane["read 0"] == lane["read 2"] < lane["read 1"]

    def test_bars_lie_at_their_times_and_are_seen_however_short(self):
        chart = timeline(
            [("a", [Interval(5.0, 15.0, "0", 0)]), ("b", [Interval(10.0, 10.0, "1", 1)])], origin=5.0
        )
        first, second = chart.rows[0].bars[0], chart.rows[1].bars[0]
        assert (first.x, first.x + first.width) == (chart.left, chart.right)
        assert second.x == pytest.approx((chart.left + chart.right) / 2)
        assert second.width > 0
        assert (first.label, second.label) == ("0", "")

    def test_what_begins_before_the_origin_is_cut_there_but_keeps_its_figures(self):
        chart = timeline([("a", [Interval(1.0, 15.0, "0", 0)])], origin=5.0)
        (bar,) = chart.rows[0].bars
        assert (bar.x, bar.x + bar.width) == (chart.left, chart.right)
        assert bar.tooltip == "a 0: 14.000 s from -4.000 s"

    def test_the_marker_is_on_the_same_axis(self):
        chart = timeline([("a", [Interval(5.0, 15.0, "0", 0)])], origin=5.0, marker=(10.0, "half"))
        assert chart.marker.at == pytest.approx((chart.left + chart.right) / 2)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1 kB"),
        (37_945_344, "37.9 MB"),
        (279e9, "279 GB"),
        (2e12, "2 TB"),
    ],
)
def test_bytes_for_people(value, text):
    assert format_bytes(value) == text
    assert text.endswith(byte_unit(value)[1])
