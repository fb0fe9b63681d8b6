"""Runs a function on several ranks of one machine, on simulated or real GPUs: results come back, or the
error.

One rank runs in this process. More are processes of their own, so their function must be importable and a
script needs a `__main__` guard. Ranks meet over a file in a private directory, which leaves no port to race
for. When one rank fails, the others are ended at once and its error is raised here; ranks end by themselves
should this process die.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import multiprocessing.context
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from optstream.core.signals import Ended, clean_up_on_sigterm
from optstream.harness.errors import ConfigurationError, OptstreamError, RankError
from optstream.harness.simulated_cuda import simulated_cuda

Hardware = Literal["simulated", "gpu"]

# How long the first failure waits for one that explains it: peers of a failed rank fail, too, by lost
# connections.
EXPLANATION_S = 0.5
# Imported once by the server that simulated ranks are forked from. Megatron's import takes seconds, and every
# rank would spend them at the same time.
PRELOADED = ["optstream.harness.training_state"]
# How long an ended rank may take before it is killed.
TERMINATION_S = 5.0


def available_hardware() -> Hardware:
    """Real GPUs where there are any."""
    return "gpu" if torch.cuda.is_available() else "simulated"


def run_ranks(
    function: Callable[..., Any],
    ranks: int,
    *args: Any,
    hardware: Hardware = "simulated",
    collective_timeout_s: float = 600.0,
) -> list[Any]:
    """Calls `function(rank, *args)` on every rank, inside an initialised torch.distributed world of that
    size.

    `hardware="simulated"` runs under `simulated_cuda` over gloo; `"gpu"` on one GPU per rank over NCCL.
    Returns the results in the order of ranks.

    Raises ConfigurationError if the world cannot be started; a rank's own OptstreamError, its message naming
    the rank; RankError for anything else that ended a rank.
    """
    if ranks < 1:
        raise ConfigurationError(f"{ranks} ranks cannot run", why="it must be at least 1")
    if hardware == "gpu" and torch.cuda.device_count() < ranks:
        raise ConfigurationError(
            f"{ranks} ranks cannot run on this machine",
            why=f"each takes a GPU, and {torch.cuda.device_count()} are visible",
            remedy="Use fewer ranks, or simulated hardware",
        )
    if ranks == 1:
        with _world(dist.HashStore(), 0, 1, hardware, collective_timeout_s):
            return [function(0, *args)]
    with tempfile.TemporaryDirectory(prefix="optstream-ranks-") as folder:
        store_path = str(Path(folder, "store"))
        task = (function, ranks, store_path, hardware, collective_timeout_s, args)
        processes = _Processes(ranks, hardware, task)
        with contextlib.closing(processes):
            return processes.results()


class _Processes:
    """The running ranks, each with a pipe on which it reports once."""

    def __init__(self, ranks: int, hardware: Hardware, task: tuple) -> None:
        context = _process_context(hardware)
        self._pipes: dict[Connection, int] = {}
        self._processes = []
        try:
            for rank in range(ranks):
                pipe, its_end = context.Pipe()
                self._pipes[pipe] = rank
                process = context.Process(
                    target=_rank_main, args=(rank, its_end, *task), name=f"optstream-rank-{rank}", daemon=True
                )
                process.start()
                self._processes.append(process)
                its_end.close()  # so that the death of the rank reads as the end of the pipe
        except BaseException:
            self.close()
            raise

    def results(self) -> list[Any]:
        """Waits for all ranks. Raises the error that best explains the first failure."""
        results: dict[int, Any] = {}
        failures: list[OptstreamError] = []
        deadline_s = None
        waiting = dict(self._pipes)
        while waiting:
            timeout_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            ready = wait(list(waiting), timeout_s)
            for pipe in ready:
                rank = waiting.pop(pipe)
                outcome = self._receive(pipe, rank)
                if isinstance(outcome, _Failure):
                    failures.append(outcome.error)
                else:
                    results[rank] = outcome.value
            if failures:
                deadline_s = deadline_s or time.monotonic() + EXPLANATION_S
                explained = [error for error in failures if not isinstance(error, RankError)]
                if explained or not ready:
                    raise (explained or failures)[0]
        if failures:
            raise failures[0]
        for process in self._processes:
            process.join(TERMINATION_S)
        return [results[rank] for rank in range(len(self._processes))]

    def _receive(self, pipe: Connection, rank: int) -> _Success | _Failure:
        try:
            return pickle.loads(pipe.recv_bytes())
        except EOFError:
            process = self._processes[rank]
            process.join(TERMINATION_S)
            return _Failure(RankError(f"rank {rank} died", why=_exit_reason(process.exitcode), rank=rank))

    def close(self) -> None:
        """Ends whatever still runs, and waits until it has."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(TERMINATION_S)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        for pipe in self._pipes:
            pipe.close()


