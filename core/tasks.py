"""Tasks on `Workers` whose results and errors somebody waits for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from typing import Any

from optstream.core.workers import Workers


def start(workers: Workers, function: Callable[..., Any], *args: Any) -> Future:
    """Run `function(*args)` on one of the threads; the future has what it returned or raised."""
    future: Future = Future()

    def run() -> None:
        try:
            result = function(*args)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    workers.submit(run)
    return future


def run_all(workers: Workers, functions: Iterable[Callable[[], Any]]) -> None:
    """Run all of them at once; returns when every one has ended, and raises the first error, if any."""
    futures = [start(workers, function) for function in functions]
    wait(futures)
    for future in futures:
        future.result()
