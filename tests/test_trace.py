"""A trace that Perfetto can show: every span once, at its time, and none across another on its track."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optstream.core.records import Span, StepRecord
from optstream.core.schedule import Stage
from optstream.harness.errors import ConfigurationError
from optstream.harness.simulator import DeviceModel, Simulation
from optstream.harness.trace import trace_events, write_trace

pytestmark = pytest.mark.unit


def record(step: int, start_s: float, total_s: float, *spans: Span) -> StepRecord:
    return StepRecord(step=step, start_s=start_s, total_s=total_s, spans=list(spans))


def slices(events: list[dict]) -> list[dict]:
    return [event for event in events if event["ph"] == "X"]


def test_a_file_that_loads(tmp_path):
    path = tmp_path / "trace.json"
    # The read of the first bucket was ahead of the step; its write ended behind it.
    steps = [
        record(1, 10.0, 1.0, Span(Stage.READ, 0, 9.5, 10.0), Span(Stage.WRITE, 0, 10.5, 11.5)),
        record(2, 12.0, 0.5),
    ]
    write_trace(str(path), steps)
    loaded = json.loads(path.read_text())
    found = {(event["cat"], event["name"]): event for event in slices(loaded["traceEvents"])}
    assert set(found) == {
        ("step", "step 1"),
        ("step", "step 2"),
        ("read", "bucket 0"),
        ("write", "bucket 0"),
    }
    assert found["read", "bucket 0"]["ts"] == 0.0
    assert found["step", "step 1"]["ts"] == pytest.approx(0.5e6)
    assert found["step", "step 2"]["dur"] == pytest.approx(0.5e6)
    assert found["write", "bucket 0"]["args"] == {"bucket": 0, "step": 1}


def test_no_records_are_an_empty_trace():
    assert trace_events([]) == []


def test_a_path_that_cannot_be_written_is_one_clear_error(tmp_path):
    with pytest.raises(ConfigurationError, match="cannot write"):
        write_trace(str(tmp_path / "missing" / "trace.json"), [])


@given(
    st.lists(
        st.tuples(st.sampled_from(Stage), st.integers(0, 9), st.integers(0, 50), st.integers(1, 20)),
        max_size=30,
    )
)
def test_every_span_is_there_once_and_no_track_holds_two_at_a_time(drawn):
    spans = [Span(stage, bucket, start, start + length) for stage, bucket, start, length in drawn]
    events = trace_events([record(1, 0.0, 100.0, *spans)])
    shown = slices(events)
    expected = sorted((span.stage.value, span.start_s, span.end_s) for span in spans)
    assert expected == sorted(
        (event["cat"], round(event["ts"] / 1e6), round((event["ts"] + event["dur"]) / 1e6))
        for event in shown
        if event["cat"] != "step"
    )
    for track in {event["tid"] for event in shown}:
        on_track = sorted((e["ts"], e["ts"] + e["dur"]) for e in shown if e["tid"] == track)
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(on_track))
        assert len({event["cat"] for event in shown if event["tid"] == track}) == 1
    named = {event["tid"] for event in events if event["ph"] == "M"}
    assert named == {event["tid"] for event in shown}


def test_a_simulated_step_can_be_shown_too():
    device = DeviceModel(read_bytes_per_s=4.0, write_bytes_per_s=2.0, adam_bytes_per_s=8.0)
    step = Simulation(device, [1.0] * 5, depth=3).step()
    (spans,) = step.spans
    events = trace_events([record(1, step.start_s, step.total_s, *spans)])
    assert sum(event["cat"] == "update" for event in slices(events)) == 5
