"""`optstream check`: exit codes, the table, the JSON, and docs/flags.md from the same data."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from optstream.core.config import DEFAULTS, FLAGS
from optstream.core.validator import RULES
from optstream.harness import check, flags_doc
from optstream.harness.errors import ConfigurationError

pytestmark = pytest.mark.unit

STREAMING_ALONE = ("--stream-optimizer-state-to-disk", "--use-distributed-optimizer")
REPOSITORY = Path(__file__).parent.parent


def run(*words: str) -> int:
    parser = argparse.ArgumentParser(prog="optstream")
    check.add_parser(parser.add_subparsers())
    args = parser.parse_args(["check", *words])
    return args.run(args)


def test_a_valid_configuration_exits_0_and_shows_what_it_resolves_to(capsys, monkeypatch):
    monkeypatch.setenv("SCRATCH", "/nvme")
    assert run("--", *STREAMING_ALONE) == 0
    out, err = capsys.readouterr()
    assert "/nvme/miles_train_offload_" in out.replace("\n", "")
    assert all(flag.name in out for flag in FLAGS)
    assert err == ""


@pytest.mark.parametrize(
    ("added", "rules"),
    [
        (["--offload-train"], ["stream-offload-needs-disk"]),
        (["--train-backend", "fsdp"], ["stream-needs-megatron"]),
        (["--offload-train-disk-chunk-mb", "0"], ["chunk-positive"]),
        (
            [
                "--offload-train",
                "--train-backend",
                "fsdp",
                "--offload-train-disk-chunk-mb",
                "-1",
                "--indep-dp",
            ],
            ["stream-offload-needs-disk", "stream-needs-megatron", "stream-indep-dp", "chunk-positive"],
        ),
    ],
)
def test_a_refused_configuration_exits_2_with_one_line_a_violation(capsys, added, rules):
    assert run("--", *STREAMING_ALONE, *added) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.split("]")[0].removeprefix("[") for line in err.splitlines()] == rules


def test_json_on_stdout_is_all_that_is_printed(capsys):
    assert run("--json", "-", "--", *STREAMING_ALONE, "--offload-train", "--optimizer", "sgd") == 2
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert err == ""
    assert list(found) == ["valid", "violations", "resolved"]
    assert found["valid"] is False
    assert [list(violation) for violation in found["violations"]] == [
        ["rule", "flags", "message", "remedy"]
    ] * 2
    assert found["violations"][1]["flags"] == ["--stream-optimizer-state-to-disk", "--optimizer"]
    assert list(found["resolved"]) == list(DEFAULTS)
    assert found["resolved"]["offload_train"] is True


def test_json_goes_to_a_file_beside_the_table(capsys, tmp_path):
    path = tmp_path / "verdict.json"
    assert run("--json", str(path)) == 0
    assert "resolved configuration" in capsys.readouterr().out
    assert json.loads(path.read_text()) == {
        "valid": True,
        "violations": [],
        "resolved": DEFAULTS | {"offload_train": False, "offload_rollout": False},
    }


def test_json_that_cannot_be_written_is_one_clear_error(tmp_path):
    with pytest.raises(ConfigurationError, match=r"cannot write .*nowhere.*: No such file"):
        run("--json", str(tmp_path / "nowhere" / "verdict.json"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--stream-optimizer-state-to-dis"], "unrecognized arguments"),
        (["--offload-train-target", "tape"], "invalid choice: 'tape'"),
        (["--lora-rank", "many"], "invalid int value: 'many'"),
    ],
)
def test_flags_that_no_parser_takes_are_one_clear_error(words, message):
    with pytest.raises(ConfigurationError, match=message) as caught:
        run("--", *words)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_docs_flags_md_is_up_to_date():
    text = (REPOSITORY / "docs" / "flags.md").read_text(encoding="utf-8")
    assert text == flags_doc.render(), "run: python -m optstream.harness.flags_doc docs/flags.md"


def test_docs_name_every_flag_and_rule():
    text = flags_doc.render()
    assert all(flag.spelling.replace("|", "\\|") in text for flag in FLAGS)
    assert all(f"`{rule.id}`" in text for rule in RULES)
