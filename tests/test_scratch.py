"""Paths of live files: no two jobs, roles, cells, ranks or optimizers share one, and each is relative."""

from __future__ import annotations

import itertools
import os
import socket
from pathlib import PurePosixPath

import pytest

from optstream.core import scratch
from optstream.core.scratch import (
    job_name,
    process_subdirectory,
    scratch_subdirectory,
    trainer_subdirectory,
)

pytestmark = pytest.mark.unit

LAUNCHERS = ("SLURM_JOB_ID", "LSB_JOBID", "PBS_JOBID", "RAY_JOB_ID", "TORCHELASTIC_RUN_ID")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for variable in LAUNCHERS:
        monkeypatch.delenv(variable, raising=False)


def test_without_a_launcher_the_job_is_this_process():
    assert job_name() == f"pid{os.getpid()}"


@pytest.mark.parametrize("variable", LAUNCHERS)
def test_a_launcher_names_the_job(monkeypatch, variable):
    monkeypatch.setenv(variable, "4711")
    assert job_name() == "4711"


def test_the_scheduler_is_believed_before_the_launcher_inside_it(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "inner")
    monkeypatch.setenv("SLURM_JOB_ID", "outer")
    assert job_name() == "outer"


@pytest.mark.parametrize("nothing", ["", "none"])
def test_a_launcher_that_gives_no_name_is_none(monkeypatch, nothing):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", nothing)
    assert job_name() == f"pid{os.getpid()}"


def test_every_role_cell_rank_and_optimizer_has_a_path_of_its_own():
    paths = [
        scratch_subdirectory(role, cell, rank, index)
        for role, cell, rank, index in itertools.product(("actor", "critic"), range(11), range(11), range(3))
    ]
    paths += [
        trainer_subdirectory(role, cell, rank)
        for role, cell, rank in itertools.product(("actor", "critic"), range(11), range(11))
    ]
    assert len(set(paths)) == len(paths)
    # Nor does one lie inside another, which clearing the outer one would remove.
    parts = {PurePosixPath(path).parts for path in paths}
    assert not any(path[:length] in parts for path in parts for length in range(1, len(path)))


def test_nodes_that_share_a_file_system_do_not_meet(monkeypatch):
    here = scratch_subdirectory("actor", 0, 0, 0)
    monkeypatch.setattr(socket, "gethostname", lambda: "another-node")
    assert scratch_subdirectory("actor", 0, 0, 0) != here


def test_two_jobs_on_a_node_do_not_meet(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    first = scratch_subdirectory("actor", 0, 0, 0)
    monkeypatch.setenv("SLURM_JOB_ID", "2")
    assert scratch_subdirectory("actor", 0, 0, 0) != first


@pytest.mark.parametrize("name", ["../../etc", "a/b", "..", ".", "", "x y", "a:b", "ä", ".hidden"])
def test_no_name_leaves_its_place_in_the_path(monkeypatch, name):
    monkeypatch.setenv("SLURM_JOB_ID", name)
    monkeypatch.setattr(scratch.socket, "gethostname", lambda: name)
    path = PurePosixPath(scratch_subdirectory(name, 2, 3, 1))
    assert len(path.parts) == 7
    assert not path.is_absolute()
    assert path.parts[0] == "optstream"
    assert path.parts[-3:] == ("cell2", "rank3", "optimizer1")
    assert not any(part.startswith(".") or ":" in part for part in path.parts)


def test_a_sleeping_trainer_lies_beside_its_optimizers():
    trainer, optimizer = (
        PurePosixPath(trainer_subdirectory("actor", 1, 3)),
        PurePosixPath(scratch_subdirectory("actor", 1, 3, 0)),
    )
    assert trainer.parent == optimizer.parent
    assert trainer != optimizer


def test_processes_that_are_all_pid_1_do_not_meet(monkeypatch):
    """Each in a container of its own, on one shared disk, under one host name."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    paths = [PurePosixPath(process_subdirectory()) for _ in range(100)]
    assert len(set(paths)) == 100
    assert {path.parts[0] for path in paths} == {"optstream"}
