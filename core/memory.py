"""Host buffers that disks and devices can move fast.

The kernel splits a direct transfer into one request per physically contiguous run, so a buffer of scattered
4 KiB pages moves several times slower than one of 2 MiB pages. Pageable host buffers are therefore private
anonymous memory, aligned to 2 MiB and marked for transparent huge pages. Buffers that a device copies from
are pinned instead, since only from those can it copy on its own.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch

from optstream.core.plan import round_up

HUGE_PAGE_BYTES = 2 << 20


def allocate_host(size_bytes: int, *, pinned: bool = False) -> torch.Tensor:
    """A 1-D uint8 tensor of exactly `size_bytes`, page-aligned at least, huge pages where there are any.

    The memory lives as long as the tensor or any view of it.
    """
    if pinned:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    mapping = mmap.mmap(-1, round_up(size_bytes, HUGE_PAGE_BYTES) + HUGE_PAGE_BYTES, flags=flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Kernels built without huge pages refuse; small pages work as well, only slower.
        with suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    skipped = -whole.data_ptr() % HUGE_PAGE_BYTES
    return whole[skipped : skipped + size_bytes]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous 1-D uint8 host tensor, writable and without a copy."""
    return memoryview(tensor.numpy())
