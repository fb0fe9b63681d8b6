"""Ranks that fail, die or are interrupted: the error comes back, and no process stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from optstream.harness.errors import ConfigurationError, DataError, RankError
from optstream.harness.launch import run_ranks

pytestmark = pytest.mark.e2e

RANK_FUNCTIONS = """
import os, signal, sys, time
import torch
import torch.distributed as dist
from optstream.harness.errors import DataError

def write_pid(folder, rank):
    with open(os.path.join(folder, f"pid{rank}.part"), "w") as file:
        file.write(str(os.getpid()))
    os.rename(file.name, os.path.join(folder, f"pid{rank}"))

def total(rank, addend):
    value = torch.tensor([rank + addend], device="cuda")
    dist.all_reduce(value)
    return rank, dist.get_world_size(), value.item()

def fail(rank, folder, how):
    write_pid(folder, rank)
    while not os.path.exists(os.path.join(folder, "pid0")):
        time.sleep(0.01)  # once rank 1 has failed, nothing else of rank 0 is sure to happen
    if rank == 1:
        if how == "typed":
            raise DataError("no text", why="it is empty", remedy="Give some")
        if how == "untyped":
            raise ValueError("bad value\\nsecond line")
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            os._exit(3)
        if how == "unpicklable":
            return lambda: None
    dist.barrier()   # rank 1 never comes
    time.sleep(3600)

def linger(rank, folder):
    write_pid(folder, rank)
    time.sleep(3600)
"""


@pytest.fixture
def functions(tmp_path, monkeypatch):
    """A module that the ranks can import, too."""
    (tmp_path / "rank_functions.py").write_text(RANK_FUNCTIONS)
    monkeypatch.syspath_prepend(str(tmp_path))
    import rank_functions

    yield rank_functions
    del sys.modules["rank_functions"]


def pids(folder, ranks: int = 2) -> list[int]:
    paths = [folder / f"pid{rank}" for rank in range(ranks)]
    wait_until(lambda: all(path.exists() for path in paths))
    return [int(path.read_text()) for path in paths]


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until(condition) -> None:
    deadline = time.monotonic() + 300  # a hang, on however slow a machine
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_results_come_in_the_order_of_ranks(functions, ranks):
    total = sum(rank + 10 for rank in range(ranks))
    assert run_ranks(functions.total, ranks, 10) == [(rank, ranks, total) for rank in range(ranks)]


def test_a_typed_error_comes_back_as_itself_and_names_its_rank(functions, tmp_path):
    with pytest.raises(DataError) as caught:
        run_ranks(functions.fail, 2, str(tmp_path), "typed")
    assert str(caught.value) == "rank 1: no text: it is empty. Give some"
    assert not any(map(is_running, pids(tmp_path)))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("untyped", "rank 1 failed: ValueError: bad value"),
        ("killed", "rank 1 died: killed by SIGKILL"),
        ("exit", "rank 1 died: exit code 3"),
        ("unpicklable", "rank 1 failed: .*pickle"),
    ],
)
def test_anything_else_is_a_rank_error(functions, tmp_path, how, message):
    with pytest.raises(RankError, match=message) as caught:
        run_ranks(functions.fail, 2, str(tmp_path), how)
    assert caught.value.rank == 1
    assert "\n" not in str(caught.value)
    assert ("second line" in caught.value.traceback_text) == (how == "untyped")
    assert not any(map(is_running, pids(tmp_path)))


def test_one_rank_fails_in_this_process_and_leaves_no_world(functions, tmp_path):
    with pytest.raises(ZeroDivisionError):
        run_ranks(divmod, 1, 0)  # divmod(rank, 0)
    assert run_ranks(functions.total, 1, 0) == [(0, 1, 0)]


def test_the_meeting_place_is_removed(functions, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    run_ranks(functions.total, 2, 0)
    with pytest.raises(DataError):
        run_ranks(functions.fail, 2, str(tmp_path), "typed")
    assert [path.name for path in (tmp_path / "temporary").iterdir() if "optstream" in path.name] == []


@pytest.mark.parametrize("ranks", [0, -1])
def test_no_ranks_are_refused(ranks):
    with pytest.raises(ConfigurationError, match=f"{ranks} ranks cannot run"):
        run_ranks(print, ranks)


def test_more_ranks_than_gpus_are_refused():
    with pytest.raises(ConfigurationError, match="10000 ranks cannot run on this machine: each takes a GPU"):
        run_ranks(print, 10000, hardware="gpu")


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_ranks_end_with_the_process_that_started_them(tmp_path, end):
    (tmp_path / "rank_functions.py").write_text(RANK_FUNCTIONS)
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        import rank_functions
        from optstream.harness.launch import run_ranks
        if __name__ == "__main__":
            run_ranks(rank_functions.linger, 2, {str(tmp_path)!r})
        """)
    )
    process = subprocess.Popen([sys.executable, str(script)], stderr=subprocess.PIPE, start_new_session=True)
    try:
        running = pids(tmp_path)
        if end == signal.SIGINT:
            os.killpg(process.pid, end)  # as a terminal does on Ctrl-C
        else:
            process.send_signal(end)
        error = process.communicate(timeout=300)[1].decode()
        wait_until(lambda: not any(map(is_running, running)))
        if end == signal.SIGINT:
            assert error.count("KeyboardInterrupt") == 1, error
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
