"""Saving and loading StreamingAdamW: what is restored, by what it is matched, and what is refused."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from optstream.backends import open_backend
from optstream.backends.errors import ClaimedError, DirectoryError, SpaceError
from optstream.backends.fake import FakeSystem
from optstream.backends.nvme import NvmeBackend
from optstream.backends.system import System
from optstream.core import checkpoint_storage
from optstream.core.config import StreamConfig
from optstream.core.errors import CheckpointError, PoisonedError
from optstream.core.manifest import Manifest
from optstream.core.optimizer import StreamingAdamW
from optstream.core.publish import CheckpointDirectory
from optstream.harness.faults import FaultPlan, FaultyBackend

pytestmark = pytest.mark.unit

SEGMENTS = ("main", "exp_avg", "exp_avg_sq")
SHAPES = {"embedding": (7, 10), "weight": (10, 10), "other": (10, 10), "bias": (10,), "scale": ()}


def parameters(names=tuple(SHAPES), dtype=torch.float32, seed=0) -> dict[str, torch.nn.Parameter]:
    """Values depend on the name alone, not on the order."""
    made = {}
    for name in names:
        generator = torch.Generator().manual_seed(seed + list(SHAPES).index(name))
        made[name] = torch.nn.Parameter(torch.randn(SHAPES[name], generator=generator).to(dtype))
    return made


def streaming(named: dict, *, disk: FakeSystem | None = None, backend=None, groups=None, **config):
    scratch = backend or NvmeBackend("/scratch", subdirectory="test/optimizer", system=disk or FakeSystem())
    settings = StreamConfig(True, ("/unused",), **{"bucket_numel": 64, "depth": 2, **config})
    return StreamingAdamW(groups or list(named.items()), settings, backend=scratch, lr=0.01)


def step(named: dict, streamed: StreamingAdamW, count: int = 1) -> None:
    for _ in range(count):
        for param in named.values():
            param.grad = torch.sin(3 * param.detach())
        streamed.step()


def same(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(
        one[name]["step"] == other[name]["step"]
        and all(torch.equal(one[name][key], other[name][key]) for key in SEGMENTS)
        for name in one
    )


def manifest_of(base: Path) -> Path:
    return base / "optimizer" / "manifest.json"


def edited(base: Path, change) -> None:
    """Change a manifest's body and sign it again, as a faulty writer would."""
    body = json.loads(manifest_of(base).read_bytes())
    del body["checksum"]
    change(body)
    text = json.dumps(body, separators=(",", ":"))
    signed = f'{text[:-1]},"checksum":"{xxhash.xxh3_64_hexdigest(text.encode())}"}}\n'
    manifest_of(base).write_text(signed)


def data_of(base: Path) -> Path:
    (path,) = (base / "optimizer" / "rank00000").iterdir()
    return path


@pytest.fixture
def base(tmp_path) -> Path:
    return tmp_path / "checkpoint"


@pytest.fixture
def saved(base):
    """A checkpoint of step 3 at `base`, and the state that is in it."""
    named = parameters()
    streamed = streaming(named)
    step(named, streamed, 3)
    streamed.save_to(base)
    state = streamed.full_state()
    streamed.close()
    return state


# ---- what is restored --------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_is_the_run_that_was_not_interrupted(base, steps, dtype):
    named = parameters(dtype=dtype)
    straight = streaming(named)
    step(named, straight, steps)
    straight.save_to(base)
    step(named, straight, 2)
    others = parameters(dtype=dtype, seed=100)
    resumed = streaming(others, bucket_numel=300, depth=3)
    assert resumed.load_from(base) is True
    step(others, resumed, 2)
    assert same(straight.full_state(), resumed.full_state())
    for name, param in named.items():
        assert torch.equal(param, others[name]), "parameters come back, too"


