"""Flags as data: the parser made from them, and the configuration that the optimizers take."""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys

import pytest

from optstream.core.config import DEFAULTS, FLAG_BY_DEST, FLAGS, GROUPS, Kind, StreamConfig, add_arguments
from optstream.core.errors import StreamConfigError

pytestmark = pytest.mark.unit


def parse(*words: str) -> argparse.Namespace:
    return add_arguments(argparse.ArgumentParser(exit_on_error=False)).parse_args(words)


def test_nothing_given_is_the_defaults():
    assert vars(parse()) == DEFAULTS


def test_defaults_are_those_that_trainers_have():
    assert DEFAULTS["offload_train_target"] == "cpu"
    assert DEFAULTS["offload_train_disk_chunk_mb"] == 256
    assert DEFAULTS["stream_optimizer_state_bucket_numel"] == 8 * 1024**2
    assert DEFAULTS["stream_optimizer_state_depth"] == 4
    assert DEFAULTS["stream_optimizer_state_host_cache_mb"] == 0
    for switch in ("write_behind", "read_ahead", "verify"):
        assert DEFAULTS[f"stream_optimizer_state_{switch}"] is True


@pytest.mark.parametrize("dest", ["offload_train", "offload_rollout"])
def test_a_tristate_tells_not_given_from_given(dest):
    name = FLAG_BY_DEST[dest].name
    assert getattr(parse(), dest) is None
    assert getattr(parse(name), dest) is True
    assert getattr(parse(name.replace("--", "--no-")), dest) is False
    assert [flag.dest for flag in FLAGS if flag.is_tristate] == ["offload_train", "offload_rollout"]


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.dest)
def test_a_value_survives_the_command_line(flag):
    values = {
        Kind.SWITCH: [False, True],
        Kind.TOGGLE: [True, False],
        Kind.TRISTATE: [None, True, False],
        Kind.INTEGER: [flag.default, 17, 0, -1],
        Kind.TEXT: flag.choices or ["adam", "muon"],
        Kind.PATHS: [None, "/a", "/a:/b"],
    }[flag.kind]
    for value in values:
        assert getattr(parse(*flag.as_arguments(value)), flag.dest) == value
        assert flag.accepts(value)


def test_several_directories_in_a_sequence_are_spelled_with_colons():
    assert FLAG_BY_DEST["offload_train_disk_dir"].as_arguments(["/a", "/b"]) == (
        "--offload-train-disk-dir",
        "/a:/b",
    )


@pytest.mark.parametrize(
    "words", [["--no-such-flag"], ["--offload-train-target", "tape"], ["--lora-rank", "x"]]
)
def test_what_no_flag_takes_is_refused(words, capsys):
    with pytest.raises((argparse.ArgumentError, SystemExit)):
        parse(*words)


def test_flags_that_a_trainer_has_stay_the_trainers():
    parser = argparse.ArgumentParser()
    group = parser.add_argument_group("trainer")
    group.add_argument("--optimizer", choices=("adam", "lion"), default="lion")
    parser.add_argument("--no-load-optim", action="store_true", default=None)
    parsed = add_arguments(parser).parse_args(["--stream-optimizer-state-to-disk"])
    assert (parsed.optimizer, parsed.no_load_optim) == ("lion", None)
    assert parsed.stream_optimizer_state_to_disk is True


def test_adding_twice_changes_nothing():
    parser = add_arguments(argparse.ArgumentParser())
    before = parser.format_help()
    assert add_arguments(parser) is parser
    assert parser.format_help() == before


def test_a_collision_is_an_error_where_asked():
    parser = argparse.ArgumentParser()
    parser.add_argument("--colocate")
    with pytest.raises(argparse.ArgumentError, match="--colocate"):
        add_arguments(parser, skip_existing=False)


def test_every_flag_is_documented_once_and_grouped():
    assert len(FLAG_BY_DEST) == len(FLAGS)
    assert {flag.group for flag in FLAGS} == set(GROUPS)
    help_text = " ".join(add_arguments(argparse.ArgumentParser()).format_help().split())
    for flag in FLAGS:
        assert flag.help
        assert flag.name in help_text


def test_configuring_imports_no_torch():
    code = (
        "import sys, optstream.core.config, optstream.core.validator, optstream.harness.check;"
        "sys.exit(int('torch' in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_stream_config_is_frozen():
    config = StreamConfig(enabled=True, directories=("/scratch",))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.depth = 2


def test_a_disabled_stream_config_needs_nothing():
    assert StreamConfig(enabled=False, directories=()).directories == ()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("directories", ()),
        ("directories", "/scratch"),
        ("bucket_numel", 0),
        ("depth", 0),
        ("chunk_bytes", 0),
        ("host_cache_bytes", -1),
        ("moment_dtype", "fp16"),
        ("moment_dtype", "fp8e4m3"),
    ],
)
def test_a_stream_config_that_no_run_can_have_is_refused(field, value):
    with pytest.raises(StreamConfigError, match="director" if field == "directories" else field):
        StreamConfig(**{"enabled": True, "directories": ("/scratch",), field: value})
