"""A run's diary: every step of it, however few the engine remembers."""

from __future__ import annotations

from collections import deque

import pytest
import torch

from optstream.core.config import StreamConfig
from optstream.core.optimizer import StreamingAdamW
from optstream.harness.diary import Diary

pytestmark = pytest.mark.unit


def test_every_step_is_in_it_though_the_engine_forgets(tmp_path):
    param = torch.nn.Parameter(torch.zeros(100))
    optimizer = StreamingAdamW([param], StreamConfig(enabled=True, directories=(str(tmp_path),)))
    optimizer.streamer.engine._records = deque(maxlen=2)
    diary = Diary([optimizer])
    diary.turn_page()
    for step in range(7):
        if step != 3:  # One that a loss scaler skips.
            param.grad = torch.ones_like(param)
            optimizer.step()
        diary.turn_page()
    optimizer.streamer.engine.drain()
    assert [record.step for (record,) in diary.steps] == [1, 2, 3, 4, 5, 6]
    assert [record.written_bytes for (record,) in diary.steps] == [1200] * 6
    optimizer.close()