@given(st.integers(1, 400), st.integers(1, 400), st.sampled_from(["fp32", "bf16"]), st.integers(1, 90))
def test_any_bucket_size_loads_any_other(one, other, moments, item_numel):
    named = parameters()
    saving = streaming(named, bucket_numel=one, moment_dtype=moments)
    step(named, saving, 2)
    directory = on_fake_disk(FakeSystem())
    saving._checkpoints.save(directory, iteration=None, background=False)
    manifest = directory.manifest()
    assert manifest.formats["exp_avg"] == moments
    loading = streaming(parameters(seed=9), bucket_numel=other)
    loading._checkpoints.load(directory, loading._publish, keep_schedule=False)
    assert same(saving.full_state(), loading.full_state())
    saving.close()
    loading.close()


def on_fake_disk(disk: FakeSystem) -> CheckpointDirectory:
    from optstream.backends.reader import DirectoryReader

    return CheckpointDirectory(
        "/checkpoint",
        opener=lambda directories, *, subdirectory, keep: NvmeBackend(
            directories[0], subdirectory=subdirectory, keep=keep, system=disk
        ),
        reader=lambda base, *, subdirectory: DirectoryReader(f"{base}/{subdirectory}", system=disk),
    )


def test_entries_are_matched_by_name_not_by_place_and_size(saved, base):
    reordered = parameters(["bias", "other", "scale", "weight", "embedding"], seed=100)
    streamed = streaming(reordered)
    streamed.load_from(base)
    found = streamed.full_state()
    assert same(saved, {name: found[name] for name in saved})


def test_each_parameters_own_step_count_comes_back(base):
    named = parameters(["weight", "bias"])
    streamed = streaming(named)
    step(named, streamed, 2)
    named["bias"].grad = None
    named["weight"].grad = torch.ones(10, 10)
    streamed.step()
    streamed.save_to(base)
    other = streaming(parameters(["weight", "bias"]))
    other.load_from(base)
    found = other.full_state()
    assert (found["weight"]["step"], found["bias"]["step"]) == (3, 2)
    assert other.streamer.counts.groups == [3]


def test_memory_and_files_are_after_a_save_what_they_were_before(base):
    named = parameters()
    disk = FakeSystem()
    streamed = streaming(named, disk=disk)
    step(named, streamed)
    streamed.streamer.engine.drain()

    def held():
        files = sum(size for _, size in streamed.streamer.store.backend.list())
        return files, streamed.streamer.engine.slots, disk.open_descriptors(), set(threading.enumerate())

    before = held()
    for background in (False, True):
        streamed.save_to(base, background=background)
        streamed.wait_for_save()
        files, slots, descriptors, threads = held()
        assert (files, descriptors) == (before[0], before[2])
        assert threads <= before[3]  # what other tests left may end meanwhile
        assert [slot.data_ptr() for slot in slots] == [slot.data_ptr() for slot in before[1]]


# ---- param groups ------------------------------------------------------------------------------------------


def two_groups(named: dict, first: dict, second: dict, *, swapped: bool = False) -> list[dict]:
    decayed = {"params": [(n, named[n]) for n in ("weight", "embedding")], **first}
    rest = {"params": [(n, named[n]) for n in ("bias",)], **second}
    return [rest, decayed] if swapped else [decayed, rest]


def test_groups_in_another_order_get_their_own_settings(base):
    names = ("weight", "embedding", "bias")
    named = parameters(names)
    first = {"lr": 0.5, "weight_decay": 0.1, "betas": (0.8, 0.9), "eps": 1e-6}
    streamed = streaming(named, groups=two_groups(named, first, {"lr": 0.25, "weight_decay": 0.0}))
    step(named, streamed)
    streamed.save_to(base)
    others = parameters(names)
    resumed = streaming(others, groups=two_groups(others, {}, {}, swapped=True))
    resumed.load_from(base)
    rest, decayed = resumed.param_groups
    assert {key: decayed[key] for key in first} == first
    assert (rest["lr"], rest["weight_decay"]) == (0.25, 0.0)


