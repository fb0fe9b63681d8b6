"""The allowed combinations as a whole: counted exactly, projected and completed, and never enumerated.

Most rules meet in a few flags only. With those fixed, each rule looks at flags of its own, and the allowed
combinations are a plain product: of the allowed values of each rule's own flags, and of the flags that no
rule reads. Fixed values that leave the same product are put together in one block, so that a `ValidSpace` is
a handful of disjoint blocks, each a product of small relations.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from optstream.harness.domains import DOMAINS, Combination, Domains, assignments
from optstream.harness.oracle import REFUSALS, Opinion


@dataclass(frozen=True, slots=True)
class Relation:
    """Some flags, and the rows of values that they may have together."""

    dests: tuple[str, ...]
    rows: tuple[tuple, ...]

    def project(self, dests: Iterable[str]) -> Relation:
        kept = [place for place, dest in enumerate(self.dests) if dest in dests]
        rows = dict.fromkeys(tuple(row[place] for place in kept) for row in self.rows)
        return Relation(tuple(self.dests[place] for place in kept), tuple(rows))

    def matching(self, fixed: Combination) -> tuple | None:
        """The first row that has the fixed values, or None."""
        places = [(place, fixed[dest]) for place, dest in enumerate(self.dests) if dest in fixed]
        return next((row for row in self.rows if all(row[place] == value for place, value in places)), None)


Block = tuple[Relation, ...]


class ValidSpace:
    """All combinations that no rule refuses.

    rules: for each rule id, its declared closure and its predicate over flags as given.
    """

    def __init__(self, rules: Mapping[str, Opinion] = REFUSALS, domains: Domains = DOMAINS) -> None:
        self.domains = domains
        self._rules = rules
        readers = Counter(dest for rule in rules.values() for dest in rule.reads)
        self._shared = {dest: values for dest, values in domains.items() if readers[dest] > 1}
        self._free = tuple(
            Relation((dest,), tuple((value,) for value in values))
            for dest, values in domains.items()
            if readers[dest] == 0
        )
        self.blocks: tuple[Block, ...] = tuple(self._blocks(rules))
        self._places = [
            {dest: place for place, relation in enumerate(block) for dest in relation.dests}
            for block in self.blocks
        ]
        self._projections: dict[tuple, Relation] = {}

    def _blocks(self, rules: Mapping[str, Opinion]) -> Iterator[Block]:
        private = [
            {
                dest: values
                for dest, values in self.domains.items()
                if dest in rule.reads - self._shared.keys()
            }
            for rule in rules.values()
        ]
        fixed_by_product: dict[tuple[Relation, ...], list[tuple]] = {}
        for fixed in assignments(self._shared):
            product = tuple(
                _allowed(rule, own, fixed) for rule, own in zip(rules.values(), private, strict=True)
            )
            if all(relation.rows for relation in product):
                fixed_by_product.setdefault(product, []).append(tuple(fixed.values()))
        for product, rows in fixed_by_product.items():
            own = tuple(relation for relation in product if relation.dests)
            yield (Relation(tuple(self._shared), tuple(rows)), *own, *self._free)

    def restricted(self, dest: str, *values: object) -> ValidSpace:
        """The part of it in which a flag has one of these values."""
        return ValidSpace(self._rules, {**self.domains, dest: values})

    def count(self) -> int:
        """How many combinations are allowed, exactly."""
        return sum(math.prod(len(relation.rows) for relation in block) for block in self.blocks)

    def project(self, dests: Iterable[str]) -> set[tuple]:
        """The value tuples of these flags, in the given order, that occur in an allowed combination."""
        dests = tuple(dests)
        everything = math.prod(len(self.domains[dest]) for dest in dests)
        found: set[tuple] = set()
        for block in range(len(self.blocks)):
            parts = self._parts(block, dests)
            order = [dest for part in parts for dest in part.dests]
            places = [order.index(dest) for dest in dests]
            for rows in itertools.product(*(part.rows for part in parts)):
                values = tuple(itertools.chain.from_iterable(rows))
                found.add(tuple(values[place] for place in places))
            if len(found) == everything:
                break
        return found

    def _parts(self, block: int, dests: tuple[str, ...]) -> list[Relation]:
        """The projections of a block's relations on these flags, without relations that have none of them."""
        wanted: dict[int, list[str]] = {}
        for dest in dests:
            wanted.setdefault(self._places[block][dest], []).append(dest)
        parts = []
        for place, kept in wanted.items():
            key = (block, place, *kept)
            if key not in self._projections:
                self._projections[key] = self.blocks[block][place].project(kept)
            parts.append(self._projections[key])
        return parts

    def complete(self, fixed: Combination) -> dict[str, object] | None:
        """An allowed combination that has these values, or None. Flags that are left take their first value
        where the rules let them."""
        for block in self.blocks:
            values: dict[str, object] = {}
            for relation in block:
                row = relation.matching(fixed)
                if row is None:
                    break
                values.update(zip(relation.dests, row, strict=True))
            else:
                return {dest: values[dest] for dest in self.domains}
        return None


def _allowed(rule: Opinion, own: Domains, fixed: Combination) -> Relation:
    """The values of a rule's own flags under which it is not broken, the shared flags being fixed.

    A rule without flags of its own yields one empty row, or none where it is broken.
    """
    rows = (tuple(values.values()) for values in assignments(own) if not rule.decide({**fixed, **values}))
    return Relation(tuple(own), tuple(rows))
