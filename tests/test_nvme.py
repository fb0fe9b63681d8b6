"""What the contract suite cannot know of the file backend: claims, owners, filesystems, system calls."""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import random
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
import warnings
from contextlib import suppress
from types import SimpleNamespace

import pytest

from optstream.backends import open_backend
from optstream.backends.claim import sweep
from optstream.backends.directories import CLAIM_NAME
from optstream.backends.errors import (
    ClaimedError,
    DirectoryError,
    InMemoryWarning,
    SpaceError,
    StorageError,
    TransferError,
    UnreservedSpaceWarning,
)
from optstream.backends.fake import FakeSystem
from optstream.backends.nvme import NvmeBackend
from optstream.backends.probe import address_of, aligned_buffer
from optstream.backends.system import System, kind_from_mountinfo
from optstream.harness.conformance import pattern, read

pytestmark = pytest.mark.unit

NOBODY = 65534


def claim(directory, subdirectory: str = "runs/one", **options) -> NvmeBackend:
    return NvmeBackend(str(directory), subdirectory=subdirectory, **options)


def tree(directory) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*")}


class Child:
    """A Python process that runs `code`, then waits; `kill` ends it as the kernel would, with no clean-up."""

    def __init__(self, code: str, *arguments: str) -> None:
        wait = "\nprint('ready', flush=True)\nimport sys\nsys.stdin.read()\n"
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code) + wait, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        line = self.process.stdout.readline().strip()
        if line != "ready":
            raise RuntimeError(f"the child said {line!r}")

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


CLAIM_AND_WRITE = """
    import sys
    from optstream.backends.nvme import NvmeBackend
    directory, subdirectory, keep = sys.argv[1:]
    backend = NvmeBackend(directory, subdirectory=subdirectory, keep=keep == "keep")
    backend.create("state", 1 << 20).write_from(0, memoryview(b"x" * 100))
"""


@pytest.fixture
def start_child():
    children = []

    def start(code: str, *arguments: str) -> Child:
        children.append(Child(code, *arguments))
        return children[-1]

    yield start
    for child in children:
        child.kill()


# Claims


def test_the_claim_names_pid_and_host_of_another_process(tmp_path, start_child):
    child = start_child(CLAIM_AND_WRITE, str(tmp_path), "runs/one", "scratch")
    with pytest.raises(ClaimedError) as caught:
        claim(tmp_path)
    assert f"pid {child.process.pid} on {os.uname().nodename}" in caught.value.owner
    assert tree(tmp_path) == {"runs", "runs/one", "runs/one/.claim", "runs/one/state"}


def test_a_killed_process_frees_its_claim_and_its_files_are_reclaimed(tmp_path, start_child):
    start_child(CLAIM_AND_WRITE, str(tmp_path), "runs/one", "scratch").kill()
    assert (tmp_path / "runs/one/state").exists()
    with claim(tmp_path) as backend:
        assert list(backend.list()) == []


def test_a_killed_process_leaves_files_that_were_to_be_kept(tmp_path, start_child):
    start_child(CLAIM_AND_WRITE, str(tmp_path), "runs/one", "keep").kill()
    claim(tmp_path, "runs/other").close()
    with claim(tmp_path) as backend:
        assert list(backend.list()) == [("state", 1 << 20)]


def test_a_dead_neighbour_is_reclaimed_and_a_live_one_is_not_touched(tmp_path, start_child):
    start_child(CLAIM_AND_WRITE, str(tmp_path), "runs/job-1/actor", "scratch").kill()
    start_child(CLAIM_AND_WRITE, str(tmp_path), "runs/job-2/actor", "scratch")
    start_child(CLAIM_AND_WRITE, str(tmp_path), "elsewhere/job-3", "scratch").kill()
    with claim(tmp_path, "runs/job-2/critic"):
        assert tree(tmp_path / "runs") == {
            "job-2",
            "job-2/actor",
            "job-2/actor/.claim",
            "job-2/actor/state",
            "job-2/critic",
            "job-2/critic/.claim",
        }
        assert (tmp_path / "elsewhere/job-3/state").exists()


