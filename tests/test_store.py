"""The store gives back what was written, or says which bytes are wrong and why. On fake and on real files."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from optstream.backends.errors import MissingFileError, SpaceError, TransferError
from optstream.backends.fake import FakeSystem
from optstream.backends.interface import Backend
from optstream.backends.nvme import NvmeBackend
from optstream.core.errors import CorruptionError
from optstream.core.formats import segment_formats
from optstream.core.integrity import Trailer
from optstream.core.memory import allocate_host
from optstream.core.plan import SEGMENTS, Entry, plan_buckets
from optstream.core.store import BucketStore, bucket_file_name

pytestmark = pytest.mark.unit

ENTRIES = [Entry("a", 3000, 0), Entry("b", 70, 0), Entry("c", 1000, 1)]
CHUNK_BYTES = 4096


@dataclass
class Disk:
    """A disk, and how to get at its files past the backend."""

    open: Callable[[], Backend]
    raw_read: Callable[[str, int, int], bytes]
    raw_write: Callable[[str, int, bytes], None]
    truncate: Callable[[str, int], None]

    def swap(self, path: str, other: str, size: int) -> None:
        first, second = self.raw_read(path, 0, size), self.raw_read(other, 0, size)
        self.raw_write(path, 0, second)
        self.raw_write(other, 0, first)


def real_disk(directory: str) -> Disk:
    def raw_read(path: str, offset: int, length: int) -> bytes:
        with open(path, "rb") as file:
            file.seek(offset)
            return file.read(length)

    def raw_write(path: str, offset: int, data: bytes) -> None:
        with open(path, "r+b") as file:
            file.seek(offset)
            file.write(data)

    return Disk(lambda: NvmeBackend(directory, subdirectory="test/store"), raw_read, raw_write, os.truncate)


def fake_disk(system: FakeSystem) -> Disk:
    def truncate(path: str, size: int) -> None:
        descriptor = system.open(path, os.O_RDWR)
        system.ftruncate(descriptor, size)
        system.close(descriptor)

    return Disk(
        lambda: NvmeBackend("/disk", subdirectory="test/store", system=system),
        system.raw_read,
        system.raw_write,
        truncate,
    )


@pytest.fixture(params=["real", "fake", "fake with blocks of 64 KiB"])
def disk(request, tmp_path) -> Disk:
    if request.param == "real":
        return real_disk(str(tmp_path))
    return fake_disk(FakeSystem(alignment_bytes=65536 if "64" in request.param else 4096))


def make_store(backend: Backend, *, verify: bool = True, moments: str = "fp32") -> BucketStore:
    return BucketStore(
        backend,
        ENTRIES,
        plan_buckets(ENTRIES, 1024),
        segment_formats(moments),
        chunk_bytes=CHUNK_BYTES,
        verify=verify,
    )


@pytest.fixture
def store(disk):
    backend = disk.open()
    store = make_store(backend)
    yield store
    store.close(remove_files=True)


def place_of(store: BucketStore) -> torch.Tensor:
    return allocate_host(store.place_bytes)


def filled(store: BucketStore, seed: int) -> torch.Tensor:
    place = place_of(store)
    place.copy_(torch.randint(0, 256, place.shape, generator=torch.Generator().manual_seed(seed)))
    return place


def path_of(store: BucketStore, bucket: int) -> str:
    return os.path.join(store.backend.root, bucket_file_name(bucket))


# ---- right bytes -------------------------------------------------------------------------------------------


def test_what_is_written_is_read_back_and_is_on_the_disk(disk, store):
    for step in (1, 2):
        written = {}
        for bucket in range(len(store.buckets)):
            written[bucket] = filled(store, 10 * step + bucket)
            store.write_bucket(bucket, written[bucket], step=step)
            assert store.step_of(bucket) == step
        for bucket, layout in enumerate(store.layouts):
            place = filled(store, 99)
            store.read_bucket(bucket, place)
            assert torch.equal(place[: layout.state_bytes], written[bucket][: layout.state_bytes])
            on_disk = disk.raw_read(path_of(store, bucket), 0, layout.state_bytes)
            assert on_disk == bytes(written[bucket][: layout.state_bytes].numpy())


def test_moments_that_were_never_written_are_zero_and_are_not_read(store):
    written, place = filled(store, 1), filled(store, 2)
    store.write_bucket(0, written, step=0, segments=("main",))
    assert not store.has_moments(0)
    transfer = store.begin_read(0, place)
    transfer.file.close()
    assert {chunk.segment for chunk in transfer.chunks} == {"main"}
    assert transfer.payload_bytes == 4 * store.buckets[0].payload_numel
    store.read_bucket(0, place)
    layout = store.layouts[0]
    main = layout.segments["main"]
    assert torch.equal(place[: main.end], written[: main.end])
    assert not place[main.end : layout.state_bytes].any()
    store.write_bucket(0, written, step=1)
    assert store.has_moments(0)


def test_rewriting_main_keeps_the_moments(store):
    first, second, place = filled(store, 1), filled(store, 2), place_of(store)
    store.write_bucket(0, first, step=3)
    store.write_bucket(0, second, step=3, segments=("main",))
    store.read_bucket(0, place)
    layout = store.layouts[0]
    end = layout.segments["main"].end
    assert torch.equal(place[:end], second[:end])
    assert torch.equal(place[end : layout.state_bytes], first[end : layout.state_bytes])


@pytest.mark.parametrize(("moments", "bytes_per_element"), [("fp32", 12), ("bf16", 8)])
def test_payload_is_the_arithmetic(disk, moments, bytes_per_element):
    with disk.open() as backend:
        store = make_store(backend, moments=moments)
        payload = moved = 0
        for bucket in range(len(store.buckets)):
            transfer = store.begin_write(bucket)
            transfer.file.close()
            payload += transfer.payload_bytes
            moved += transfer.payload_bytes + transfer.padding_bytes
        assert payload == bytes_per_element * sum(entry.numel for entry in ENTRIES)
        assert moved == sum(layout.state_bytes for layout in store.layouts)
        assert store.total_bytes == sum(size for _, size in backend.list())
        store.close(remove_files=True)


# ---- no room -----------------------------------------------------------------------------------------------


def test_no_room_is_said_before_anything_is_written():
    system = FakeSystem()
    backend = fake_disk(system).open()
    needed = make_store(backend).total_bytes
    for name, _ in list(backend.list()):
        backend.remove(name)
    system.set_free_bytes(needed - 4096)
    with pytest.raises(SpaceError, match=f"{needed} bytes are needed, {needed - 4096} are free") as caught:
        make_store(backend)
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (needed, needed - 4096)
    assert caught.value.path == backend.root
    assert list(backend.list()) == []
    system.set_free_bytes(needed)
    make_store(backend).close(remove_files=True)


def test_no_room_on_real_files_leaves_nothing(tmp_path):
    with NvmeBackend(str(tmp_path), subdirectory="test/store") as backend:
        huge = [Entry("huge", backend.free_bytes() // 4, 0)]
        with pytest.raises(SpaceError, match="bytes are needed"):
            BucketStore(
                backend, huge, plan_buckets(huge, 1 << 24), segment_formats("fp32"), chunk_bytes=1 << 22
            )
        assert list(backend.list()) == []
        backend.close(remove_files=True)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_disk_that_others_fill_meanwhile_leaves_nothing():
    """The check passes, and the third file finds the disk full: the first two must go."""
    system = FakeSystem()
    backend = fake_disk(system).open()
    needed = make_store(backend).total_bytes
    for name, _ in list(backend.list()):
        backend.remove(name)

    class Late(NvmeBackend):
        def free_bytes(self) -> int:
            return needed

    backend.close()
    late = Late("/disk", subdirectory="test/store", system=system)
    system.set_free_bytes(needed // 2)
    with pytest.raises(SpaceError, match="bucket-"):
        make_store(late)
    assert list(late.list()) == []
    late.close(remove_files=True)


# ---- wrong bytes -------------------------------------------------------------------------------------------


def write_all(store: BucketStore, step: int) -> None:
    for bucket in range(len(store.buckets)):
        store.write_bucket(bucket, filled(store, 10 * step + bucket), step=step)


def corruption(store: BucketStore, bucket: int) -> CorruptionError:
    with pytest.raises(CorruptionError) as caught:
        store.read_bucket(bucket, place_of(store))
    error = caught.value
    assert error.path == path_of(store, bucket)
    assert error.bucket == bucket
    assert error.operation == "read"
    for part in (error.path, f"bucket {bucket}", error.segment, f"offset {error.offset}", "checkpoint"):
        assert part in str(error)
    assert "\n" not in str(error)
    return error


@pytest.mark.parametrize("segment", SEGMENTS)
@pytest.mark.parametrize("where", ["first", "last"])
def test_a_flipped_byte_is_located(disk, store, segment, where):
    write_all(store, 1)
    extent = store.layouts[1].segments[segment]
    offset = extent.offset if where == "first" else extent.end - 1
    path = path_of(store, 1)
    byte = disk.raw_read(path, offset, 1)[0]
    disk.raw_write(path, offset, bytes([byte ^ 1]))
    error = corruption(store, 1)
    assert error.segment == segment
    chunk = next(chunk for chunk in store.layouts[1].chunks if chunk.offset == error.offset)
    assert chunk.offset <= offset < chunk.offset + chunk.size
    assert "damaged" in error.why
    for healthy in (0, 2):
        store.read_bucket(healthy, place_of(store))


def test_a_truncated_file_is_a_transfer_error(disk, store):
    write_all(store, 1)
    layout = store.layouts[1]
    disk.truncate(path_of(store, 1), layout.segments["exp_avg_sq"].offset)
    with pytest.raises(TransferError, match="not inside its") as caught:
        store.read_bucket(1, place_of(store))
    assert caught.value.path == path_of(store, 1)
    assert caught.value.offset == layout.segments["exp_avg_sq"].offset


def test_damage_in_a_file_without_its_end_is_still_called_damage(disk, store):
    """Finding out why must not hide that."""
    write_all(store, 1)
    disk.raw_write(path_of(store, 1), 0, b"damage")
    disk.truncate(path_of(store, 1), store.layouts[1].trailer.offset)
    error = corruption(store, 1)
    assert error.segment == "main"
    assert "trailer cannot be read" in error.why


def test_a_damaged_trailer_does_not_matter_until_it_is_needed(disk, store):
    write_all(store, 1)
    disk.raw_write(path_of(store, 1), store.layouts[1].trailer.offset, b"damage")
    store.read_bucket(1, place_of(store))
    disk.raw_write(path_of(store, 1), 0, b"damage")
    assert "trailer is damaged too" in corruption(store, 1).why


def test_a_missing_file_is_named(store):
    write_all(store, 1)
    store.backend.remove(bucket_file_name(1))
    with pytest.raises(MissingFileError, match=bucket_file_name(1)):
        store.read_bucket(1, place_of(store))


def test_exchanged_files_are_caught(disk, store):
    sizes = [layout.size_bytes for layout in store.layouts]
    assert sizes[0] == sizes[1]
    write_all(store, 1)
    disk.swap(path_of(store, 0), path_of(store, 1), sizes[0])
    assert "the file holds bucket 1: it was exchanged" in corruption(store, 0).why
    assert "the file holds bucket 0: it was exchanged" in corruption(store, 1).why


def test_an_old_copy_of_a_file_is_caught(disk, store):
    """All writes of a step lost, trailer included: the file is intact, and one step old."""
    write_all(store, 1)
    size = store.layouts[1].size_bytes
    old = disk.raw_read(path_of(store, 1), 0, size)
    write_all(store, 2)
    disk.raw_write(path_of(store, 1), 0, old)
    assert "holds step 1, not step 2: a write was lost" in corruption(store, 1).why


def test_one_lost_chunk_is_caught(disk, store):
    write_all(store, 1)
    chunk = store.layouts[1].chunks[-1]
    old = disk.raw_read(path_of(store, 1), chunk.offset, chunk.size)
    write_all(store, 2)
    disk.raw_write(path_of(store, 1), chunk.offset, old)
    error = corruption(store, 1)
    assert (error.segment, error.offset) == (chunk.segment, chunk.offset)
    assert "a write was lost" in error.why


def test_unverified_reads_take_what_is_there_and_write_no_trailer(disk):
    with disk.open() as backend:
        store = make_store(backend, verify=False)
        write_all(store, 1)
        layout = store.layouts[1]
        path = path_of(store, 1)
        assert disk.raw_read(path, layout.trailer.offset, layout.trailer.size) == bytes(layout.trailer.size)
        disk.raw_write(path, 5, b"\xff\x00\xff")
        place = place_of(store)
        store.read_bucket(1, place)
        assert bytes(place[5:8].numpy()) == b"\xff\x00\xff"
        store.close(remove_files=True)


# ---- trailers ----------------------------------------------------------------------------------------------

words = st.integers(0, 2**64 - 1)


@given(words, words, st.lists(words, max_size=20), st.integers(0, 50))
def test_a_trailer_says_what_was_put_in(bucket, step, checksums, padding):
    trailer = Trailer(bucket, step, tuple(checksums))
    memory = memoryview(bytearray(Trailer.size_bytes(len(checksums)) + padding))
    trailer.pack_into(memory)
    assert Trailer.unpack(memory) == trailer


@given(st.lists(words, min_size=1, max_size=5), st.data())
def test_no_changed_bit_goes_unnoticed(checksums, data):
    trailer = Trailer(3, 7, tuple(checksums))
    memory = memoryview(bytearray(Trailer.size_bytes(len(checksums))))
    trailer.pack_into(memory)
    memory[data.draw(st.integers(0, len(memory) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert Trailer.unpack(memory) is None


@given(st.binary(max_size=200))
def test_noise_is_no_trailer(noise):
    assert Trailer.unpack(memoryview(noise)) is None


def test_the_file_can_be_judged_by_its_own_trailer(disk, store):
    """Without the run that wrote it: whose it is, of which step, and each chunk's checksum."""
    write_all(store, 5)
    layout = store.layouts[2]
    trailer = Trailer.unpack(
        memoryview(disk.raw_read(path_of(store, 2), layout.trailer.offset, layout.trailer.size))
    )
    assert (trailer.bucket, trailer.step) == (2, 5)
    for chunk, checksum in zip(layout.chunks, trailer.checksums, strict=True):
        assert xxh3_64_intdigest(disk.raw_read(path_of(store, 2), chunk.offset, chunk.size)) == checksum
