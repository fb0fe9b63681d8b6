"""`optstream bench offload`: what it writes and refuses. Its times are no verdict."""

from __future__ import annotations

import json

import pytest

from optstream.core.integrity import checksum, checksum_of
from optstream.harness.cli import main

pytestmark = pytest.mark.unit


def test_the_report_has_the_fields_that_are_promised(tmp_path):
    command = ["bench", "offload", "--bytes", "1000001", "--rounds", "1", "--dir", str(tmp_path / "disk")]
    assert main([*command, "--device", "cpu", "--json", str(tmp_path / "report.json")]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert set(report) == {"bytes", "sleep_s", "wake_s", "sleep_floor_s", "wake_floor_s", "host_bytes_peak"}
    assert report["bytes"] == 1000001
    assert 0 < report["host_bytes_peak"] <= 256 << 20
    assert not [path for path in (tmp_path / "disk").rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    "flags",
    [["--bytes", "0"], ["--bytes", "many"], ["--rounds", "0"], ["--offload-train-disk-chunk-mb", "0"]],
)
def test_bad_usage_is_refused(tmp_path, monkeypatch, capsys, flags):
    monkeypatch.chdir(tmp_path)
    try:
        code = main(["bench", "offload", *flags])
    except SystemExit as ended:  # argparse's own way
        code = ended.code
    assert code == 2
    assert "error:" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_checksum_in_parts_is_that_of_the_whole():
    data = memoryview(bytes(range(256)) * 40)
    assert checksum_of([data[:1000], data[1000:1000], data[1000:]]) == checksum(data)
