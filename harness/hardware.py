"""What the e2e tests run on: GPUs, or a simulation of them. Decided once a run, and said why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from optstream.harness.errors import ConfigurationError

CHOICES = ("auto", "simulated", "gpu")
# The most ranks that a test of the suite takes.
RANKS_MAX = 4


@dataclass(frozen=True)
class Hardware:
    """kind: as `run_ranks` takes it. reason: why this kind. ranks_max: tests of more ranks do not run."""

    kind: Literal["simulated", "gpu"]
    reason: str
    ranks_max: int

    def __str__(self) -> str:
        left_out = "; tests of GPUs alone are left out" if self.kind == "simulated" else ""
        return f"{self.kind} ({self.reason}); tests of up to {self.ranks_max} ranks{left_out}"


def choose(wanted: str, ranks_max: int = RANKS_MAX) -> Hardware:
    """Resolve one of `CHOICES`.

    Raises ConfigurationError where GPUs are wanted and there are too few: a runner that lost its GPUs must
    not go green on a simulation.
    """
    if wanted == "simulated":
        return Hardware("simulated", "as asked", ranks_max)
    gpus, torch_version = _visible_gpus()
    seen = f"{gpus or 'no'} GPU{'' if gpus == 1 else 's'} visible to torch {torch_version}"
    if gpus >= ranks_max:
        return Hardware("gpu", seen, ranks_max)
    if wanted == "gpu":
        raise ConfigurationError(
            "--hardware=gpu cannot run here",
            why=f"{seen}, and tests of up to {ranks_max} ranks take one each",
            remedy=f"Use a machine with {ranks_max} GPUs, --ranks-max {gpus}, or --hardware=simulated"
            if gpus
            else "Use a machine with GPUs (see `optstream doctor`), or --hardware=simulated",
        )
    return Hardware("simulated", f"{seen}, fewer than --ranks-max {ranks_max}", ranks_max)


def _visible_gpus() -> tuple[int, str]:
    import torch

    return torch.cuda.device_count(), torch.__version__