def test_a_neighbour_of_another_machine_is_not_judged(tmp_path, start_child):
    start_child(CLAIM_AND_WRITE, str(tmp_path), "runs/theirs", "scratch").kill()
    record = tmp_path / "runs/theirs/.claim"
    owner = json.loads(record.read_text())
    record.write_text(json.dumps(owner | {"host": "another", "boot_id": "another"}))
    claim(tmp_path, "runs/ours").close(remove_files=True)
    assert (tmp_path / "runs/theirs/state").exists()


def test_neither_a_reused_pid_nor_a_changed_clock_keeps_a_dead_claim_alive(tmp_path, start_child):
    start_child(CLAIM_AND_WRITE, str(tmp_path), "runs/one", "scratch").kill()
    record = tmp_path / "runs/one/.claim"
    owner = json.loads(record.read_text())
    record.write_text(json.dumps(owner | {"pid": os.getpid(), "claimed_at": "2999-01-01T00:00:00+00:00"}))
    with claim(tmp_path) as backend:
        assert list(backend.list()) == []


@pytest.mark.parametrize("record", ["", "{", '{"pid": 1}', "null", "[]"])
def test_an_unreadable_record_of_a_dead_owner_is_claimed_and_no_file_lost(tmp_path, record):
    claim(tmp_path).close()
    (tmp_path / "runs/one/.claim").write_text(record)
    (tmp_path / "runs/one/state").write_text("kept")
    with claim(tmp_path) as backend:
        assert list(backend.list()) == [("state", 4)]


def test_a_forked_child_neither_keeps_the_claim_nor_removes_the_files(tmp_path):
    backend = claim(tmp_path)
    backend.create("state", 100).close()
    may_end, ended = os.pipe()
    is_ready, ready = os.pipe()
    child = os.fork()
    if child == 0:
        # Outlives the parent's claim, as a data loader's worker can.
        backend.close(remove_files=True)
        os.close(ended)
        os.write(ready, b"x")
        os.read(may_end, 1)
        os._exit(0)
    os.close(may_end)
    os.read(is_ready, 1)
    try:
        assert list(backend.list()) == [("state", 100)]
        # What a kill of this process alone would do to its descriptor.
        os.close(backend._claim._lock)
        lock = os.open(tmp_path / "runs/one/.claim", os.O_RDWR)
        assert System().try_lock(lock)
        System().close_lock(lock)
    finally:
        for descriptor in (ended, is_ready, ready):
            os.close(descriptor)
        os.waitpid(child, 0)


class InterruptedSystem(System):
    """Calls `between` once, after the claim file was opened and before it is locked."""

    def __init__(self, between) -> None:
        self.between = between

    def try_lock(self, descriptor):
        between, self.between = self.between, lambda: None
        between()
        return super().try_lock(descriptor)


def test_a_claimant_that_meets_a_sweep_starts_over(tmp_path, start_child):
    """The file it opened is gone when it gets the lock: to go on would be to claim nothing."""
    start_child(CLAIM_AND_WRITE, str(tmp_path), "runs/one", "scratch").kill()
    system = InterruptedSystem(lambda: sweep(System(), str(tmp_path / "runs")))
    with claim(tmp_path, system=system), pytest.raises(ClaimedError):
        claim(tmp_path)


def test_a_claimant_waits_for_the_sweep_that_holds_the_lock(tmp_path, start_child):
    start_child(CLAIM_AND_WRITE, str(tmp_path), "runs/one", "scratch").kill()
    sweeper_holds, may_go_on = threading.Event(), threading.Event()

    class SlowSystem(System):
        def listdir(self, descriptor):
            names = super().listdir(descriptor)
            if "state" in names:
                sweeper_holds.set()
                may_go_on.wait()
            return names

    class ImpatientSystem(System):
        def sleep(self, seconds):
            may_go_on.set()
            super().sleep(seconds)

    sweeper = threading.Thread(target=sweep, args=(SlowSystem(), str(tmp_path / "runs")))
    system = ImpatientSystem()
    sweeper.start()
    # listdir on the top directory comes first; only the one inside runs/one blocks, with or without the lock.
    sweeper_holds.wait()
    with claim(tmp_path, system=system) as backend:
        may_go_on.set()
        sweeper.join()
        assert list(backend.list()) == []
        assert (tmp_path / "runs/one" / CLAIM_NAME).exists()


