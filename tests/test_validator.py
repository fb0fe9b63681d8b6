"""The validator by example: what is allowed, what is refused, what flags become, what a trainer sees."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optstream.core.config import DEFAULTS, FLAG_BY_DEST
from optstream.core.errors import StreamConfigError
from optstream.core.validator import RULES, disk_directories, stream_config, validate, validate_arguments
from optstream.harness.domains import DOMAINS

pytestmark = pytest.mark.unit

# Disaggregated, DP1, streaming alone, no trainer offload, no directory: the run that could not start.
STREAMING_ALONE = {"stream_optimizer_state_to_disk": True, "use_distributed_optimizer": True}

flags_given = st.fixed_dictionaries(
    {}, optional={dest: st.sampled_from(values) for dest, values in DOMAINS.items()}
)


def broken(**flags: object) -> list[str]:
    return [violation.rule for violation in validate(flags).violations]


def resolved(**flags: object) -> dict[str, object]:
    return dict(validate(flags).resolved)


def test_streaming_alone_is_valid_and_names_a_directory(monkeypatch):
    monkeypatch.setenv("SCRATCH", "/nvme")
    verdict = validate(STREAMING_ALONE)
    assert verdict.valid
    assert verdict.resolved["offload_train"] is False
    assert verdict.resolved["offload_train_disk_dir"] == f"/nvme/miles_train_offload_{os.getuid()}"
    assert stream_config(verdict.resolved).directories == (f"/nvme/miles_train_offload_{os.getuid()}",)


@pytest.mark.parametrize("scratch", [None, ""])
def test_without_scratch_the_directory_is_under_slash_scratch(monkeypatch, scratch):
    monkeypatch.delenv("SCRATCH", raising=False)
    if scratch is not None:
        monkeypatch.setenv("SCRATCH", scratch)
    directory = resolved(**STREAMING_ALONE)["offload_train_disk_dir"]
    assert directory == f"/scratch/miles_train_offload_{os.getuid()}"


def test_nothing_given_is_valid_and_touches_no_disk():
    verdict = validate({})
    assert verdict.valid
    assert verdict.resolved["offload_train_disk_dir"] is None
    assert stream_config(verdict.resolved).enabled is False


@pytest.mark.parametrize(
    ("flags", "rule"),
    [
        ({"offload_train": True}, "stream-offload-needs-disk"),
        ({"colocate": True}, "stream-offload-needs-disk"),
        ({"offload": True}, "stream-offload-needs-disk"),
        ({"use_critic": True}, "stream-offload-needs-disk"),
        ({"offload_train_target": "disk"}, "disk-needs-offload"),
        ({"train_backend": "fsdp"}, "stream-needs-megatron"),
        ({"indep_dp": True}, "stream-indep-dp"),
        ({"use_distributed_optimizer": False}, "stream-needs-distributed-optimizer"),
        ({"optimizer": "sgd"}, "stream-needs-adam"),
        ({"optimizer": "dist_muon"}, "stream-needs-adam"),
        ({"lora_rank": 8}, "stream-lora"),
        ({"multi_lora_n_adapters": 2}, "stream-lora"),
        ({"lora_rank": 8, "multi_lora_n_adapters": 2}, "stream-lora"),
        ({"optimizer_cpu_offload": True}, "stream-cpu-offload"),
        ({"offload_optimizer_states": True}, "stream-offload-states"),
        ({"use_precision_aware_optimizer": True}, "stream-precision-aware"),
        ({"reset_optimizer_states": True}, "stream-reset"),
        ({"save_local_weight_checksum": True}, "stream-checksum"),
        ({"enable_witness": True}, "stream-witness"),
        ({"fp8_param_gather": True}, "stream-fp8-params"),
        ({"use_megatron_fsdp": True}, "stream-megatron-fsdp"),
        ({"stream_optimizer_state_moment_dtype": "fp16"}, "stream-moment-dtype"),
        ({"stream_optimizer_state_moment_dtype": "fp8e4m3"}, "stream-moment-dtype"),
        ({"stream_optimizer_state_moment_dtype": "fp8e5m2"}, "stream-moment-dtype"),
        ({"stream_optimizer_state_bucket_numel": 0}, "stream-sizes"),
        ({"stream_optimizer_state_depth": 0}, "stream-sizes"),
        ({"stream_optimizer_state_depth": -3, "stream_optimizer_state_bucket_numel": -1}, "stream-sizes"),
        ({"stream_optimizer_state_host_cache_mb": -1}, "stream-sizes"),
        ({"offload_train_disk_chunk_mb": 0}, "chunk-positive"),
        ({"offload_train_disk_chunk_mb": -1}, "chunk-positive"),
        ({"rematerialize_param_from_master_weight": True}, "rematerialize-needs"),
    ],
)
def test_one_fault_beside_streaming_is_one_violation(flags, rule):
    assert broken(**STREAMING_ALONE | flags) == [rule]


@pytest.mark.parametrize(
    "flags",
    [
        {"stream_optimizer_state_moment_dtype": "bf16"},
        {"offload_train_target": "cpu"},
        {"offload_train": False, "colocate": True},
        {"offload_rollout": True},
        {"offload_train": True, "offload_train_target": "disk"},
        {"colocate": True, "offload_train_target": "disk"},
        {"use_critic": True, "offload_train_target": "disk"},
        {"colocate": True, "debug_rollout_only": True},
        {"no_load_optim": True, "overlap_param_gather": True},
        {"offload_train_disk_dir": "/a:/b", "stream_optimizer_state_depth": 1},
    ],
)
def test_streaming_goes_with(flags):
    assert broken(**STREAMING_ALONE | flags) == []


@pytest.mark.parametrize(
    "flags",
    [
        {"optimizer": "sgd", "lora_rank": 8, "indep_dp": True, "enable_witness": True},
        {"stream_optimizer_state_depth": 0, "stream_optimizer_state_moment_dtype": "fp16"},
        {"offload_train_disk_chunk_mb": 0},
        {"train_backend": "fsdp", "offload_train": True},
    ],
)
def test_without_streaming_or_a_disk_target_its_rules_are_silent(flags):
    assert broken(**flags) == []


@pytest.mark.parametrize(
    ("flags", "rules"),
    [
        ({"offload_train_target": "disk"}, {"disk-needs-offload"}),
        (
            {"offload_train_target": "disk", "colocate": True, "debug_rollout_only": True},
            {"disk-needs-offload"},
        ),
        ({"offload_train_target": "disk", "colocate": True, "offload_train": False}, {"disk-needs-offload"}),
        (
            {"offload_train_target": "disk", "offload_train": True, "train_backend": "fsdp"},
            {"disk-needs-megatron"},
        ),
        (
            {"offload_train_target": "disk", "colocate": True, "offload_train_disk_chunk_mb": 0},
            {"chunk-positive"},
        ),
        (
            {"offload_train_target": "disk", "train_backend": "fsdp", "offload_train_disk_chunk_mb": -1},
            {"disk-needs-offload", "disk-needs-megatron", "chunk-positive"},
        ),
        ({"rematerialize_param_from_master_weight": True, "colocate": True}, set()),
        ({"rematerialize_param_from_master_weight": True, "offload_train": True}, {"rematerialize-needs"}),
        (
            {
                "rematerialize_param_from_master_weight": True,
                "colocate": True,
                "offload_train_target": "disk",
            },
            {"rematerialize-needs"},
        ),
        (
            {"rematerialize_param_from_master_weight": True, "colocate": True, "offload_train": False},
            {"rematerialize-needs"},
        ),
    ],
)
def test_trainer_offload_without_streaming(flags, rules):
    assert set(broken(**flags)) == rules


def test_faults_are_all_reported_at_once():
    four = {
        "offload_train": True,
        "train_backend": "fsdp",
        "offload_train_disk_chunk_mb": 0,
        "optimizer": "sgd",
    }
    assert broken(**STREAMING_ALONE | four) == [
        "stream-offload-needs-disk",
        "stream-needs-megatron",
        "stream-needs-adam",
        "chunk-positive",
    ]


def test_every_rule_can_be_broken_and_says_what_to_do():
    everything = {flag: values[-1] for flag, values in DOMAINS.items()}
    on_disk = everything | {"offload_train": False, "offload": False, "offload_train_target": "disk"}
    on_cpu = everything | {"debug_rollout_only": False, "offload_train_target": "cpu"}
    for_streaming = {"use_distributed_optimizer": False, "stream_optimizer_state_to_disk": True}
    violations = [*validate(on_disk | for_streaming).violations, *validate(on_cpu | for_streaming).violations]
    assert {violation.rule for violation in violations} == {rule.id for rule in RULES}
    for violation in violations:
        assert violation.message
        assert violation.remedy
        assert set(violation.flags) <= {flag.name for flag in FLAG_BY_DEST.values()}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, (False, False, False)),
        ({"offload": True}, (False, True, True)),
        ({"offload": True, "offload_train": False}, (False, True, True)),
        ({"offload_train": True}, (False, True, False)),
        ({"colocate": True}, (True, True, True)),
        ({"colocate": True, "offload_train": False}, (True, False, True)),
        ({"colocate": True, "offload_rollout": False}, (True, True, False)),
        ({"use_critic": True}, (False, True, False)),
        ({"use_critic": True, "offload_train": False}, (False, False, False)),
        ({"colocate": True, "offload": True, "use_critic": True, "debug_rollout_only": True}, (False,) * 3),
    ],
)
def test_offloads_resolve_in_order(flags, expected):
    values = resolved(**flags)
    assert tuple(values[dest] for dest in ("colocate", "offload_train", "offload_rollout")) == expected


def test_a_given_directory_is_kept_as_it_was_given():
    assert resolved(offload_train_disk_dir="~/a:b")["offload_train_disk_dir"] == "~/a:b"


@pytest.mark.parametrize("nothing", ["", ":", [], ()])
def test_an_empty_directory_is_an_unset_one(nothing):
    assert resolved(offload_train_disk_dir=nothing)["offload_train_disk_dir"] is None


def test_directories_become_absolute_only_for_the_optimizer(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    for given_as in ("~/a:b", ["~/a", "b"]):
        values = resolved(**STREAMING_ALONE, offload_train_disk_dir=given_as)
        assert disk_directories(values) == ("/home/someone/a", str(tmp_path / "b"))
        assert stream_config(values).directories == disk_directories(values)


def test_the_stream_config_carries_every_flag():
    config = stream_config(
        resolved(
            **STREAMING_ALONE,
            offload_train_disk_dir="/a",
            offload_train_disk_chunk_mb=3,
            stream_optimizer_state_moment_dtype="bf16",
            stream_optimizer_state_bucket_numel=64,
            stream_optimizer_state_depth=2,
            stream_optimizer_state_host_cache_mb=5,
            stream_optimizer_state_keep_slots=True,
            stream_optimizer_state_write_behind=False,
            stream_optimizer_state_read_ahead=False,
            stream_optimizer_state_verify=False,
        )
    )
    assert (config.enabled, config.directories, config.moment_dtype) == (True, ("/a",), "bf16")
    assert (config.bucket_numel, config.depth) == (64, 2)
    assert (config.chunk_bytes, config.host_cache_bytes) == (3 * 1024**2, 5 * 1024**2)
    assert (config.keep_slots, config.write_behind, config.read_ahead, config.verify) == (
        True,
        False,
        False,
        False,
    )


def test_a_stream_config_that_is_off_names_no_directory():
    config = stream_config(resolved(offload_train_disk_dir="/a", stream_optimizer_state_depth=0))
    assert (config.enabled, config.directories) == (False, ())


def test_a_trainers_namespace_gets_the_resolved_values():
    args = argparse.Namespace(**STREAMING_ALONE, offload_rollout=True, no_load_optim=None, hidden_size=64)
    values = validate_arguments(args)
    assert args.hidden_size == 64
    assert {dest: getattr(args, dest) for dest in DEFAULTS} == dict(values)
    assert args.offload_train is False
    assert args.no_load_optim is False
    assert args.stream_optimizer_state_depth == 4
    assert args.offload_train_disk_dir.endswith(f"/miles_train_offload_{os.getuid()}")


def test_a_refused_namespace_is_left_alone_and_the_error_carries_everything():
    args = argparse.Namespace(**STREAMING_ALONE, offload_train=True, optimizer="sgd")
    before = dict(vars(args))
    with pytest.raises(StreamConfigError, match=r"stream-offload-needs-disk.*stream-needs-adam") as caught:
        validate_arguments(args)
    assert vars(args) == before
    assert [each.rule for each in caught.value.violations] == [
        "stream-offload-needs-disk",
        "stream-needs-adam",
    ]
    assert "\n" not in str(caught.value)
    assert pickle.loads(pickle.dumps(caught.value)).violations == caught.value.violations


@pytest.mark.parametrize(
    ("dest", "value"),
    [
        ("stream_optimizer_state_depth", "4"),
        ("stream_optimizer_state_depth", True),
        ("colocate", "yes"),
        ("offload_train", 1),
        ("offload_train_disk_dir", 7),
        ("offload_train_disk_dir", ["/a", None]),
        ("optimizer", ["adam"]),
    ],
)
def test_a_value_of_the_wrong_type_is_named(dest, value):
    with pytest.raises(StreamConfigError, match=FLAG_BY_DEST[dest].name):
        validate_arguments(argparse.Namespace(**{dest: value}))


def test_the_resolved_configuration_is_frozen():
    with pytest.raises(TypeError):
        validate({}).resolved["colocate"] = True


@given(flags_given)
def test_what_is_valid_stays_valid_and_the_same_when_judged_again(flags):
    verdict = validate(flags)
    again = validate(verdict.resolved)
    assert dict(again.resolved) == dict(verdict.resolved)
    assert {each.rule for each in again.violations} == {each.rule for each in verdict.violations}


@given(flags_given)
def test_everything_is_resolved_and_only_the_directory_may_stay_unset(flags):
    values = resolved(**flags)
    assert list(values) == list(DEFAULTS)
    assert {dest for dest, value in values.items() if value is None} <= {"offload_train_disk_dir"}


@given(flags_given)
def test_a_missing_flag_means_its_default(flags):
    assert validate(flags) == validate(DEFAULTS | flags)


@given(flags_given)
def test_a_valid_configuration_always_makes_a_stream_config(flags):
    verdict = validate(flags)
    if verdict.valid:
        config = stream_config(verdict.resolved)
        assert config.enabled == verdict.resolved["stream_optimizer_state_to_disk"]
        assert bool(config.directories) == config.enabled


@given(flags_given.filter(lambda flags: flags.get("stream_optimizer_state_to_disk")))
def test_what_streams_has_a_directory_whatever_else_is_said(flags):
    assert resolved(**flags)["offload_train_disk_dir"]


def test_the_verdict_is_the_same_without_asserts():
    code = """
import json
from optstream.core.validator import validate
from optstream.harness.brute_force import draw
print(json.dumps([[v.rule for v in validate(c).violations] for c in draw(0, 300, seed=3)]))
"""
    runs = [
        subprocess.run(
            [sys.executable, *flags, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        for flags in ([], ["-O"])
    ]
    assert runs[0] == runs[1]
    assert sum(map(bool, json.loads(runs[0]))) > 100
