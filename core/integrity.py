"""Knowing that the bytes read back are the bytes last written.

Every chunk has a checksum, kept in memory for the run: a lost, torn, misdirected or stale write reads back
as something else than was last written, and is caught whatever the file says about itself. The same checksums
go into the trailer of the bucket's file, with the bucket's number and step, so that the file can be judged
without the run that wrote it, and so that an error can say what the wrong bytes are.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import xxhash

_MAGIC = b"OPTSTRM1"
_HEADER = struct.Struct("<8sQQQ")  # magic, bucket, step, number of chunks
_WORD = struct.Struct("<Q")


def checksum(data: memoryview) -> int:
    """xxh3, 64 bits. Not cryptographic: it guards against faults, not against an adversary."""
    return xxhash.xxh3_64_intdigest(data)


def checksum_of(parts: Iterable[memoryview]) -> int:
    """`checksum` of parts that follow each other."""
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return digest.intdigest()


@dataclass(frozen=True)
class Trailer:
    """What the rest of a bucket's file should be: whose it is, of which step, and each chunk's checksum."""

    bucket: int
    step: int
    checksums: tuple[int, ...]

    @staticmethod
    def size_bytes(chunks: int) -> int:
        return _HEADER.size + (chunks + 1) * _WORD.size

    def pack_into(self, memory: memoryview) -> None:
        """Write it at the start of `memory`; the last word is the checksum of what precedes it."""
        body = _HEADER.pack(_MAGIC, self.bucket, self.step, len(self.checksums))
        body += b"".join(map(_WORD.pack, self.checksums))
        memory[: len(body) + _WORD.size] = body + _WORD.pack(checksum(memoryview(body)))

    @classmethod
    def unpack(cls, memory: memoryview) -> Self | None:
        """The trailer at the start of `memory`, or None where there is no intact one."""
        if len(memory) < _HEADER.size:
            return None
        magic, bucket, step, chunks = _HEADER.unpack_from(memory)
        end = _HEADER.size + chunks * _WORD.size
        if magic != _MAGIC or end + _WORD.size > len(memory):
            return None
        (stored,) = _WORD.unpack_from(memory, end)
        if stored != checksum(memory[:end]):
            return None
        return cls(bucket, step, struct.unpack_from(f"<{chunks}Q", memory, _HEADER.size))
