"""A contract suite that any storage backend joins in about twenty lines.

    import pytest
    from optstream.harness.conformance import BackendContract, Subject

    @pytest.mark.unit
    class TestMyBackend(BackendContract):
        @pytest.fixture
        def subject(self, tmp_path):
            return Subject(
                open=lambda name: MyBackend(tmp_path / name),          # claims, or raises ClaimedError
                raw_read=lambda path, offset, n: read_some_other_way(path, offset, n),
                raw_write=lambda path, offset, data: write_some_other_way(path, offset, data),
                allocated_bytes=lambda path: os.stat(path).st_blocks * 512,
            )

Bytes are checked by `raw_read`, which must not go through the backend, so that a backend that answers from
its own memory, or is wrong the same way in both directions, is found out. `path` is the stored file's own.
"""

# ruff: noqa: S101  (these are tests, which pytest reports by their assert statements)

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DataObject

from optstream.backends.errors import (
    ClaimedError,
    MissingFileError,
    SpaceError,
    StorageError,
    TransferError,
)
from optstream.backends.interface import Backend, StoredFile

# One byte, odd sizes around and above a block, and one larger than any chunk that a backend may cut to.
SIZES_BYTES = [1, 1023, 4096, 4097, (2 << 20) + 13]
REFUSED_NAMES = ["", ".", "..", "a/b", "/a", "a\0b"]


@dataclass(frozen=True)
class Subject:
    """How the suite reaches the backend under test and, past it, the bytes.

    open(name): a backend over the directory of that name; equal names mean the same directory.
    raw_read(path, offset, length), raw_write(path, offset, data): a file's bytes, past the backend.
    allocated_bytes(path): what the disk has set aside for a stored file.
    limit_space(backend, free_bytes): leave only that much room. Without it, the suite asks for more than
        any disk holds instead.
    """

    open: Callable[[str], Backend]
    raw_read: Callable[[str, int, int], bytes]
    raw_write: Callable[[str, int, bytes], None]
    allocated_bytes: Callable[[str], int]
    limit_space: Callable[[Backend, int], None] | None = None


