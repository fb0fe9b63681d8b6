"""Files spread over several disks: placement, replacement across disks, and the loss of one."""

from __future__ import annotations

import errno
import os

import pytest

from optstream.backends import open_backend
from optstream.backends.errors import (
    ClaimedError,
    DirectoryError,
    MissingFileError,
    SpaceError,
    TransferError,
)
from optstream.backends.fake import FakeSystem, fake_disk, forget_fake_disks, put_fake_disk
from optstream.backends.nvme import NvmeBackend
from optstream.backends.striped import StripedBackend, measure_speed, split_generation
from optstream.backends.system import System
from optstream.harness.conformance import BackendContract, Subject, pattern, read

pytestmark = pytest.mark.unit


def on_disks(disks: dict[str, FakeSystem], speeds=None, *, subdirectory: str = "runs/one") -> StripedBackend:
    backends = [
        NvmeBackend(f"/{d}", subdirectory=subdirectory, keep=True, system=s) for d, s in disks.items()
    ]
    return StripedBackend(backends, speeds=speeds or [1.0] * len(backends))


def placed(backend: StripedBackend) -> list[list[str]]:
    return [[split_generation(stored)[0] for stored, _ in disk.list()] for disk in backend._backends]


class TestStripedBackendOnFakeDisks(BackendContract):
    @pytest.fixture
    def subject(self):
        disks = {"A": FakeSystem(), "B": FakeSystem(alignment_bytes=65536)}

        def disk_of(path: str) -> FakeSystem:
            return disks[path.split("/")[1]]

        return Subject(
            open=lambda name: on_disks(disks, subdirectory=f"runs/{name}"),
            raw_read=lambda path, offset, length: disk_of(path).raw_read(path, offset, length),
            raw_write=lambda path, offset, data: disk_of(path).raw_write(path, offset, data),
            allocated_bytes=lambda path: disk_of(path).stat(path).st_blocks * 512,
            limit_space=lambda backend, free: [disk.set_free_bytes(free) for disk in disks.values()],
        )


def test_equal_disks_get_equal_shares():
    with on_disks({"A": FakeSystem(), "B": FakeSystem(), "C": FakeSystem()}) as backend:
        for number in range(9):
            backend.create(f"bucket-{number}", 1000).close()
        assert [len(names) for names in placed(backend)] == [3, 3, 3]


@pytest.mark.parametrize(("speeds", "shares"), [([3, 1], [9, 3]), ([1, 3], [3, 9]), ([1.0, 0.8], [6, 6])])
def test_faster_disks_get_more_unless_the_difference_is_small(speeds, shares):
    with on_disks({"A": FakeSystem(), "B": FakeSystem()}, speeds) as backend:
        for number in range(12):
            backend.create(f"bucket-{number}", 1000).close()
        assert [len(names) for names in placed(backend)] == shares


def test_a_full_disk_gets_nothing_more():
    disks = {"A": FakeSystem(capacity_bytes=100_000), "B": FakeSystem()}
    with on_disks(disks) as backend:
        for number in range(10):
            backend.create(f"bucket-{number}", 40_000).close()
        assert [len(names) for names in placed(backend)] == [2, 8]


def test_a_file_that_fits_on_no_disk_is_refused_though_the_sum_would_do():
    disks = {"A": FakeSystem(capacity_bytes=100_000), "B": FakeSystem(capacity_bytes=100_000)}
    with on_disks(disks) as backend:
        assert backend.free_bytes() > 150_000
        with pytest.raises(SpaceError, match="150000 bytes are needed") as caught:
            backend.create("bucket", 150_000)
        assert caught.value.free_bytes < 100_000
        assert list(backend.list()) == []


def test_removed_files_make_their_disk_attractive_again():
    with on_disks({"A": FakeSystem(), "B": FakeSystem()}) as backend:
        for name in "abcd":
            backend.create(name, 1000).close()
        for name in placed(backend)[1]:
            backend.remove(name)
        backend.create("e", 1000).close()
        assert placed(backend)[1] == ["e"]


