"""Copies between places (host) and slots (device), on a stream of their own where there is one."""

from __future__ import annotations

from typing import Protocol

import torch

from optstream.core.memory import allocate_host


class Copies(Protocol):
    """Each call returns when the copy is done, so that memory can be reused at once."""

    def allocate_place(self, size_bytes: int) -> torch.Tensor: ...

    def allocate_slot(self, size_bytes: int) -> torch.Tensor: ...

    def upload(self, place: torch.Tensor, slot: torch.Tensor) -> None: ...

    def download(self, slot: torch.Tensor, place: torch.Tensor) -> None: ...

    def step_begins(self) -> None:
        """Slots were allocated on the caller's stream; uploads from now on come after that."""

    def update_enqueued(self) -> None:
        """The caller's stream has been given an update; downloads from now on come after it."""


class HostCopies:
    """The device is the host, or is simulated there: copies are plain, and updates are done on return."""

    def allocate_place(self, size_bytes: int) -> torch.Tensor:
        return allocate_host(size_bytes)

    def allocate_slot(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)

    def upload(self, place: torch.Tensor, slot: torch.Tensor) -> None:
        slot.copy_(place)

    def download(self, slot: torch.Tensor, place: torch.Tensor) -> None:
        place.copy_(slot)

    def step_begins(self) -> None:
        return None

    def update_enqueued(self) -> None:
        return None


class AcceleratorCopies:
    """Pinned places, slots from the device's caching allocator, one copy stream for each direction.

    Each direction is driven by one thread, which blocks on its stream, so that a finished copy needs no
    polling; the two directions overlap with each other and with the update on the caller's stream.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._up = torch.Stream(device=device)
        self._down = torch.Stream(device=device)

    def allocate_place(self, size_bytes: int) -> torch.Tensor:
        return allocate_host(size_bytes, pinned=True)

    def allocate_slot(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, device=self.device)

    def upload(self, place: torch.Tensor, slot: torch.Tensor) -> None:
        with self._up:
            slot.copy_(place, non_blocking=True)
        self._up.synchronize()

    def download(self, slot: torch.Tensor, place: torch.Tensor) -> None:
        with self._down:
            place.copy_(slot, non_blocking=True)
        self._down.synchronize()

    def step_begins(self) -> None:
        self._up.wait_event(self._event_on_callers_stream())

    def update_enqueued(self) -> None:
        self._down.wait_event(self._event_on_callers_stream())

    def _event_on_callers_stream(self) -> torch.Event:
        event = torch.Event(device=self.device)
        event.record(torch.accelerator.current_stream(self.device))
        return event


def copies_for(device: torch.device) -> Copies:
    """How memory moves to and from `device`."""
    return HostCopies() if device.type == "cpu" else AcceleratorCopies(device)
