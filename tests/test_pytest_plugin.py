"""The plugin in test runs of its own: levels, hardware, ranks."""

from __future__ import annotations

import pytest
import torch

from optstream.harness.errors import ConfigurationError
from optstream.harness.hardware import choose

pytest_plugins = "pytester"
pytestmark = pytest.mark.unit

SUITE = """
    import pytest

    @pytest.mark.e2e
    def test_one(hardware):
        assert hardware == "{expected}"

    @pytest.mark.e2e
    @pytest.mark.ranks(2)
    def test_two(hardware):
        pass
"""


@pytest.fixture
def run(pytester, monkeypatch):
    """Run a small suite of two tests on a machine with so many GPUs."""

    def in_process(*words: str, gpus: int = 0, expected: str = "simulated", source: str = SUITE):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        pytester.makepyfile(source.replace("{expected}", expected))
        return pytester.runpytest_inprocess("-p", "no:cacheprovider", "-p", "no:xdist", *words)

    return in_process


def test_gpu_without_gpus_is_one_line_and_a_usage_error(run):
    ended = run("--hardware=gpu")
    assert ended.ret == pytest.ExitCode.USAGE_ERROR
    (line,) = [line for line in ended.errlines if line.strip()]
    assert line.startswith("ERROR: --hardware=gpu cannot run here")
    assert "no GPUs visible" in line


def test_gpu_with_too_few_is_an_error_even_where_some_tests_would_fit(run):
    ended = run("--hardware=gpu", gpus=1)
    assert ended.ret == pytest.ExitCode.USAGE_ERROR
    ended.stderr.fnmatch_lines(["ERROR: *1 GPU visible*tests of up to 4 ranks*--ranks-max 1*"])


def test_gpu_takes_gpus(run):
    ended = run("--hardware=gpu", gpus=4, expected="gpu")
    ended.assert_outcomes(passed=2)
    ended.stdout.fnmatch_lines(["optstream hardware: gpu (4 GPUs visible*"])


def test_a_single_gpu_runs_the_part_for_one(run):
    ended = run("--hardware=gpu", "--ranks-max=1", gpus=1, expected="gpu")
    ended.assert_outcomes(passed=1, deselected=1)


@pytest.mark.parametrize(("gpus", "expected"), [(0, "simulated"), (3, "simulated"), (4, "gpu")])
def test_auto_says_what_it_chose_and_why(run, gpus, expected):
    ended = run("--hardware=auto", gpus=gpus, expected=expected)
    ended.assert_outcomes(passed=2)
    ended.stdout.fnmatch_lines([f"optstream hardware: {expected} ({gpus or 'no'} GPU*visible to torch*"])


def test_simulated_is_simulated_whatever_there_is(run):
    ended = run("--hardware=simulated", gpus=8)
    ended.assert_outcomes(passed=2)
    ended.stdout.fnmatch_lines(["optstream hardware: simulated (as asked)*"])


def test_hardware_is_chosen_without_being_asked(run):
    run(gpus=4, expected="gpu").assert_outcomes(passed=2)


def test_a_suite_that_requires_levels_says_its_hardware(run, pytester):
    pytester.makeini("[pytest]\noptstream_require_level = true")
    run().stdout.fnmatch_lines(["optstream hardware: simulated *"])
    assert "optstream hardware" not in run("-m", "unit").stdout.str()


@pytest.mark.parametrize(("gpus", "ran"), [(0, 1), (4, 2)])
def test_what_only_gpus_can_show_is_left_out_of_a_simulation(run, gpus, ran):
    source = """
        import pytest

        @pytest.mark.e2e
        def test_anywhere(): pass

        @pytest.mark.e2e
        @pytest.mark.gpu
        def test_gpu(): pass
    """
    run("--hardware=auto", gpus=gpus, source=source).assert_outcomes(passed=ran, deselected=2 - ran)


def test_an_unknown_kind_is_refused(run):
    assert run("--hardware=tpu").ret == pytest.ExitCode.USAGE_ERROR


@pytest.mark.parametrize("ranks", ["0", "-1", "many"])
def test_a_number_of_ranks_that_is_none_is_refused(run, ranks):
    assert run(f"--ranks-max={ranks}").ret == pytest.ExitCode.USAGE_ERROR


@pytest.mark.parametrize(
    "words", [["-m", "unit"], ["-m", "e2e"], [], ["-m", "unit", "-n", "1"]], ids=" ".join
)
def test_a_test_without_a_level_fails_every_run_where_levels_are_required(run, pytester, words):
    pytester.makeini("[pytest]\noptstream_require_level = true")
    pytester.makepyfile("def test_unmarked(): pass")
    ended = pytester.runpytest_inprocess(*words)
    ended.assert_outcomes(errors=1)
    ended.stdout.fnmatch_lines(["*it carries none of the markers unit, e2e, nightly*"])


def test_levels_are_not_required_of_others(run):
    run(source="def test_unmarked(): pass").assert_outcomes(passed=1)


def test_the_choice_is_the_same_without_pytest(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose("gpu", 2).kind == "gpu"
    with pytest.raises(ConfigurationError, match="2 GPUs visible"):
        choose("gpu", 3)


# ---- the report --------------------------------------------------------------------------------------------

REPORTED = """
    import pytest
    pytestmark = pytest.mark.e2e

    def test_good(record_property):
        record_property("bytes written", 12345)

    def test_bad():
        assert "<left>" == "<right>"
"""


def test_the_report_shows_figures_failures_and_how_to_rerun(run, pytester):
    run("--hardware=simulated", "--optstream-report", "page.html", source=REPORTED)
    page = (pytester.path / "page.html").read_text()
    assert "1 passed, 1 failed" in page
    assert 'class="verdict bad"' in page
    assert "bytes written" in page
    assert "12345" in page
    assert "&lt;left&gt;" in page
    assert "<left>" not in page
    name = "test_the_report_shows_figures_failures_and_how_to_rerun.py::test_bad"
    assert f"pytest --hardware=simulated {name}" in page
    for subject in ("torch", "megatron-core", "simulated (as asked)"):
        assert subject in page


def test_workers_hand_their_figures_to_the_page(run, pytester):
    source = REPORTED.replace('assert "<left>" == "<right>"', "pass")
    pytester.makepyfile(source)
    ended = pytester.runpytest_inprocess("-n", "2", "--optstream-report", "page.html")
    ended.assert_outcomes(passed=2)
    page = (pytester.path / "page.html").read_text()
    assert "2 passed, 0 failed" in page
    assert 'class="verdict good"' in page
    assert "12345" in page


def test_a_run_of_nothing_is_not_good(run, pytester):
    run("-k", "no_such_test", "--optstream-report", "page.html")
    assert 'class="verdict bad"' in (pytester.path / "page.html").read_text()


def test_a_report_that_cannot_be_written_is_one_line(run):
    ended = run("--optstream-report", "no/such/folder/page.html")
    assert ended.ret == pytest.ExitCode.USAGE_ERROR
    ended.stderr.fnmatch_lines(["ERROR: --optstream-report no/such/folder/page.html cannot be written*"])
