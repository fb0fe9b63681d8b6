"""Where one rank's live files go, so that jobs, roles, cells and ranks never meet."""

from __future__ import annotations

import os
import re
import secrets
import socket

# What launchers call the job, in the order in which they are believed.
_JOB_VARIABLES = ("SLURM_JOB_ID", "LSB_JOBID", "PBS_JOBID", "RAY_JOB_ID", "TORCHELASTIC_RUN_ID")


def job_name() -> str:
    """The launcher's name for this job, or one made of this process's pid."""
    for variable in _JOB_VARIABLES:
        value = os.environ.get(variable, "")
        if value and value != "none":  # torchrun's run id when nobody gave it one
            return _component(value)
    return f"pid{os.getpid()}"


def scratch_subdirectory(role: str, cell: int, rank: int, index: int) -> str:
    """`optstream/<host>/<job>/<role>/cell<cell>/rank<rank>/optimizer<index>`.

    role: actor, critic, ...: models of one job that train side by side. cell: which of several copies of the
    model that each have ranks of their own from 0. index: which optimizer of the rank.
    """
    return f"{_rank_subdirectory(role, cell, rank)}/optimizer{index}"


def trainer_subdirectory(role: str, cell: int, rank: int) -> str:
    """`optstream/<host>/<job>/<role>/cell<cell>/rank<rank>/trainer`, beside the rank's optimizers."""
    return f"{_rank_subdirectory(role, cell, rank)}/trainer"


def process_subdirectory() -> str:
    """`optstream/<host>/<job>/torch/pid<pid>-<random>`, another one at every call.

    For optimizers of processes that need not be ranks of anything. The pid alone is not enough: in containers
    every process is pid 1, and they may share a disk and a host name.
    """
    host = _component(socket.gethostname())
    return f"optstream/{host}/{job_name()}/torch/pid{os.getpid()}-{secrets.token_hex(4)}"


def _rank_subdirectory(role: str, cell: int, rank: int) -> str:
    host = _component(socket.gethostname())
    return f"optstream/{host}/{job_name()}/{_component(role)}/cell{cell}/rank{rank}"


def _component(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", text).lstrip(".") or "unnamed"