class PowerCut(BaseException):
    """Nothing goes on after it."""


class CutWhileReclaiming(FakeSystem):
    cut = False

    def unlink(self, path, *, dir_fd=None):
        if self.cut:
            raise PowerCut
        super().unlink(path, dir_fd=dir_fd)


@pytest.mark.parametrize("seed", range(16))
def test_what_a_power_cut_leaves_is_known_to_be_a_dead_runs(seed):
    """Whatever of the unsynced bytes survives; also where it cuts a neighbour's reclaiming short."""
    system, rng = CutWhileReclaiming(), random.Random(seed)
    claim("/disk", system=system).create("state", 100).close()
    system.crash(rng)
    system.cut = True
    with suppress(PowerCut):
        claim("/disk", "runs/two", system=system)
    system.cut = False
    system.crash(rng)
    claim("/disk", "runs/three", system=system).close(remove_files=True)
    assert system.files() == []


def test_many_claimants_of_one_place_and_one_wins(tmp_path):
    winners, losers = [], []
    barrier = threading.Barrier(6)

    def work() -> None:
        barrier.wait()
        try:
            winners.append(claim(tmp_path))
        except ClaimedError:
            losers.append(1)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(winners), len(losers)) == (1, 5)
    winners[0].close(remove_files=True)
    assert tree(tmp_path) == set()


def test_a_claimant_whose_new_directory_a_neighbour_removes_starts_over(tmp_path):
    class Unlucky(System):
        times = 3

        def mkdir(self, path, mode=0o777, *, dir_fd=None):
            super().mkdir(path, mode, dir_fd=dir_fd)
            if self.times:
                self.times -= 1
                super().rmdir(path, dir_fd=dir_fd)

    claim(tmp_path / "base", system=Unlucky()).close(remove_files=True)
    endlessly = Unlucky()
    endlessly.times = 10**9
    with pytest.raises(DirectoryError, match="No such file or directory"):
        claim(tmp_path / "base", system=endlessly)


def test_neighbours_that_start_and_end_together_do_not_disturb_each_other(tmp_path):
    failures = []

    def work(rank: int) -> None:
        try:
            for _ in range(10):
                with claim(tmp_path / "base", f"runs/job/{rank}") as backend:
                    backend.create("state", 100).close()
                    backend.close(remove_files=True)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert not (tmp_path / "base/runs").exists()


# Directories, owners and permissions


def test_directories_are_0700_and_files_0600(tmp_path):
    with claim(tmp_path / "base", "runs/one") as backend:
        backend.create("state", 10).close()
        for directory in ("base", "base/runs", "base/runs/one"):
            assert stat.S_IMODE((tmp_path / directory).stat().st_mode) == 0o700
        for file in ("state", CLAIM_NAME):
            assert stat.S_IMODE((tmp_path / "base/runs/one" / file).stat().st_mode) == 0o600


