"""An independent verdict over one combination of flags, to hold the validator against.

It imports nothing of optstream, on purpose, and is written the other way round: the validator applies steps
forward over a table; here each value and each refusal is decided at once from the flags as they were given.
Every function declares the flags that it reads; the matrix hands it nothing else.

A combination maps argparse names to values as parsed: None for an unset tri-state or directory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Combination = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Opinion:
    """One decision, and the flags (as given) that it looks at."""

    reads: frozenset[str]
    decide: Callable[[Combination], object]


REFUSALS: dict[str, Opinion] = {}
VALUES: dict[str, Opinion] = {}


def _opinion(table: dict[str, Opinion], name: str, *reads: str) -> Callable:
    def register(decide: Callable[[Combination], object]) -> Callable[[Combination], object]:
        table[name] = Opinion(frozenset(reads), decide)
        return decide

    return register


def refuses(rule: str, *reads: str) -> Callable:
    return _opinion(REFUSALS, rule, *reads)


def value_of(dest: str, *reads: str) -> Callable:
    return _opinion(VALUES, dest, *reads)


# ---- what the flags mean --------------------------------------------------------------------------------

TRAINER_PARKED = ("debug_rollout_only", "offload", "offload_train", "colocate", "use_critic")
ROLLOUT_PARKED = ("debug_rollout_only", "offload", "offload_rollout", "colocate")
DISK_IN_USE = ("offload_train_target", "stream_optimizer_state_to_disk")


@value_of("colocate", "colocate", "debug_rollout_only")
def shares_devices(c: Combination) -> bool:
    return c["colocate"] and not c["debug_rollout_only"]


@value_of("offload_train", *TRAINER_PARKED)
def trainer_parked(c: Combination) -> bool:
    if c["debug_rollout_only"]:
        return False
    if c["offload"]:
        return True
    if c["offload_train"] is None:
        return c["colocate"] or c["use_critic"]
    return c["offload_train"]


@value_of("offload_rollout", *ROLLOUT_PARKED)
def rollout_parked(c: Combination) -> bool:
    if c["debug_rollout_only"]:
        return False
    if c["offload"]:
        return True
    if c["offload_rollout"] is None:
        return c["colocate"]
    return c["offload_rollout"]


def disk_in_use(c: Combination) -> bool:
    return c["stream_optimizer_state_to_disk"] or c["offload_train_target"] == "disk"


@value_of("offload_train_disk_dir", "offload_train_disk_dir", *DISK_IN_USE)
def directory(c: Combination) -> str | None:
    if c["offload_train_disk_dir"] is not None or not disk_in_use(c):
        return c["offload_train_disk_dir"]
    scratch = os.environ.get("SCRATCH", "")
    return f"{scratch.rstrip('/') if scratch else '/scratch'}/miles_train_offload_{os.getuid()}"


# ---- what is refused ------------------------------------------------------------------------------------


@refuses("disk-needs-offload", "offload_train_target", *TRAINER_PARKED)
def disk_without_offload(c: Combination) -> bool:
    return c["offload_train_target"] == "disk" and not trainer_parked(c)


@refuses("disk-needs-megatron", "offload_train_target", "train_backend")
def disk_on_another_backend(c: Combination) -> bool:
    return (c["offload_train_target"], c["train_backend"]) == ("disk", "fsdp")


@refuses(
    "stream-offload-needs-disk", "stream_optimizer_state_to_disk", "offload_train_target", *TRAINER_PARKED
)
def streaming_parked_on_cpu(c: Combination) -> bool:
    return c["stream_optimizer_state_to_disk"] and c["offload_train_target"] == "cpu" and trainer_parked(c)


@refuses("stream-needs-megatron", "stream_optimizer_state_to_disk", "train_backend")
def streaming_on_another_backend(c: Combination) -> bool:
    return c["stream_optimizer_state_to_disk"] and c["train_backend"] == "fsdp"


@refuses("stream-indep-dp", "stream_optimizer_state_to_disk", "indep_dp")
def streaming_in_cells(c: Combination) -> bool:
    return c["stream_optimizer_state_to_disk"] and c["indep_dp"]


@refuses("stream-needs-distributed-optimizer", "stream_optimizer_state_to_disk", "use_distributed_optimizer")
def streaming_undistributed(c: Combination) -> bool:
    return c["stream_optimizer_state_to_disk"] and not c["use_distributed_optimizer"]


@refuses("stream-needs-adam", "stream_optimizer_state_to_disk", "optimizer")
def streaming_something_else(c: Combination) -> bool:
    return c["stream_optimizer_state_to_disk"] and c["optimizer"] != "adam"


@refuses("stream-lora", "stream_optimizer_state_to_disk", "lora_rank", "multi_lora_n_adapters")
def streaming_adapters(c: Combination) -> bool:
    if not c["stream_optimizer_state_to_disk"]:
        return False
    return c["lora_rank"] != 0 or c["multi_lora_n_adapters"] != 0


@refuses("stream-cpu-offload", "stream_optimizer_state_to_disk", "optimizer_cpu_offload")
def streaming_on_the_cpu(c: Combination) -> bool:
    return c["stream_optimizer_state_to_disk"] and c["optimizer_cpu_offload"]


@refuses("stream-offload-states", "stream_optimizer_state_to_disk", "offload_optimizer_states")
def streaming_offloaded_states(c: Combination) -> bool:
    return c["stream_optimizer_state_to_disk"] and c["offload_optimizer_states"]


@refuses("stream-precision-aware", "stream_optimizer_state_to_disk", "use_precision_aware_optimizer")
def streaming_foreign_mains(c: Combination) -> bool:
    return c["stream_optimizer_state_to_disk"] and c["use_precision_aware_optimizer"]


@refuses("stream-reset", "stream_optimizer_state_to_disk", "reset_optimizer_states")
def streaming_reset(c: Combination) -> bool:
    return c["stream_optimizer_state_to_disk"] and c["reset_optimizer_states"]


@refuses("stream-checksum", "stream_optimizer_state_to_disk", "save_local_weight_checksum")
def streaming_checksummed(c: Combination) -> bool:
    return c["stream_optimizer_state_to_disk"] and c["save_local_weight_checksum"]


@refuses("stream-witness", "stream_optimizer_state_to_disk", "enable_witness")
def streaming_witnessed(c: Combination) -> bool:
    return c["stream_optimizer_state_to_disk"] and c["enable_witness"]


@refuses("stream-fp8-params", "stream_optimizer_state_to_disk", "fp8_param_gather")
def streaming_fp8_params(c: Combination) -> bool:
    return c["stream_optimizer_state_to_disk"] and c["fp8_param_gather"]


@refuses("stream-megatron-fsdp", "stream_optimizer_state_to_disk", "use_megatron_fsdp")
def streaming_fsdp(c: Combination) -> bool:
    return c["stream_optimizer_state_to_disk"] and c["use_megatron_fsdp"]


@refuses("stream-moment-dtype", "stream_optimizer_state_to_disk", "stream_optimizer_state_moment_dtype")
def streaming_unscaled(c: Combination) -> bool:
    unscaled = ("fp16", "fp8e4m3", "fp8e5m2")
    return c["stream_optimizer_state_to_disk"] and c["stream_optimizer_state_moment_dtype"] in unscaled


@refuses(
    "stream-sizes",
    "stream_optimizer_state_to_disk",
    "stream_optimizer_state_bucket_numel",
    "stream_optimizer_state_depth",
    "stream_optimizer_state_host_cache_mb",
)
def streaming_nothing(c: Combination) -> bool:
    if not c["stream_optimizer_state_to_disk"]:
        return False
    if c["stream_optimizer_state_host_cache_mb"] < 0:
        return True
    return min(c["stream_optimizer_state_bucket_numel"], c["stream_optimizer_state_depth"]) <= 0


@refuses("chunk-positive", "offload_train_disk_chunk_mb", *DISK_IN_USE)
def chunk_of_nothing(c: Combination) -> bool:
    return c["offload_train_disk_chunk_mb"] <= 0 and disk_in_use(c)


# Not use_critic: it parks the trainer only where colocation, without which this is refused anyway, does not.
@refuses(
    "rematerialize-needs",
    "rematerialize_param_from_master_weight",
    "offload_train_target",
    "debug_rollout_only",
    "offload",
    "offload_train",
    "colocate",
)
def rematerialize_without_mains(c: Combination) -> bool:
    if not c["rematerialize_param_from_master_weight"]:
        return False
    return not shares_devices(c) or not trainer_parked(c) or c["offload_train_target"] == "disk"


# ---- the whole verdict ----------------------------------------------------------------------------------


def violated(c: Combination) -> frozenset[str]:
    """The ids of every rule that this combination breaks; empty if it is allowed."""
    return frozenset(rule for rule, opinion in REFUSALS.items() if opinion.decide(c))


def resolved(c: Combination) -> dict[str, object]:
    """What the flags become. A flag that no function above speaks for stays as it was given."""
    return {**c, **{dest: opinion.decide(c) for dest, opinion in VALUES.items()}}
