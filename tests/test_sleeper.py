"""Tensors sleep and wake whole, wherever either is interrupted; however the program ends, their file goes."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import pytest
import torch

from optstream.backends.errors import OptstreamError
from optstream.backends.fake import FakeSystem
from optstream.backends.nvme import NvmeBackend
from optstream.core.device_memory import ReleasedStorages
from optstream.core.errors import AsleepError
from optstream.core.parking import DiskParking, HostParking
from optstream.core.sleeper import NOTHING, Sleeper


def tensors() -> list[torch.Tensor]:
    """Two that share a storage, one of its own and one with nothing in it."""
    whole = torch.arange(3000.0)
    return [whole[:1000], whole[500:], torch.full((7,), 2.5), torch.empty(0)]


class Interrupted(BaseException):
    """As KeyboardInterrupt, of which pytest would think that it is for itself."""


class InterruptedMemory(ReleasedStorages):
    """Interrupted at the `nth` thing that happens, before or after it."""

    def __init__(self, nth: int) -> None:
        self.nth = nth

    def pass_by(self) -> None:
        self.nth -= 1
        if self.nth == 0:
            raise Interrupted

    def release(self, parked) -> None:
        self.pass_by()
        super().release(parked)
        self.pass_by()

    def restore(self, parked) -> None:
        self.pass_by()
        super().restore(parked)
        self.pass_by()


class InterruptedParking(HostParking):
    def __init__(self, memory: InterruptedMemory) -> None:
        super().__init__()
        self._memory = memory

    def save(self, parked) -> None:
        self._memory.pass_by()
        super().save(parked)
        self._memory.pass_by()

    def load(self, parked) -> None:
        self._memory.pass_by()
        super().load(parked)
        self._memory.pass_by()


@pytest.mark.unit
@pytest.mark.parametrize("nth", range(1, 12))
def test_an_interrupt_anywhere_leaves_tensors_that_are_there_or_can_be_woken(nth):
    held, expected = tensors(), tensors()
    memory = InterruptedMemory(nth)
    sleeper = Sleeper(InterruptedParking(memory), memory=memory)

    def attempt(call, *arguments) -> bool:
        try:
            call(*arguments)
        except Interrupted:
            return False
        return True

    went_through = attempt(sleeper.sleep, lambda: held)
    assert went_through == (nth > 4)
    for tensor in held:
        if sleeper.is_asleep:
            with pytest.raises(AsleepError):
                tensor.sum()
        else:
            tensor.sum()
    assert attempt(sleeper.wake_up) == (nth <= 4 or nth > 8)
    sleeper.wake_up()
    assert all(map(torch.equal, held, expected))


@pytest.mark.unit
def test_sleeping_tensors_take_no_memory_and_are_counted_once():
    held = tensors()
    sleeper = Sleeper(HostParking())
    assert sleeper.sleep(lambda: held).bytes == 4 * (3000 + 7)
    assert [tensor.untyped_storage().nbytes() for tensor in held] == [0] * 4
    assert sleeper.sleep(lambda: held) == NOTHING
    assert sleeper.wake_up().bytes == 4 * (3000 + 7)
    assert sleeper.wake_up() == NOTHING
    assert held[0].data_ptr() + 4 * 500 == held[1].data_ptr()


@pytest.mark.unit
def test_memory_that_cannot_be_taken_away_is_refused_before_anything_is_written():
    system = FakeSystem()
    foreign = torch.frombuffer(bytearray(64), dtype=torch.uint8)
    backend = NvmeBackend("/disk", subdirectory="test/trainer", system=system)
    sleeper = Sleeper(DiskParking(backend, chunk_bytes=1 << 16))
    with pytest.raises(OptstreamError, match="torch did not allocate"):
        sleeper.sleep(lambda: [foreign])
    assert not sleeper.is_asleep
    assert foreign.sum() == 0
    assert [path for path in system.files() if "trainer.bin" in path] == []
    sleeper.close()


@pytest.mark.unit
def test_a_failed_wake_gives_the_memory_back():
    held = tensors()

    class Failing(HostParking):
        def load(self, parked) -> None:
            raise OptstreamError("not now")

    sleeper = Sleeper(Failing())
    sleeper.sleep(lambda: held)
    with pytest.raises(OptstreamError, match="not now"):
        sleeper.wake_up()
    assert sleeper.is_asleep
    assert [tensor.untyped_storage().nbytes() for tensor in held] == [0] * 4


@pytest.mark.unit
def test_closed_it_says_so():
    sleeper = Sleeper(HostParking())
    sleeper.close()
    sleeper.close()
    for use in (lambda: sleeper.sleep(tensors), sleeper.wake_up):
        with pytest.raises(OptstreamError, match="closed"):
            use()


@pytest.mark.unit
def test_who_forgets_a_sleeper_loses_its_file():
    system = FakeSystem()
    backend = NvmeBackend("/disk", subdirectory="test/trainer", system=system)
    sleeper = Sleeper(DiskParking(backend, chunk_bytes=1 << 16))
    sleeper.sleep(tensors)
    assert any("trainer.bin" in path for path in system.files())
    del sleeper
    assert system.files() == []
    assert system.open_descriptors() == 0


ASLEEP = """
    import os, sys, time, torch
    from optstream.backends import open_backend
    from optstream.core.parking import DiskParking
    from optstream.core.signals import clean_up_on_sigterm
    from optstream.core.sleeper import Sleeper
    clean_up_on_sigterm()
    weights = torch.ones(100_000)
    backend = open_backend((sys.argv[1],), subdirectory="run/trainer")
    sleeper = Sleeper(DiskParking(backend, chunk_bytes=1 << 16))
    sleeper.sleep(lambda: [weights])
    print("asleep", flush=True)
"""
WAIT = "while True: time.sleep(0.01)"
ENDINGS = {
    "the end of the program": ("pass", None, 0),
    "an exception": ("raise ValueError('mine')", None, 1),
    "SIGINT": (WAIT, signal.SIGINT, -signal.SIGINT),
    "SIGTERM": (WAIT, signal.SIGTERM, 143),
    "a forked child that ends first": ("os.fork() or os._exit(0); os.wait(); sleeper.wake_up()", None, 0),
}


@pytest.mark.e2e
@pytest.mark.parametrize("ending", ENDINGS)
def test_however_a_program_ends_its_file_goes(tmp_path, ending):
    code, sent, expected = ENDINGS[ending]
    program = textwrap.dedent(ASLEEP) + code
    run = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", program, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert run.stdout.readline() == "asleep\n"
    if sent is not None:
        assert list(tmp_path.rglob("trainer.bin"))
        run.send_signal(sent)
    _, error = run.communicate(timeout=300)
    assert run.returncode == expected, error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.e2e
def test_what_fails_where_nobody_can_be_told_is_one_line(tmp_path):
    program = textwrap.dedent(ASLEEP) + f"os.remove({str(tmp_path)!r} + '/run/trainer/.claim')"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()
    assert line.startswith("optstream: error: cannot clean up")
