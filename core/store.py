"""The buckets of one optimizer in files: one file a bucket, each chunk checked when it is read back.

The store knows what lies on file and whether it is right. What is in memory, and when to move it, is the
schedule's and the engine's business.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch

from optstream.backends.errors import SpaceError, StorageError
from optstream.backends.interface import Backend, StoredFile
from optstream.core.errors import CorruptionError
from optstream.core.formats import Format
from optstream.core.integrity import Trailer, checksum
from optstream.core.memory import bytes_of
from optstream.core.plan import SEGMENTS, Bucket, Chunk, Entry, Layout, bucket_layout
from optstream.core.snapshot import Snapshot
from optstream.core.tasks import run_all
from optstream.core.workers import Workers


def bucket_file_name(bucket: int) -> str:
    return f"bucket-{bucket:05d}.bin"


def other_file_name(name: str) -> str:
    """A bucket has two names, for its file and for one that replaces it while a snapshot holds the first."""
    return name.removesuffix(".new") if name.endswith(".new") else f"{name}.new"


@contextmanager
def _errors_name(bucket: int, segment: str = "") -> Iterator[None]:
    """Storage knows files and offsets; what of the state that is, is known here."""
    try:
        yield
    except StorageError as error:
        error.say_what_it_holds(f"bucket {bucket}, {segment}" if segment else f"bucket {bucket}")
        raise


@dataclass
class Contents:
    """What a bucket's file holds: which segments were ever written, each chunk's checksum (None for one that
    was not), and the step whose values they are."""

    name: str
    written: frozenset[str]
    checksums: list[int | None]
    step: int


@dataclass
class Transfer:
    """One bucket on its way between its file and a place. `payload_bytes` excludes padding and trailer."""

    bucket: int
    file: StoredFile
    chunks: tuple[Chunk, ...]
    payload_bytes: int
    padding_bytes: int
    contents: Contents


class BucketStore:
    """Creates the bucket files of one optimizer and moves their chunks.

    verify: check every chunk against the checksum of what was last written there.
    chunk_bytes: the most one transfer moves, and the unit that is checked.

    Raises SpaceError before anything is written if the files cannot fit. Threads may move different chunks at
    the same time; one bucket is only ever read or written at a time (the schedule sees to it).
    """

    def __init__(
        self,
        backend: Backend,
        entries: Sequence[Entry],
        buckets: Sequence[Bucket],
        formats: dict[str, Format],
        *,
        chunk_bytes: int,
        verify: bool = True,
    ) -> None:
        self.backend = backend
        self.entries = tuple(entries)
        self.buckets = tuple(buckets)
        self.formats = formats
        self.verify = verify
        element_bytes = {name: format_.element_bytes for name, format_ in formats.items()}
        self.layouts: tuple[Layout, ...] = tuple(
            bucket_layout(
                bucket,
                element_bytes,
                alignment_bytes=backend.filesystem.alignment_bytes,
                chunk_bytes=chunk_bytes,
                trailer_bytes=Trailer.size_bytes,
            )
            for bucket in self.buckets
        )
        # Moments are all zero until the first step has written them.
        self._contents = [
            Contents(bucket_file_name(bucket), frozenset(), [None] * len(layout.chunks), step=0)
            for bucket, layout in enumerate(self.layouts)
        ]
        self._snapshot: Snapshot | None = None
        self._create_files()

    @property
    def total_bytes(self) -> int:
        return sum(layout.size_bytes for layout in self.layouts)

    @property
    def place_bytes(self) -> int:
        """Memory that can hold any bucket, trailer included."""
        return max((layout.size_bytes for layout in self.layouts), default=0)

    @property
    def slot_bytes(self) -> int:
        """Device memory that can hold any bucket."""
        return max((layout.state_bytes for layout in self.layouts), default=0)

    def step_of(self, bucket: int) -> int:
        """The step whose values the bucket's file holds; 0 before the first."""
        return self._contents[bucket].step

    def has_moments(self, bucket: int) -> bool:
        return "exp_avg" in self._contents[bucket].written

    # ---- moving one bucket -------------------------------------------------------------------------------

    def begin_read(self, bucket: int, place: torch.Tensor, contents: Contents | None = None) -> Transfer:
        """Open the bucket for reading. Segments that were never written are zeroed in `place` at once.

        contents: what is to be read, where that is not what the bucket holds now (snapshots)."""
        layout = self.layouts[bucket]
        contents = contents or self._contents[bucket]
        for name in SEGMENTS:
            if name not in contents.written:
                extent = layout.segments[name]
                place[extent.offset : extent.end].zero_()
        return self._transfer(bucket, contents.written, contents)

    def read_chunk(self, transfer: Transfer, chunk: Chunk, place: torch.Tensor) -> None:
        """Fill the chunk's range of `place`. Raises TransferError, or CorruptionError for other bytes than
        were last written there."""
        memory = bytes_of(place)[chunk.offset : chunk.offset + chunk.size]
        with _errors_name(transfer.bucket, chunk.segment):
            transfer.file.read_into(chunk.offset, memory)
        if self.verify and checksum(memory) != transfer.contents.checksums[chunk.index]:
            raise self._corruption(transfer, chunk)

    def begin_write(self, bucket: int, segments: Sequence[str] = SEGMENTS) -> Transfer:
        """Open the bucket for writing `segments`. Waits where a snapshot holds it and cannot make way."""
        wanted = frozenset(segments)
        snapshot = self._snapshot
        if snapshot is not None:
            snapshot.make_way(bucket, whole=wanted == frozenset(SEGMENTS))
        return self._transfer(bucket, wanted, self._contents[bucket])

    def write_chunk(self, transfer: Transfer, chunk: Chunk, place: torch.Tensor) -> None:
        """Write the chunk's range of `place`."""
        memory = bytes_of(place)[chunk.offset : chunk.offset + chunk.size]
        if self.verify:
            transfer.contents.checksums[chunk.index] = checksum(memory)
        with _errors_name(transfer.bucket, chunk.segment):
            transfer.file.write_from(chunk.offset, memory)

    def end_write(self, transfer: Transfer, place: torch.Tensor, *, step: int) -> None:
        """All chunks are written: say so in the trailer (using that part of `place`) and remember it."""
        bucket, contents = transfer.bucket, transfer.contents
        contents.written |= {chunk.segment for chunk in transfer.chunks}
        contents.step = step
        if self.verify:
            extent = self.layouts[bucket].trailer
            memory = bytes_of(place)[extent.offset : extent.end]
            memory[:] = bytes(extent.size)
            known = tuple(value or 0 for value in contents.checksums)
            Trailer(bucket, step, known).pack_into(memory)
            with _errors_name(bucket, "trailer"):
                transfer.file.write_from(extent.offset, memory)

    # ---- whole buckets, for construction, reload and checkpoints -----------------------------------------

    def read_bucket(self, bucket: int, place: torch.Tensor) -> None:
        """Read all of a bucket into `place`, on the calling thread."""
        transfer = self.begin_read(bucket, place)
        with transfer.file:
            for chunk in transfer.chunks:
                self.read_chunk(transfer, chunk, place)

    def write_bucket(
        self,
        bucket: int,
        place: torch.Tensor,
        *,
        step: int,
        segments: Sequence[str] = SEGMENTS,
        workers: Workers | None = None,
    ) -> None:
        """Write `segments` of a bucket from `place`: chunks one after the other or, on `workers`, at once."""
        transfer = self.begin_write(bucket, segments)
        with transfer.file:
            writes = [partial(self.write_chunk, transfer, chunk, place) for chunk in transfer.chunks]
            if workers is not None:
                run_all(workers, writes)
            else:
                for write in writes:
                    write()
            self.end_write(transfer, place, step=step)

    # ---- snapshots ---------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """What the files hold now, to be read while steps go on; one at a time. See `Snapshot`."""
        if self._snapshot is not None:
            raise RuntimeError("the store has a snapshot already")
        self._snapshot = Snapshot(self)
        return self._snapshot

    def forget(self, snapshot: Snapshot) -> None:
        """`snapshot` holds nothing any more."""
        if self._snapshot is snapshot:
            self._snapshot = None

    def contents(self, bucket: int) -> Contents:
        """A copy of what is known of the bucket's file."""
        known = self._contents[bucket]
        return replace(known, checksums=list(known.checksums))

    def move_to_other_file(self, bucket: int) -> None:
        """The next write of the whole bucket makes it a new file, and leaves the old one as it is.

        Raises SpaceError, and nothing has changed then."""
        known = self._contents[bucket]
        name = other_file_name(known.name)
        self.backend.create(name, self.layouts[bucket].size_bytes).close()
        self._contents[bucket] = replace(known, name=name, checksums=list(known.checksums))

    def replace_damaged_files(self) -> None:
        """Files that are gone or not of their size are made anew, empty: everything will be written again."""
        sizes = dict(self.backend.list())
        for bucket, (known, layout) in enumerate(zip(self._contents, self.layouts, strict=True)):
            if sizes.get(known.name) != layout.size_bytes:
                with _errors_name(bucket):
                    self.backend.create(known.name, layout.size_bytes).close()

    def close(self, *, remove_files: bool) -> None:
        self.backend.close(remove_files=remove_files)

    # ---- inside ------------------------------------------------------------------------------------------

    def _create_files(self) -> None:
        needed, free = self.total_bytes, self.backend.free_bytes()
        if needed > free:
            raise SpaceError(
                f"{self.backend.root} cannot hold the optimizer state",
                why=f"{needed} bytes are needed, {free} are free",
                remedy="Free space there, name another directory, or add one with A:B",
                needed_bytes=needed,
                free_bytes=free,
                path=self.backend.root,
            )
        created = []
        try:
            for index, layout in enumerate(self.layouts):
                name = bucket_file_name(index)
                with _errors_name(index):
                    self.backend.create(name, layout.size_bytes).close()
                created.append(name)
        except BaseException:
            for name in created:
                self.backend.remove(name)
            raise

    def _transfer(self, bucket: int, segments: frozenset[str], contents: Contents) -> Transfer:
        layout = self.layouts[bucket]
        chunks = tuple(chunk for chunk in layout.chunks if chunk.segment in segments)
        payload = sum(layout.segments[name].payload_bytes for name in segments)
        moved = sum(layout.segments[name].size for name in segments)
        with _errors_name(bucket):
            file = self.backend.open(contents.name)
        return Transfer(bucket, file, chunks, payload, moved - payload, contents)

    def _corruption(self, transfer: Transfer, chunk: Chunk) -> CorruptionError:
        bucket = transfer.bucket
        return CorruptionError(
            f"{transfer.file.path} does not hold what was written to it",
            why=f"bucket {bucket}, {chunk.segment}, {chunk.size} bytes at offset {chunk.offset}: "
            + self._diagnose(transfer),
            remedy="The state on this disk is lost: restore from a checkpoint, and check the disk",
            bucket=bucket,
            segment=chunk.segment,
            path=transfer.file.path,
            offset=chunk.offset,
            operation="read",
        )

    def _diagnose(self, transfer: Transfer) -> str:
        """What the file says it is, to tell a lost write from an exchanged file from damage."""
        bucket = transfer.bucket
        extent = self.layouts[bucket].trailer
        raw = memoryview(bytearray(extent.size))
        try:
            transfer.file.read_into(extent.offset, raw)
        except StorageError as error:
            return f"the checksum differs, and the file's trailer cannot be read ({error.why})"
        trailer = Trailer.unpack(raw)
        if trailer is None:
            return "the checksum differs, and the file's trailer is damaged too"
        if trailer.bucket != bucket:
            return f"the file holds bucket {trailer.bucket}: it was exchanged, or a write went astray"
        if trailer.step != transfer.contents.step:
            return f"the file holds step {trailer.step}, not step {transfer.contents.step}: a write was lost"
        return (
            "the checksum differs from that of the bytes last written: they were damaged, or a write was lost"
        )