def test_closing_with_the_files_removes_what_the_claim_made_and_no_more(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/other").write_text("someone's")
    claim(tmp_path / "mine").close(remove_files=True)
    assert tree(tmp_path) == {"mine", "mine/other"}
    claim(tmp_path / "new/base").close(remove_files=True)
    assert tree(tmp_path) == {"mine", "mine/other"}


@pytest.mark.parametrize("where", ["base", "base/runs", "base/runs/one"])
def test_symbolic_links_in_the_path_are_refused(tmp_path, where):
    (tmp_path / "target").mkdir()
    link = tmp_path / where
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(tmp_path / "target")
    with pytest.raises(DirectoryError, match="symbolic link"):
        claim(tmp_path / "base")
    assert list((tmp_path / "target").iterdir()) == []


@pytest.mark.parametrize("where", ["base", "base/runs", "base/runs/one"])
def test_a_file_where_a_directory_should_be_is_refused(tmp_path, where):
    file = tmp_path / where
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("someone's")
    with pytest.raises(DirectoryError, match="not a directory"):
        claim(tmp_path / "base")
    assert file.read_text() == "someone's"


def test_a_symbolic_link_as_the_claim_file_is_refused(tmp_path):
    claim(tmp_path).close()
    (tmp_path / "runs/one" / CLAIM_NAME).symlink_to(tmp_path / "victim")
    with pytest.raises(DirectoryError):
        claim(tmp_path)
    assert not (tmp_path / "victim").exists()


def test_a_symbolic_link_as_a_file_is_refused_and_its_target_survives(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    with claim(tmp_path) as backend:
        (tmp_path / "runs/one/state").symlink_to(victim)
        with pytest.raises(StorageError, match="symbolic link"):
            backend.open("state")
        with backend.create("state", 100) as file:
            file.write_from(0, memoryview(b"x" * 100))
        (tmp_path / "runs/one/link").symlink_to(victim)
        backend.close(remove_files=True)
    assert victim.read_text() == "precious"


class ForeignSystem(System):
    """The real kernel, on which the inode `foreign` is another user's and this process is user `me`."""

    def __init__(self, foreign: int, me: int = 1000) -> None:
        self.foreign, self.me = foreign, me

    def geteuid(self) -> int:
        return self.me

    def fstat(self, descriptor: int) -> SimpleNamespace:
        real = os.fstat(descriptor)
        owner = 4711 if real.st_ino == self.foreign else self.me
        names = ("st_mode", "st_ino", "st_dev", "st_size", "st_blocks")
        return SimpleNamespace(st_uid=owner, **{name: getattr(real, name) for name in names})


@pytest.mark.parametrize("where", ["base", "base/runs", "base/runs/one"])
def test_a_directory_of_another_user_is_refused(tmp_path, where):
    foreign = tmp_path / where
    foreign.mkdir(parents=True)
    with pytest.raises(DirectoryError, match="belongs to user 4711 and this process runs as user 1000"):
        claim(tmp_path / "base", system=ForeignSystem(foreign.stat().st_ino))
    assert list(foreign.iterdir()) == []


def test_root_may_use_a_users_directory_but_not_what_another_made_below(tmp_path):
    base, below = tmp_path / "base", tmp_path / "base/runs"
    below.mkdir(parents=True)
    claim(base, system=ForeignSystem(base.stat().st_ino, me=0)).close(remove_files=True)
    below.mkdir()
    with pytest.raises(DirectoryError, match="4711"):
        claim(base, system=ForeignSystem(below.stat().st_ino, me=0))


def test_a_file_of_another_user_is_refused():
    disk = FakeSystem()
    with NvmeBackend("/scratch", subdirectory="runs/one", system=disk) as backend:
        file = backend.create("state", 100)
        file.close()
        disk.chown(file.path, disk.geteuid() + 1)
        with pytest.raises(DirectoryError, match="belongs to user"):
            backend.open("state")


REFUSED_WITHOUT_PRIVILEGES = """
    import os, sys
    from optstream.backends.errors import DirectoryError
    from optstream.backends.nvme import NvmeBackend
    directory, nobody = sys.argv[1], int(sys.argv[2])
    if os.geteuid() == 0:
        os.chown(directory, nobody, nobody)
        os.setgroups([])
        os.setgid(nobody)
        os.setuid(nobody)
    try:
        NvmeBackend(directory, subdirectory="runs/one")
    except DirectoryError as error:
        print(error)
"""


@pytest.mark.parametrize("mode", [0o500, 0o000])
def test_a_directory_that_cannot_be_written_is_one_clear_error(mode):
    """In a child without privileges, since root can write anywhere; others cannot enter tmp_path."""
    with tempfile.TemporaryDirectory() as above:
        os.chmod(above, 0o755)
        directory = os.path.join(above, "unwritable")
        os.mkdir(directory)
        os.chmod(directory, mode)
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(REFUSED_WITHOUT_PRIVILEGES), directory, str(NOBODY)],
            capture_output=True,
            text=True,
            check=False,
        )
        os.chmod(directory, 0o700)
        assert os.listdir(directory) == []
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) == 1
    assert directory in done.stdout
    assert "Permission denied. Choose a directory that this user can write" in done.stdout


