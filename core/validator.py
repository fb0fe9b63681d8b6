"""Which flags go together: rules as data, how flags resolve, and the verdict with every violation at once.

`STEPS` say, in order, what flags become; `RULES` say what is refused, and why. Both are tables: the validator
applies them, docs/flags.md prints them, and the argument matrix (harness/matrix.py) holds each row of them
against an independent oracle. A condition may read only what its row declares in `reads`.

Flags are keyed by argparse name (`offload_train_disk_dir`). Imports no torch.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from optstream.core.config import FLAG_BY_DEST, FLAGS, MIB, SOUND_MOMENT_DTYPES, Kind, StreamConfig
from optstream.core.errors import StreamConfigError

Values = Mapping[str, object]

STREAM = "stream_optimizer_state_to_disk"
MOMENT_DTYPE = "stream_optimizer_state_moment_dtype"
BUCKET_NUMEL = "stream_optimizer_state_bucket_numel"
DEPTH = "stream_optimizer_state_depth"
HOST_CACHE = "stream_optimizer_state_host_cache_mb"
TRAIN = "offload_train"
ROLLOUT = "offload_rollout"
TARGET = "offload_train_target"
DISK_DIR = "offload_train_disk_dir"
CHUNK = "offload_train_disk_chunk_mb"


def default_directory() -> str:
    """Where files go when no directory was given: per user, so that two people on a node do not meet."""
    return os.path.join(os.environ.get("SCRATCH") or "/scratch", f"miles_train_offload_{os.getuid()}")


def uses_disk(values: Values) -> bool:
    """Streaming uses the disk by itself, whether or not the trainer is parked there too."""
    return values[TARGET] == "disk" or values[STREAM]


@dataclass(frozen=True, slots=True)
class Step:
    """One step of resolution: where `when` holds, the flags in `sets` become `to`.

    Under `only_unset` those that have a value keep it. A callable `to` is called for the value.
    """

    text: str
    reads: tuple[str, ...]
    when: Callable[[Values], bool]
    sets: tuple[str, ...]
    to: object
    only_unset: bool = False


STEPS: tuple[Step, ...] = (
    Step(
        "`--offload` turns on both offloads.",
        reads=("offload",),
        when=lambda v: v["offload"],
        sets=(TRAIN, ROLLOUT),
        to=True,
    ),
    Step(
        "`--debug-rollout-only` turns off `--colocate` and both offloads: there is no trainer to park.",
        reads=("debug_rollout_only",),
        when=lambda v: v["debug_rollout_only"],
        sets=("colocate", TRAIN, ROLLOUT),
        to=False,
    ),
    Step(
        "`--colocate` turns on each offload that is unset; an explicit `--no-offload-...` is respected.",
        reads=("colocate",),
        when=lambda v: v["colocate"],
        sets=(TRAIN, ROLLOUT),
        to=True,
        only_unset=True,
    ),
    Step(
        "`--use-critic` turns on an unset `--offload-train`: actor and critic take turns.",
        reads=("use_critic",),
        when=lambda v: v["use_critic"],
        sets=(TRAIN,),
        to=True,
        only_unset=True,
    ),
    Step(
        "An offload that is still unset is off.",
        reads=(),
        when=lambda v: True,
        sets=(TRAIN, ROLLOUT),
        to=False,
        only_unset=True,
    ),
    Step(
        "`--offload-train-disk-dir`, when unset and something uses the disk (`--offload-train-target disk`, "
        "or streaming by itself), becomes `$SCRATCH/miles_train_offload_<uid>`, or the same under `/scratch` "
        "where `SCRATCH` is not set. Otherwise it stays unset.",
        reads=(TARGET, STREAM),
        when=uses_disk,
        sets=(DISK_DIR,),
        to=default_directory,
        only_unset=True,
    ),
)


@dataclass(frozen=True, slots=True)
class Rule:
    """One reason to refuse: where `broken` holds over the resolved flags it `reads`, `refused` is refused."""

    id: str
    reads: tuple[str, ...]
    broken: Callable[[Values], bool]
    refused: str
    why: str
    remedy: str

    @property
    def flags(self) -> tuple[str, ...]:
        return tuple(FLAG_BY_DEST[dest].name for dest in self.reads)


def _streaming_excludes(rule_id: str, dest: str, refused: str, why: str) -> Rule:
    flag = FLAG_BY_DEST[dest].name
    return Rule(
        rule_id,
        reads=(STREAM, dest),
        broken=lambda v: v[STREAM] and v[dest],
        refused=f"streaming with {refused}",
        why=why,
        remedy=f"Drop {flag}, or drop --stream-optimizer-state-to-disk",
    )


RULES: tuple[Rule, ...] = (
    Rule(
        "disk-needs-offload",
        reads=(TARGET, TRAIN),
        broken=lambda v: v[TARGET] == "disk" and not v[TRAIN],
        refused="a disk target without trainer offload",
        why="nothing is ever parked, so the target would not be read",
        remedy="Add --offload-train (--colocate implies it), or drop --offload-train-target disk; "
        "streaming alone needs no target",
    ),
    Rule(
        "disk-needs-megatron",
        reads=(TARGET, "train_backend"),
        broken=lambda v: v[TARGET] == "disk" and v["train_backend"] != "megatron",
        refused="a disk target on a backend other than megatron",
        why="only the Megatron trainer knows how to park itself in files",
        remedy="Use --train-backend megatron, or --offload-train-target cpu",
    ),
    Rule(
        "stream-offload-needs-disk",
        reads=(STREAM, TRAIN, TARGET),
        broken=lambda v: v[STREAM] and v[TRAIN] and v[TARGET] != "disk",
        refused="streaming with trainer offload to the CPU",
        why="a run whose state does not fit the GPU for the step will not hold a pinned copy of the whole "
        "actor in host memory either",
        remedy="Add --offload-train-target disk, or drop trainer offload if the trainer has its devices to "
        "itself (--colocate, --offload and --use-critic turn it on)",
    ),
    Rule(
        "stream-needs-megatron",
        reads=(STREAM, "train_backend"),
        broken=lambda v: v[STREAM] and v["train_backend"] != "megatron",
        refused="streaming on a backend other than megatron",
        why="the state that is streamed is that of Megatron's DistributedOptimizer",
        remedy="Use --train-backend megatron",
    ),
    _streaming_excludes(
        "stream-indep-dp",
        "indep_dp",
        "independent data-parallel cells",
        "ranks restart at 0 in each cell, so two cells on a node would share a directory",
    ),
    Rule(
        "stream-needs-distributed-optimizer",
        reads=(STREAM, "use_distributed_optimizer"),
        broken=lambda v: v[STREAM] and not v["use_distributed_optimizer"],
        refused="streaming without the distributed optimizer",
        why="only its shards give each rank main params of its own to keep in files",
        remedy="Add --use-distributed-optimizer",
    ),
    Rule(
        "stream-needs-adam",
        reads=(STREAM, "optimizer"),
        broken=lambda v: v[STREAM] and v["optimizer"] != "adam",
        refused="streaming with an optimizer other than adam",
        why="the files hold main params and Adam's two moments, and no other optimizer's state",
        remedy="Use --optimizer adam",
    ),
    Rule(
        "stream-lora",
        reads=(STREAM, "lora_rank", "multi_lora_n_adapters"),
        broken=lambda v: v[STREAM] and (v["lora_rank"] > 0 or v["multi_lora_n_adapters"] > 0),
        refused="streaming with LoRA or multi-LoRA",
        why="their checkpoint path saves the optimizer's own state dict, which lacks what is in files",
        remedy="Drop --lora-rank and --multi-lora-n-adapters: adapters are small enough to stay resident "
        "without --stream-optimizer-state-to-disk",
    ),
    _streaming_excludes(
        "stream-cpu-offload",
        "optimizer_cpu_offload",
        "CPU optimizer offload",
        "the fp32 main params must be Megatron's own, on the device during the step",
    ),
    _streaming_excludes(
        "stream-offload-states",
        "offload_optimizer_states",
        "optimizer-state offload",
        "the fp32 main params must be Megatron's own, and two mechanisms would move the same state",
    ),
    _streaming_excludes(
        "stream-precision-aware",
        "use_precision_aware_optimizer",
        "the precision-aware optimizer",
        "the fp32 main params must be Megatron's own, and it keeps them inside FusedAdam",
    ),
    _streaming_excludes(
        "stream-reset",
        "reset_optimizer_states",
        "a reset of the optimizer states",
        "it writes state that the store holds",
    ),
    _streaming_excludes(
        "stream-checksum",
        "save_local_weight_checksum",
        "weight checksums",
        "they read state that the store holds",
    ),
    _streaming_excludes(
        "stream-witness",
        "enable_witness",
        "the witness",
        "it reads state that the store holds",
    ),
    _streaming_excludes(
        "stream-fp8-params",
        "fp8_param_gather",
        "fp8 params",
        "they are quantised by a collective over the whole set, which cannot be done bucket by bucket",
    ),
    _streaming_excludes(
        "stream-megatron-fsdp",
        "use_megatron_fsdp",
        "Megatron-FSDP",
        "it shards and holds the main params itself",
    ),
    Rule(
        "stream-moment-dtype",
        reads=(STREAM, MOMENT_DTYPE),
        broken=lambda v: v[STREAM] and v[MOMENT_DTYPE] not in SOUND_MOMENT_DTYPES,
        refused="streaming with fp16 or 8-bit moments",
        why="unscaled, exp_avg_sq underflows to zero in them and the update explodes",
        remedy=f"Use --stream-optimizer-state-moment-dtype {' or '.join(SOUND_MOMENT_DTYPES)}",
    ),
    Rule(
        "stream-sizes",
        reads=(STREAM, BUCKET_NUMEL, DEPTH, HOST_CACHE),
        broken=lambda v: v[STREAM] and (v[BUCKET_NUMEL] < 1 or v[DEPTH] < 1 or v[HOST_CACHE] < 0),
        refused="streaming with a bucket size or depth that is not positive, or a negative cache",
        why="nothing could be fetched, and no cache is smaller than none",
        remedy="Give --stream-optimizer-state-bucket-numel and --stream-optimizer-state-depth 1 or more, and "
        "--stream-optimizer-state-host-cache-mb 0 or more",
    ),
    Rule(
        "chunk-positive",
        reads=(TARGET, STREAM, CHUNK),
        broken=lambda v: uses_disk(v) and v[CHUNK] < 1,
        refused="a chunk size that is not positive while something uses the disk",
        why="no transfer would move anything",
        remedy="Give --offload-train-disk-chunk-mb 1 or more (256 by default)",
    ),
    Rule(
        "rematerialize-needs",
        reads=("rematerialize_param_from_master_weight", "colocate", TRAIN, TARGET),
        broken=lambda v: (
            v["rematerialize_param_from_master_weight"]
            and not (v["colocate"] and v[TRAIN] and v[TARGET] == "cpu")
        ),
        refused="rematerialising params from main params without colocation and trainer offload to the CPU",
        why="params are made again when a colocated trainer wakes, from main params in host memory",
        remedy="Drop --rematerialize-param-from-master-weight, or use it with --colocate and "
        "--offload-train-target cpu; it never goes with streaming",
    ),
)


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken rule, in words. `flags` are those that the rule looks at, as spelled on the command line."""

    rule: str
    flags: tuple[str, ...]
    message: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the flags resolve to, read-only, and every rule they break; none if they go together."""

    resolved: Values
    violations: tuple[Violation, ...]

    @property
    def valid(self) -> bool:
        return not self.violations


def validate(values: Values) -> Verdict:
    """Judge flags by argparse name. What is missing or None has its default; other keys are not looked at.

    Raises StreamConfigError for a value of the wrong type, which no parser would have let through.
    """
    resolved = resolve(_complete(values))
    violations = tuple(_explain(rule, resolved) for rule in broken_rules(resolved))
    return Verdict(MappingProxyType(resolved), violations)


def validate_arguments(args: argparse.Namespace) -> Values:
    """Judge a trainer's own namespace, write the resolved value of every flag back to it, and return them.

    Raises StreamConfigError carrying every violation; `args` is then as it was.
    """
    verdict = validate(vars(args))
    if not verdict.valid:
        raise refusal(verdict.violations)
    for dest, value in verdict.resolved.items():
        setattr(args, dest, value)
    return verdict.resolved


def refusal(violations: Sequence[Violation]) -> StreamConfigError:
    """The error that carries these violations."""
    if len(violations) == 1:
        (only,) = violations
        return StreamConfigError(
            f"[{only.rule}] {only.message}", remedy=only.remedy, violations=tuple(violations)
        )
    listing = "; ".join(f"[{each.rule}] {each.message}. {each.remedy}" for each in violations)
    return StreamConfigError(
        f"{len(violations)} things do not go together", why=listing, violations=tuple(violations)
    )


def stream_config(resolved: Values) -> StreamConfig:
    """The part of a valid resolved configuration that the optimizers take. Directories are made absolute."""
    enabled = bool(resolved[STREAM])
    return StreamConfig(
        enabled=enabled,
        directories=disk_directories(resolved) if enabled else (),
        bucket_numel=resolved[BUCKET_NUMEL],
        depth=resolved[DEPTH],
        moment_dtype=resolved[MOMENT_DTYPE],
        chunk_bytes=resolved[CHUNK] * MIB,
        host_cache_bytes=resolved[HOST_CACHE] * MIB,
        keep_slots=resolved["stream_optimizer_state_keep_slots"],
        write_behind=resolved["stream_optimizer_state_write_behind"],
        read_ahead=resolved["stream_optimizer_state_read_ahead"],
        verify=resolved["stream_optimizer_state_verify"],
    )


def disk_directories(resolved: Values) -> tuple[str, ...]:
    """`--offload-train-disk-dir` as absolute paths, `~` expanded; empty where it is unset."""
    return tuple(os.path.abspath(os.path.expanduser(path)) for path in _split(resolved[DISK_DIR]))


def resolve(raw: Values, steps: Iterable[Step] = STEPS) -> dict[str, object]:
    """Apply the steps, in order, to a complete set of flags."""
    values = dict(raw)
    apply_steps(steps, values)
    return values


def apply_steps(steps: Iterable[Step], values: MutableMapping[str, object]) -> None:
    for step in steps:
        if not step.when(values):
            continue
        for dest in step.sets:
            if not step.only_unset or values[dest] is None:
                values[dest] = step.to() if callable(step.to) else step.to


def broken_rules(resolved: Values, rules: Iterable[Rule] = RULES) -> list[Rule]:
    return [rule for rule in rules if rule.broken(resolved)]


def trace(dests: Iterable[str], steps: Sequence[Step] = STEPS) -> tuple[tuple[Step, ...], frozenset[str]]:
    """The steps that can change any of these resolved flags, and the raw flags that these then depend on.

    Each step is narrowed to the flags that matter, so that applying it reads nothing else.
    """
    wanted = set(dests)
    relevant: list[Step] = []
    for step in reversed(steps):
        sets = tuple(dest for dest in step.sets if dest in wanted)
        if sets:
            relevant.append(replace(step, sets=sets))
            wanted.update(step.reads)
    return tuple(reversed(relevant)), frozenset(wanted)


def _complete(values: Values) -> dict[str, object]:
    complete: dict[str, object] = {}
    for flag in FLAGS:
        value = values.get(flag.dest)
        if not flag.accepts(value):
            raise StreamConfigError(
                f"{flag.name} is {value!r}",
                why=f"a {type(value).__name__} is no value of {flag.spelling}",
                remedy="Give it as its parser would",
            )
        if flag.kind is Kind.PATHS and not _split(value):
            value = None
        complete[flag.dest] = flag.default if value is None else value
    return complete


def _split(directories: object) -> tuple[str, ...]:
    if directories is None:
        return ()
    paths = directories.split(os.pathsep) if isinstance(directories, str) else directories
    return tuple(path for path in paths if path)


def _explain(rule: Rule, resolved: Values) -> Violation:
    flags = (FLAG_BY_DEST[dest] for dest in rule.reads)
    given = " ".join(
        " ".join(flag.as_arguments(resolved[flag.dest]))
        for flag in flags
        if resolved[flag.dest] != flag.default
    )
    return Violation(rule.id, rule.flags, f"{rule.refused} ({given}): {rule.why}", rule.remedy)
