"""Real processes over one directory: all train right, no files but the dead ones' go."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from optstream.core.config import StreamConfig
from optstream.core.optimizer import StreamingAdamW
from optstream.harness.reference import ReferenceAdamW, same_bits

NUMEL = 3000

TRAIN = """
    import os, signal, sys, time
    import torch
    from optstream.core.config import StreamConfig
    from optstream.core.optimizer import StreamingAdamW
    from optstream.core.signals import clean_up_on_sigterm
    directory, checkpoint, ending = sys.argv[1:]
    param = torch.nn.Parameter(torch.arange(3000.0))
    optimizer = StreamingAdamW([param], StreamConfig(True, (directory,), bucket_numel=1024))
    def step():
        param.grad = torch.full((3000,), 0.5)
        optimizer.step()
    step()
    if checkpoint != "none":
        optimizer.save_to(checkpoint)
"""


class Run:
    """A process that trains one step, then does as `ending` says once it is told to go on."""

    def __init__(self, code: str, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-W",
                "ignore",
                "-c",
                textwrap.dedent(TRAIN) + textwrap.dedent(code),
                *map(str, arguments),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_until_ready(self) -> None:
        line = self.process.stdout.readline().strip()
        if line != "ready":
            raise RuntimeError(f"it said {line!r}: {self.process.stderr.read()}")

    def finish(self) -> tuple[int, str]:
        _, error = self.process.communicate(timeout=300)
        return self.process.returncode, error


@pytest.fixture
def start():
    runs = []

    def start(code: str, *arguments: object) -> Run:
        runs.append(Run(code, *arguments))
        return runs[-1]

    yield start
    for run in runs:
        run.process.kill()
        run.process.communicate()


def optimizer_in(directory: Path, seed: int) -> tuple[torch.nn.Parameter, StreamingAdamW, ReferenceAdamW]:
    param = torch.nn.Parameter(torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed)))
    reference = ReferenceAdamW([param], lr=1e-3)
    return param, StreamingAdamW([param], StreamConfig(True, (str(directory),), bucket_numel=1024)), reference


def check_step(param: torch.nn.Parameter, optimizer: StreamingAdamW, reference: ReferenceAdamW) -> None:
    param.grad = torch.ones(NUMEL)
    optimizer.step()
    reference.step([param.grad])
    assert same_bits(param.detach(), reference.params()[0])


def bucket_files(directory: Path) -> set[Path]:
    return set(directory.rglob("bucket-*"))


@pytest.mark.unit
def test_two_optimizers_of_one_process(tmp_path):
    first, second = optimizer_in(tmp_path, 1), optimizer_in(tmp_path, 2)
    for _ in range(2):
        check_step(*first)
        check_step(*second)
    mine = bucket_files(tmp_path)
    first[1].close()
    left = bucket_files(tmp_path)
    assert left < mine
    check_step(*second)
    second[1].close()
    assert list(tmp_path.iterdir()) == []


LINGER = """
    print("ready", flush=True)
    sys.stdin.read()
    step()
    assert bool((param != torch.arange(3000.0)).any())
    optimizer.close()
"""


@pytest.mark.e2e
def test_another_process_ends_or_is_killed_and_this_one_goes_on(tmp_path, start):
    ending, killed = start(LINGER, tmp_path, "none", ""), start(LINGER, tmp_path, "none", "")
    for run in (ending, killed):
        run.wait_until_ready()
    mine = optimizer_in(tmp_path, 1)
    check_step(*mine)
    killed.process.kill()
    killed.process.wait()
    assert ending.finish()[0] == 0
    check_step(*mine)
    # A newcomer takes the dead one's files away, and nobody else's.
    newcomer = optimizer_in(tmp_path, 2)
    assert len({path.parent for path in bucket_files(tmp_path)}) == 2
    check_step(*newcomer)
    check_step(*mine)
    for _, optimizer, _ in (mine, newcomer):
        optimizer.close()
    assert list(tmp_path.iterdir()) == []


DIE_IN_STEP = """
    def die(piece, main):
        os.kill(os.getpid(), signal.SIGKILL)
    print("ready", flush=True)
    optimizer._publish = die
    step()
