"""The argument matrix: every combination of flags has one right verdict, and every allowed one has run.

Four judgements, each catching what the others cannot: the decomposition judges the whole product, brute force
checks the decomposition, coverage says what a small set of combinations touches, and execution runs allowed
combinations for real. `run_matrix` does all four; the tests call the parts.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing import get_context

from optstream.core.config import DISK, FLAGS, STREAMING
from optstream.core.validator import STREAM
from optstream.harness.brute_force import Drawn, Mismatch, judge, judge_all
from optstream.harness.covering import count_coverage, covering_array
from optstream.harness.decomposition import Comparison, compare, oracle_side, validator_side
from optstream.harness.domains import Combination, command_line, count
from optstream.harness.valid_space import ValidSpace

Execute = Callable[[Combination], str | None]
"""Runs one allowed combination for real; returns None, or what went wrong. Called in worker processes."""

Progress = Callable[[str, int, int], None]
"""Told a stage's name, how much of it is done, and how much there is."""

ACTED_ON = tuple(flag.dest for flag in FLAGS if flag.group in (DISK, STREAMING))
"""The flags that optstream itself acts on; the others only decide whether it may."""

BRUTE_FORCE_NIGHTLY = 10_000_000
_CHUNK = 50_000


@dataclass(frozen=True, slots=True)
class Failure:
    """One thing found, and the command that shows it again."""

    kind: str
    what: str
    command: str


@dataclass(slots=True)
class MatrixReport:
    """What `optstream matrix` found. Counts are of combinations, unless named otherwise."""

    combinations: int = 0
    brute_forced: int = 0
    valid: int = 0
    invalid: int = 0
    disagreements: int = 0
    executed: int = 0
    pairs_covered: int = 0
    pairs_total: int = 0
    triples_covered: int = 0
    triples_total: int = 0
    failures: list[Failure] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.failures

    def as_json(self) -> dict:
        return asdict(self)


def run_matrix(
    *,
    brute_force: int = BRUTE_FORCE_NIGHTLY,
    seed: int = 0,
    threewise: bool = True,
    execute: Execute | None = None,
    workers: int = 1,
    progress: Progress = lambda stage, done, total: None,
) -> MatrixReport:
    """Judge the whole product, draw `brute_force` combinations, count coverage, execute what is allowed.

    threewise: cover and count triples too, which takes a while.
    """
    report = MatrixReport()
    progress("whole product", 0, 1)
    _judge_product(report)
    progress("whole product", 1, 1)
    with _pool(workers) as run_all:
        chunks = [(start, min(start + _CHUNK, brute_force)) for start in range(0, brute_force, _CHUNK)]
        for done, drawn in enumerate(run_all(partial(_judge_chunk, seed=seed), chunks), start=1):
            add_drawn(report, drawn)
            progress("brute force", done, len(chunks))
        allowed = _measure_coverage(report, progress, 3 if threewise else 2)
        if execute is not None:
            for done, (combination, wrong) in enumerate(
                zip(allowed, run_all(execute, allowed), strict=True), start=1
            ):
                add_execution(report, combination, wrong)
                progress("execution", done, len(allowed))
    return report


def run_one(combination: Combination, *, execute: Execute | None = None) -> MatrixReport:
    """The same verdicts over a single combination: what a failure's command does."""
    report = MatrixReport(combinations=1)
    drawn = judge_all([dict(combination)])
    report.valid, report.invalid = drawn.valid, drawn.drawn - drawn.valid
    add_drawn(report, drawn)
    if execute is not None and report.valid and report.passed:
        add_execution(report, combination, execute(combination))
    return report


def executions(space: ValidSpace, *arrays: Iterable[Combination]) -> list[Combination]:
    """The allowed combinations to run: each setting of what optstream acts on, and these covering arrays.

    Where nothing streams, the other flags that optstream acts on are not read, so one such combination stands
    for all, beside those that the arrays hold.
    """
    streaming = space.restricted(STREAM, True)
    settings = sorted(streaming.project(ACTED_ON), key=repr)
    streamed = (streaming.complete(dict(zip(ACTED_ON, values, strict=True))) for values in settings)
    distinct: dict[tuple, Combination] = {}
    for combination in itertools.chain((space.complete({STREAM: False}),), streamed, *arrays):
        distinct.setdefault(tuple(combination.items()), combination)
    return list(distinct.values())


def part_of(items: Sequence, part: int, parts: int) -> Sequence:
    """Every `parts`-th item from `part` on (from 0): the parts are disjoint and together hold everything."""
    return items[part::parts]


def add_drawn(report: MatrixReport, drawn: Drawn) -> None:
    report.brute_forced += drawn.drawn
    report.disagreements += len(drawn.mismatches)
    report.failures += map(_of_mismatch, drawn.mismatches)


def add_execution(report: MatrixReport, combination: Combination, wrong: str | None) -> None:
    report.executed += 1
    if wrong is not None:
        report.failures.append(Failure("execution", wrong, reproduce(combination)))


def reproduce(combination: Combination) -> str:
    return shlex.join(["optstream", "matrix", "--", *command_line(combination)])


def _judge_product(report: MatrixReport) -> None:
    comparison = compare(validator_side(), oracle_side())
    report.combinations = count()
    report.valid = ValidSpace().count()
    report.invalid = report.combinations - report.valid
    report.disagreements += len(comparison.one_sided) + len(comparison.disagreements)
    report.failures += failures_of(comparison)


def failures_of(comparison: Comparison) -> Iterator[Failure]:
    for what in comparison.one_sided:
        yield Failure("rule ids", what, reproduce({}))
    for each in comparison.disagreements:
        yield Failure("whole product", f"{each.question}: {each.answers}", reproduce(each.combination))


def _of_mismatch(mismatch: Mismatch) -> Failure:
    return Failure("brute force", mismatch.describe(), reproduce(mismatch.combination))


def _measure_coverage(report: MatrixReport, progress: Progress, strength_max: int) -> list[Combination]:
    """The allowed combinations to execute, once it is counted what they cover."""
    space = ValidSpace()
    strengths = range(2, strength_max + 1)
    arrays = []
    for done, strength in enumerate(strengths):
        progress("coverage", done, len(strengths))
        arrays.append(covering_array(space, strength))
    allowed = executions(space, *arrays)
    measured = [count_coverage(allowed, space, strength) for strength in strengths]
    report.pairs_covered, report.pairs_total = measured[0].covered, measured[0].total
    if strength_max > 2:
        report.triples_covered, report.triples_total = measured[1].covered, measured[1].total
    for assignment in itertools.chain.from_iterable(coverage.missing for coverage in measured):
        values = dict(assignment)
        report.failures.append(
            Failure("coverage", f"not covered: {values}", reproduce(space.complete(values)))
        )
    progress("coverage", len(strengths), len(strengths))
    return allowed


def _judge_chunk(bounds: tuple[int, int], *, seed: int) -> Drawn:
    return judge(*bounds, seed=seed)


@contextmanager
def _pool(workers: int) -> Iterator[Callable]:
    """`map`, over worker processes where there are several. Spawned: a fork would copy threads' locks."""
    if workers == 1:
        yield map
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        yield pool.map
