"""A bucket's file judged by its trailer, without the run that wrote it.

The trailer has the bucket, the step and a checksum of each chunk, but not where chunks begin: that follows
from the sizes of segments and chunks, of which few are possible.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from optstream.backends.errors import OptstreamError
from optstream.backends.reader import DirectoryReader, ReadableFile
from optstream.core.integrity import Trailer, checksum
from optstream.core.plan import round_up

# Trailers begin at multiples of the backend's alignment, which is a page at least.
PAGE_BYTES = 4096
ALIGNMENT_BYTES = (PAGE_BYTES, 16 << 10, 64 << 10)
# Chunks are 4 MiB, or what --offload-train-disk-chunk-mb says, where that is less.
CHUNK_BYTES = tuple(mib << 20 for mib in (4, 3, 2, 1))
# Where a trailer is looked for, from the end of the file: room for the checksums of a 4 GiB bucket.
SEARCHED_BYTES = 1 << 20


@dataclass
class BucketFile:
    """step: None without an intact trailer. state_bytes: padding included. moments: their format; of several
    that are possible, all."""

    step: int | None = None
    state_bytes: int = 0
    moments: str = ""
    problems: list[str] = field(default_factory=list)


def inspect_bucket_file(reader: DirectoryReader, name: str, *, verify: bool) -> BucketFile:
    found = BucketFile()
    try:
        with reader.open(name) as file:
            _inspect(file, name, found, verify)
    except OptstreamError as error:
        found.problems.append(str(error))
    return found


def _inspect(file: ReadableFile, name: str, found: BucketFile, verify: bool) -> None:
    place, trailer = _find_trailer(file)
    if trailer is None:
        found.problems.append(
            f"{file.path} has no intact trailer: it was never written, cut short or damaged"
        )
        return
    found.step, found.state_bytes = trailer.step, place
    if name.partition(".")[0] != f"bucket-{trailer.bucket:05d}":
        found.problems.append(f"{file.path} holds bucket {trailer.bucket}: files were exchanged")
    candidates = list(_layouts(place, len(trailer.checksums)))
    found.moments = "/".join(sorted({moments for moments, _ in candidates}))
    if not verify:
        return
    # Small buckets may have the same layout in two formats: then both are named.
    if holding := sorted({moments for moments, chunks in candidates if _holds(file, trailer, chunks)}):
        found.moments = "/".join(holding)
    else:
        found.problems.append(f"{file.path} does not hold what was written to it: a checksum differs")


def _find_trailer(file: ReadableFile) -> tuple[int, Trailer | None]:
    last = (file.size_bytes - 1) // PAGE_BYTES * PAGE_BYTES
    for place in range(last, max(-1, last - SEARCHED_BYTES), -PAGE_BYTES):
        memory = memoryview(bytearray(file.size_bytes - place))
        file.read_into(place, memory)
        trailer = Trailer.unpack(memory)
        if trailer is not None:
            return place, trailer
    return 0, None


def _layouts(state_bytes: int, count: int) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """(moment format, (offset, size) of each chunk) of every layout with that many chunks."""
    for moments, sizes in _segment_sizes(state_bytes):
        for chunk_bytes in CHUNK_BYTES:
            chunks = []
            offset = 0
            for size in sizes:
                chunks += [
                    (start, min(chunk_bytes, offset + size - start))
                    for start in range(offset, offset + size, chunk_bytes)
                ]
                offset += size
            if len(chunks) == count:
                yield moments, chunks


def _segment_sizes(state_bytes: int) -> Iterator[tuple[str, tuple[int, int, int]]]:
    if state_bytes % 3 == 0:
        yield "fp32", (state_bytes // 3,) * 3
    # bf16 moments have half the bytes, each segment rounded up to the alignment.
    for alignment in ALIGNMENT_BYTES:
        half = state_bytes // 2 // alignment * alignment
        for main in range(max(alignment, half - 2 * alignment), half + 2 * alignment, alignment):
            moment = round_up(main // 2, alignment)
            if main + 2 * moment == state_bytes:
                yield "bf16", (main, moment, moment)


def _holds(file: ReadableFile, trailer: Trailer, chunks: list[tuple[int, int]]) -> bool:
    for (offset, size), expected in zip(chunks, trailer.checksums, strict=True):
        if not expected:
            continue  # Moments before the first step.
        memory = memoryview(bytearray(size))
        file.read_into(offset, memory)
        if checksum(memory) != expected:
            return False
    return True
