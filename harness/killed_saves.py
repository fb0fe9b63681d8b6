"""SIGKILL at random moments of saves, on real files: each time the checkpoint is some step's, whole."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import torch

from optstream.core.config import StreamConfig
from optstream.core.optimizer import StreamingAdamW

SEGMENTS = ("main", "exp_avg", "exp_avg_sq")
# exp_avg of a gradient that is always 1 is 1 - beta1 ** step, but for fp32's rounding.
MOMENT_TOLERANCE = 1e-5

VICTIM = """
import sys, torch
from optstream.core.config import StreamConfig
from optstream.core.optimizer import StreamingAdamW
params = [torch.nn.Parameter(torch.zeros(3000))]
streamed = StreamingAdamW(params, StreamConfig(True, (sys.argv[1],), bucket_numel=1024), lr=1.0)
for count in range(1, 1000000):
    params[0].grad = torch.ones(3000)
    streamed.step()
    streamed.save_to(sys.argv[2])
    if count == 1:
        print("saved", flush=True)
"""


def kill_at_random_moments(folder: Path, times: int, *, seed: int = 0) -> None:
    """Start a run that saves after every step, kill it, and look at what it left; `times` times.

    Raises AssertionError with what is wrong of a checkpoint that is not one whole step's state."""
    rng = random.Random(seed)
    params = [torch.nn.Parameter(torch.zeros(3000))]
    scratch, base = folder / "scratch", folder / "checkpoint"
    streamed = StreamingAdamW(params, StreamConfig(True, (str(folder / "own"),), bucket_numel=1024), lr=1.0)
    kill = partial(_kill_one, scratch, base, rng)
    for _ in range(times):
        kill()
        streamed.load_from(base)
        (state,) = streamed.full_state().values()
        # All gradients are ones and all params start equal: any mixture of two steps shows.
        mixed = [name for name in SEGMENTS if not bool((state[name] == state[name][0]).all())]
        moment = 1.0 - 0.9 ** state["step"]
        if mixed or abs(float(state["exp_avg"][0]) - moment) > MOMENT_TOLERANCE:
            raise AssertionError(f"after a kill, step {state['step']} is not whole: {mixed}")
    streamed.close()


def _kill_one(scratch: Path, base: Path, rng: random.Random) -> None:
    command = [sys.executable, "-W", "ignore", "-c", VICTIM, str(scratch), str(base)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        if process.stdout.readline() != b"saved\n":
            raise AssertionError(f"the run ended with exit code {process.wait()} before it had saved")
        time.sleep(rng.uniform(0, 0.1))
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
