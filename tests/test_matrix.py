"""The argument matrix: validator and oracle agree on the whole product, and what says so can fail."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optstream.core.config import DEFAULTS, FLAGS
from optstream.core.validator import RULES, STEPS, STREAM, validate
from optstream.harness import matrix, matrix_report, oracle
from optstream.harness.brute_force import Shuffle, draw, judge
from optstream.harness.check import parse_flags
from optstream.harness.covering import count_coverage, covering_array
from optstream.harness.decomposition import (
    OutsideClosureError,
    RecordingMapping,
    compare,
    oracle_side,
    validator_side,
)
from optstream.harness.domains import DOMAINS, Indexed, assignments, command_line, count
from optstream.harness.matrix_shard import Shard, parse_shard
from optstream.harness.oracle import Opinion
from optstream.harness.valid_space import ValidSpace

pytestmark = pytest.mark.unit

DRAWN_IN_UNIT = 20_000


@pytest.fixture(scope="module")
def space() -> ValidSpace:
    return ValidSpace()


@pytest.fixture(scope="module")
def pairwise(space) -> list:
    return covering_array(space, 2)


@st.composite
def small_domains(draw) -> dict[str, tuple]:
    """One value of each flag, and all values of a few, so that the product can be enumerated."""
    open_flags = draw(st.sets(st.sampled_from(sorted(DOMAINS)), max_size=7))
    domains: dict[str, tuple] = {}
    for dest, values in DOMAINS.items():
        domains[dest] = values if dest in open_flags else (draw(st.sampled_from(values)),)
        if count(domains) > 1000:
            domains[dest] = values[:1]
    return domains


# ---- the whole product ----------------------------------------------------------------------------------


def test_validator_and_oracle_agree_on_the_whole_product():
    comparison = compare(validator_side(), oracle_side())
    assert comparison.one_sided == []
    assert comparison.disagreements == []
    assert count() > 5e9


def test_the_rule_ids_are_those_that_others_rely_on():
    assert {rule.id for rule in RULES} == set(oracle.REFUSALS)
    assert len(RULES) == 20


def test_every_closure_is_read_in_full():
    """A flag that a rule declares and never looks at would be shown to people as part of the violation."""
    sides = (validator_side(), oracle_side())
    read = compare(*sides).read
    for side in sides:
        for question, opinion in (*side.rules.items(), *side.values.items()):
            assert read[side.name, question] == opinion.reads, (side.name, question)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_a_deleted_rule_is_found(rule):
    assert not compare(
        validator_side(rules=[each for each in RULES if each is not rule]), oracle_side()
    ).agrees


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_a_flipped_rule_is_found(rule):
    flipped = dataclasses.replace(rule, broken=lambda values: not rule.broken(values))
    side = validator_side(rules=[flipped if each is rule else each for each in RULES])
    found = compare(side, oracle_side())
    assert {disagreement.question for disagreement in found.disagreements} == {rule.id}


@pytest.mark.parametrize("place", range(len(STEPS)))
@pytest.mark.parametrize("mutation", ["deleted", "flipped", "opposite", "overriding"])
def test_a_changed_step_of_resolution_is_found(place, mutation):
    step = STEPS[place]
    changed = {
        "deleted": [],
        "flipped": [dataclasses.replace(step, when=lambda values: not step.when(values))],
        "opposite": [dataclasses.replace(step, to=not step.to)],
        "overriding": [dataclasses.replace(step, only_unset=not step.only_unset)],
    }[mutation]
    steps = [*STEPS[:place], *changed, *STEPS[place + 1 :]]
    assert not compare(validator_side(steps=steps), oracle_side()).agrees


# The steps between commute: they only turn on what is unset, and rollout-only turns off whatever they did.
@pytest.mark.parametrize("place", [0, 3])
def test_steps_in_another_order_are_found(place):
    steps = [*STEPS[:place], STEPS[place + 1], STEPS[place], *STEPS[place + 2 :]]
    assert not compare(validator_side(steps=steps), oracle_side()).agrees


@pytest.mark.parametrize(
    "look",
    [
        lambda values: values["colocate"],
        lambda values: values.get("colocate", False),
        lambda values: "colocate" in values and values["colocate"],
    ],
    ids=["item", "get", "contains"],
)
@pytest.mark.parametrize("side", ["validator", "oracle"])
def test_reading_outside_the_declared_closure_fails(side, look):
    if side == "validator":
        rules = [
            dataclasses.replace(rule, broken=lambda v: look(v) or False)
            if rule.id == "stream-reset"
            else rule
            for rule in RULES
        ]
        ours, theirs = validator_side(rules=rules), oracle_side()
    else:
        sly = Opinion(oracle.REFUSALS["stream-reset"].reads, look)
        ours = validator_side()
        theirs = dataclasses.replace(oracle_side(), rules=oracle.REFUSALS | {"stream-reset": sly})
    with pytest.raises(OutsideClosureError, match=rf"stream-reset \({side}\) reads colocate"):
        compare(ours, theirs)


def test_reading_outside_through_a_copy_shows_the_closure_only():
    given_flags = RecordingMapping("question", dict(DEFAULTS), frozenset({"colocate"}))
    assert dict(given_flags) == {"colocate": False}


def test_the_oracle_imports_nothing_of_what_it_judges():
    with open(oracle.__file__, encoding="utf-8") as source:
        tree = ast.parse(source.read())
    imported = {
        name
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [getattr(node, "module", "")]
        )
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert imported == {"__future__", "os", "collections.abc", "dataclasses"}


# ---- brute force ----------------------------------------------------------------------------------------


def test_a_slice_of_the_draw_agrees():
    drawn = judge(0, DRAWN_IN_UNIT)
    assert [mismatch.describe() for mismatch in drawn.mismatches] == []
    assert drawn.drawn == DRAWN_IN_UNIT
    assert 0 < drawn.valid < drawn.drawn


@given(st.fixed_dictionaries({dest: st.sampled_from(values) for dest, values in DOMAINS.items()}))
def test_any_combination_agrees(combination):
    verdict = validate(combination)
    assert {violation.rule for violation in verdict.violations} == oracle.violated(combination)
    assert dict(verdict.resolved) == oracle.resolved(combination)


def test_brute_force_finds_a_rule_that_is_missing_and_says_which(monkeypatch):
    monkeypatch.delitem(oracle.REFUSALS, "stream-reset")
    mismatches = judge(0, 2000).mismatches
    assert mismatches
    assert {mismatch.describe() for mismatch in mismatches} == {"stream-reset: only the validator"}


def test_brute_force_finds_a_value_that_differs_and_says_which(monkeypatch):
    monkeypatch.setitem(oracle.VALUES, "colocate", Opinion(frozenset(), lambda c: None))
    mismatches = judge(0, 50).mismatches
    assert len(mismatches) == 50
    assert "colocate: {'validator': " in mismatches[0].describe()


@given(st.integers(1, 3000), st.integers(0, 2**64))
def test_a_shuffle_is_a_permutation(size, seed):
    shuffle = Shuffle(size, seed)
    assert sorted(shuffle[place] for place in range(size)) == list(range(size))


def test_a_draw_has_no_repetition_and_its_slices_fit_together():
    whole = [tuple(combination.values()) for combination in draw(0, 3000)]
    assert len(set(whole)) == 3000
    assert whole == [tuple(each.values()) for part in ((0, 1000), (1000, 3000)) for each in draw(*part)]
    assert whole != [tuple(combination.values()) for combination in draw(0, 3000, seed=1)]


def test_a_draw_reaches_every_value_of_every_flag():
    seen = {dest: set() for dest in DOMAINS}
    for combination in draw(0, 500):
        for dest, value in combination.items():
            seen[dest].add(value)
    assert seen == {dest: set(values) for dest, values in DOMAINS.items()}


@given(small_domains())
def test_indices_count_through_the_product(domains):
    indexed = Indexed(domains)
    assert [indexed[index] for index in range(len(indexed))] == list(assignments(domains))
    for outside in (-1, len(indexed)):
        with pytest.raises(IndexError):
            indexed[outside]


def test_the_whole_product_is_indexed_from_end_to_end():
    indexed = Indexed()
    assert len(indexed) == count()
    assert indexed[0] == {dest: values[0] for dest, values in DOMAINS.items()} == DEFAULTS
    assert indexed[count() - 1] == {dest: values[-1] for dest, values in DOMAINS.items()}


def test_every_flag_has_both_its_default_and_something_else():
    assert list(DOMAINS) == [flag.dest for flag in FLAGS]
    for flag in FLAGS:
        assert DOMAINS[flag.dest][0] == flag.default
        assert len(set(DOMAINS[flag.dest])) == len(DOMAINS[flag.dest]) > 1
        assert all(flag.accepts(value) for value in DOMAINS[flag.dest])


# ---- what is allowed, as a whole ------------------------------------------------------------------------


@given(small_domains(), st.data())
def test_the_space_is_what_enumeration_finds(domains, data):
    space = ValidSpace(domains=domains)
    allowed = [each for each in assignments(domains) if not oracle.violated(each)]
    assert space.count() == len(allowed)
    dests = data.draw(st.permutations(sorted(domains)))[:3]
    assert space.project(dests) == {tuple(each[dest] for dest in dests) for each in allowed}
    fixed = {dest: data.draw(st.sampled_from(domains[dest])) for dest in dests}
    completed = space.complete(fixed)
    if completed is None:
        assert not any(fixed.items() <= each.items() for each in allowed)
    else:
        assert completed in allowed
        assert fixed.items() <= completed.items()


def test_completing_nothing_gives_the_defaults(space):
    assert space.complete({}) == DEFAULTS


# ---- coverage -------------------------------------------------------------------------------------------


def test_pairwise_covers_every_allowed_pair_with_allowed_rows(space, pairwise):
    coverage = count_coverage(pairwise, space, 2)
    assert coverage.missing == ()
    assert coverage.covered == coverage.total > 3000
    assert not any(oracle.violated(row) for row in pairwise)
    assert all(list(row) == list(DOMAINS) for row in pairwise)
    assert len(pairwise) < 100


@given(small_domains(), st.randoms())
def test_coverage_is_counted_as_enumeration_counts_it(domains, random):
    space = ValidSpace(domains=domains)
    allowed = [each for each in assignments(domains) if not oracle.violated(each)]
    rows = random.sample(allowed, k=min(3, len(allowed)))

    def pairs(combinations: list[dict]) -> set:
        return {pair for each in combinations for pair in itertools.combinations(each.items(), 2)}

    coverage = count_coverage(rows, space, 2)
    assert coverage.covered == len(pairs(rows))
    assert set(coverage.missing) == pairs(allowed) - pairs(rows)
    assert coverage.total == len(pairs(allowed))


def test_rows_outside_the_space_cover_nothing_that_is_not_allowed(space):
    refused = DEFAULTS | {STREAM: True, "indep_dp": True}
    assert count_coverage([refused], space, 2).covered < len(list(itertools.combinations(DOMAINS, 2)))


# ---- the report -----------------------------------------------------------------------------------------


def test_a_report_over_everything_passes_and_executes_what_is_allowed(space):
    executed = []
    stages = []
    report = matrix.run_matrix(
        brute_force=1000,
        threewise=False,
        execute=executed.append,
        progress=lambda stage, done, total: stages.append((stage, done == total)),
    )
    assert report.failures == []
    assert report.passed
    assert report.combinations == count()
    assert report.valid + report.invalid == report.combinations
    assert report.valid == space.count()
    assert report.brute_forced == 1000
    assert report.disagreements == 0
    assert report.pairs_covered == report.pairs_total > 0
    assert report.executed == len(executed) > 1000
    assert {stage for stage, ended in stages if ended} == {
        "whole product",
        "brute force",
        "coverage",
        "execution",
    }


def test_executions_hold_every_setting_of_what_streams(space, pairwise):
    chosen = matrix.executions(space, pairwise)
    assert not any(oracle.violated(each) for each in chosen)
    assert all(row in chosen for row in pairwise)
    settings = {tuple(each[dest] for dest in matrix.ACTED_ON) for each in chosen if each[STREAM]}
    streaming = matrix.ACTED_ON.index(STREAM)
    assert settings == {each for each in space.project(matrix.ACTED_ON) if each[streaming]}
    assert any(not each[STREAM] for each in chosen)
    assert len({tuple(each.items()) for each in chosen}) == len(chosen)


def test_what_goes_wrong_in_execution_is_a_failure_with_its_command():
    combination = DEFAULTS | {"colocate": True, "stream_optimizer_state_depth": -1}
    report = matrix.run_one(combination, execute=lambda each: "the bits differ")
    assert (report.combinations, report.valid, report.executed, report.passed) == (1, 1, 1, False)
    (failure,) = report.failures
    assert failure.what == "the bits differ"
    assert failure.command == "optstream matrix -- --colocate --stream-optimizer-state-depth -1"


def test_a_refused_combination_is_not_executed():
    report = matrix.run_one(DEFAULTS | {STREAM: True}, execute=lambda each: "executed")
    assert (report.valid, report.invalid, report.executed, report.passed) == (0, 1, 0, True)


def test_a_disagreement_is_a_failure_with_its_command(monkeypatch):
    monkeypatch.delitem(oracle.REFUSALS, "stream-lora")
    comparison = compare(validator_side(), oracle_side())
    assert [failure.what for failure in matrix.failures_of(comparison)] == [
        "only the validator knows stream-lora"
    ]
    monkeypatch.setitem(oracle.REFUSALS, "stream-lora", Opinion(frozenset({STREAM}), lambda c: False))
    failures = list(matrix.failures_of(compare(validator_side(), oracle_side())))
    assert len(failures) == 3
    assert failures[0].what == "stream-lora: {'validator': True, 'oracle': False}"
    assert failures[0].command.startswith("optstream matrix -- --stream-optimizer-state-to-disk")


@given(st.fixed_dictionaries({dest: st.sampled_from(values) for dest, values in DOMAINS.items()}))
def test_a_command_gives_the_combination_back(combination):
    assert vars(parse_flags(command_line(combination))) == combination


def test_the_page_shows_rules_counts_and_failures():
    report = matrix.MatrixReport(combinations=12345, pairs_covered=3, pairs_total=4)
    report.failures.append(matrix.Failure("coverage", "<not covered>", "optstream matrix -- --colocate"))
    page = matrix_report.render(report)
    assert "12,345" in page
    assert "3 of 4" in page
    assert "&lt;not covered&gt;" in page
    assert "<code>optstream matrix -- --colocate</code>" in page
    assert all(rule.id in page for rule in RULES)
    assert "every verdict agrees" not in page
    assert "every verdict agrees" in matrix_report.render(matrix.MatrixReport())


def test_the_json_has_the_names_that_others_rely_on():
    assert list(json.loads(json.dumps(matrix.MatrixReport().as_json()))) == [
        "combinations",
        "brute_forced",
        "valid",
        "invalid",
        "disagreements",
        "executed",
        "pairs_covered",
        "pairs_total",
        "triples_covered",
        "triples_total",
        "failures",
    ]


# ---- shards ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("of", [1, 2, 3, 7])
def test_shards_run_every_part_once_and_other_tests_always(of):
    parts = [SimpleNamespace(callspec=SimpleNamespace(params={"matrix_part": part})) for part in range(5)]
    others = [SimpleNamespace(), SimpleNamespace(callspec=SimpleNamespace(params={"depth": 2}))]
    runs = []
    for index in range(1, of + 1):
        kept, dropped = Shard(index, of).select([*parts, *others])
        assert all(other in kept for other in others)
        assert len(kept) + len(dropped) == 7
        runs += [item for item in kept if item in parts]
    assert sorted(runs, key=parts.index) == parts


def test_a_shard_is_written_i_of_n():
    assert parse_shard("2/3") == Shard(2, 3)


@pytest.mark.parametrize("text", ["", "2", "0/3", "4/3", "1/0", "a/b", "-1/3", "1/3/5"])
def test_what_is_no_shard_is_refused(text):
    with pytest.raises(Exception, match="is no shard"):
        parse_shard(text)