@pytest.mark.parametrize("subdirectory", ["", "/abs", "a/../b", "..", "a/.claim"])
def test_a_subdirectory_that_leaves_its_base_is_a_programming_error(tmp_path, subdirectory):
    with pytest.raises(ValueError, match="relative path"):
        claim(tmp_path, subdirectory)
    assert tree(tmp_path) == set()


# Filesystems


def test_tmpfs_warns_that_it_saves_no_memory():
    with pytest.warns(InMemoryWarning, match="keeps files in host memory"):
        backend = NvmeBackend("/scratch", subdirectory="a", system=FakeSystem(kind="tmpfs"))
    assert backend.filesystem.in_memory
    assert not backend.filesystem.bypasses_page_cache


@pytest.mark.parametrize("kind", ["btrfs", "zfs"])
def test_a_filesystem_that_cannot_reserve_says_so_at_the_start(kind):
    with pytest.warns(UnreservedSpaceWarning, match=kind):
        backend = NvmeBackend("/scratch", subdirectory="a", system=FakeSystem(kind=kind))
    assert not backend.filesystem.reserves_space


def test_an_ordinary_filesystem_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        NvmeBackend("/scratch", subdirectory="a", system=FakeSystem(kind="ext4")).close()


def test_the_filesystem_is_that_of_the_innermost_mount():
    mountinfo = textwrap.dedent(r"""
        22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/root rw
        30 22 0:5 / /dev/shm rw shared:2 - tmpfs tmpfs rw
        31 22 8:2 / /mnt/my\040disk rw master:3 propagate_from:2 - xfs /dev/sdb rw
        32 22 8:3 / /mnt rw - ext4 /dev/sdc rw
        33 22 8:4 / /over rw - ext4 /dev/sdd rw
        34 33 8:5 / /over rw - btrfs /dev/sde rw
    """).strip()
    for path, kind in {
        "/": "ext4",
        "/home": "ext4",
        "/dev/shm/x": "tmpfs",
        "/dev/shmx": "ext4",
        "/mnt/my disk/a": "xfs",
        "/mnt/my": "ext4",
        "/over/a": "btrfs",
    }.items():
        assert (path, kind_from_mountinfo(mountinfo, path)) == (path, kind)


@pytest.mark.parametrize("alignment_bytes", [4096, 8192, 65536, 1 << 20])
def test_the_alignment_is_found_by_trying(alignment_bytes):
    disk = FakeSystem(alignment_bytes=alignment_bytes)
    with NvmeBackend("/scratch", subdirectory="a", system=disk) as backend:
        assert backend.filesystem.alignment_bytes == alignment_bytes
        assert backend.filesystem.bypasses_page_cache
        assert list(backend.list()) == []


def test_a_device_that_is_stricter_about_memory_than_about_offsets_is_found_out():
    class StrictAboutMemory(FakeSystem):
        def pwritev(self, descriptor, buffers, offset):
            if self._descriptor(descriptor).direct and address_of(buffers[0]) % 32768:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return super().pwritev(descriptor, buffers, offset)

    with NvmeBackend("/scratch", subdirectory="a", system=StrictAboutMemory()) as backend:
        assert backend.filesystem.alignment_bytes == 32768


def test_without_direct_transfers_the_page_cache_is_used_and_said_to_be():
    with NvmeBackend("/scratch", subdirectory="a", system=FakeSystem(alignment_bytes=None)) as backend:
        assert not backend.filesystem.bypasses_page_cache


