"""Every flag, once, as data; and the frozen configuration that the streaming optimizers take.

The parser, the validator, the argument matrix and docs/flags.md are all made from `FLAGS`. Names are spelled
as the trainers that have them spell them. Which flags go together is the validator's business.
Imports no torch: checking a configuration must answer at once.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from optstream.core.errors import StreamConfigError

MIB = 1 << 20
MOMENT_DTYPES = ("fp32", "bf16", "fp16", "fp8e4m3", "fp8e5m2")
# fp16 and unscaled 8 bits let exp_avg_sq underflow to zero, and the update explodes.
SOUND_MOMENT_DTYPES = ("fp32", "bf16")


class Kind(Enum):
    """How a flag is spelled, and the values it can have."""

    SWITCH = "switch"  # --x: False, or True when given
    TOGGLE = "toggle"  # --[no-]x: a bool with a default
    TRISTATE = "tristate"  # --[no-]x: None when not given, and then decided by other flags
    INTEGER = "integer"
    TEXT = "text"
    PATHS = "paths"  # one directory, or several as A:B:C (or, in a namespace, a sequence of them)


@dataclass(frozen=True, slots=True)
class Flag:
    """One command-line flag. `nargs` is argparse's, None for exactly one value."""

    name: str
    kind: Kind
    default: object
    help: str
    group: str
    choices: tuple[str, ...] | None = None
    metavar: str | None = None
    nargs: str | None = None

    @property
    def dest(self) -> str:
        """The attribute that argparse gives it."""
        return self.name.removeprefix("--").replace("-", "_")

    @property
    def is_tristate(self) -> bool:
        return self.kind is Kind.TRISTATE

    @property
    def is_boolean(self) -> bool:
        return self.kind in (Kind.SWITCH, Kind.TOGGLE, Kind.TRISTATE)

    @property
    def spelling(self) -> str:
        """As a person writes it in a table: `--[no-]offload-train`, `--offload-train-target {cpu,disk}`."""
        if self.kind in (Kind.TOGGLE, Kind.TRISTATE):
            return f"--[no-]{self.name.removeprefix('--')}"
        if self.choices:
            return f"{self.name} {{{','.join(self.choices)}}}"
        return f"{self.name} {self.metavar}" if self.metavar else self.name

    def accepts(self, value: object) -> bool:
        """Whether a value found in a trainer's namespace is of this flag's type. None means "not given"."""
        if value is None:
            return True
        if self.is_boolean:
            return isinstance(value, bool)
        if self.kind is Kind.INTEGER:
            return isinstance(value, int) and not isinstance(value, bool)
        if self.kind is Kind.PATHS and isinstance(value, list | tuple):
            return all(isinstance(path, str) for path in value)
        return isinstance(value, str)

    def as_arguments(self, value: object) -> tuple[str, ...]:
        """The words that give the flag this value on a command line; none for an unset one."""
        if value is None or (self.kind is Kind.SWITCH and not value):
            return ()
        if self.is_boolean:
            return (self.name if value else f"--no-{self.name.removeprefix('--')}",)
        if self.kind is Kind.PATHS and not isinstance(value, str):
            value = os.pathsep.join(value)
        return (self.name, str(value))

    def add_to(self, container: argparse._ActionsContainer) -> None:
        """Add it to a parser or an argument group. Raises argparse.ArgumentError if it is there already."""
        match self.kind:
            case Kind.SWITCH:
                options: dict = {"action": "store_true"}
            case Kind.TOGGLE | Kind.TRISTATE:
                options = {"action": argparse.BooleanOptionalAction}
            case Kind.INTEGER:
                options = {"type": int, "metavar": self.metavar, "nargs": self.nargs}
            case Kind.TEXT | Kind.PATHS:
                options = {"type": str, "nargs": self.nargs, "metavar": self.metavar, "choices": self.choices}
        container.add_argument(self.name, default=self.default, help=self.help, **options)


DEPLOYMENT = "optstream: deployment"
DISK = "optstream: disk"
STREAMING = "optstream: streaming of the optimizer state"
OPTIMIZER = "optstream: optimizer and model"

GROUPS: dict[str, str] = {
    DEPLOYMENT: "where trainer and rollout engines live, and what is parked while the other works",
    DISK: "the files of trainer offload to disk and of streaming",
    STREAMING: "Adam state in files, one bucket at a time on the device during the step",
    OPTIMIZER: "what the trainer does otherwise; streaming depends on it",
}

