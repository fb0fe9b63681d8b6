"""The settings of param groups in a checkpoint, matched by the parameters that the groups hold.

Groups have no names, and their order is the trainer's affair: another model part, another rank or another
version makes them in another order, or splits off one more. What a group is, is which parameters are in it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from optstream.core.errors import CheckpointError

logger = logging.getLogger(__name__)

# Not settings: the parameters themselves, their names, the step count, which is recorded apart, and
# Megatron's mark of which ranks hold the parameters, which is the topology's affair.
_NOT_SETTINGS = frozenset({"params", "param_names", "step", "is_expert_parallel"})
# What a learning-rate scheduler decides, and with it the trainer's own flags.
SCHEDULED = frozenset({"lr", "initial_lr", "max_lr", "min_lr", "weight_decay", "start_wd", "end_wd"})


@dataclass
class GroupRecord:
    """One param group: its plain settings, its count of steps, and the names of the parameters in it."""

    settings: dict[str, Any]
    step: int
    params: list[str]


def describe(
    groups: Sequence[dict], steps: Sequence[int], names: Sequence[Iterable[str]]
) -> list[GroupRecord]:
    """A record of each group of an optimizer. `steps`, `names`: of each group."""
    return [
        GroupRecord(
            {
                key: _plain(value)
                for key, value in group.items()
                if key not in _NOT_SETTINGS and _is_plain(value)
            },
            step,
            sorted(set(held)),
        )
        for group, step, held in zip(groups, steps, names, strict=True)
    ]


def merge(records: Iterable[GroupRecord]) -> list[GroupRecord]:
    """One record for each distinct group of all ranks: a group is cut over ranks as its parameters are."""
    merged: dict[str, GroupRecord] = {}
    for record in records:
        identity = json.dumps([record.settings, record.step], sort_keys=True)
        if identity in merged:
            record = GroupRecord(
                record.settings, record.step, sorted({*merged[identity].params, *record.params})
            )
        merged[identity] = record
    return list(merged.values())


def match(saved: Sequence[GroupRecord], names: Collection[str], group: dict, path: str) -> GroupRecord | None:
    """The saved group that holds `names`; None where none does. Where groups were saved without names, the
    one whose multipliers are those of `group`, by which Megatron tells them apart.

    Raises CheckpointError where they were in groups of different settings.
    """
    found = [record for record in saved if not set(names).isdisjoint(record.params)]
    if not found:
        nameless = [record for record in saved if not record.params]
        found = [record for record in nameless if _identity(record.settings) == _identity(group)]
    if not found:
        return None
    if any((record.settings, record.step) != (found[0].settings, found[0].step) for record in found):
        some = ", ".join(sorted(names)[:3])
        raise CheckpointError(
            f"the param groups of {path} do not fit this optimizer",
            why=f"one group here holds parameters ({some}, ...) that were in {len(found)} groups with "
            "different settings there",
            remedy="Group the parameters as they were grouped when it was saved",
            path=path,
        )
    return found[0]


def restore(group: dict, record: GroupRecord, *, keep: Collection[str] = ()) -> None:
    """Give `group` the settings of `record`, except for those named in `keep`.

    A setting that only one of the two has is left alone, and logged."""
    current = {key for key, value in group.items() if key not in _NOT_SETTINGS and _is_plain(value)}
    for key in sorted(current - record.settings.keys()):
        logger.warning("the checkpoint's param group has no %s; it stays %r", key, group[key])
    for key, value in record.settings.items():
        if key not in current:
            logger.warning("this optimizer's param groups have no %s; %r is not restored", key, value)
        elif key not in keep:
            group[key] = _like(group[key], value)


def _identity(settings: dict) -> tuple:
    return tuple(settings.get(key) for key in ("wd_mult", "lr_mult", "is_decoupled_lr"))


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(each) for each in value)
    if torch.is_tensor(value):
        return value.numel() == 1
    return value is None or isinstance(value, bool | int | float | str)


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value.item() if torch.is_tensor(value) else value


def _like(current: Any, value: Any) -> Any:
    if torch.is_tensor(current):
        # In place: a capturable optimizer's learning rate is a tensor that others hold, too.
        return current.fill_(value)
    return tuple(value) if isinstance(current, tuple) else value