def test_where_only_the_cache_can_be_turned_off_it_is_turned_off(tmp_path):
    class MacSystem(System):
        direct_flag = 0

        def __init__(self):
            self.uncached = set()

        def disable_cache(self, descriptor):
            self.uncached.add(os.fstat(descriptor).st_ino)
            return True

    system = MacSystem()
    with claim(tmp_path, system=system) as backend, backend.create("state", 5000) as file:
        assert backend.filesystem.bypasses_page_cache
        assert os.stat(file.path).st_ino in system.uncached
        file.write_from(1, memoryview(b"odd"))
        assert read(file, 0, 5) == b"\0odd\0"


class CountingSystem(System):
    def __init__(self) -> None:
        self.calls = []

    def preadv(self, descriptor, buffers, offset):
        self.calls.append(("read", len(buffers[0])))
        return super().preadv(descriptor, buffers, offset)

    def pwritev(self, descriptor, buffers, offset):
        self.calls.append(("write", len(buffers[0])))
        return super().pwritev(descriptor, buffers, offset)


# Space


def test_space_is_checked_before_anything_is_written():
    disk = FakeSystem(capacity_bytes=1 << 20)
    with NvmeBackend("/scratch", subdirectory="a", system=disk) as backend:
        free = backend.free_bytes()
        with pytest.raises(SpaceError) as caught:
            backend.create("state", 1 << 21)
        assert (caught.value.needed_bytes, caught.value.free_bytes) == (1 << 21, free)
        assert f"{1 << 21} bytes are needed and {free} are free" in str(caught.value)
        assert backend.free_bytes() == free


def test_a_disk_that_others_fill_cannot_hurt_a_file_that_exists():
    disk = FakeSystem()
    with NvmeBackend("/scratch", subdirectory="a", system=disk) as backend, backend.create("s", 5000) as file:
        disk.set_free_bytes(0)
        file.write_from(0, memoryview(pattern(5000)))
        assert read(file, 0, 5000) == pattern(5000)


@pytest.mark.parametrize("call", ["reserve", "ftruncate", "pwritev"])
def test_space_that_runs_out_during_creation_leaves_nothing(tmp_path, call):
    class FullSystem(System):
        full = False

        def reserve(self, descriptor, size_bytes):
            raise OSError(errno.ENOSPC if call == "reserve" else errno.EOPNOTSUPP, "injected")

        def ftruncate(self, descriptor, size_bytes):
            if self.full and call == "ftruncate":
                raise OSError(errno.EDQUOT, "injected")
            super().ftruncate(descriptor, size_bytes)

        def pwritev(self, descriptor, buffers, offset):
            if self.full and call == "pwritev" and offset > 0:
                raise OSError(errno.ENOSPC, "injected")
            return super().pwritev(descriptor, buffers, offset)

    system = FullSystem()
    with claim(tmp_path, system=system) as backend:
        system.full = True
        with pytest.raises(SpaceError) as caught:
            backend.create("state", 3 << 20)
        assert caught.value.free_bytes > 0
        assert list(backend.list()) == []


def test_a_disk_too_full_for_the_claim_leaves_nothing(tmp_path):
    class FullSystem(System):
        def pwritev(self, descriptor, buffers, offset):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(SpaceError):
        claim(tmp_path, system=FullSystem())
    assert tree(tmp_path) == set()


def test_without_fallocate_the_space_is_reserved_by_writing(tmp_path):
    class NoFallocate(CountingSystem):
        def reserve(self, descriptor, size_bytes):
            self.calls.clear()
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

        def filesystem_kind(self, path):
            return "ext2"

    size_bytes = (3 << 20) + 5000
    system = NoFallocate()
    with claim(tmp_path, system=system) as backend, backend.create("state", size_bytes) as file:
        assert sum(length for operation, length in system.calls if operation == "write") == size_bytes
        assert read(file, 0, size_bytes) == bytes(size_bytes)


def test_replacing_a_file_counts_its_space_as_free():
    disk = FakeSystem(capacity_bytes=1 << 20)
    with NvmeBackend("/scratch", subdirectory="a", system=disk) as backend:
        backend.create("state", 900_000).close()
        backend.create("state", 950_000).close()
        assert list(backend.list()) == [("state", 950_000)]


# Transfers


