"""Settings for the project's own test run: hypothesis profiles, threads and signals."""

from __future__ import annotations

import os
import signal

# One thread a worker: two xdist workers with two OpenMP threads each fight over a 2-core machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A script's background jobs ignore SIGINT, and so do their children: tests of Ctrl-C would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from hypothesis import HealthCheck, settings

SLOW_STORAGE_IS_NORMAL = [HealthCheck.too_slow, HealthCheck.data_too_large]

settings.register_profile(
    "unit", deadline=None, max_examples=30, derandomize=True, suppress_health_check=SLOW_STORAGE_IS_NORMAL
)
# Random, with its database: a derandomised nightly would repeat the same examples forever.
settings.register_profile(
    "nightly",
    deadline=None,
    max_examples=1000,
    derandomize=False,
    suppress_health_check=SLOW_STORAGE_IS_NORMAL,
)
settings.load_profile(os.environ.get("OPTSTREAM_HYPOTHESIS_PROFILE", "unit"))