def test_a_schedule_that_the_trainer_overrides_stays(saved, base):
    named = parameters()
    streamed = streaming(named)
    streamed.param_groups[0].update(lr=7.0, weight_decay=0.3, betas=(0.5, 0.6), min_lr=0.2)
    streamed.load_from(base, keep_schedule=True)
    (group,) = streamed.param_groups
    assert (group["lr"], group["weight_decay"], group["min_lr"]) == (7.0, 0.3, 0.2)
    assert group["betas"] == (0.9, 0.999), "no schedule rules these"
    streamed.load_from(base)
    assert (group["lr"], group["weight_decay"]) == (0.01, 0.01)


def test_a_missing_and_an_extra_group_key_are_left_alone_and_logged(saved, base, caplog):
    def change(body):
        settings = body["groups"][0]["settings"]
        del settings["eps"]
        settings["novel"] = 3

    edited(base, change)
    streamed = streaming(parameters())
    streamed.param_groups[0]["eps"] = 1e-3
    with caplog.at_level(logging.WARNING):
        streamed.load_from(base)
    assert streamed.param_groups[0]["eps"] == 1e-3
    assert "novel" not in streamed.param_groups[0]
    assert "has no eps" in caplog.text
    assert "have no novel" in caplog.text


def test_groups_of_different_settings_cannot_become_one(base):
    names = ("weight", "embedding", "bias")
    named = parameters(names)
    streamed = streaming(named, groups=two_groups(named, {"lr": 0.5}, {"lr": 0.25}))
    streamed.save_to(base)
    with pytest.raises(CheckpointError, match="2 groups with different settings"):
        streaming(parameters(names)).load_from(base)


# ---- what is refused ---------------------------------------------------------------------------------------


def cut_short(base: Path) -> None:
    os.truncate(data_of(base), data_of(base).stat().st_size - 128)


def exchange(base: Path) -> None:
    """Two items of the same size change places on disk."""
    body = json.loads(manifest_of(base).read_bytes())
    one, other = (body["tensors"][f"main/{name}"]["items"][0] for name in ("weight", "other"))
    data = bytearray(data_of(base).read_bytes())
    size = one[4]
    assert size == other[4]
    a, b = slice(one[3], one[3] + size), slice(other[3], other[3] + size)
    data[a], data[b] = data[b], data[a]
    data_of(base).write_bytes(data)


def flip_a_bit(base: Path) -> None:
    data = bytearray(data_of(base).read_bytes())
    data[17] ^= 4
    data_of(base).write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda base: data_of(base).unlink(), "is incomplete.*is missing"),
        (cut_short, "ends after"),
        (exchange, "checksum differs"),
        (flip_a_bit, "checksum differs"),
        (lambda base: manifest_of(base).unlink(), "never finished"),
        (lambda base: manifest_of(base).write_text("{}"), "damaged"),
        (lambda base: manifest_of(base).write_bytes(manifest_of(base).read_bytes()[:-40]), "damaged"),
        (
            lambda base: manifest_of(base).write_text(
                manifest_of(base).read_text().replace('"iteration":3', '"iteration":4')
            ),
            "damaged.*checksum",
        ),
        (lambda base: edited(base, lambda body: body.update(version=99)), "format version 99"),
        (lambda base: edited(base, lambda body: body.update(format="other")), "format is 'other'"),
        (
            lambda base: edited(base, lambda body: body["tensors"].pop("exp_avg/bias")),
            "does not fit.*exp_avg/bias",
        ),
        (
            lambda base: edited(base, lambda body: body["tensors"]["main/weight"]["items"].pop()),
            "elements of main/weight",
        ),
        (
            lambda base: edited(
                base,
                lambda body: body["tensors"]["main/weight"]["items"].__setitem__(
                    1, [*body["tensors"]["main/weight"]["items"][0]]
                ),
            ),
            "main/weight",
        ),
        (lambda base: shutil.rmtree(base), "--no-load-optim"),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_loading_another_mends_it(saved, base, tmp_path, damage, said):
    shutil.copytree(base, tmp_path / "good")
    damage(base)
    named = parameters()
    streamed = streaming(named)
    with pytest.raises(CheckpointError, match=said):
        streamed.load_from(base)
    streamed.load_from(tmp_path / "good")
    assert same(saved, streamed.full_state())


