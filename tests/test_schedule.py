"""The pipeline's decisions under completions in random order, checked against where the data really is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optstream.core.schedule import Command, Schedule, ScheduleError, Stage

pytestmark = pytest.mark.unit

configurations = st.fixed_dictionaries(
    {
        "buckets": st.integers(1, 9),
        "depth": st.integers(1, 5),
        "cache_places": st.integers(0, 6),
        "keep_slots": st.booleans(),
        "staged": st.booleans(),
    }
)


class Machine:
    """Carries commands out in any order, with versions in place of bytes.

    `file`, `places` and `slots` say which update of which bucket each holds. Every command must find what it
    needs where the schedule says it is; that is the whole oracle.
    """

    def __init__(self, configuration: dict) -> None:
        self.schedule = Schedule(**configuration)
        self.staged = configuration["staged"]
        self.depth = configuration["depth"]
        self.places_allowed = configuration["depth"] + configuration["cache_places"]
        self.file = [0] * configuration["buckets"]
        self.updates = [0] * configuration["buckets"]
        self.places: dict[int, tuple[int, int]] = {}
        self.slots: dict[int, tuple[int, int]] = {}
        self.pending: list[Command] = []
        self.log: list[Command] = []

    def drop_what_was_let_go(self) -> None:
        """A bucket that is no newer than its file may leave its place without a command."""
        held = self.schedule.held
        for place, (owner, version) in list(self.places.items()):
            if held.get(owner) != place:
                assert version == self.file[owner], "newer bytes were dropped"
                del self.places[place]

    def accept(self, commands: list[Command]) -> None:
        self.drop_what_was_let_go()
        for command in commands:
            self.log.append(command)
            same_bucket = [c for c in self.pending if c.bucket == command.bucket]
            assert not same_bucket, f"{command} while {same_bucket} is in flight"
            if command.stage is Stage.READ:
                assert command.place not in self.places, "a read into a place that holds a bucket"
            if command.stage is Stage.UPLOAD:
                assert command.slot not in self.slots, "an upload into a slot that holds a bucket"
            if command.stage is Stage.UPDATE:
                assert not any(c.stage is Stage.UPDATE for c in self.pending)
            self.pending.append(command)
            owned_places = {c.place for c in self.pending} | set(self.places)
            owned_slots = {c.slot for c in self.pending if c.slot is not None} | set(self.slots)
            assert len(owned_places) <= self.places_allowed
            assert len(owned_slots) <= (self.depth if self.staged else 0)

    def carry_out(self, command: Command) -> None:
        self.pending.remove(command)
        bucket, place, slot = command.bucket, command.place, command.slot
        where = (self.slots, slot) if self.staged else (self.places, place)
        match command.stage:
            case Stage.READ:
                self.places[place] = (bucket, self.file[bucket])
            case Stage.UPLOAD:
                self.slots[slot] = self.places[place]
                assert self.slots[slot][0] == bucket
            case Stage.UPDATE:
                memory, key = where
                assert memory[key] == (bucket, self.updates[bucket]), "an update of stale or foreign bytes"
                self.updates[bucket] += 1
                memory[key] = (bucket, self.updates[bucket])
            case Stage.DOWNLOAD:
                self.places[place] = self.slots.pop(slot)
                assert self.places[place] == (bucket, self.updates[bucket])
            case Stage.WRITE:
                assert self.places.pop(place) == (bucket, self.updates[bucket])
                self.file[bucket] = self.updates[bucket]
        self.accept(self.schedule.completed(command))

    def run(self, data: st.DataObject, until) -> None:
        while not until():
            assert self.pending, "nothing in flight and not done: a deadlock"
            self.carry_out(data.draw(st.sampled_from(self.pending)))


@given(configurations, st.data())
def test_every_bucket_is_updated_once_a_step_with_its_newest_bytes(configuration, data):
    machine = Machine(configuration)
    schedule = machine.schedule
    everything = range(configuration["buckets"])
    expected = [0] * configuration["buckets"]
    for _ in range(data.draw(st.integers(1, 4), label="steps")):
        if data.draw(st.booleans(), label="read ahead"):
            machine.accept(schedule.read_ahead())
            for _ in range(data.draw(st.integers(0, 6))):
                if machine.pending:
                    machine.carry_out(data.draw(st.sampled_from(machine.pending)))
        active = data.draw(
            st.one_of(st.just(set(everything)), st.sets(st.sampled_from(everything))), label="active"
        )
        machine.accept(schedule.start_step(active))
        machine.run(data, lambda: schedule.step_done)
        for bucket in active:
            expected[bucket] += 1
        assert machine.updates == expected
        if machine.staged and not configuration["keep_slots"]:
            assert not machine.slots, "slots are given back between steps"
        if data.draw(st.booleans(), label="drain"):
            machine.accept(schedule.drain())
            machine.run(data, lambda: not schedule.outstanding)
            assert schedule.dirty == []
            assert machine.file == machine.updates
    machine.run(data, lambda: not schedule.outstanding)
    machine.accept(schedule.drain())
    machine.run(data, lambda: not schedule.outstanding)
    assert machine.file == machine.updates
    assert not machine.places


@given(configurations, st.data())
def test_each_bucket_passes_its_stages_in_order(configuration, data):
    machine = Machine(configuration)
    machine.accept(machine.schedule.start_step(range(configuration["buckets"])))
    machine.run(data, lambda: machine.schedule.step_done)
    machine.accept(machine.schedule.drain())
    machine.run(data, lambda: not machine.schedule.outstanding)
    stages = [Stage.READ, Stage.UPLOAD, Stage.UPDATE, Stage.DOWNLOAD, Stage.WRITE]
    if not configuration["staged"]:
        stages = [Stage.READ, Stage.UPDATE, Stage.WRITE]
    for bucket in range(configuration["buckets"]):
        assert [command.stage for command in machine.log if command.bucket == bucket] == stages
    updated = [command.bucket for command in machine.log if command.stage is Stage.UPDATE]
    assert updated == sorted(updated)


@given(configurations, st.data())
def test_volume_is_the_whole_state_less_exactly_what_is_kept(configuration, data):
    machine = Machine(configuration)
    buckets, depth = configuration["buckets"], configuration["depth"]
    kept = min(buckets, configuration["cache_places"] + (depth if configuration["keep_slots"] else 0))
    for step in range(4):
        machine.log.clear()
        machine.accept(machine.schedule.start_step(range(buckets)))
        machine.run(data, lambda: machine.schedule.step_done)
        machine.run(data, lambda: not machine.schedule.outstanding)
        read = sum(command.stage is Stage.READ for command in machine.log)
        written = sum(command.stage is Stage.WRITE for command in machine.log)
        assert read == (buckets if step == 0 else buckets - kept)
        assert written == buckets - kept


@given(configurations, st.data())
def test_a_failure_stops_new_work_and_reset_ends_it(configuration, data):
    machine = Machine(configuration)
    schedule = machine.schedule
    machine.accept(schedule.start_step(range(configuration["buckets"])))
    for _ in range(data.draw(st.integers(0, 10))):
        if machine.pending:
            machine.carry_out(data.draw(st.sampled_from(machine.pending)))
    if not machine.pending:
        return
    schedule.failed(machine.pending.pop(data.draw(st.integers(0, len(machine.pending) - 1))))
    while machine.pending:
        assert schedule.completed(machine.pending.pop()) == []
    with pytest.raises(ScheduleError, match="reset first"):
        schedule.start_step([])
    schedule.reset()
    assert schedule.step_done
    fresh = Machine(configuration)
    fresh.schedule = schedule
    fresh.accept(schedule.start_step(range(configuration["buckets"])))
    fresh.run(data, lambda: schedule.step_done)
    assert fresh.updates == [1] * configuration["buckets"]


def test_depth_one_is_serial():
    schedule = Schedule(3, 1)
    issued = schedule.start_step(range(3))
    order = []
    while issued:
        assert len(issued) == 1
        order.append((issued[0].stage, issued[0].bucket))
        issued = schedule.completed(issued[0])
    assert order == [(stage, b) for b in range(3) for stage in (Stage.READ, Stage.UPDATE, Stage.WRITE)]


def test_the_default_overlaps_all_three_stages():
    schedule = Schedule(8, 4)
    pending = schedule.start_step(range(8))
    seen = set()
    while pending:
        seen.add(frozenset(command.stage for command in pending))
        # The oldest write finishes last, as on a disk that writes slower than it reads.
        command = min(pending, key=lambda c: (c.stage is Stage.WRITE, c.bucket))
        pending.remove(command)
        pending += schedule.completed(command)
        seen.add(frozenset(command.stage for command in pending))
    assert frozenset({Stage.READ, Stage.UPDATE, Stage.WRITE}) in seen


def test_a_completion_that_was_never_asked_for_is_refused():
    with pytest.raises(ScheduleError, match="not outstanding"):
        Schedule(1, 1).completed(Command(Stage.READ, 0, 0))


def test_steps_do_not_overlap():
    schedule = Schedule(2, 2)
    schedule.start_step([0, 1])
    with pytest.raises(ScheduleError, match="not done"):
        schedule.start_step([0, 1])