FLAGS: tuple[Flag, ...] = (
    Flag(
        "--train-backend",
        Kind.TEXT,
        "megatron",
        "the training framework",
        DEPLOYMENT,
        choices=("megatron", "fsdp"),
    ),
    Flag("--colocate", Kind.SWITCH, False, "trainer and rollout engines share the devices", DEPLOYMENT),
    Flag("--offload", Kind.SWITCH, False, "short for --offload-train --offload-rollout", DEPLOYMENT),
    Flag(
        "--offload-train",
        Kind.TRISTATE,
        None,
        "park the trainer while rollout engines use the devices",
        DEPLOYMENT,
    ),
    Flag(
        "--offload-rollout",
        Kind.TRISTATE,
        None,
        "park the rollout engines while the trainer uses the devices",
        DEPLOYMENT,
    ),
    Flag(
        "--offload-train-target",
        Kind.TEXT,
        "cpu",
        "where a parked trainer goes: a pinned host copy, or files on node-local disks",
        DEPLOYMENT,
        choices=("cpu", "disk"),
    ),
    Flag("--use-critic", Kind.SWITCH, False, "train a critic beside the actor", DEPLOYMENT),
    Flag("--debug-rollout-only", Kind.SWITCH, False, "run rollout alone, no trainer", DEPLOYMENT),
    Flag(
        "--indep-dp",
        Kind.SWITCH,
        False,
        "independent data-parallel cells, each with ranks of its own from 0",
        DEPLOYMENT,
    ),
    Flag(
        "--offload-train-disk-dir",
        Kind.PATHS,
        None,
        "directory on node-local NVMe, or several as A:B:C (one a disk); unset, and used: "
        "$SCRATCH/miles_train_offload_<uid>, or /scratch/miles_train_offload_<uid>",
        DISK,
        metavar="DIR[:DIR...]",
    ),
    Flag(
        "--offload-train-disk-chunk-mb",
        Kind.INTEGER,
        256,
        "MiB moved between device and disk at a time; bounds the host memory of a transfer",
        DISK,
        metavar="MIB",
    ),
    Flag(
        "--stream-optimizer-state-to-disk",
        Kind.SWITCH,
        False,
        "keep the fp32 main params and Adam moments in files, and stream them through the device "
        "during the step: for state that does not fit the device while the step runs",
        STREAMING,
    ),
    Flag(
        "--stream-optimizer-state-moment-dtype",
        Kind.TEXT,
        "fp32",
        "how the moments are stored; fp32 gives the resident optimizer's bits",
        STREAMING,
        choices=MOMENT_DTYPES,
    ),
    Flag(
        "--stream-optimizer-state-bucket-numel",
        Kind.INTEGER,
        8388608,
        "elements of a bucket: what is fetched, updated and written back together",
        STREAMING,
        metavar="N",
    ),
    Flag(
        "--stream-optimizer-state-depth",
        Kind.INTEGER,
        4,
        "buckets on the device at once; 1 is serial",
        STREAMING,
        metavar="N",
    ),
    Flag(
        "--stream-optimizer-state-host-cache-mb",
        Kind.INTEGER,
        0,
        "MiB of host memory a rank for a write-back cache of buckets",
        STREAMING,
        metavar="MIB",
    ),
    Flag(
        "--stream-optimizer-state-keep-slots",
        Kind.SWITCH,
        False,
        "keep the last buckets of a step on the device for the next one",
        STREAMING,
    ),
    Flag(
        "--stream-optimizer-state-write-behind",
        Kind.TOGGLE,
        True,
        "return from the step when the last update is done; writes end during the next forward",
        STREAMING,
    ),
    Flag(
        "--stream-optimizer-state-read-ahead",
        Kind.TOGGLE,
        True,
        "fetch the first buckets before the gradients are final",
        STREAMING,
    ),
    Flag(
        "--stream-optimizer-state-verify",
        Kind.TOGGLE,
        True,
        "check every byte read back against the checksum of what was written",
        STREAMING,
    ),
    Flag("--optimizer", Kind.TEXT, "adam", "the optimizer: adam, sgd, muon, ...", OPTIMIZER, metavar="NAME"),
    Flag(
        "--use-distributed-optimizer",
        Kind.SWITCH,
        False,
        "shard the optimizer state over data-parallel ranks",
        OPTIMIZER,
    ),
    Flag(
        "--lora-rank",
        Kind.INTEGER,
        0,
        "rank of LoRA adapters; 0 trains the whole model",
        OPTIMIZER,
        metavar="N",
    ),
    Flag(
        "--multi-lora-n-adapters",
        Kind.INTEGER,
        0,
        "how many LoRA adapters train at once; 0 is none",
        OPTIMIZER,
        metavar="N",
    ),
    Flag("--optimizer-cpu-offload", Kind.SWITCH, False, "Megatron: run the optimizer on the CPU", OPTIMIZER),
    Flag(
        "--offload-optimizer-states",
        Kind.SWITCH,
        False,
        "Megatron: move optimizer states to the host between steps",
        OPTIMIZER,
    ),
    Flag(
        "--use-precision-aware-optimizer",
        Kind.SWITCH,
        False,
        "Megatron: keep main params and moments inside TransformerEngine's FusedAdam",
        OPTIMIZER,
    ),
    Flag(
        "--reset-optimizer-states",
        Kind.SWITCH,
        False,
        "set the optimizer states to zero at each rollout",
        OPTIMIZER,
    ),
    Flag(
        "--save-local-weight-checksum",
        Kind.SWITCH,
        False,
        "record checksums of weights and optimizer state",
        OPTIMIZER,
    ),
    Flag(
        "--enable-witness",
        Kind.SWITCH,
        False,
        "record what a sample did to the optimizer state",
        OPTIMIZER,
    ),
    Flag(
        "--rematerialize-param-from-master-weight",
        Kind.SWITCH,
        False,
        "drop the params of a parked trainer and make them again from its main params",
        OPTIMIZER,
    ),
    Flag("--no-load-optim", Kind.SWITCH, False, "load a checkpoint without its optimizer state", OPTIMIZER),
    Flag(
        "--fp8-param-gather",
        Kind.SWITCH,
        False,
        "Megatron: keep params in fp8 and gather them in it",
        OPTIMIZER,
    ),
    Flag("--use-megatron-fsdp", Kind.SWITCH, False, "Megatron-FSDP instead of DDP", OPTIMIZER),
    Flag(
        "--overlap-param-gather",
        Kind.SWITCH,
        False,
        "overlap the all-gather of params with the forward",
        OPTIMIZER,
    ),
)

