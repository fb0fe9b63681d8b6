"""Entries -> buckets -> bytes: nothing lost, nothing twice, nothing across a boundary."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from optstream.core.plan import Bucket, Entry, Piece, bucket_layout, plan_buckets

pytestmark = pytest.mark.unit

SIZES_THAT_HAVE_BROKEN_OTHERS = [1, 1023, 4097, 14_412_000]
sizes = st.lists(st.one_of(st.integers(1, 300), st.sampled_from([1023, 4097])), max_size=12)


def entries_of(numels: list[int]) -> list[Entry]:
    return [Entry(f"entry{index}", numel, group=index % 3) for index, numel in enumerate(numels)]


def trailer_bytes(chunks: int) -> int:
    return 40 + 8 * chunks


@given(sizes, st.integers(1, 2000))
@example(SIZES_THAT_HAVE_BROKEN_OTHERS, 8 << 20)
@example(SIZES_THAT_HAVE_BROKEN_OTHERS, 1 << 20)
@example([64], 64)
@example([65], 64)
def test_every_element_is_in_exactly_one_piece_in_order(numels, bucket_numel):
    pieces = [piece for bucket in plan_buckets(entries_of(numels), bucket_numel) for piece in bucket.pieces]
    reached = dict.fromkeys(range(len(numels)), 0)
    for piece in pieces:
        assert piece.start == reached[piece.entry], "a gap or an overlap"
        assert piece.stop > piece.start
        reached[piece.entry] = piece.stop
    assert list(reached.values()) == numels
    assert [piece.entry for piece in pieces] == sorted(piece.entry for piece in pieces)


@given(sizes, st.integers(1, 2000))
@example(SIZES_THAT_HAVE_BROKEN_OTHERS, 8 << 20)
def test_buckets_fit_and_pieces_do_not_overlap(numels, bucket_numel):
    capacity = (bucket_numel + 63) // 64 * 64
    for index, bucket in enumerate(plan_buckets(entries_of(numels), bucket_numel)):
        assert bucket.index == index
        end = 0
        for piece in bucket.pieces:
            assert piece.offset == piece.span.start == -(-end // 64) * 64
            assert piece.span.stop - piece.span.start == piece.numel
            end = piece.span.stop
        assert end <= bucket.numel <= capacity
        assert bucket.numel % 64 == 0
        assert bucket.payload_numel == sum(piece.stop - piece.start for piece in bucket.pieces)


@given(sizes, st.integers(1, 2000))
@example(SIZES_THAT_HAVE_BROKEN_OTHERS, 1 << 20)
def test_entries_are_cut_only_where_they_must_be_and_at_multiples_of_64(numels, bucket_numel):
    capacity = (bucket_numel + 63) // 64 * 64
    pieces_of: dict[int, list[Piece]] = {}
    for bucket in plan_buckets(entries_of(numels), bucket_numel):
        for piece in bucket.pieces:
            pieces_of.setdefault(piece.entry, []).append(piece)
    for entry, pieces in pieces_of.items():
        assert all(piece.start % 64 == 0 for piece in pieces)
        assert len(pieces) == -(-numels[entry] // capacity)
        assert all(piece.numel == capacity for piece in pieces[:-1])


def test_a_bucket_is_left_only_when_the_next_entry_does_not_fit():
    plan = plan_buckets(entries_of([100, 28, 64, 65, 64]), 256)
    assert [[piece.entry for piece in bucket.pieces] for bucket in plan] == [[0, 1, 2], [3, 4]]
    assert [bucket.numel for bucket in plan] == [256, 192]


def test_no_entries_make_no_buckets():
    assert plan_buckets([], 64) == ()


@pytest.mark.parametrize(
    ("entries", "bucket_numel", "message"),
    [
        ([Entry("a", 1, 0)], 0, "must be positive, not 0"),
        ([Entry("a", 0, 0)], 64, "'a' has 0 elements"),
        ([Entry("a", 1, 0), Entry("b", 1, 0), Entry("a", 2, 1)], 64, "these are not: a"),
    ],
)
def test_what_cannot_be_planned_is_refused(entries, bucket_numel, message):
    with pytest.raises(ValueError, match=message):
        plan_buckets(entries, bucket_numel)


@given(
    numels=st.lists(st.integers(1, 5000), min_size=1, max_size=5),
    moment_bytes=st.sampled_from([4, 2]),
    alignment=st.sampled_from([1, 512, 4096, 65536]),
    chunk_bytes=st.integers(1, 100_000),
)
def test_the_layout_tiles_the_file(numels, moment_bytes, alignment, chunk_bytes):
    bucket = plan_buckets(entries_of(numels), 1 << 20)[0]
    element_bytes = {"main": 4, "exp_avg": moment_bytes, "exp_avg_sq": moment_bytes}
    layout = bucket_layout(
        bucket,
        element_bytes,
        alignment_bytes=alignment,
        chunk_bytes=chunk_bytes,
        trailer_bytes=trailer_bytes,
    )
    unit = max(alignment, 64)
    end = 0
    for name in ("main", "exp_avg", "exp_avg_sq"):
        extent = layout.segments[name]
        assert extent.offset == end
        assert extent.offset % unit == extent.size % unit == 0
        assert 0 <= extent.size - bucket.numel * element_bytes[name] < unit
        assert extent.payload_bytes == sum(numels) * element_bytes[name]
        end = extent.end
    assert layout.state_bytes == layout.trailer.offset == end
    assert layout.trailer.size >= trailer_bytes(len(layout.chunks))
    assert layout.size_bytes == end + layout.trailer.size
    assert layout.size_bytes % unit == 0
    assert layout.payload_bytes == sum(numels) * (4 + 2 * moment_bytes)

    end = 0
    for index, chunk in enumerate(layout.chunks):
        extent = layout.segments[chunk.segment]
        assert chunk.index == index
        assert chunk.offset == end, "chunks leave a gap or overlap"
        assert extent.offset <= chunk.offset < chunk.offset + chunk.size <= extent.end
        assert chunk.size % unit == 0
        assert 0 < chunk.size < chunk_bytes + unit
        end += chunk.size
    assert end == layout.state_bytes


def test_payload_is_twelve_bytes_an_element_and_a_third_of_it_main():
    bucket = Bucket(0, (Piece(0, 0, 1023, 0), Piece(1, 0, 1, 1024)))
    fp32 = dict.fromkeys(("main", "exp_avg", "exp_avg_sq"), 4)
    layout = bucket_layout(bucket, fp32, alignment_bytes=4096, chunk_bytes=4096, trailer_bytes=trailer_bytes)
    assert layout.payload_bytes == 1024 * 12
    assert layout.segments["main"].payload_bytes == 1024 * 4