def test_the_files_are_found_again_with_the_disks_in_any_order():
    disks = {"A": FakeSystem(), "B": FakeSystem()}
    with on_disks(disks) as backend:
        for seed, name in enumerate("abcd"):
            with backend.create(name, 5000) as file:
                file.write_from(0, memoryview(pattern(5000, seed)))
    with on_disks(dict(reversed(disks.items()))) as backend:
        assert [name for name, _ in backend.list()] == ["a", "b", "c", "d"]
        for seed, name in enumerate("abcd"):
            with backend.open(name) as file:
                assert read(file, 0, 5000) == pattern(5000, seed)
                assert file.name == name


def test_files_of_a_single_disk_are_found_when_a_second_is_added():
    disks = {"A": FakeSystem(), "B": FakeSystem()}
    with NvmeBackend("/A", subdirectory="runs/one", keep=True, system=disks["A"]) as single:
        single.create("state", 100).close()
    with on_disks(disks) as backend:
        assert list(backend.list()) == [("state", 100)]
        backend.create("part", 200).close()
        backend.publish("part", "state")
        assert list(backend.list()) == [("state", 200)]


def published_across_disks(disks: dict[str, FakeSystem]) -> StripedBackend:
    """ "final" in its first version on one disk and, ready to be published over it, "part" on another."""
    backend = on_disks(disks)
    for seed, name in ((1, "final"), (2, "part")):
        with backend.create(name, 5000) as file:
            file.write_from(0, memoryview(pattern(5000, seed)))
            file.sync()
    assert placed(backend) == [["final"], ["part"]]
    return backend


def test_publishing_over_a_file_of_another_disk_replaces_it():
    backend = published_across_disks({"A": FakeSystem(), "B": FakeSystem()})
    backend.publish("part", "final")
    assert placed(backend) == [[], ["final"]]


@pytest.mark.parametrize("dies_at", ["before", "between", "after"])
def test_a_crash_while_publishing_across_disks_leaves_the_old_or_the_new(dies_at):
    class Dying(FakeSystem):
        dies = ""

        def rename(self, *args, **kwargs):
            if self.dies == "before":
                raise KeyboardInterrupt
            super().rename(*args, **kwargs)

        def unlink(self, *args, **kwargs):
            if self.dies == "between":
                raise KeyboardInterrupt
            super().unlink(*args, **kwargs)

    disks = {"A": Dying(), "B": Dying()}
    backend = published_across_disks(disks)
    for disk in disks.values():
        disk.dies = dies_at
    if dies_at == "after":
        backend.publish("part", "final")
    else:
        with pytest.raises(KeyboardInterrupt):
            backend.publish("part", "final")
    for disk in disks.values():
        disk.dies = ""
        disk.crash()
    with on_disks(disks) as backend, backend.open("final") as file:
        assert read(file, 0, 5000) == pattern(5000, 1 if dies_at == "before" else 2)
        # After a return, only the new one may ever be seen, although nobody synced the removal of the old.
        assert sum(names.count("final") for names in placed(backend)) == 1


def test_a_disk_that_fails_is_named():
    class Failing(FakeSystem):
        def preadv(self, descriptor, buffers, offset):
            if getattr(self, "broken", False):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().preadv(descriptor, buffers, offset)

    disks = {"A": FakeSystem(), "B": Failing()}
    with on_disks(disks) as backend:
        files = [backend.create(name, 5000) for name in ("a", "b")]
        disks["B"].broken = True
        read(files[0], 0, 5000)
        with pytest.raises(TransferError, match="/B/runs/one/b"):
            read(files[1], 0, 5000)