def test_an_aligned_transfer_is_one_call_on_the_callers_buffer(tmp_path):
    system = CountingSystem()
    with claim(tmp_path, system=system) as backend, backend.create("state", 8 << 20) as file:
        buffer = aligned_buffer(4 << 20, backend.filesystem.alignment_bytes)
        system.calls.clear()
        file.write_from(4 << 20, buffer)
        file.read_into(0, buffer)
        assert system.calls == [("write", 4 << 20), ("read", 4 << 20)]


def test_direct_transfers_stay_out_of_the_page_cache(tmp_path):
    size_bytes = (4 << 20) + 100
    with claim(tmp_path) as backend, backend.create("state", size_bytes) as file:
        file.write_from(0, memoryview(pattern(size_bytes)))
        assert read(file, 0, size_bytes) == pattern(size_bytes)
        # The odd last block, and nothing else; where there is no O_DIRECT, the backend says so.
        bound = 1 if backend.filesystem.bypasses_page_cache else -(-size_bytes // mmap.PAGESIZE)
        assert cached_pages(file.path) <= bound


def cached_pages(path: str) -> int:
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as pages:
        length = len(pages)
        resident = (ctypes.c_ubyte * -(-length // mmap.PAGESIZE))()
        address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        if ctypes.CDLL(None, use_errno=True).mincore(
            ctypes.c_void_p(address), ctypes.c_size_t(length), resident
        ):
            raise OSError(ctypes.get_errno(), "mincore")
        return sum(page & 1 for page in resident)


def test_two_parts_of_one_block_written_at_once_are_both_kept(tmp_path):
    """The second write comes between the first one's reading of the block and its writing it back."""
    second_is_stopped_or_done = threading.Event()

    class WatchedLock:
        lock = threading.Lock()

        def __enter__(self):
            if not self.lock.acquire(blocking=False):
                second_is_stopped_or_done.set()
                self.lock.acquire()

        def __exit__(self, *error):
            self.lock.release()

    class Interleaving(System):
        between = None

        def preadv(self, descriptor, buffers, offset):
            moved = super().preadv(descriptor, buffers, offset)
            between, self.between = self.between, None
            if between is not None:
                between()
            return moved

    system = Interleaving()
    with claim(tmp_path, system=system) as backend:
        backend._patch_lock = WatchedLock()
        with backend.create("state", 1 << 20) as file:

            def write_second() -> None:
                file.write_from(10, memoryview(b"second"))
                second_is_stopped_or_done.set()

            second = threading.Thread(target=write_second)

            def start_second() -> None:
                second.start()
                second_is_stopped_or_done.wait()

            system.between = start_second
            file.write_from(0, memoryview(b"first"))
            second.join()
            assert read(file, 0, 16) == b"first\0\0\0\0\0second"


def test_a_file_truncated_behind_our_back_is_a_short_read(tmp_path):
    with claim(tmp_path) as backend, backend.create("state", 1 << 20) as file:
        os.truncate(file.path, 4096)
        assert read(file, 0, 4096) == bytes(4096)
        for offset, length in ((0, 1 << 20), (4096, 4096), (5000, 10)):
            with pytest.raises(TransferError, match="bytes were transferred") as caught:
                read(file, offset, length)
            assert caught.value.path == file.path


def test_closing_waits_for_transfers_in_flight(tmp_path):
    """A descriptor closed under a transfer may be another file's by the time the kernel looks at it."""
    inside, may_go_on = threading.Event(), threading.Event()

    class SlowSystem(CountingSystem):
        slow, closed = False, ()

        def pwritev(self, descriptor, buffers, offset):
            if self.slow:
                inside.set()
                may_go_on.wait()
                self.closed_early = descriptor in self.closed
            return super().pwritev(descriptor, buffers, offset)

        def close(self, descriptor):
            self.closed = (*self.closed, descriptor)
            super().close(descriptor)

    system = SlowSystem()
    with claim(tmp_path, system=system) as backend:
        file = backend.create("state", 4096)
        system.slow, system.closed = True, ()
        writer = threading.Thread(target=file.write_from, args=(0, aligned_buffer(4096, 4096)))
        writer.start()
        inside.wait()
        file.close()
        with pytest.raises(StorageError, match="closed"):
            file.write_from(0, memoryview(b"x"))
        may_go_on.set()
        writer.join()
        assert not system.closed_early
        assert len(system.closed) == 1


def test_an_open_file_has_at_most_two_descriptors_and_none_is_left(tmp_path):
    before = len(os.listdir("/dev/fd"))
    with claim(tmp_path) as backend:
        held = len(os.listdir("/dev/fd"))
        even, odd = backend.create("even", 8192), backend.create("odd", 5000)
        assert len(os.listdir("/dev/fd")) == held + 3
        even.close()
        odd.close()
        assert len(os.listdir("/dev/fd")) == held
        backend.create("left-open", 5000)
    assert len(os.listdir("/dev/fd")) == before


def test_failed_claims_and_creations_leave_no_descriptor():
    disk = FakeSystem(capacity_bytes=1 << 20)
    with NvmeBackend("/scratch", subdirectory="a", system=disk) as backend:
        held = disk.open_descriptors()
        with pytest.raises(ClaimedError):
            NvmeBackend("/scratch", subdirectory="a", system=disk)
        with pytest.raises(SpaceError):
            backend.create("state", 1 << 30)
        assert disk.open_descriptors() == held
    assert disk.open_descriptors() == 0


def test_running_out_of_descriptors_is_one_clear_error():
    class Exhausted(FakeSystem):
        exhausted = False

        def open(self, path, flags, mode=0o777, *, dir_fd=None):
            if self.exhausted:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return super().open(path, flags, mode, dir_fd=dir_fd)

    disk = Exhausted()
    with NvmeBackend("/scratch", subdirectory="a", system=disk) as backend:
        disk.exhausted = True
        with pytest.raises(StorageError, match="ulimit -n"):
            backend.create("state", 5000)


# Durability, on the fake kernel, which knows what a power cut would leave


@pytest.mark.parametrize("synced", [True, False])
def test_what_sync_returned_for_survives_a_crash_and_the_rest_does_not(synced):
    disk = FakeSystem()
    backend = NvmeBackend("/scratch", subdirectory="a", keep=True, system=disk)
    with backend.create("state", 5000) as file:
        file.write_from(0, memoryview(pattern(5000)))
        if synced:
            file.sync()
    disk.crash()
    with NvmeBackend("/scratch", subdirectory="a", keep=True, system=disk) as backend:
        assert list(backend.list()) == ([("state", 5000)] if synced else [])
        if synced:
            with backend.open("state") as file:
                assert read(file, 0, 5000) == pattern(5000)


def test_a_published_file_survives_a_crash():
    disk = FakeSystem()
    backend = NvmeBackend("/scratch", subdirectory="a", keep=True, system=disk)
    for seed in (1, 2):
        with backend.create("part", 5000) as file:
            file.write_from(0, memoryview(pattern(5000, seed)))
            file.sync()
        backend.publish("part", "final")
    disk.crash()
    with NvmeBackend("/scratch", subdirectory="a", keep=True, system=disk) as backend:
        assert list(backend.list()) == [("final", 5000)]
        with backend.open("final") as file:
            assert read(file, 0, 5000) == pattern(5000, 2)


def test_opening_a_backend_by_name(tmp_path):
    with open_backend([str(tmp_path)], subdirectory="a") as backend:
        assert isinstance(backend, NvmeBackend)
        backend.close(remove_files=True)
    with pytest.raises(ValueError, match="unknown kind"):
        open_backend([str(tmp_path)], subdirectory="a", kind="tape")
    with pytest.raises(ValueError, match="no directory"):
        open_backend([], subdirectory="a")


def test_a_claim_that_fails_later_gives_up_what_it_took(tmp_path):
    class Broken(System):
        def filesystem_kind(self, path):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.raises(StorageError):
        claim(tmp_path, system=Broken())
    assert tree(tmp_path) == set()
    claim(tmp_path).close(remove_files=True)
