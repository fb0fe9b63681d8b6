"""`optstream train` as a person runs it: what it prints, writes and refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

TINY = ["--steps", "3", "--layers", "1", "--hidden", "32", "--heads", "2", "--seq", "16", "--batch", "1"]


def optstream(*words: str, cwd: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "optstream.harness.cli", *words],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def files_under(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_run_writes_summary_and_report_and_leaves_no_scratch(tmp_path):
    done = optstream("train", *TINY, "--bucket-numel", "2048", "--json", "out.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "equal to the last bit" in done.stdout
    (folder,) = (tmp_path / "runs").iterdir()
    assert files_under(folder) == ["report.html", "summary.json"]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary == json.loads((tmp_path / "out.json").read_text())
    assert set(summary) == {
        *("bit_identical", "max_error", "steps", "parameters", "loss", "resident", "streamed")
    }
    assert set(summary["resident"]) == {"state_bytes_peak", "step_s", "digest"}
    assert set(summary["streamed"]) == {
        *("state_bytes_peak", "state_bytes_bound", "read_bytes", "written_bytes"),
        *("step_s", "buckets", "depth", "digest"),
    }
    assert summary["bit_identical"] is True
    assert summary["max_error"] == 0
    assert summary["resident"]["digest"] == summary["streamed"]["digest"]
    parameters = summary["parameters"]
    assert summary["streamed"]["read_bytes"] == [4 * parameters, 12 * parameters, 12 * parameters]
    assert summary["streamed"]["written_bytes"] == [12 * parameters] * 3
    assert summary["resident"]["state_bytes_peak"] == 12 * parameters
    assert summary["streamed"]["state_bytes_peak"] <= summary["streamed"]["state_bytes_bound"]


def test_json_on_standard_output_is_all_there_is_on_it(tmp_path):
    flags = ["--backend", "fake", "--ranks", "2", "--json", "-", "--stream-optimizer-state-depth", "2"]
    done = optstream("train", *TINY, *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["ranks"] == 2
    assert summary["bit_identical"] is True
    assert summary["streamed"]["depth"] <= 2


def test_lossy_moments_say_so_and_pass_within_their_tolerance(tmp_path):
    flags = ["--stream-optimizer-state-moment-dtype", "bf16", "--json", "-"]
    done = optstream("train", *TINY, *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["bit_identical"] is False
    assert summary["max_error"] > 0
    assert "tolerance" in done.stderr


def binary(tmp_path: Path) -> list[str]:
    (tmp_path / "binary").write_bytes(b"\x7fELF\0\0\0")
    return ["--data", "binary"]


def empty(tmp_path: Path) -> list[str]:
    (tmp_path / "empty").touch()
    return ["--data", "empty"]


def not_a_directory(tmp_path: Path) -> list[str]:
    (tmp_path / "file").touch()
    return ["--dir", "file/below"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--ranks", "3", "--tp", "2"], "3 ranks cannot be divided"),
        (["--hidden", "33"], "cannot be divided"),
        (["--layers", "1", "--pp", "2", "--ranks", "2"], "cannot be divided"),
        (["--experts", "2", "--tp", "2", "--ranks", "2"], "experts cannot be combined with --tp"),
        (["--data", "missing"], "missing"),
        (binary, "binary"),
        (empty, "empty"),
        (not_a_directory, "file"),
        (["--stream-optimizer-state-moment-dtype", "fp16"], "stream-moment-dtype"),
        (["--bucket-numel", "0"], "stream-sizes"),
        (["--stream-optimizer-state-depth", "0"], "stream-sizes"),
        (["--no-such-flag"], "--no-such-flag"),
        (["--steps", "0"], "--steps 0 cannot run"),
        (["--steps", "many"], "--steps"),
        (["--json", "no/such/folder.json"], "no/such/folder.json"),
    ],
    ids=lambda value: getattr(value, "__name__", None) or " ".join(value)[:40],
)
def test_bad_input_is_one_line_and_exit_2_and_leaves_nothing(flags, expected, tmp_path):
    flags = flags(tmp_path) if callable(flags) else flags
    before = files_under(tmp_path)
    done = optstream("train", *TINY, *flags, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    errors = [line for line in done.stderr.splitlines() if "error:" in line]
    assert len(errors) == 1
    assert expected in errors[0]
    assert files_under(tmp_path) == before
