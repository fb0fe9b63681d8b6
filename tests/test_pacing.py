"""Work behind the steps: it waits for them, is never starved, and never holds up a step that needs it."""

from __future__ import annotations

import threading

import pytest
import torch

from optstream.core.config import StreamConfig
from optstream.core.optimizer import StreamingAdamW
from optstream.core.pacing import PACE, WAITING, Background, Pace

pytestmark = pytest.mark.unit

SOON_S = 30.0  # Nothing here waits that long unless it is broken.


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class TimedPace(Pace):
    """Steps follow each other without a pause, so that every wait lasts as long as it may."""

    def __init__(self) -> None:
        super().__init__(Clock())
        self.waited_s = 0.0

    def wait_for_steps(self, timeout_s: float) -> None:
        self.clock.now += timeout_s
        self.waited_s += timeout_s


def test_work_waits_for_the_step_and_goes_on_after_it():
    pace = Pace()
    pace.longest_step_s = SOON_S
    background = Background(pace)
    went_on = threading.Event()

    def work() -> None:
        background.give_way()
        went_on.set()

    thread = threading.Thread(target=work)
    with pace.stepping():
        thread.start()
        assert not went_on.wait(0.05)
    assert went_on.wait(SOON_S)
    thread.join()


def test_work_goes_on_during_a_step_that_needs_it():
    pace = Pace()
    pace.longest_step_s = 2 * SOON_S
    background = Background(pace)
    thread = threading.Thread(target=background.give_way)
    with pace.stepping():
        thread.start()
        with pace.needing():
            thread.join(SOON_S)
            assert not thread.is_alive()


def test_work_without_steps_does_not_wait():
    pace = Pace()
    pace.longest_step_s = SOON_S
    Background(pace).give_way()


@pytest.mark.parametrize("longest_step_s", [0.0, 0.5, 20.0])
def test_steps_without_a_pause_do_not_starve_it(longest_step_s):
    pace = TimedPace()
    pace.longest_step_s = longest_step_s
    background = Background(pace)
    pieces, piece_s = 200, 0.25
    for _ in range(pieces):
        background.give_way()
        pace.clock.now += piece_s
    worked_s = pieces * piece_s
    assert pace.clock.now == pytest.approx(worked_s + pace.waited_s)
    assert pace.waited_s <= WAITING * worked_s + longest_step_s
    assert pace.waited_s >= WAITING * (worked_s - piece_s)  # and it does wait while it has patience


def test_a_save_in_the_background_reads_nothing_while_a_step_runs(tmp_path):
    config = StreamConfig(enabled=True, directories=(str(tmp_path / "scratch"),), bucket_numel=1024)
    param = torch.nn.Parameter(torch.zeros(8 * 1024))
    optimizer = StreamingAdamW([param], config)
    param.grad = torch.ones_like(param)
    optimizer.step()
    with PACE.stepping():  # As a step would that takes for ever, but holds nothing that the save needs.
        PACE.longest_step_s = SOON_S
        optimizer.save_to(str(tmp_path / "saved"), background=True)
        assert optimizer.saving
        threading.Event().wait(0.1)
        assert optimizer.save_progress[0] == 0
    optimizer.wait_for_save()
    done, total = optimizer.save_progress
    assert done == total > 0
    optimizer.close()