def _process_context(hardware: Hardware) -> multiprocessing.context.BaseContext:
    if hardware == "gpu" or sys.platform == "darwin":  # neither CUDA nor macOS's frameworks survive a fork
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # Has an effect on the first call. The server keeps the environment variables of that moment.
    context.set_forkserver_preload(PRELOADED)
    return context


def _exit_reason(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"killed by {signal.Signals(-exit_code).name}"
    return f"exit code {exit_code}"


class _Success:
    def __init__(self, value: Any) -> None:
        self.value = value


class _Failure:
    def __init__(self, error: OptstreamError) -> None:
        self.error = error


def _rank_main(
    rank: int,
    pipe: Connection,
    function: Callable[..., Any],
    ranks: int,
    store_path: str,
    hardware: Hardware,
    collective_timeout_s: float,
    args: tuple,
) -> None:
    # Ctrl-C reaches the whole process group: the parent decides, and ends the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # And a rank that it ends still removes its files.
    clean_up_on_sigterm()
    threading.Thread(target=_exit_with_parent, name="optstream-parent-watch", daemon=True).start()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    try:
        with _world(dist.FileStore(store_path, ranks), rank, ranks, hardware, collective_timeout_s):
            try:
                report = pickle.dumps(_Success(function(rank, *args)))
            except Ended:
                raise
            except BaseException as error:
                # Reported while the world stands: peers must not see lost connections before the cause is
                # known.
                _report_failure(pipe, error, rank)
        pipe.send_bytes(report)
    except Ended:
        raise
    except BaseException as error:
        _report_failure(pipe, error, rank)


def _report_failure(pipe: Connection, error: BaseException, rank: int) -> None:
    """Sends the error, then waits to be ended by the parent."""
    pipe.send_bytes(_pickled_failure(error, rank))
    with contextlib.suppress(EOFError):
        pipe.recv_bytes()
    sys.exit(1)


def _pickled_failure(error: BaseException, rank: int) -> bytes:
    text = "".join(traceback.format_exception(error))
    if isinstance(error, OptstreamError):
        error.what = f"rank {rank}: {error.what}"
        error.args = (f"rank {rank}: {error}",)
        try:
            return pickle.dumps(_Failure(error))
        except Exception as unpicklable:
            text += f"\n(the error itself could not be sent: {unpicklable})"
    why = f"{type(error).__name__}: {error}".splitlines()[0]
    return pickle.dumps(_Failure(RankError(f"rank {rank} failed", why=why, rank=rank, traceback_text=text)))


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(TERMINATION_S)
        os._exit(1)


@contextlib.contextmanager
def _world(
    store: dist.Store, rank: int, ranks: int, hardware: Hardware, collective_timeout_s: float
) -> Iterator[None]:
    """An initialised torch.distributed world on this machine, undone on exit."""
    if dist.is_initialized():
        raise ConfigurationError(
            "ranks cannot be started", why="torch.distributed is already initialised in this process"
        )
    with contextlib.ExitStack() as stack:
        if hardware == "simulated":
            stack.enter_context(simulated_cuda())
            stack.enter_context(_loopback())
            backend, device = "gloo", None
        else:
            torch.cuda.set_device(rank)
            backend, device = "nccl", torch.device("cuda", rank)
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=collective_timeout_s),
            device_id=device,
        )
        # Megatron's optimizers and models hold their groups in cycles, and each group of gloo has three
        # threads, which poll: in a process that runs many worlds, one after the other, they would add up.
        stack.callback(gc.collect)
        stack.callback(dist.destroy_process_group)
        yield


@contextlib.contextmanager
def _loopback() -> Iterator[None]:
    """Keeps gloo on the loopback interface: looking up the host's own name can fail, and slowly."""
    variable = "GLOO_SOCKET_IFNAME"
    if variable in os.environ:
        yield
        return
    os.environ[variable] = "lo0" if sys.platform == "darwin" else "lo"
    try:
        yield
    finally:
        del os.environ[variable]
