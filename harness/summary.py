"""The figures of a comparison, for machines (summary.json) and for people (a table)."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

import xxhash
from rich.table import Table

from optstream.harness.training_config import TrainingConfig

if TYPE_CHECKING:
    from optstream.harness.compare import Comparison


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
            "digest": _joint_digest([each.resident.digest for each in comparisons]),
        },
        "streamed": {
            "state_bytes_peak": streamed.state_bytes_peak,
            "state_bytes_bound": streamed.state_bytes_bound,
            "read_bytes": streamed.read_bytes,
            "written_bytes": streamed.written_bytes,
            "step_s": streamed.step_s,
            "buckets": streamed.buckets,
            "depth": streamed.depth,
            "digest": _joint_digest([each.streamed.digest for each in comparisons]),
        },
    }
    if config.ranks > 1:
        summary["ranks"] = config.ranks
    return summary


def table(config: TrainingConfig, comparisons: list[Comparison]) -> Table:
    """What a person wants to see first, resident beside streamed."""
    resident, streamed = comparisons[0].resident, comparisons[0].streamed
    shown = Table(title=f"{comparisons[0].parameters:,} parameters, {config.steps} steps, rank 0")
    shown.add_column("")
    shown.add_column("resident", justify="right")
    shown.add_column("streamed", justify="right")
    shown.add_row("first loss", f"{resident.loss[0]:.6f}", f"{streamed.loss[0]:.6f}")
    shown.add_row("last loss", f"{resident.loss[-1]:.6f}", f"{streamed.loss[-1]:.6f}")
    shown.add_row(
        "state on the device, peak bytes",
        f"{resident.state_bytes_peak:,}",
        f"{streamed.state_bytes_peak:,}",
    )
    shown.add_row(
        f"bound: {streamed.depth} x largest of {streamed.buckets} buckets, and what is resident by design",
        "",
        f"{streamed.state_bytes_bound:,}",
    )
    shown.add_row(
        "beside it: upcast gradients, peak bytes",
        f"{resident.gradient_bytes_peak:,}",
        f"{streamed.gradient_bytes_peak:,}",
    )
    shown.add_row(
        "beside it: the update's temporaries, peak bytes",
        f"{resident.temporary_bytes_peak:,}",
        f"{streamed.temporary_bytes_peak:,}",
    )
    shown.add_row("bytes read, first step", "", f"{streamed.read_bytes[0]:,}")
    shown.add_row("bytes read a step, later", "", f"{streamed.read_bytes[-1]:,}")
    shown.add_row("bytes written a step", "", f"{streamed.written_bytes[-1]:,}")
    shown.add_row("padding moved, last step", "", f"{streamed.padding_bytes[-1]:,}")
    shown.add_row(
        "seconds a step, median", f"{median(resident.step_s):.4f}", f"{median(streamed.step_s):.4f}"
    )
    return shown


def lossy_tolerance(config: TrainingConfig) -> float:
    """How far a main param may end from its resident value with moments in a lossy format.

    Adam moves a parameter by about lr a step at most, so two unrelated runs could end 2 x lr x steps apart;
    half of that is where a format would no longer be said to follow the resident run.
    """
    return config.lr * config.steps


def _joint_digest(digests: list[str]) -> str:
    """One rank's digest as it is; of several, the hash of all in the order of ranks."""
    if len(digests) == 1:
        return digests[0]
    return xxhash.xxh3_128_hexdigest("".join(digests).encode())
