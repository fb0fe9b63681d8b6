"""`optstream bench step` at a size at which times mean nothing: volumes, ratios, and what is left behind."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from optstream.core.config import StreamConfig
from optstream.core.records import StepRecord
from optstream.harness import bench
from optstream.harness.bench import BenchError, BenchReport, BenchSettings, Launch, measure_launch
from optstream.harness.bench_cli import markdown
from optstream.harness.bench_contenders import (
    Floor,
    FloorSetting,
    Problem,
    Resident,
    Serial,
    Streamed,
    floor_settings,
)
from optstream.harness.cli import main

pytestmark = pytest.mark.unit

FIXED_FIELDS = {
    "numel",
    "read_bytes",
    "written_bytes",
    "resident_s",
    "serial_s",
    "streamed_s",
    "exposed_s",
    "floor_s",
    "streamed_over_limit",
    "serial_over_streamed",
    "host_bytes_peak",
}
BUCKET_NUMEL = 4096
NUMEL = 8 * BUCKET_NUMEL
# main, exp_avg and exp_avg_sq in fp32, and a trailer of one page.
PLACE_BYTES = 12 * BUCKET_NUMEL + 4096


@pytest.fixture
def short_sweep(monkeypatch):
    """Two settings for the floor instead of all: the command's own test has them all."""
    monkeypatch.setattr(bench, "floor_settings", lambda device: floor_settings(device)[:2])


def settings_in(directory: Path, **fields) -> BenchSettings:
    config = StreamConfig(True, (str(directory),), bucket_numel=BUCKET_NUMEL, depth=2, **fields)
    return BenchSettings(NUMEL, config, launches=1, rounds=1, steps=2)


def test_the_command_reports_what_it_promises_and_leaves_nothing(tmp_path, capsys):
    disk, trace = tmp_path / "disk", tmp_path / "trace.json"
    arguments = ["--numel", "3e4", "--dir", str(disk), "--launches", "1", "--rounds", "1", "--steps", "2"]
    assert main(["bench", "step", *arguments, "--json", "-", "--trace", str(trace)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {event["cat"] for event in json.loads(trace.read_text())["traceEvents"] if "cat" in event} == {
        "step",
        "read",
        "update",
        "write",
    }
    assert report.keys() >= FIXED_FIELDS
    assert report["numel"] == 30_000
    assert report["read_bytes"] == report["written_bytes"] == 12 * 30_000
    assert all(report[name] > 0 for name in FIXED_FIELDS)
    limit_s = max(report["floor_s"], report["resident_s"])
    assert report["streamed_over_limit"] == report["streamed_s"] / limit_s
    assert report["serial_over_streamed"] == report["serial_s"] / report["streamed_s"]
    assert list(disk.rglob("*")) == []


@pytest.mark.parametrize(("cached", "share"), [(0, 1.0), (4, 0.5), (8, 0.0)])
def test_volume_falls_by_what_the_cache_keeps(short_sweep, tmp_path, cached, share):
    settings = settings_in(tmp_path, host_cache_bytes=cached * PLACE_BYTES)
    launch = measure_launch(settings)
    report = BenchReport(settings, [launch]).as_dict()
    assert report["read_bytes"] == report["written_bytes"] == 12 * NUMEL * share
    assert report["host_bytes_peak"] <= min(2 + cached, 8) * PLACE_BYTES
    assert set(launch.seconds) == {"resident", "serial", "streamed", "unverified", "floor", "exposed"}


def test_without_verification_there_is_nothing_to_compare_it_with(short_sweep, tmp_path):
    settings = settings_in(tmp_path, verify=False)
    report = BenchReport(settings, [measure_launch(settings)])
    assert report.verification_share is None
    assert report.as_dict()["unverified_s"] is None
    assert "| unverified |" not in markdown(report)


def test_the_floor_moves_the_bytes_of_the_streamed_step(tmp_path):
    config = settings_in(tmp_path).config
    problem = Problem(NUMEL, torch.device("cpu"), fused=True)
    setting = FloorSetting(1 << 20, 2, "huge pages")
    with (
        closing(Floor(problem, config, setting)) as floor,
        closing(Streamed(problem, config)) as streamed,
    ):
        for contender in (floor, streamed):
            contender.run(3)
        moved = [
            [(record.read_bytes, record.written_bytes) for record in contender.records[1:]]
            for contender in (floor, streamed)
        ]
    # Not in the first step: the floor's buckets hold nothing before it, not even main params.
    assert moved[0] == moved[1] == [(12 * NUMEL, 12 * NUMEL)] * 2


@pytest.mark.parametrize("contender", [Serial, Streamed])
def test_contenders_do_the_same_steps_to_the_bit(tmp_path, contender):
    problem = Problem(NUMEL + 1000, torch.device("cpu"), fused=True)
    config = replace(settings_in(tmp_path).config, directories=(str(tmp_path),))
    with closing(Resident(problem)) as resident, closing(contender(problem, config)) as other:
        before = [param.clone() for param in resident.model.params]
        for one in (resident, other):
            one.run(3)
        assert all(map(torch.equal, resident.model.params, other.model.params))
        assert not any(map(torch.equal, before, other.model.params))


def test_contenders_that_disagree_are_not_timed(tmp_path, monkeypatch):
    class Wrong(Serial):
        def run(self, steps: int) -> float:
            seconds = super().run(steps)
            self.model.params[0][0] += 1
            return seconds

    monkeypatch.setattr(bench, "Serial", Wrong)
    with pytest.raises(BenchError, match="the serial step gives other params"):
        measure_launch(settings_in(tmp_path))
    assert list(tmp_path.rglob("*")) == []


def test_a_report_is_the_median_of_launches_and_the_spread_of_rounds(tmp_path):
    def launch(*streamed: float) -> Launch:
        seconds = {"streamed": list(streamed), "resident": [1.0], "floor": [2.0], "serial": [6.0]}
        return Launch(
            seconds=seconds | {"exposed": [0.5]},
            records=[StepRecord(step, total_s=streamed[0]) for step in range(2)],
            host_bytes_peak=1,
            floor=FloorSetting(1 << 20, 2, "huge pages"),
            sweep={},
        )

    report = BenchReport(settings_in(tmp_path), [launch(1.0, 3.0, 9.0), launch(4.0), launch(5.0, 5.0)])
    assert report.seconds("streamed") == 4.0
    assert report.spread("streamed") == (1.0, 9.0)
    assert report.limit_s == 2.0
    assert report.streamed_over_limit == 2.0
    assert report.serial_over_streamed == 1.5
    table = markdown(report)
    assert "| streamed | 4.000 | 1.000 to 9.000 | 2.00 x the limit" in table
    assert "| serial | 6.000 |" in table


@pytest.mark.parametrize(
    ("flag", "value"), [("--numel", "many"), ("--numel", "0"), ("--launches", "1.5"), ("--gap-s", "-1")]
)
def test_bad_usage_is_told_before_anything_is_measured(flag, value, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "step", flag, value])
    assert ended.value.code == 2
    assert flag in capsys.readouterr().err


def test_flags_that_do_not_go_together_are_one_error(capsys):
    assert main(["bench", "step", "--stream-optimizer-state-depth", "0"]) == 2
    assert "depth is 0" in capsys.readouterr().err
