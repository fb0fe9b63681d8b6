"""Allowed combinations run on the fake filesystem, refused ones leave nothing, a wrong run says so."""

from __future__ import annotations

import dataclasses
import json
from argparse import ArgumentParser

import pytest
import torch

from optstream.core.config import DEFAULTS
from optstream.core.errors import StreamConfigError
from optstream.core.optimizer import StreamingAdamW
from optstream.core.validator import DISK_DIR, STREAM, stream_config, validate_arguments
from optstream.harness import execution, matrix, matrix_cli, oracle
from optstream.harness.brute_force import draw
from optstream.harness.check import parse_flags
from optstream.harness.covering import covering_array
from optstream.harness.domains import command_line
from optstream.harness.valid_space import ValidSpace

pytestmark = pytest.mark.unit

STREAMING_ALONE = DEFAULTS | {
    STREAM: True,
    "use_distributed_optimizer": True,
    "stream_optimizer_state_bucket_numel": 64,
}


@pytest.fixture
def as_configured(monkeypatch):
    """Let a run be configured otherwise than its flags say."""

    def change(**fields):
        monkeypatch.setattr(
            execution, "stream_config", lambda values: dataclasses.replace(stream_config(values), **fields)
        )

    return change


def test_a_pairwise_set_over_all_flags_runs():
    rows = covering_array(ValidSpace(), 2)
    assert {row[STREAM] for row in rows} == {False, True}
    assert {matrix.reproduce(row): wrong for row in rows if (wrong := execution.execute(row))} == {}


def test_a_pairwise_set_over_all_that_streams_runs():
    space = ValidSpace().restricted(STREAM, True)
    rows = covering_array(space, 2)
    for dest in matrix.ACTED_ON:
        assert {row[dest] for row in rows} == {values for (values,) in space.project((dest,))}
    assert {matrix.reproduce(row): wrong for row in rows if (wrong := execution.execute(row))} == {}


def test_the_run_that_could_not_start_streams():
    assert execution.execute(STREAMING_ALONE | {"stream_optimizer_state_bucket_numel": 8388608}) is None


def test_refused_combinations_leave_no_file_and_no_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("SCRATCH", str(tmp_path / "scratch"))
    refused = [each for each in draw(0, 500) if oracle.violated(each) and each[STREAM]]
    assert len(refused) > 200
    for combination in refused:
        if combination[DISK_DIR] is not None:
            combination[DISK_DIR] = combination[DISK_DIR].replace("/scratch", str(tmp_path))
        with pytest.raises(StreamConfigError):
            validate_arguments(parse_flags(command_line(combination)))
    assert list(tmp_path.iterdir()) == []


def test_a_refused_combination_does_not_run():
    assert "stream-needs-distributed-optimizer" in execution.execute(DEFAULTS | {STREAM: True})


def test_bits_that_differ_are_found(as_configured):
    as_configured(moment_dtype="bf16")
    assert "differs from resident" in execution.execute(STREAMING_ALONE)


def test_streaming_that_is_not_engaged_is_found(as_configured):
    as_configured(enabled=False)
    assert "streaming: False, not True" in execution.execute(STREAMING_ALONE)


def test_streaming_that_should_not_be_engaged_is_found(as_configured):
    as_configured(enabled=True, directories=("/scratch/a",))
    assert "streaming: True, not False" in execution.execute(DEFAULTS)


def test_directories_without_streaming_are_found(as_configured):
    as_configured(directories=("/scratch/a",))
    assert "directories: ('/scratch/a',), not ()" in execution.execute(DEFAULTS)


def test_files_in_another_directory_are_found(as_configured):
    as_configured(directories=("/scratch/elsewhere",))
    assert "lie in 0 of 1 directories" in execution.execute(STREAMING_ALONE)


def test_a_bucket_size_that_is_not_heeded_is_found(as_configured):
    as_configured(bucket_numel=8388608)
    assert "buckets of each step" in execution.execute(STREAMING_ALONE)


def test_steps_that_do_not_stream_are_found(monkeypatch):
    """An optimizer that gets the bits right without its files."""
    monkeypatch.setattr(StreamingAdamW, "records", property(lambda self: []))
    assert "steps that streamed: []" in execution.execute(STREAMING_ALONE)


def test_files_that_stay_are_found(monkeypatch):
    close = StreamingAdamW.close
    kept = []
    monkeypatch.setattr(StreamingAdamW, "close", lambda self: kept.append(self))
    assert "files after close" in execution.execute(STREAMING_ALONE)
    for optimizer in kept:
        close(optimizer)


def test_a_step_that_raises_is_reported_by_type(monkeypatch):
    def fail(self, closure=None):
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(StreamingAdamW, "step", fail)
    assert execution.execute(STREAMING_ALONE) == "OutOfMemoryError: no memory left"


# ---- optstream matrix -----------------------------------------------------------------------------------


def run(*words: str) -> int:
    parser = ArgumentParser(prog="optstream")
    matrix_cli.add_parser(parser.add_subparsers())
    args = parser.parse_args(["matrix", *words])
    return args.run(args)


def test_one_combination_is_judged_and_run(capsys, tmp_path):
    page = tmp_path / "matrix.html"
    flags = command_line(STREAMING_ALONE)
    assert run("--json", "-", "--report", str(page), "--", *flags) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["combinations"], found["valid"], found["executed"], found["failures"]) == (1, 1, 1, [])
    assert "every verdict agrees" in page.read_text()


def test_a_failure_exits_1_and_shows_its_command(capsys, as_configured):
    as_configured(moment_dtype="bf16")
    assert run("--", *command_line(STREAMING_ALONE)) == 1
    out = capsys.readouterr().out
    assert "differs from resident" in out
    assert matrix.reproduce(STREAMING_ALONE) in out


def test_a_refused_combination_is_explained(capsys):
    assert run("--", "--stream-optimizer-state-to-disk") == 0
    assert "[stream-needs-distributed-optimizer]" in capsys.readouterr().out


def test_without_flags_everything_is_run(monkeypatch, capsys):
    called = {}

    def run_matrix(**arguments):
        called.update(arguments)
        arguments["progress"]("brute force", 1, 2)
        return matrix.MatrixReport(combinations=7)

    monkeypatch.setattr(matrix_cli, "run_matrix", run_matrix)
    assert run("--json", "-", "--workers", "3", "--seed", "5") == 0
    assert json.loads(capsys.readouterr().out)["combinations"] == 7
    assert called["brute_force"] >= 10_000_000
    assert (called["workers"], called["seed"], called["execute"]) == (3, 5, execution.execute)


@pytest.mark.parametrize("words", [["--workers", "0"], ["--brute-force", "-1"], ["--brute-force", "many"]])
def test_unusable_counts_are_refused(words, capsys):
    with pytest.raises(SystemExit):
        run(*words)
    assert words[0] in capsys.readouterr().err
