"""The buckets of a store as they were at one moment, read while steps go on: copy on write, by bucket.

A bucket is one file, and a step writes it whole. So nothing is copied: as long as the snapshot still needs a
bucket, its next write goes to a second file, which is the bucket's file from then on; the old one goes when
the snapshot lets go of the bucket. Where the disk has no room for a second file, the write waits instead.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING

import torch

from optstream.backends.errors import SpaceError
from optstream.core.pacing import PACE, Background
from optstream.core.tasks import run_all
from optstream.core.workers import Workers

if TYPE_CHECKING:
    from optstream.core.store import BucketStore

# Chunks of a bucket that are read at once; as many as the engine has for its own reads.
READERS = 4


class Snapshot:
    """Made by `BucketStore.snapshot`, while nothing is being written and nothing is newer in memory.

    `release` every bucket as soon as it was read, and `close` it in the end: until then the store keeps what
    it holds. Any thread may read; one bucket is read by one thread at a time.
    """

    def __init__(self, store: BucketStore) -> None:
        self._store = store
        self._contents = [store.contents(bucket.index) for bucket in store.buckets]
        self._held = {bucket.index for bucket in store.buckets}
        self._diverted: set[int] = set()
        self._changed = threading.Condition()
        self._workers = Workers(READERS, "optstream-snapshot")
        self._background = Background()

    def read_bucket(self, bucket: int, place: torch.Tensor) -> None:
        """Fill `place` (1-D uint8, the bucket's layout), when no step wants the disk.

        Raises TransferError or CorruptionError."""
        self._background.give_way()
        transfer = self._store.begin_read(bucket, place, self._contents[bucket])
        with transfer.file:
            run_all(
                self._workers,
                [partial(self._store.read_chunk, transfer, chunk, place) for chunk in transfer.chunks],
            )

    def release(self, bucket: int) -> None:
        """The bucket was read: its old bytes are needed no more. Idempotent."""
        with self._changed:
            if bucket not in self._held:
                return
            self._held.remove(bucket)
            if bucket in self._diverted:
                self._store.backend.remove(self._contents[bucket].name)
            self._changed.notify_all()

    def close(self) -> None:
        """Release what is still held. Idempotent."""
        for bucket in sorted(self._held):
            self.release(bucket)
        self._workers.close()
        self._store.forget(self)

    def make_way(self, bucket: int, *, whole: bool) -> None:
        """The bucket is about to be written, all of it or (not `whole`) in part. Returns when it may be."""
        with self._changed:
            if bucket not in self._held or bucket in self._diverted:
                return
            if whole and self._divert(bucket):
                return
            with PACE.needing():
                self._changed.wait_for(lambda: bucket not in self._held)

    def _divert(self, bucket: int) -> bool:
        try:
            self._store.move_to_other_file(bucket)
        except SpaceError:
            return False
        self._diverted.add(bucket)
        return True
