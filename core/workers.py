"""A few threads that run tasks in turn: of those that wait, the one with the lowest turn goes first.

Not a ThreadPoolExecutor, because of how a process ends: that one refuses new tasks as soon as the interpreter
begins to exit, while a write-behind still hands its chunks out, and whoever waits for those waits for ever.
These threads are daemons: they work on until `close`, which an exit handler calls.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from itertools import count as count_up
from queue import PriorityQueue

Task = Callable[[], None]


class Workers:
    """`count` threads. A task handles its own exceptions: one that escapes ends its thread."""

    def __init__(self, count: int, name: str) -> None:
        self._tasks: PriorityQueue[tuple[float, int, Task | None]] = PriorityQueue()
        self._submitted = count_up()  # Keeps tasks of one turn in order, and the queue from comparing tasks.
        self._threads: list[threading.Thread] = []
        try:
            for index in range(count):
                thread = threading.Thread(
                    target=_run, args=(self._tasks,), name=f"{name}-{index}", daemon=True
                )
                thread.start()
                self._threads.append(thread)
        except BaseException:
            self.close()
            raise

    def submit(self, task: Task | None, turn: float = 0) -> None:
        self._tasks.put((turn, next(self._submitted), task))

    def close(self) -> None:
        """Return once everything submitted has run and the threads have ended. Idempotent."""
        for _ in self._threads:
            self.submit(None, math.inf)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def __contains__(self, thread: threading.Thread) -> bool:
        return thread in self._threads


def _run(tasks: PriorityQueue[tuple[float, int, Task | None]]) -> None:
    while (task := tasks.get()[-1]) is not None:
        task()
        # A waiting thread would otherwise keep what its last task held: memory, or the optimizer itself.
        del task