"""


@pytest.mark.unit
def test_a_run_killed_in_the_middle_of_a_step_starts_again_from_its_checkpoint(tmp_path, start):
    scratch, checkpoint = tmp_path / "scratch", tmp_path / "checkpoint"
    run = start(DIE_IN_STEP, scratch, checkpoint, "")
    run.wait_until_ready()
    assert run.finish()[0] == -signal.SIGKILL
    dead = bucket_files(scratch)
    assert dead
    param = torch.nn.Parameter(torch.arange(3000.0))
    reference = ReferenceAdamW([param], lr=1e-3)
    reference.step([torch.full((3000,), 0.5)])
    with torch.no_grad():
        param.zero_()
    optimizer = StreamingAdamW([param], StreamConfig(True, (str(scratch),), bucket_numel=1024))
    assert not dead & bucket_files(scratch), "the dead run still takes its space"
    assert optimizer.load_from(checkpoint)
    for _ in range(2):
        param.grad = torch.full((3000,), 0.5)
        optimizer.step()
        reference.step([param.grad])
        assert same_bits(param.detach(), reference.params()[0])
    optimizer.close()
    assert list(scratch.iterdir()) == []


# ---- ends ------------------------------------------------------------------------------------------------

# Not a lock: a signal that comes just before a thread blocks on one is not handled until it has the lock.
WAIT = "while True: time.sleep(0.01)"

ENDINGS = {
    "the end of the program": ("step()", None, 0),
    "sys.exit": ("sys.exit(3)", None, 3),
    "an exception": ("raise ValueError('mine')", None, 1),
    "SIGINT": (WAIT, signal.SIGINT, -signal.SIGINT),
    "SIGTERM": (
        f"print(clean_up_on_sigterm(), flush=True)\n{WAIT}",
        signal.SIGTERM,
        143,
    ),
    "SIGTERM with a handler of the user's": (
        "signal.signal(signal.SIGTERM, lambda *_: os._exit(9)); print(clean_up_on_sigterm(), flush=True)\n"
        + WAIT,
        signal.SIGTERM,
        9,
    ),
}


@pytest.mark.e2e
@pytest.mark.parametrize("ending", ENDINGS)
def test_however_a_run_ends_its_files_go(tmp_path, start, ending):
    code, sent, expected = ENDINGS[ending]
    run = start(f"print('ready', flush=True)\n{code}", tmp_path, "none", "")
    run.wait_until_ready()
    if sent is not None:
        if sent is signal.SIGTERM:
            installed = run.process.stdout.readline().strip()
            assert installed == str(expected == 143)
        run.process.send_signal(sent)
    code, error = run.finish()
    assert code == expected, error
    if expected == 9:
        # It took the end of its process into its own hands: the next start clears up.
        assert bucket_files(tmp_path)
        optimizer_in(tmp_path, 1)[1].close()
    assert list(tmp_path.iterdir()) == []


# ---- containers --------------------------------------------------------------------------------------------

UNSHARE = ("unshare", "--pid", "--fork")


def can_unshare() -> bool:
    return bool(shutil.which("unshare")) and not subprocess.run([*UNSHARE, "true"], check=False).returncode


# Where the machine cannot make a pid namespace (that takes root, and Linux), only what a process is told of
# its own pid is changed.
@pytest.mark.e2e
@pytest.mark.parametrize("way", ["told", "namespace"] if can_unshare() else ["told"])
def test_two_containers_in_which_all_are_pid_1(way, tmp_path):
    told = "import os; os.getpid = lambda: 1\n" if way == "told" else ""
    inside = UNSHARE if way == "namespace" else ()
    code = (
        told
        + textwrap.dedent(TRAIN)
        + textwrap.dedent(
            """
        assert os.getpid() == 1, os.getpid()
        print("ready", flush=True)
        sys.stdin.read()
        step()
        optimizer.close()
        """
        )
    )
    command = [*inside, sys.executable, "-W", "ignore", "-c", code, str(tmp_path), "none", ""]
    runs = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    try:
        assert [run.stdout.readline().strip() for run in runs] == ["ready", "ready"]
        assert len({path.parent for path in bucket_files(tmp_path)}) == 2
        mine = optimizer_in(tmp_path, 1)
        check_step(*mine)
        assert len({path.parent for path in bucket_files(tmp_path)}) == 3
        for run in runs:
            run.communicate(timeout=300)
        assert [run.returncode for run in runs] == [0, 0]
        check_step(*mine)
        mine[1].close()
        assert list(tmp_path.iterdir()) == []
    finally:
        for run in runs:
            run.kill()
            run.communicate()
