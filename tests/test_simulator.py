"""Overlap, proved in virtual time: against a bound that no schedule can beat, and against a recurrence."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optstream.core.schedule import Stage
from optstream.harness.simulator import DeviceModel, SimulatedStep, Simulation, lower_bound_s

pytestmark = pytest.mark.unit

speeds = st.floats(0.1, 1000.0)
sizes = st.lists(st.floats(0.5, 100.0), min_size=1, max_size=20)


def device_of(read: float, write: float, adam: float, link: float = math.inf, **more) -> DeviceModel:
    return DeviceModel(
        read_bytes_per_s=read, write_bytes_per_s=write, adam_bytes_per_s=adam, link_bytes_per_s=link, **more
    )


def run_and_drain(simulation: Simulation) -> tuple[SimulatedStep, float]:
    step = simulation.step()
    simulation.drain()
    return step, simulation.now_s


def makespan(sizes, depth, read, write, adam, link=None) -> tuple[float, float]:
    """The recurrence of a pipeline of first-in-first-out servers in which bucket i cannot start before bucket
    i - depth has left: the ends of the last update (or download) and of the last write."""
    ends: dict[str, list[float]] = {stage: [] for stage in ("read", "up", "update", "down", "write")}

    def serve(stage: str, seconds: float, *after: float) -> float:
        server_free = ends[stage][-1] if ends[stage] else 0.0
        ends[stage].append(max(server_free, *after) + seconds)
        return ends[stage][-1]

    for index, size in enumerate(sizes):
        out = index - depth
        done = serve("read", size / read, ends["write"][out] if out >= 0 else 0.0)
        if link:
            done = serve("up", size / link, done, ends["down"][out] if out >= 0 else 0.0)
        done = serve("update", size / adam, done)
        if link:
            done = serve("down", size / link, done)
        serve("write", size / write, done)
    return ends["down" if link else "update"][-1], ends["write"][-1]


@given(sizes, st.integers(1, 6), speeds, speeds, speeds)
def test_in_place_it_takes_what_the_recurrence_says(sizes, depth, read, write, adam):
    step, drained_s = run_and_drain(Simulation(device_of(read, write, adam), sizes, depth=depth))
    assert (step.end_s, drained_s) == pytest.approx(makespan(sizes, depth, read, write, adam), rel=1e-9)


@given(sizes, st.integers(1, 6), speeds, speeds, speeds, speeds)
def test_staged_it_takes_what_the_recurrence_says(sizes, depth, read, write, adam, link):
    simulation = Simulation(device_of(read, write, adam, link), sizes, depth=depth, staged=True)
    step, drained_s = run_and_drain(simulation)
    assert (step.end_s, drained_s) == pytest.approx(makespan(sizes, depth, read, write, adam, link), rel=1e-9)


@given(st.integers(1, 30), st.integers(3, 6), speeds, speeds, speeds)
def test_equal_buckets_overlap_up_to_the_bound(count, depth, read, write, adam):
    device, buckets = device_of(read, write, adam), [1.0] * count
    _, drained_s = run_and_drain(Simulation(device, buckets, depth=depth))
    bound = lower_bound_s(device, buckets)
    assert bound <= drained_s * (1 + 1e-9)
    assert drained_s <= 1.05 * bound + 1 / read + 1 / write


@given(st.integers(1, 30), st.integers(5, 8), speeds, speeds, speeds, speeds)
def test_with_two_copies_more_the_same_takes_a_depth_of_five(count, depth, read, write, adam, link):
    device, buckets = device_of(read, write, adam, link), [1.0] * count
    _, drained_s = run_and_drain(Simulation(device, buckets, depth=depth, staged=True))
    assert drained_s <= 1.05 * lower_bound_s(device, buckets) + 1 / read + 1 / write + 2 / link


@given(st.integers(1, 30), st.integers(3, 6), speeds, speeds, st.floats(0.55, 1.0), st.integers(1, 4))
def test_the_bound_holds_where_directions_and_ranks_share_the_disks(count, depth, disk, adam, share, ranks):
    """Both directions are equally fast alone, and together somewhat faster than one."""
    device, buckets = device_of(disk, disk, adam, mixed_bytes_per_s=2 * share * disk), [1.0] * count
    _, drained_s = run_and_drain(Simulation(device, buckets, depth=depth, ranks=ranks))
    one_way = ranks / (share * disk)
    assert drained_s <= 1.05 * lower_bound_s(device, buckets, ranks=ranks) + 2 * one_way


@given(sizes, speeds, speeds, speeds)
def test_depth_one_is_the_sum_of_everything(sizes, read, write, adam):
    _, drained_s = run_and_drain(Simulation(device_of(read, write, adam), sizes, depth=1))
    assert drained_s == pytest.approx(sum(sizes) * (1 / read + 1 / write + 1 / adam))


@given(sizes, st.integers(1, 6), st.booleans(), st.integers(1, 3))
def test_the_same_input_gives_the_same_spans(sizes, depth, staged, ranks):
    def run():
        device = device_of(7.0, 3.0, 11.0, 13.0, mixed_bytes_per_s=8.0, latency_s=0.01, chunk_bytes=1)
        simulation = Simulation(device, sizes, depth=depth, staged=staged, ranks=ranks)
        steps = [simulation.step() for _ in range(2)]
        simulation.drain()
        return steps, simulation.now_s

    assert run() == run()


@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 14))
def test_a_cache_saves_the_reads_and_writes_of_what_it_holds(count, depth, cache):
    simulation = Simulation(device_of(2.0, 1.0, 5.0), [1.0] * count, depth=depth, cache_places=cache)
    simulation.step()
    step = simulation.step()
    (spans,) = step.spans
    assert sum(span.stage is Stage.READ for span in spans) == max(0, count - cache)
    if cache >= count:
        assert step.total_s == pytest.approx(count / 5.0)


def test_a_gap_hides_writes_and_read_ahead_hides_reads():
    def second_step(*, read_ahead: bool, gap_s: float, write_bytes_per_s: float = 10.0) -> float:
        simulation = Simulation(device_of(10.0, write_bytes_per_s, 1000.0), [1.0] * 8, depth=4)
        simulation.step()
        if read_ahead:
            simulation.wait(gap_s / 2)
            simulation.read_ahead()
            gap_s /= 2
        simulation.wait(gap_s)
        return simulation.step().total_s

    # Eight reads of 0.1 s in a row, and the last one's update.
    assert second_step(read_ahead=False, gap_s=10.0) == pytest.approx(0.8 + 0.001)
    # Four are there already: an update and a write make room for the other four.
    assert second_step(read_ahead=True, gap_s=10.0) == pytest.approx(0.001 + 0.1 + 0.4 + 0.001)
    # Slow writes of the step before hold up this one, unless they had time to end: four, or all eight.
    slow = {"read_ahead": False, "write_bytes_per_s": 1.0}
    assert second_step(gap_s=10.0, **slow) == pytest.approx(0.101 + 4 * 1.0 + 0.101)
    assert second_step(gap_s=0.0, **slow) == pytest.approx(8 * 1.0)


def test_latency_delays_each_transfer_and_a_shallow_queue_slows_it():
    slow = device_of(100.0, 100.0, math.inf, latency_s=1.0, chunk_bytes=5, queue_depth=2)
    _, drained_s = run_and_drain(Simulation(slow, [20.0], depth=1))
    # 2 requests of 5 bytes a second, not 100 bytes: 2 s each way, and 1 s before the first byte.
    assert drained_s == pytest.approx(2 * (1.0 + 2.0))


@pytest.mark.parametrize(
    ("readers", "writers", "expected"),
    [
        (1, 0, (6.0, 0.0)),
        (0, 2, (0.0, 2.0)),
        (1, 1, (3.5, 3.5)),
        (2, 1, (1.75, 3.5)),
    ],
)
def test_disk_rates(readers, writers, expected):
    assert device_of(6.0, 4.0, 1.0, mixed_bytes_per_s=7.0).disk_rates(readers, writers) == expected


def test_what_one_direction_cannot_use_goes_to_the_other():
    assert device_of(1.0, 9.0, 1.0, mixed_bytes_per_s=7.0).disk_rates(1, 1) == (1.0, 6.0)


def test_a_node_of_eight_ranks_is_bound_by_its_writes():
    """A 35B model on 8 GPUs and 48 / 26 GB/s of disks: 369 GB written at 26 GB/s are 14.2 s."""
    node = DeviceModel(
        read_bytes_per_s=48e9, write_bytes_per_s=26e9, adam_bytes_per_s=1e12, link_bytes_per_s=50e9
    )
    buckets = [8388608 * 12.0] * 458
    simulation = Simulation(node, buckets, depth=4, ranks=8, staged=True)
    _, drained_s = run_and_drain(simulation)
    assert lower_bound_s(node, buckets, ranks=8) == pytest.approx(14.2, rel=0.01)
    assert 14.1 < drained_s < 14.5
