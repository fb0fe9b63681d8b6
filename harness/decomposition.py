"""Judge the whole product of flags by its parts: sound, because each part is told what it may look at.

Enumerating 10^12 combinations is out of reach, and not needed: each rule and each resolved value depends on a
few flags. Both sides (the validator and the oracle) declare these closures, one for each question. For every
question the union of both closures is enumerated whole, and the answers must agree. Each side is handed a
recording mapping that holds nothing but its own declared closure, so a hidden dependency is an error, not a
gap: what agrees on the closures agrees on the whole product.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from optstream.core import validator
from optstream.core.config import FLAGS
from optstream.core.validator import RULES, STEPS, Rule, Step
from optstream.harness import oracle
from optstream.harness.domains import DOMAINS, Combination, Domains, assignments, count
from optstream.harness.oracle import Opinion


class OutsideClosureError(Exception):
    """A question looked at a flag that it does not declare; its closure cannot be relied on."""

    # Not a KeyError: Mapping.get and ChainMap would take that for an absent key, and go on.


class RecordingMapping(Mapping):
    """The flags of a declared closure, as given; notes which are read, and refuses any other."""

    def __init__(self, question: str, combination: Combination, closure: frozenset[str]) -> None:
        self._question, self._combination, self._closure = question, combination, closure
        self.read: set[str] = set()

    def __getitem__(self, dest: str) -> object:
        if dest not in self._closure:
            raise OutsideClosureError(f"{self._question} reads {dest}, which it does not declare")
        self.read.add(dest)
        return self._combination[dest]

    def __iter__(self) -> Iterator[str]:
        return iter(self._closure)

    def __len__(self) -> int:
        return len(self._closure)


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two that are compared: a predicate for each rule id, a function for each resolved value."""

    name: str
    rules: Mapping[str, Opinion]
    values: Mapping[str, Opinion]


def validator_side(rules: Sequence[Rule] = RULES, steps: Sequence[Step] = STEPS) -> Side:
    """The validator's tables as questions about flags as given: each rule and value, through resolution."""
    return Side(
        "validator",
        {rule.id: _through_resolution(rule.reads, rule.broken, steps) for rule in rules},
        {flag.dest: _through_resolution((flag.dest,), _pick(flag.dest), steps) for flag in FLAGS},
    )


def oracle_side() -> Side:
    unchanged = {flag.dest: Opinion(frozenset((flag.dest,)), _pick(flag.dest)) for flag in FLAGS}
    return Side("oracle", oracle.REFUSALS, {**unchanged, **oracle.VALUES})


def _pick(dest: str) -> Callable[[Combination], object]:
    return lambda values: values[dest]


def _through_resolution(
    reads: Sequence[str], ask: Callable[[Combination], object], steps: Sequence[Step]
) -> Opinion:
    relevant, closure = validator.trace(reads, steps)

    def decide(given: Combination) -> object:
        values = ChainMap({}, given)  # what steps set lies over what was given; the rest is read through
        validator.apply_steps(relevant, values)
        return ask(values)

    return Opinion(closure, decide)


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A combination of a closure's flags on which the sides differ, whatever the other flags are."""

    question: str
    combination: dict[str, object]
    answers: dict[str, object]


@dataclass(slots=True)
class Comparison:
    """What was found. `asked` counts enumerated combinations; `read` has the flags each side looked at."""

    asked: int = 0
    one_sided: list[str] = field(default_factory=list)
    disagreements: list[Disagreement] = field(default_factory=list)
    read: dict[tuple[str, str], set[str]] = field(default_factory=dict)

    @property
    def agrees(self) -> bool:
        return not self.one_sided and not self.disagreements


def compare(ours: Side, theirs: Side, domains: Domains = DOMAINS) -> Comparison:
    """Hold two sides against each other over the whole product of the domains.

    Raises OutsideClosureError where a side reads a flag that it does not declare.
    """
    found = Comparison()
    for our_table, their_table in ((ours.rules, theirs.rules), (ours.values, theirs.values)):
        for question in sorted(our_table.keys() ^ their_table.keys()):
            who = ours.name if question in our_table else theirs.name
            found.one_sided.append(f"only the {who} knows {question}")
        for question in our_table:
            if question in their_table:
                answers = {ours.name: our_table[question], theirs.name: their_table[question]}
                _compare_one(question, answers, domains, found)
    return found


def _compare_one(question: str, sides: Mapping[str, Opinion], domains: Domains, found: Comparison) -> None:
    union = frozenset().union(*(opinion.reads for opinion in sides.values()))
    relevant = {dest: values for dest, values in domains.items() if dest in union}
    found.asked += count(relevant)
    for combination in assignments(relevant):
        answers = {}
        for name, opinion in sides.items():
            given = RecordingMapping(f"{question} ({name})", combination, opinion.reads)
            answers[name] = opinion.decide(given)
            found.read.setdefault((name, question), set()).update(given.read)
        ours, theirs = answers.values()
        if ours != theirs:
            found.disagreements.append(Disagreement(question, combination, answers))
