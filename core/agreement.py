"""All ranks fail together: one small all-reduce tells everybody that somebody's storage failed.

Without it the healthy ranks would enter the parameter all-gather and wait there for the one that has gone,
until the collective's timeout, and the reason would be in another process's log.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from optstream.core.errors import RemoteRankError


def raise_together(failure: Exception | None, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Collective over `group`. Returns if no rank has a `failure`.

    Otherwise every rank raises the failure of the lowest failing rank: there the exception itself (another
    rank that failed too raises its own), elsewhere a RemoteRankError with its message. `device` is one that
    the group's backend can reduce on.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        if failure is not None:
            raise failure
        return
    size = dist.get_world_size(group)
    rank = dist.get_rank(group)
    first = torch.tensor([rank if failure is not None else size], dtype=torch.int32, device=device)
    dist.all_reduce(first, op=dist.ReduceOp.MIN, group=group)
    failing = int(first.item())
    if failing == size:
        return
    source = dist.get_global_rank(group, failing) if group is not None else failing
    message = [str(failure) if failing == rank else None]
    dist.broadcast_object_list(message, src=source, group=group, device=device)
    if failure is not None:
        raise failure
    raise RemoteRankError(
        f"rank {source} failed",
        why=message[0],
        remedy="All ranks stopped before the parameter all-gather; their state is half-updated",
        rank=source,
    )
