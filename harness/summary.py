"""The figures of a comparison, for machines (summary.json) and for people (a table)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import xxhash
from rich.table import Table

from optstream.harness.training_config import TrainingConfig

if TYPE_CHECKING:
    from optstream.harness.compare import Comparison
    from optstream.harness.rl_compare import RlComparison


def summarise(config: TrainingConfig, comparisons: list[Comparison]) -> dict[str, Any]:
    """summary.json: byte and time figures are rank 0's, digests are over all ranks."""
    first = comparisons[0]
    streamed = first.streamed
    summary = {
        "bit_identical": all(each.difference is None for each in comparisons),
        "max_error": max(each.max_error for each in comparisons),
        "steps": config.steps,
        "parameters": first.parameters,
        "loss": streamed.loss,
        "resident": {
            "state_bytes_peak": first.resident.state_bytes_peak,
            "step_s": first.resident.step_s,
            "digest": joint_digest([each.resident.digest for each in comparisons]),
        },
        "streamed": {
            "state_bytes_peak": streamed.state_bytes_peak,
            "state_bytes_bound": streamed.state_bytes_bound,
            "read_bytes": streamed.read_bytes,
            "written_bytes": streamed.written_bytes,
            "step_s": streamed.step_s,
            "buckets": streamed.buckets,
            "depth": streamed.depth,
            "digest": joint_digest([each.streamed.digest for each in comparisons]),
        },
    }
    if config.ranks > 1:
        summary["ranks"] = config.ranks
    return summary


def figures(comparisons: list[Comparison]) -> list[tuple[str, str, str]]:
    """(what, resident, streamed) of rank 0, as a person reads them; empty where a run has none."""
    resident, streamed = comparisons[0].resident, comparisons[0].streamed
    return [
        ("first loss", f"{resident.loss[0]:.6f}", f"{streamed.loss[0]:.6f}"),
        ("last loss", f"{resident.loss[-1]:.6f}", f"{streamed.loss[-1]:.6f}"),
        (
            "state on the device, peak bytes",
            f"{resident.state_bytes_peak:,}",
            f"{streamed.state_bytes_peak:,}",
        ),
        (
            f"its bound: {streamed.depth} x largest of {streamed.buckets} buckets + resident by design",
            "",
            f"{streamed.state_bytes_bound:,}",
        ),
        (
            "beside it: upcast gradients, peak bytes",
            f"{resident.gradient_bytes_peak:,}",
            f"{streamed.gradient_bytes_peak:,}",
        ),
        (
            "beside it: the update's temporaries, peak bytes",
            f"{resident.temporary_bytes_peak:,}",
            f"{streamed.temporary_bytes_peak:,}",
        ),
        ("bytes read, first step", "", f"{streamed.read_bytes[0]:,}"),
        ("bytes read a step, last", "", f"{streamed.read_bytes[-1]:,}"),
        ("bytes written a step, last", "", f"{streamed.written_bytes[-1]:,}"),
        ("padding moved besides, last step", "", f"{streamed.padding_bytes[-1]:,}"),
        (
            "median seconds a training step",
            f"{median(resident.step_s):.4f}",
            f"{median(streamed.step_s):.4f}",
        ),
    ]


def title(config: TrainingConfig, comparisons: list[Comparison]) -> str:
    ranks = f", rank 0 of {config.ranks}" if config.ranks > 1 else ""
    return f"{comparisons[0].parameters:,} parameters, {config.steps} steps{ranks}"


def table(config: TrainingConfig, comparisons: list[Comparison]) -> Table:
    """The figures, for a terminal."""
    shown = Table(title=title(config, comparisons))
    shown.add_column("")
    shown.add_column("resident", justify="right")
    shown.add_column("streamed", justify="right")
    for row in figures(comparisons):
        shown.add_row(*row)
    return shown


@dataclass(frozen=True)
class Verdict:
    """Whether the streamed run is what was asked for, and that in words."""

    passed: bool
    text: str


def verdict(
    config: TrainingConfig, moment_dtype: str, comparisons: Sequence[Comparison | RlComparison]
) -> Verdict:
    """Equal to the last bit or, with a lossy moment format, within its tolerance."""
    differing = [(rank, each) for rank, each in enumerate(comparisons) if each.difference is not None]
    if not differing:
        return Verdict(True, "equal to the last bit: losses, model params, main params, moments")
    if moment_dtype == "fp32":
        rank, first = differing[0]
        return Verdict(False, f"different: {first.difference}, on rank {rank}")
    error, tolerance = max(each.main_error for each in comparisons), lossy_tolerance(config)
    return Verdict(
        error <= tolerance,
        f"{moment_dtype} moments: main params differ from resident ones by at most {error:.3g}; "
        f"the tolerance, lr x steps, is {tolerance:.3g}",
    )


def lossy_tolerance(config: TrainingConfig) -> float:
    """How far a main param may end from its resident value with moments in a lossy format.

    Adam moves a parameter by about lr a step at most, so two unrelated runs could end 2 x lr x steps apart;
    half of that is where a format would no longer be said to follow the resident run.
    """
    return config.lr * config.steps


def joint_digest(digests: list[str]) -> str:
    """One rank's digest as it is; of several, the hash of all in the order of ranks."""
    if len(digests) == 1:
        return digests[0]
    return xxhash.xxh3_128_hexdigest("".join(digests).encode())