def test_a_disk_that_is_not_there_any_more_is_named(tmp_path):
    both = [str(tmp_path / "A"), str(tmp_path / "B")]
    with open_backend(both, subdirectory="runs/one", keep=True) as backend:
        for name in ("a", "b"):
            backend.create(name, 5000).close()
    (tmp_path / "B").rename(tmp_path / "gone")
    (tmp_path / "B").write_text("no directory")
    with pytest.raises(DirectoryError, match=both[1]):
        open_backend(both, subdirectory="runs/one", keep=True)
    with open_backend(both[:1], subdirectory="runs/one", keep=True) as backend:
        assert len(list(backend.list())) == 1


def test_a_missing_file_says_where_it_was_looked_for():
    with (
        on_disks({"A": FakeSystem(), "B": FakeSystem()}) as backend,
        pytest.raises(MissingFileError, match="/A/runs/one:/B/runs/one"),
    ):
        backend.open("nowhere")


def test_all_directories_are_claimed_or_none(tmp_path):
    a, b = str(tmp_path / "A"), str(tmp_path / "B")
    with open_backend([b], subdirectory="runs/one"):
        with pytest.raises(ClaimedError, match=b):
            open_backend([a, b], subdirectory="runs/one")
        open_backend([a], subdirectory="runs/one").close(remove_files=True)


def test_every_disk_is_closed_even_if_one_fails(tmp_path):
    class Stubborn(System):
        def unlink(self, name, *, dir_fd):
            if name == ".claim":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            super().unlink(name, dir_fd=dir_fd)

    before = len(os.listdir("/dev/fd"))
    disks = [
        NvmeBackend(str(tmp_path / name), subdirectory="runs/one", system=system)
        for name, system in (("A", System()), ("B", Stubborn()), ("C", System()))
    ]
    with pytest.raises(Exception, match="B/runs/one"):
        StripedBackend(disks, speeds=[1, 1, 1]).close()
    assert len(os.listdir("/dev/fd")) == before
    for name in "AC":
        NvmeBackend(str(tmp_path / name), subdirectory="runs/one").close()


def test_speed_is_measured_and_the_probe_removed(tmp_path):
    with NvmeBackend(str(tmp_path), subdirectory="runs/one") as backend:
        assert measure_speed(backend) > 0
        assert list(backend.list()) == []
    full = FakeSystem(capacity_bytes=1 << 20)
    with NvmeBackend("/A", subdirectory="runs/one", system=full) as backend:
        full.set_free_bytes(0)
        assert measure_speed(backend) == 1.0


def test_the_description_is_that_of_the_weakest_disk():
    disks = {"A": FakeSystem(alignment_bytes=65536), "B": FakeSystem(alignment_bytes=None, kind="xfs")}
    with on_disks(disks) as backend:
        info = backend.filesystem
        assert (info.kind, info.alignment_bytes, info.bypasses_page_cache) == ("fakefs+xfs", 65536, False)


@pytest.mark.parametrize(
    ("stored", "expected"),
    [("a@7", ("a", 7)), ("a@b@10", ("a@b", 10)), ("a", ("a", -1)), ("a@x", ("a@x", -1))],
)
def test_generations_are_part_of_the_stored_name(stored, expected):
    assert split_generation(stored) == expected


def test_fake_disks_belong_to_their_directories():
    forget_fake_disks()
    put_fake_disk("/scratch/A", FakeSystem(capacity_bytes=1 << 20))
    with open_backend(
        ["/scratch/A", "/scratch/B"], subdirectory="runs/one", kind="fake", keep=True
    ) as backend:
        backend.create("state", 100).close()
        with pytest.raises(ClaimedError):
            open_backend(["/scratch/B"], subdirectory="runs/one", kind="fake")
    assert fake_disk("/scratch/A").open_descriptors() == 0
    with open_backend(
        ["/scratch/A", "/scratch/B"], subdirectory="runs/one", kind="fake", keep=True
    ) as backend:
        assert list(backend.list()) == [("state", 100)]
    forget_fake_disks()
    with open_backend(["/scratch/A", "/scratch/B"], subdirectory="runs/one", kind="fake") as backend:
        assert list(backend.list()) == []
    forget_fake_disks()
