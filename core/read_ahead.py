"""The reads of the next step start while backward is still computing its gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch


class BackwardHook:
    """Calls `start` at the first gradient that any of `params` accumulates, and not again until `rearm`.

    The parameters hold it weakly: they may outlive the optimizer, which must not live on in their hooks.
    """

    def __init__(self, params: Iterable[torch.nn.Parameter], start: Callable[[], None]) -> None:
        self._start = start
        self._armed = True
        this = weakref.ref(self)

        def gradient_arrived(_: torch.Tensor) -> None:
            if (hook := this()) is not None and hook._armed:
                hook._armed = False
                hook._start()

        self._handles = [param.register_post_accumulate_grad_hook(gradient_arrived) for param in params]

    def rearm(self) -> None:
        """A step is over: the next gradient is the first of the next one."""
        self._armed = True

    def remove(self) -> None:
        """Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
