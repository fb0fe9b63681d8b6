"""The whole table of deployments on one machine: what each set of flags does with a device that is too small.

Proportions are those of the run that optstream was made for: 12 bytes a parameter of state, and a device with
276.6 bytes of memory for every 279 of them. Every row runs the same loop of rollout and training; the model
of the last row is small enough for its device.
"""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from optstream.core.config import add_arguments
from optstream.core.validator import validate
from optstream.harness.rl import Progress, RlRun, RlSettings, run_rl
from optstream.harness.rl_compare import REFERENCE, moved_bytes, phases_of
from optstream.harness.stream_settings import StreamSettings
from optstream.harness.training_config import TrainingConfig

Outcome = Literal["trained", "oom", "refused"]

STATE_BYTES_PER_PARAMETER = 12
DEVICE_BYTES_PER_STATE_BYTE = 276.6 / 279

# Wide and short, so that activations are as small beside the state as they are in large models.
LARGE = TrainingConfig(layers=2, hidden=192, heads=4, seq=32, batch=1, lr=3e-3)
SMALL = dataclasses.replace(LARGE, layers=1, hidden=128)
STEPS = 2

STREAM = "--stream-optimizer-state-to-disk"
DISK = ("--offload-train-target", "disk")


@dataclass(frozen=True)
class Deployment:
    """One row. expected: how it must end; phase: where, if out of memory; rule: which one refuses it."""

    name: str
    flags: tuple[str, ...]
    expected: Outcome
    phase: str | None = None
    rule: str | None = None
    config: TrainingConfig = LARGE


TABLE = (
    Deployment("disaggregated, resident", (), "oom", phase="step"),
    Deployment("disaggregated, streaming alone", (STREAM,), "trained"),
    Deployment("disaggregated, the old work-around", ("--offload-train", *DISK, STREAM), "trained"),
    Deployment("colocated, CPU offload", ("--colocate",), "oom", phase="step"),
    Deployment("colocated, disk offload", ("--colocate", *DISK), "oom", phase="step"),
    Deployment("colocated, disk offload and streaming", ("--colocate", *DISK, STREAM), "trained"),
    Deployment(
        "colocated, CPU offload and streaming",
        ("--colocate", "--offload-train-target", "cpu", STREAM),
        "refused",
        rule="stream-offload-needs-disk",
    ),
    Deployment("colocated, small model", ("--colocate",), "trained", config=SMALL),
)
# Not a row: what the last one would be with streaming, whose bits must be the same.
SMALL_STREAMED = Deployment(
    "colocated, small model, streaming", ("--colocate", *DISK, STREAM), "trained", config=SMALL
)


@dataclass(frozen=True)
class Row:
    """What one deployment did. read_bytes, written_bytes: of its last step."""

    deployment: Deployment
    outcome: Outcome
    phase: str | None = None
    rule: str | None = None
    run: RlRun = field(default_factory=RlRun)

    @property
    def as_expected(self) -> bool:
        expected = self.deployment
        return (self.outcome, self.phase, self.rule) == (expected.expected, expected.phase, expected.rule)

    def as_dict(self) -> dict[str, Any]:
        run = self.run
        return {
            "deployment": self.deployment.name,
            "flags": list(self.deployment.flags),
            "outcome": self.outcome,
            "phase": self.phase,
            "rule": self.rule,
            "device_bytes_peak": run.device_bytes_peak,
            "host_bytes_peak": run.host_bytes_peak,
            "moved_bytes": moved_bytes(run),
            "read_bytes": run.read_bytes[-1] if run.read_bytes else 0,
            "written_bytes": run.written_bytes[-1] if run.written_bytes else 0,
            "phases": phases_of(run),
        }


@dataclass(frozen=True)
class DeploymentsReport:
    """device_bytes: of the simulated device. differences: pairs that train the same model to other bits."""

    device_bytes: int
    rows: tuple[Row, ...]
    differences: tuple[str, ...]

    @property
    def holds(self) -> bool:
        return not self.differences and all(row.as_expected for row in self.rows)


def run_deployments(rank: int, directory: str, progress: Progress | None = None) -> DeploymentsReport:
    """Every row of TABLE, in its order. A function for `run_ranks`, on one rank.

    directory: where rows that use the disk put their files.
    """
    references = {id(config): run_rl(rank, config, RlSettings(STEPS, REFERENCE)) for config in (LARGE, SMALL)}
    state_bytes = STATE_BYTES_PER_PARAMETER * references[id(LARGE)].parameters
    device_bytes = int(state_bytes * DEVICE_BYTES_PER_STATE_BYTE)
    rows = []
    for number, deployment in enumerate((*TABLE, SMALL_STREAMED), start=1):
        if progress is not None:
            progress(deployment.name, number)
        rows.append(_run(rank, deployment, directory, device_bytes))
    differences = tuple(
        f"{row.deployment.name}: {difference}"
        for row in rows
        if row.outcome == "trained"
        and (difference := _difference(references[id(row.deployment.config)], row.run)) is not None
    )
    return DeploymentsReport(device_bytes, tuple(rows[: len(TABLE)]), differences)


def _run(rank: int, deployment: Deployment, directory: str, device_bytes: int) -> Row:
    flags = flags_of(deployment, directory)
    verdict = validate(flags)
    if not verdict.valid:
        return Row(deployment, "refused", rule=verdict.violations[0].rule)
    settings = RlSettings(STEPS, StreamSettings(flags), device_bytes)
    run = run_rl(rank, deployment.config, settings)
    if run.out_of_memory is not None:
        return Row(deployment, "oom", phase=run.phases[-1].name, run=run)
    return Row(deployment, "trained", run=run)


def flags_of(deployment: Deployment, directory: str) -> dict[str, Any]:
    """The deployment's command line as a trainer's parser reads it, with sizes that fit the small models."""
    words = [
        "--use-distributed-optimizer",
        "--offload-train-disk-dir",
        directory,
        "--offload-train-disk-chunk-mb",
        "1",
        "--stream-optimizer-state-bucket-numel",
        "32768",
    ]
    parser = add_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return vars(parser.parse_args([*words, *deployment.flags]))


def _difference(reference: RlRun, run: RlRun) -> str | None:
    for name in ("loss", "samples", "digest"):
        if getattr(reference, name) != getattr(run, name):
            return f"{name} is {getattr(run, name)!r}, and resident it is {getattr(reference, name)!r}"
    return None
