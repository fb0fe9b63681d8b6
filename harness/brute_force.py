"""Whole verdicts over combinations drawn without repetition: the check on the decomposition itself.

A draw is a fixed shuffle of all indices of the product, of which any slice can be taken, so that runners can
share a draw between them and a combination can be found again by its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from optstream.core.validator import broken_rules, resolve
from optstream.harness import oracle
from optstream.harness.domains import DOMAINS, Domains, Indexed

# The finaliser of MurmurHash3 (Austin Appleby, public domain), cut to the width at hand: each line can be
# undone modulo 2^bits, so together they permute.
_ODD_MULTIPLIERS = (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53)


class Shuffle:
    """A pseudo-random permutation of range(size), in constant memory."""

    def __init__(self, size: int, seed: int = 0) -> None:
        self._size = size
        self._bits = max(2, (size - 1).bit_length())
        self._mask = (1 << self._bits) - 1
        self._half = (self._bits + 1) // 2
        self._offset = (seed * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & self._mask

    def __getitem__(self, place: int) -> int:
        value = place
        while True:  # a walk along the permutation's cycle, out of the padding to a power of two
            value = (value + self._offset) & self._mask
            for multiplier in _ODD_MULTIPLIERS:
                value ^= value >> self._half
                value = (value * multiplier) & self._mask
            value ^= value >> self._half
            if value < self._size:
                return value


@dataclass(slots=True)
class Mismatch:
    """A combination that validator and oracle judge differently."""

    combination: dict[str, object]
    rules: dict[str, frozenset[str]]
    resolved: dict[str, dict[str, object]]

    def describe(self) -> str:
        """What differs, by side: rules that only one of them finds broken, values that are not the same."""
        one, other = self.rules
        parts = [
            f"{rule}: only the {one if rule in self.rules[one] else other}"
            for rule in sorted(self.rules[one] ^ self.rules[other])
        ]
        for dest in dict.fromkeys((*self.resolved[one], *self.resolved[other])):
            answers = {side: resolved.get(dest) for side, resolved in self.resolved.items()}
            if answers[one] != answers[other]:
                parts.append(f"{dest}: {answers}")
        return "; ".join(parts)


@dataclass(slots=True)
class Drawn:
    """What a slice of a draw showed."""

    drawn: int = 0
    valid: int = 0
    mismatches: list[Mismatch] = field(default_factory=list)

    def __iadd__(self, other: Drawn) -> Drawn:
        self.drawn += other.drawn
        self.valid += other.valid
        self.mismatches += other.mismatches
        return self


def judge(start: int, stop: int, *, seed: int = 0, domains: Domains = DOMAINS) -> Drawn:
    """Judge the combinations at places start..stop of the draw."""
    return judge_all(draw(start, stop, seed=seed, domains=domains))


def judge_all(combinations: Iterable[dict[str, object]]) -> Drawn:
    """Hold the validator's verdict against the oracle's: valid or not, which rules, which values."""
    found = Drawn()
    for combination in combinations:
        resolved = resolve(combination)
        broken = frozenset(rule.id for rule in broken_rules(resolved))
        expected_broken, expected_resolved = oracle.violated(combination), oracle.resolved(combination)
        found.drawn += 1
        found.valid += not broken
        if broken != expected_broken or resolved != expected_resolved:
            found.mismatches.append(
                Mismatch(
                    combination,
                    {"validator": broken, "oracle": expected_broken},
                    {"validator": resolved, "oracle": expected_resolved},
                )
            )
    return found


def draw(start: int, stop: int, *, seed: int = 0, domains: Domains = DOMAINS) -> Iterator[dict[str, object]]:
    """The combinations at these places of a draw without repetition. Places past the end yield nothing."""
    combinations = Indexed(domains)
    shuffle = Shuffle(len(combinations), seed)
    for place in range(start, min(stop, len(combinations))):
        yield combinations[shuffle[place]]
