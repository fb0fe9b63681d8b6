"""The values of each flag that the argument matrix goes through, and the combinations that they span.

Every flag has a row: two-valued ones follow from their kind, the others list values that differ in meaning
and both sides of each boundary. A combination is a dict from argparse name to value as parsed, in the order
of `FLAGS`; its index counts through the whole product, so that any combination can be named by a number.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from optstream.core.config import FLAGS, Flag, Kind

Combination = Mapping[str, object]
Domains = Mapping[str, tuple]

ONE_DIRECTORY = "/scratch/a"
SEVERAL_DIRECTORIES = os.pathsep.join(("/scratch/a", "/scratch/b"))

_LISTED: dict[str, tuple] = {
    "offload_train_disk_dir": (None, ONE_DIRECTORY, SEVERAL_DIRECTORIES),
    "offload_train_disk_chunk_mb": (256, 1, 0, -1),
    "stream_optimizer_state_bucket_numel": (8388608, 64, 1, 0, -1),
    "stream_optimizer_state_depth": (4, 1, 0, -1),
    "stream_optimizer_state_host_cache_mb": (0, 1, -1),
    "optimizer": ("adam", "sgd", "muon"),
    "lora_rank": (0, 1),
    "multi_lora_n_adapters": (0, 1),
}


def _values(flag: Flag) -> tuple:
    if flag.dest in _LISTED:
        return _LISTED[flag.dest]
    if flag.kind is Kind.TRISTATE:
        return (None, False, True)
    if flag.is_boolean:
        return (flag.default, not flag.default)
    if flag.choices:
        return tuple(sorted(flag.choices, key=lambda choice: choice != flag.default))
    raise LookupError(f"{flag.name} has no values for the argument matrix: list some in harness/domains.py")


DOMAINS: Domains = MappingProxyType({flag.dest: _values(flag) for flag in FLAGS})
"""For each flag, its values; the first is the default."""


def count(domains: Domains = DOMAINS) -> int:
    """How many combinations there are."""
    return math.prod(len(values) for values in domains.values())


class Indexed:
    """The whole product of some domains, by index; the last flag varies fastest, as in itertools.product."""

    # Decoding flag by flag costs more than judging. A table of dicts for each run of flags does it in a few
    # divisions; 4096 entries a table keep them in the cache.
    _TABLE_ROWS_MAX = 4096

    def __init__(self, domains: Domains = DOMAINS) -> None:
        self._count = count(domains)
        self._tables: list[list[dict[str, object]]] = []
        run: dict[str, tuple] = {}
        for dest, values in domains.items():
            if run and count(run) * len(values) > self._TABLE_ROWS_MAX:
                self._tables.append(list(assignments(run)))
                run = {}
            run[dest] = values
        self._tables.append(list(assignments(run)))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, object]:
        if not 0 <= index < self._count:
            raise IndexError(index)
        parts = []
        for table in reversed(self._tables):
            index, row = divmod(index, len(table))
            parts.append(table[row])
        combination: dict[str, object] = {}
        for part in reversed(parts):
            combination |= part
        return combination


def assignments(domains: Domains) -> Iterable[dict[str, object]]:
    """Every combination of these flags' values."""
    for values in itertools.product(*domains.values()):
        yield dict(zip(domains, values, strict=True))


def command_line(combination: Combination) -> list[str]:
    """The words that give these flags their values, without those at their default."""
    words: list[str] = []
    for flag in FLAGS:
        value = combination.get(flag.dest, flag.default)
        if value != flag.default:
            words += flag.as_arguments(value)
    return words
