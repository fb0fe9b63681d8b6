"""The soak is sound on the code as it is, and finds each of four things that could be taken out of it."""

from __future__ import annotations

import json
import logging
import threading

import pytest

from optstream.backends.fake_system import FakeSystem
from optstream.backends.nvme_file import NvmeFile
from optstream.core import store
from optstream.core.engine import Engine
from optstream.harness.cli import main
from optstream.harness.fault_plan import FaultPlan
from optstream.harness.faults import Kind, Operation
from optstream.harness.life import Life, Storage
from optstream.harness.soak import SoakReport, judge, live, live_and_judge, random_life, soak

SEED = 7000


@pytest.fixture(autouse=True)
def quiet():
    """Background saves log their failures, and here they fail by the dozen."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.unit
def test_the_code_as_it_is_withstands():
    report = soak(60, SEED, files=False, lives_max=4)
    assert report.failures == []
    assert report.sound
    counts = report.as_json()
    assert counts["faults_injected"] > 50
    assert counts["detected"] + counts["tolerated"] == counts["faults_injected"]
    assert counts["detected"] > 0
    assert counts["tolerated"] > 0
    assert counts["recovered"] > 0
    assert counts["seeds"] == [SEED + index for index in range(4)]


# ---- four things that could be taken out -------------------------------------------------------------------


def without_checksums(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(store, "checksum", lambda data: 0)


def without_lock(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FakeSystem, "try_lock", lambda self, descriptor: True)


def without_fsync(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(NvmeFile, "sync", lambda self: None)


def without_poison(patch: pytest.MonkeyPatch) -> None:
    original = Engine.raise_failure

    def once(self) -> None:
        if not self._surfaced:
            original(self)

    patch.setattr(Engine, "raise_failure", once)


# What is taken out, and a life that it matters in.
MUTATIONS = {
    without_checksums: ("lost@write#5", ("step", "step")),
    without_lock: ("", ("step", "claim_again")),
    without_fsync: ("", ("step", "save", "cut_power")),
    without_poison: ("EIO@write#5", ("step", "step", "step")),
}


@pytest.mark.unit
@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_what_is_taken_out_is_missed_at_once(mutate, monkeypatch):
    faults, actions = MUTATIONS[mutate]

    def sound(seed: int) -> bool:
        life = Life(Storage("/disk", FakeSystem()), FaultPlan.parse(f"seed={seed} {faults}"))

        def act() -> None:
            life.construct()
            for action in actions:
                getattr(life, action)()

        return judge(life, act).sound

    # What a power cut tears differs from seed to seed, and may be nothing.
    assert all(map(sound, range(2)))
    mutate(monkeypatch)
    assert not all(map(sound, range(2)))


@pytest.mark.nightly
@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_a_soak_finds_what_is_taken_out(mutate, monkeypatch):
    mutate(monkeypatch)
    report = SoakReport()
    for seed in range(SEED, SEED + 100):
        live_and_judge(seed, report, files=False)
        if not report.sound:
            assert report.failures
            return
    raise AssertionError("it was not missed in 100 lives")


@pytest.mark.nightly
def test_ten_thousand_faults(tmp_path):
    report = soak(60, SEED, progress=lambda report: None, lives_max=600)
    assert report.failures == []
    assert report.sound
    assert report.verdict.injected.total() >= 10_000


# ---- lives and their report --------------------------------------------------------------------------------


@pytest.mark.unit
def test_a_life_follows_from_its_seed():
    one, other = ([], [])
    for found in (one, other):
        for seed in range(SEED, SEED + 2):
            life, rng = random_life(seed, None)
            live(life, rng)
            found.append((str(life.injector.plan), life.layer, rng.random()))
    assert one == other
    assert len({plan for plan, *_ in one}) == 2


@pytest.mark.unit
def test_a_life_that_hangs_is_found(monkeypatch, capfd):
    monkeypatch.setattr("optstream.harness.soak.HANG_S", 0.0)
    report = soak(60, SEED, files=False)
    assert report.hangs == 1
    assert len(report.seeds) == 1
    assert not report.sound
    assert "hangs" in report.failures[0]
    assert "life.py" in capfd.readouterr().err  # Where it stands.
    for thread in threading.enumerate():
        if thread.name == f"life-{SEED}":
            thread.join()


@pytest.mark.unit
def test_an_untyped_error_is_a_failure(monkeypatch):
    def raise_plainly(self, *arguments) -> None:
        raise OSError("plain")

    monkeypatch.setattr(store.BucketStore, "begin_read", raise_plainly)
    report = SoakReport()
    live_and_judge(SEED, report, files=False)
    assert "OSError" in report.failures[0]


@pytest.mark.unit
def test_the_command_prints_the_agreed_json(capsys):
    assert main(["soak", "--minutes", "0", "--seed", str(SEED), "--json", "-"]) == 0
    counts = json.loads(capsys.readouterr().out)
    assert list(counts) == [
        "operations",
        "faults_injected",
        "faults_by_kind",
        "detected",
        "tolerated",
        "recovered",
        "silent_corruptions",
        "leaks",
        "hangs",
        "seeds",
    ]
    assert sum(counts["faults_by_kind"].values()) == counts["faults_injected"]
    assert counts["seeds"] == [SEED]


@pytest.mark.unit
@pytest.mark.parametrize("minutes", ["-1", "nan", "soon"])
def test_a_time_that_is_none_is_refused(minutes, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["soak", "--minutes", minutes])
    assert caught.value.code == 2
    assert "minutes" in capsys.readouterr().err


# ---- the judge itself: a Life must not say that all is well when it is not --------------------------------


@pytest.mark.unit
def test_a_wrong_bit_in_memory_is_seen():
    life = Life(Storage("/disk", FakeSystem()), FaultPlan())
    life.construct()
    life.step()
    life.optimizer.param_groups[0]["lr"] = 1.0  # The model is not told.
    assert not life.step()
    assert "param 0" in life.verdict.silent[0]
    life.finish()


@pytest.mark.unit
def test_a_file_left_behind_is_seen():
    storage = Storage("/disk", FakeSystem())
    life = Life(storage, FaultPlan())
    life.construct()
    life.optimizer.streamer.store.backend.close()  # Gives the claim up, and removes nothing.
    life.close()
    assert any("bucket-00000.bin" in leak for leak in life.verdict.leaks)


@pytest.mark.unit
def test_a_false_alarm_is_seen():
    life = Life(Storage("/disk", FakeSystem()), FaultPlan.single(Kind.LATENCY, Operation.WRITE, 1))
    life.construct()
    life.optimizer.streamer.store.backend.remove("bucket-00000.bin")
    life.step()
    assert "what no fault explains" in life.verdict.silent[0]
    life.finish()