def test_a_checkpoint_of_another_model_is_refused(saved, base):
    with pytest.raises(CheckpointError, match=r"shape \(10, 10\) there and \(5, 20\)"):
        streaming({"weight": torch.nn.Parameter(torch.zeros(5, 20))}).load_from(base)
    with pytest.raises(CheckpointError, match="holds no main/novel"):
        streaming({"novel": torch.nn.Parameter(torch.zeros(3))}).load_from(base)


def test_a_half_restored_optimizer_refuses_to_go_on(saved, base):
    flip_a_bit(base)
    named = parameters()
    streamed = streaming(named)
    with pytest.raises(CheckpointError):
        streamed.load_from(base)
    with pytest.raises(PoisonedError):
        step(named, streamed)
    with pytest.raises(PoisonedError):
        streamed.save_to(base)


def test_a_poisoned_optimizer_saves_nothing_and_is_mended_by_loading(saved, base, tmp_path):
    inner = NvmeBackend("/scratch", subdirectory="test/optimizer", system=FakeSystem())
    backend = FaultyBackend(inner, FaultPlan.single("EIO", "write", 30))
    named = parameters()
    streamed = streaming(named, backend=backend, write_behind=False)
    with pytest.raises(Exception, match="injected"):
        step(named, streamed, 20)
    with pytest.raises(PoisonedError):
        streamed.save_to(tmp_path / "other")
    assert not (tmp_path / "other").exists()
    streamed.load_from(base)
    assert same(saved, streamed.full_state())
    step(named, streamed)


# ---- where it is saved -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["with spaces and ümläüts 検査", "x" * 200])
def test_paths(tmp_path, name):
    named = parameters()
    streamed = streaming(named)
    streamed.save_to(tmp_path / name)
    assert streamed.load_from(str(tmp_path / name))


def test_saving_again_replaces(saved, base):
    named = parameters()
    streamed = streaming(named)
    first = data_of(base)
    streamed.load_from(base)
    step(named, streamed)
    streamed.save_to(base)
    assert data_of(base) != first
    other = streaming(parameters())
    other.load_from(base)
    assert same(streamed.full_state(), other.full_state())


def test_of_two_that_save_one_tag_the_second_is_told_of_the_first(saved, base):
    with (
        open_backend([str(base)], subdirectory="optimizer", keep=True),
        pytest.raises(ClaimedError, match=f"pid {os.getpid()}"),
    ):
        streaming(parameters()).save_to(base)
    assert same(saved, loaded(base))


def loaded(base: Path) -> dict:
    streamed = streaming(parameters(seed=5))
    streamed.load_from(base)
    return streamed.full_state()


class ReadOnly(System):
    """A read-only mount: nothing can be made or opened for writing."""

    def mkdir(self, path, mode=0o777, *, dir_fd=None):
        if os.access(path, os.F_OK):
            raise FileExistsError(path)
        raise OSError(30, "Read-only file system")

    def open(self, path, flags, mode=0o777, *, dir_fd=None):
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(30, "Read-only file system")
        return os.open(path, flags, mode, dir_fd=dir_fd)


def test_a_read_only_checkpoint_is_loaded_and_not_saved_to(saved, base):
    from optstream.backends.reader import DirectoryReader

    directory = CheckpointDirectory(
        base,
        opener=lambda directories, *, subdirectory, keep: NvmeBackend(
            directories[0], subdirectory=subdirectory, keep=keep, system=ReadOnly()
        ),
        reader=lambda path, *, subdirectory: DirectoryReader(f"{path}/{subdirectory}", system=ReadOnly()),
    )
    streamed = streaming(parameters(seed=5))
    streamed._checkpoints.load(directory, streamed._publish, keep_schedule=False)
    assert same(saved, streamed.full_state())
    with pytest.raises(DirectoryError, match="Read-only file system"):
        streamed._checkpoints.save(directory, iteration=None, background=False)
    assert same(saved, loaded(base))


