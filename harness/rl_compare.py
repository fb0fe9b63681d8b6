"""`optstream train --rl-steps`: the loop under a deployment's flags, beside the same loop with all state
resident, nothing parked and no limit, from the same seed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from rich.table import Table

from optstream.core.validator import STREAM
from optstream.harness.errors import DeviceMemoryError
from optstream.harness.final_state import SEGMENTS, first_difference, largest_error
from optstream.harness.rl import Progress, RlRun, RlSettings, run_rl
from optstream.harness.stream_settings import StreamSettings
from optstream.harness.summary import Verdict, joint_digest, verdict
from optstream.harness.training_config import TrainingConfig

REFERENCE = StreamSettings({"use_distributed_optimizer": True})


@dataclass(frozen=True)
class RlComparison:
    """One rank's two loops, without their tensors. `difference` names the first value that differs."""

    reference: RlRun
    asked: RlRun
    streams: bool
    difference: str | None
    max_error: float
    main_error: float


def compare_rl_on_rank(
    rank: int, config: TrainingConfig, settings: RlSettings, progress: Progress | None = None
) -> RlComparison:
    """Both loops. Raises DeviceMemoryError where the asked one runs out of memory."""
    asked = run_rl(rank, config, settings, progress)
    if asked.out_of_memory is not None:
        raise DeviceMemoryError(f"phase {asked.phases[-1].name}: {asked.out_of_memory}", resident={})
    reference = run_rl(rank, config, RlSettings(settings.steps, REFERENCE), progress)
    errors = {name: largest_error(reference.final, asked.final, name) for name in SEGMENTS}
    difference = first_difference(reference.loss, asked.loss, reference.final, asked.final)
    if difference is None and reference.samples != asked.samples:
        difference = "the samples"
    return RlComparison(
        replace(reference, final=None),
        replace(asked, final=None),
        bool(settings.stream.flags.get(STREAM)),
        difference,
        max_error=max(errors.values()),
        main_error=errors["main"],
    )


def summarise_rl(config: TrainingConfig, comparisons: list[RlComparison]) -> dict[str, Any]:
    """summary.json: that of `optstream train`, with the loop's phases. Figures are rank 0's.

    moved_bytes is of one sleep and one wake, the last. `streamed` is null where nothing streams.
    """
    first = comparisons[0]
    asked = first.asked
    summary = {
        "bit_identical": all(each.difference is None for each in comparisons)
        and disagreement(comparisons) is None,
        "max_error": max(each.max_error for each in comparisons),
        "steps": len(asked.loss),
        "parameters": asked.parameters,
        "loss": asked.loss,
        "resident": _run_of([each.reference for each in comparisons]),
        "streamed": None,
        "phases": phases_of(asked),
        "samples": asked.samples,
        "sleep_s": asked.sleep_s,
        "wake_s": asked.wake_s,
        "moved_bytes": moved_bytes(asked),
    }
    if first.streams:
        summary["streamed"] = {
            **_run_of([each.asked for each in comparisons]),
            "state_bytes_bound": asked.state_bytes_bound,
            "read_bytes": asked.read_bytes,
            "written_bytes": asked.written_bytes,
            "buckets": asked.buckets,
            "depth": asked.depth,
        }
    if config.ranks > 1:
        summary["ranks"] = config.ranks
    return summary


def rl_verdict(config: TrainingConfig, settings: RlSettings, comparisons: list[RlComparison]) -> Verdict:
    """As of `optstream train`; and all ranks must have said the same."""
    if found := disagreement(comparisons):
        return Verdict(False, f"different: {found}")
    flags = settings.stream.flags
    moments = flags["stream_optimizer_state_moment_dtype"] if comparisons[0].streams else "fp32"
    return verdict(replace(config, steps=settings.steps), moments, comparisons)


def disagreement(comparisons: list[RlComparison]) -> str | None:
    """Where two ranks of the asked loop do not have the same losses and samples, in words: they are of one
    model, whichever way it is divided."""
    first = comparisons[0].asked
    for rank, each in enumerate(comparisons):
        for name, attribute in (("losses", "loss"), ("samples", "samples")):
            # As text: a loss that is no number is the same on all ranks, and not equal to itself.
            if repr(getattr(each.asked, attribute)) != repr(getattr(first, attribute)):
                return f"the {name} of rank {rank} are not those of rank 0"
    return None


def compared_name(comparison: RlComparison) -> str:
    """What the asked loop is, beside the resident one."""
    if comparison.streams:
        return "streamed"
    return "parked in turns" if comparison.asked.sleep_s else "as asked"


def _run_of(runs: list[RlRun]) -> dict[str, Any]:
    return {
        "state_bytes_peak": runs[0].state_bytes_peak,
        "step_s": runs[0].step_s,
        "digest": joint_digest([run.digest for run in runs]),
    }


def phases_of(run: RlRun) -> list[dict[str, Any]]:
    return [
        {"name": phase.name, "seconds": phase.seconds, "device_bytes_peak": phase.device_bytes_peak}
        for phase in run.phases
    ]


def moved_bytes(run: RlRun) -> dict[str, int]:
    """Of the last sleep and the last wake: all moments are there by then."""
    return {
        "sleep": run.sleep_bytes[-1] if run.sleep_bytes else 0,
        "wake": run.wake_bytes[-1] if run.wake_bytes else 0,
    }


def rl_title(config: TrainingConfig, comparisons: list[RlComparison]) -> str:
    asked = comparisons[0].asked
    ranks = f", rank 0 of {config.ranks}" if config.ranks > 1 else ""
    return f"{asked.parameters:,} parameters, {len(asked.loss)} steps of rollout and training{ranks}"


def rl_table(config: TrainingConfig, comparisons: list[RlComparison]) -> Table:
    """What each phase took, the loss and the samples, for a person."""
    asked = comparisons[0].asked
    shown = Table(title=rl_title(config, comparisons))
    for column in ("phase", "times", "seconds, mean", "device bytes, peak"):
        shown.add_column(column, justify="left" if column == "phase" else "right")
    for name in dict.fromkeys(phase.name for phase in asked.phases):
        phases = [phase for phase in asked.phases if phase.name == name]
        mean_s = sum(phase.seconds for phase in phases) / len(phases)
        peak = max(phase.device_bytes_peak for phase in phases)
        shown.add_row(name, str(len(phases)), f"{mean_s:.4f}", f"{peak:,}")
    moved = moved_bytes(asked)
    shown.add_section()
    shown.add_row("bytes of one sleep, one wake", "", f"{moved['sleep']:,}", f"{moved['wake']:,}")
    shown.add_row("loss, first and last", "", f"{asked.loss[0]:.6f}", f"{asked.loss[-1]:.6f}")
    return shown