FLAG_BY_DEST: dict[str, Flag] = {flag.dest: flag for flag in FLAGS}
DEFAULTS: dict[str, object] = {flag.dest: flag.default for flag in FLAGS}


def add_arguments(
    parser: argparse.ArgumentParser,
    *,
    flags: Iterable[Flag] = FLAGS,
    skip_existing: bool = True,
) -> argparse.ArgumentParser:
    """Add the flags to a trainer's parser, and return it; fits Megatron's `extra_args_provider`.

    skip_existing: leave a flag that the parser has already as it is. If False, such a flag raises
    argparse.ArgumentError.
    """
    groups: dict[str, argparse._ArgumentGroup] = {}
    for flag in flags:
        # argparse has no public way to ask, and trying would leave empty groups in --help.
        if skip_existing and flag.name in parser._option_string_actions:
            continue
        if flag.group not in groups:
            groups[flag.group] = parser.add_argument_group(flag.group, GROUPS[flag.group])
        flag.add_to(groups[flag.group])
    return parser


@dataclass(frozen=True, slots=True)
class StreamConfig:
    """The resolved streaming configuration that the optimizers of `core` take.

    Made from a trainer's flags by `validator.stream_config`, or directly by who uses `StreamingAdamW` alone.

    enabled: whether the state is streamed at all; if not, nothing below is read.
    directories: absolute base directories, one a disk.
    bucket_numel: elements of a bucket. depth: buckets on the device at once.
    moment_dtype: how exp_avg and exp_avg_sq are stored.
    chunk_bytes: the most one transfer moves. host_cache_bytes: the write-back cache of a rank, 0 for none.

    Raises StreamConfigError for sizes that no run can have.
    """

    enabled: bool
    directories: tuple[str, ...]
    bucket_numel: int = 8388608
    depth: int = 4
    moment_dtype: str = "fp32"
    chunk_bytes: int = 256 * MIB
    host_cache_bytes: int = 0
    keep_slots: bool = False
    write_behind: bool = True
    read_ahead: bool = True
    verify: bool = True

    def __post_init__(self) -> None:
        if not self.enabled:
            return
        if isinstance(self.directories, str) or not self.directories:
            raise StreamConfigError(
                "streaming has no directory",
                why=f"directories is {self.directories!r}",
                remedy="Pass a tuple with at least one directory on node-local NVMe",
            )
        for name in ("bucket_numel", "depth", "chunk_bytes"):
            if getattr(self, name) < 1:
                raise StreamConfigError(
                    f"{name} is {getattr(self, name)}", why="it must be positive", remedy="Pass 1 or more"
                )
        if self.host_cache_bytes < 0:
            raise StreamConfigError(
                f"host_cache_bytes is {self.host_cache_bytes}",
                why="it is negative",
                remedy="Pass 0 for no cache",
            )
        if self.moment_dtype not in SOUND_MOMENT_DTYPES:
            raise StreamConfigError(
                f"moment_dtype is {self.moment_dtype!r}",
                why="unscaled, exp_avg_sq underflows to zero in it and the update explodes",
                remedy=f"Pass one of {', '.join(SOUND_MOMENT_DTYPES)}",
            )