class BackendContract:
    """Subclasses give the fixture `subject` and carry a level marker."""

    @pytest.fixture
    def backend(self, subject: Subject) -> Iterator[Backend]:
        with subject.open("contract") as backend:
            yield backend
            backend.close(remove_files=True)

    # Bytes

    @pytest.mark.parametrize("size_bytes", SIZES_BYTES)
    def test_fresh_bytes_are_zeros_and_the_size_is_exact(self, subject, backend, size_bytes):
        with backend.create("fresh", size_bytes) as file:
            assert file.size_bytes == size_bytes
            assert read(file, 0, size_bytes) == bytes(size_bytes)
            assert list(backend.list()) == [("fresh", size_bytes)]
            assert subject.raw_read(file.path, 0, size_bytes + 1) == bytes(size_bytes)

    @pytest.mark.parametrize("size_bytes", SIZES_BYTES)
    def test_what_is_written_is_on_the_disk_and_reads_back(self, subject, backend, size_bytes):
        data = pattern(size_bytes)
        with backend.create("whole", size_bytes) as file:
            file.write_from(0, memoryview(data))
            file.sync()
            assert subject.raw_read(file.path, 0, size_bytes + 1) == data
            assert read(file, 0, size_bytes) == data
        with backend.open("whole") as file:
            assert file.size_bytes == size_bytes
            assert read(file, 0, size_bytes) == data

    def test_reads_come_from_the_disk(self, subject, backend):
        with backend.create("changed", 10_000) as file:
            file.write_from(0, memoryview(pattern(10_000)))
            file.sync()
            subject.raw_write(file.path, 5000, b"changed behind its back")
            assert read(file, 5000, 23) == b"changed behind its back"

    def test_any_sequence_of_transfers_equals_a_dictionary_of_bytes(self, subject, backend):
        sizes = st.integers(0, 3 * 65536 + 100)
        grains = st.sampled_from([1, 1, 512, 4096, 65536])

        # The speed of a disk is no part of the contract.
        @settings(deadline=None)
        @given(data=st.data(), size_bytes=sizes, grain=grains)
        def check(data: DataObject, size_bytes: int, grain: int) -> None:
            places = st.integers(0, size_bytes // grain)
            written: dict[int, int] = {}
            with backend.create("model", size_bytes) as file:
                for _ in range(data.draw(st.integers(0, 8), label="transfers")):
                    offset = data.draw(places, label="offset") * grain
                    length = min(data.draw(places, label="length") * grain, size_bytes - offset)
                    if data.draw(st.booleans(), label="write"):
                        chunk = pattern(length, data.draw(st.integers(1, 255)))
                        file.write_from(offset, memoryview(chunk))
                        written.update(zip(range(offset, offset + length), chunk, strict=True))
                    else:
                        expected = bytes(written.get(at, 0) for at in range(offset, offset + length))
                        assert read(file, offset, length) == expected
                file.sync()
                everything = bytes(written.get(at, 0) for at in range(size_bytes))
                assert subject.raw_read(file.path, 0, size_bytes + 1) == everything

        check()

    @pytest.mark.parametrize("skew", [0, 1, 8, 64, 4095])
    def test_buffers_at_any_address_transfer_and_nothing_beside_them_changes(self, backend, skew):
        block = backend.filesystem.alignment_bytes
        memory = aligned_array(4 * block + skew, block)
        target = memory[skew : skew + 2 * block]
        with backend.create("skewed", 2 * block) as file:
            target[:] = np.frombuffer(pattern(2 * block), dtype=np.uint8)
            file.write_from(0, memoryview(target))
            memory[:] = 0xEE
            file.read_into(0, memoryview(target))
        assert target.tobytes() == pattern(2 * block)
        assert (memory[:skew] == 0xEE).all()
        assert (memory[skew + 2 * block :] == 0xEE).all()

    def test_buffers_of_any_item_type_count_in_bytes(self, backend):
        values = np.arange(1000, dtype=np.float32)
        with backend.create("floats", values.nbytes) as file:
            file.write_from(0, memoryview(values))
            back = np.zeros_like(values)
            file.read_into(0, memoryview(back))
        assert (back == values).all()

    def test_two_handles_of_one_file_see_each_other(self, backend):
        with backend.create("shared", 9000) as first, backend.open("shared") as second:
            first.write_from(100, memoryview(b"first"))
            second.write_from(105, memoryview(b"second"))
            assert read(second, 100, 11) == b"firstsecond"
            assert read(first, 100, 11) == b"firstsecond"

    @pytest.mark.parametrize("share_bytes", [1 << 16, 1021, 7])
    def test_threads_on_ranges_that_do_not_overlap(self, subject, backend, share_bytes):
        """With shares that are no multiple of a block, neighbours own parts of the same one."""
        threads, rounds = 4, 12
        size_bytes = threads * share_bytes + 5
        failures: list[BaseException] = []
        with backend.create("crowd", size_bytes) as file:

            def work(index: int) -> None:
                try:
                    for round_number in range(rounds):
                        mine = pattern(share_bytes, 1 + index * rounds + round_number)
                        file.write_from(index * share_bytes, memoryview(mine))
                        if read(file, index * share_bytes, share_bytes) != mine:
                            raise RuntimeError(f"thread {index} lost round {round_number}")
                except BaseException as error:
                    failures.append(error)

            run_threads([lambda index=index: work(index) for index in range(threads)])
            assert not failures, failures
            last = [pattern(share_bytes, 1 + index * rounds + rounds - 1) for index in range(threads)]
            file.sync()
            assert subject.raw_read(file.path, 0, size_bytes) == b"".join(last) + bytes(5)

    def test_threads_create_and_remove_files_of_their_own(self, backend):
        failures: list[BaseException] = []

        def work(index: int) -> None:
            try:
                for turn in range(5):
                    with backend.create(f"own-{index}", 5000) as file:
                        file.write_from(turn, memoryview(b"mine"))
                    backend.remove(f"own-{index}")
            except BaseException as error:
                failures.append(error)

        run_threads([lambda index=index: work(index) for index in range(4)])
        assert not failures, failures
        assert list(backend.list()) == []

    # Exactness

    @pytest.mark.parametrize(("offset", "length"), [(0, 5001), (5000, 1), (4999, 2), (-1, 1), (1 << 40, 1)])
    def test_transfers_that_leave_the_file_are_refused(self, subject, backend, offset, length):
        with backend.create("bounded", 5000) as file:
            file.write_from(0, memoryview(pattern(5000)))
            buffer = bytearray(length)
            with pytest.raises(TransferError) as caught:
                file.write_from(offset, memoryview(buffer))
            assert (caught.value.path, caught.value.offset) == (file.path, offset)
            with pytest.raises(TransferError):
                file.read_into(offset, memoryview(buffer))
            file.sync()
            assert subject.raw_read(file.path, 0, 5001) == pattern(5000)

    def test_an_empty_transfer_does_nothing_anywhere_inside(self, backend):
        with backend.create("nothing", 5000) as file:
            for offset in (0, 1, 4096, 5000):
                file.write_from(offset, memoryview(b""))
                file.read_into(offset, memoryview(bytearray()))

    def test_an_empty_file(self, backend):
        with backend.create("empty", 0) as file:
            assert file.size_bytes == 0
            file.sync()
        assert list(backend.list()) == [("empty", 0)]

    # Names

    def test_list_is_sorted_and_remove_removes(self, backend):
        for name in ("b", "a.x", "c"):
            backend.create(name, 10).close()
        assert [name for name, _ in backend.list()] == ["a.x", "b", "c"]
        backend.remove("b")
        assert [name for name, _ in backend.list()] == ["a.x", "c"]

    def test_creating_an_existing_name_replaces_the_file(self, backend):
        with backend.create("again", 5000) as file:
            file.write_from(0, memoryview(pattern(5000)))
        with backend.create("again", 6000) as file:
            assert read(file, 0, 6000) == bytes(6000)
        assert list(backend.list()) == [("again", 6000)]

    def test_publish_replaces_the_name_with_the_new_file(self, subject, backend):
        for name, seed in (("final", 1), ("final.part", 2)):
            with backend.create(name, 5000) as file:
                file.write_from(0, memoryview(pattern(5000, seed)))
                file.sync()
        backend.publish("final.part", "final")
        assert list(backend.list()) == [("final", 5000)]
        with backend.open("final") as file:
            assert subject.raw_read(file.path, 0, 5000) == pattern(5000, 2)

    def test_publish_under_a_new_name(self, backend):
        backend.create("part", 10).close()
        backend.publish("part", "new")
        assert list(backend.list()) == [("new", 10)]

    def test_what_is_missing_is_said_to_be_missing(self, backend):
        for act in (
            lambda: backend.open("nowhere"),
            lambda: backend.remove("nowhere"),
            lambda: backend.publish("nowhere", "somewhere"),
        ):
            with pytest.raises(MissingFileError, match="nowhere"):
                act()
        assert list(backend.list()) == []

    @pytest.mark.parametrize("name", REFUSED_NAMES)
    def test_names_are_single_plain_components(self, backend, name):
        for act in (
            lambda: backend.create(name, 10),
            lambda: backend.open(name),
            lambda: backend.remove(name),
            lambda: backend.publish(name, "fine"),
            lambda: backend.publish("fine", name),
        ):
            with pytest.raises((ValueError, MissingFileError)):
                act()
        assert list(backend.list()) == []

    # Space

    def test_a_file_that_does_not_fit_is_refused_and_leaves_nothing(self, subject, backend):
        backend.create("before", 5000).close()
        if subject.limit_space is not None:
            subject.limit_space(backend, 1 << 20)
            size_bytes = (1 << 20) + 1
        else:
            size_bytes = 1 << 58
        free_before = backend.free_bytes()
        with pytest.raises(SpaceError) as caught:
            backend.create("too-large", size_bytes)
        assert caught.value.needed_bytes >= size_bytes
        assert caught.value.free_bytes < size_bytes
        assert str(caught.value.needed_bytes) in str(caught.value)
        assert list(backend.list()) == [("before", 5000)]
        if subject.limit_space is not None:
            assert backend.free_bytes() == free_before

    @pytest.mark.parametrize("size_bytes", SIZES_BYTES)
    def test_the_whole_size_is_reserved_at_creation(self, subject, backend, size_bytes):
        promised = size_bytes if backend.filesystem.reserves_space else 0
        with backend.create("reserved", size_bytes) as file:
            assert subject.allocated_bytes(file.path) >= promised

    # The claim and the end

    def test_a_second_claimant_is_refused_and_told_who_owns_it(self, subject, backend):
        backend.create("mine", 10).close()
        with pytest.raises(ClaimedError) as caught:
            subject.open("contract")
        assert caught.value.owner
        assert caught.value.owner in str(caught.value)
        assert list(backend.list()) == [("mine", 10)]

    def test_a_closed_backend_frees_its_claim_and_keeps_its_files(self, subject):
        with subject.open("kept") as backend:
            with backend.create("kept", 5000) as file:
                file.write_from(0, memoryview(pattern(5000)))
                file.sync()
            backend.close()
            backend.close()
        with subject.open("kept") as backend:
            assert list(backend.list()) == [("kept", 5000)]
            with backend.open("kept") as file:
                assert read(file, 0, 5000) == pattern(5000)
            backend.close(remove_files=True)
        with subject.open("kept") as backend:
            assert list(backend.list()) == []
            backend.close(remove_files=True)

    def test_neighbours_do_not_see_each_other(self, subject, backend):
        with subject.open("neighbour") as neighbour:
            backend.create("same", 10).close()
            assert list(neighbour.list()) == []
            neighbour.close(remove_files=True)
        assert list(backend.list()) == [("same", 10)]

    def test_use_after_close_is_a_typed_error(self, subject):
        backend = subject.open("closed")
        file = backend.create("file", 10)
        survivor = backend.create("survivor", 10)
        file.close()
        file.close()
        for act in (
            lambda: file.read_into(0, memoryview(bytearray(1))),
            lambda: file.write_from(0, memoryview(b"x")),
            file.sync,
        ):
            with pytest.raises(StorageError):
                act()
        backend.close(remove_files=True)
        for act in (
            lambda: survivor.write_from(0, memoryview(b"x")),
            lambda: backend.create("late", 1),
            lambda: backend.open("file"),
            lambda: backend.remove("file"),
            lambda: list(backend.list()),
            lambda: backend.publish("file", "late"),
            backend.free_bytes,
        ):
            with pytest.raises(StorageError):
                act()

    def test_the_filesystem_is_described(self, backend):
        info = backend.filesystem
        assert info.alignment_bytes >= 1
        assert info.alignment_bytes & (info.alignment_bytes - 1) == 0
        assert backend.free_bytes() > 0


def pattern(length: int, seed: int = 1) -> bytes:
    """Bytes that differ between seeds and between any two nearby places."""
    places = np.arange(length, dtype=np.uint32)
    return ((places * 2654435761 + seed * 40503) >> 13).astype(np.uint8).tobytes()


def read(file: StoredFile, offset: int, length: int) -> bytes:
    # Not zeros: a read that fills nothing must not pass for a read of zeros.
    buffer = bytearray(b"\xdd" * length)
    file.read_into(offset, memoryview(buffer))
    return bytes(buffer)


def aligned_array(length: int, alignment: int) -> np.ndarray:
    memory = np.empty(length + alignment, dtype=np.uint8)
    start = -memory.ctypes.data % alignment
    return memory[start : start + length]


def run_threads(bodies: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=body) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