# ---- behind the steps --------------------------------------------------------------------------------------


@pytest.fixture
def slow_saves(monkeypatch):
    """Saves wait at each item until they may go on."""
    may_go_on = threading.Event()
    original = checkpoint_storage._Appender.append

    def append(self, data):
        may_go_on.wait()
        return original(self, data)

    monkeypatch.setattr(checkpoint_storage._Appender, "append", append)
    yield may_go_on
    may_go_on.set()


@pytest.mark.parametrize("write_behind", [True, False])
def test_a_save_in_the_background_holds_the_step_at_which_it_was_asked_for(base, slow_saves, write_behind):
    named = parameters()
    streamed = streaming(named, write_behind=write_behind, host_cache_bytes=1 << 20)
    step(named, streamed, 2)
    state = streamed.full_state()
    streamed.save_to(base, background=True)
    step(named, streamed, 3)
    assert not manifest_of(base).exists()
    slow_saves.set()
    streamed.wait_for_save()
    assert same(state, loaded(base))
    names = [name for name, _ in streamed.streamer.store.backend.list()]
    assert len(names) == len(streamed.streamer.buckets), "the second files are the only ones now"
    latest = streamed.full_state()
    streamed.save_to(base)
    assert same(latest, loaded(base))


def test_steps_wait_where_the_disk_has_no_room_for_second_files(base, slow_saves):
    disk = FakeSystem()
    named = parameters()
    streamed = streaming(named, disk=disk)
    step(named, streamed)
    state = streamed.full_state()
    disk.set_free_bytes(0)
    streamed.save_to(base, background=True)
    threading.Timer(0.2, slow_saves.set).start()
    step(named, streamed, 2)
    streamed.wait_for_save()
    assert same(state, loaded(base))
    assert not any(name.endswith(".new") for name, _ in streamed.streamer.store.backend.list())


@pytest.mark.parametrize("second", ["save", "load", "close", "reload"])
def test_what_cannot_run_beside_a_save_waits_for_it(saved, base, tmp_path, slow_saves, second):
    named = parameters()
    streamed = streaming(named)
    step(named, streamed)
    state = streamed.full_state()
    streamed.save_to(tmp_path / "first", background=True)
    threading.Timer(0.2, slow_saves.set).start()
    match second:
        case "save":
            streamed.save_to(tmp_path / "second")
        case "load":
            streamed.load_from(base)
        case "close":
            streamed.close()
        case "reload":
            streamed.reload_model_params()
            streamed.wait_for_save()
    assert same(state, loaded(tmp_path / "first"))


def test_a_failure_in_the_background_is_raised_by_the_next_call_and_the_next_save_works(base, monkeypatch):
    named = parameters()
    streamed = streaming(named)

    def full(self, data):
        raise SpaceError("no space", needed_bytes=2, free_bytes=1)

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint_storage._Appender, "append", full)
        streamed.save_to(base, background=True)
        with pytest.raises(SpaceError):
            streamed.save_to(base)
    streamed.save_to(base)
    assert same(streamed.full_state(), loaded(base))


def test_progress_is_counted(base):
    named = parameters()
    streamed = streaming(named)
    streamed.save_to(base)
    done, total = streamed.save_progress
    assert total - 64 < done <= total == data_of(base).stat().st_size


def test_loading_runs_no_code(saved, base):
    """Metadata is JSON, data is raw: nothing in a checkpoint is a pickle."""
    assert isinstance(Manifest.from_bytes(manifest_of(base).read_bytes(), ""), Manifest)
    assert {path.suffix for path in base.rglob("*") if path.is_file()} == {".json", ".bin"}
    size = sum(numel * 4 for numel in (70, 100, 100, 10, 1)) * 3
    assert size <= data_of(base).stat().st_size < size + 64 * 3 * 12
