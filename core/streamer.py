"""The streamed state of one optimizer: plan, store, engine and update put together.

`optimizer.py` (plain torch) and `megatron.py` differ in where parameters and gradients are; what they share
is here. Parameters are known by entry: one shard each, cut into pieces by the plan.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from optstream.backends import open_backend
from optstream.backends.interface import Backend
from optstream.core.config import StreamConfig
from optstream.core.copies import copies_for
from optstream.core.engine import Engine
from optstream.core.finalizer import Finalizer
from optstream.core.formats import segment_formats
from optstream.core.plan import SEGMENTS, Entry, Piece, plan_buckets
from optstream.core.records import StepRecord
from optstream.core.store import BucketStore
from optstream.core.update import BucketUpdater, Gradient, Publish

# One transfer moves at most this much, whatever --offload-train-disk-chunk-mb allows: larger ones do not move
# faster, and smaller ones keep more of them in flight.
TRANSFER_BYTES = 8 << 20

# The values a main param starts from, as a 1-D tensor of any floating dtype on any device.
Source = Callable[[Piece], torch.Tensor]


@dataclass(frozen=True)
class PieceState:
    """fp32 host copies of one piece's state."""

    piece: Piece
    main: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor


class StateStreamer:
    """Main params and moments of `entries` in files, updated bucket by bucket.

    master: the optimizer whose settings and param groups rule the update; it holds no state itself.
    update_class: the optimizer class that does the arithmetic; by default the master's own.
    source: the initial main values.
    device: where updates run. staged: that device has memory of its own (a simulated one has, too).
    backend: already claimed; or None to claim `<directory>/<subdirectory>` of the config.

    Construction writes the main params (4 bytes an element) one bucket at a time. It raises DirectoryError,
    ClaimedError, SpaceError or UnsupportedError, and leaves nothing behind then.
    """

    def __init__(
        self,
        config: StreamConfig,
        master: torch.optim.Optimizer,
        entries: Sequence[Entry],
        source: Source,
        *,
        device: torch.device,
        subdirectory: str = "",
        staged: bool | None = None,
        backend: Backend | None = None,
        update_class: type[torch.optim.Optimizer] | None = None,
        observe: Callable[[], None] | None = None,
    ) -> None:
        self.config = config
        self.entries = tuple(entries)
        formats = segment_formats(config.moment_dtype)
        self.buckets = plan_buckets(self.entries, config.bucket_numel)
        self._updater = BucketUpdater(
            master, [entry.group for entry in self.entries], formats, update_class=update_class
        )
        self._buckets_of = self._index_buckets()
        self._copies = copies_for(device)
        self.steps = 0
        backend = backend or open_backend(config.directories, subdirectory=subdirectory)
        with ExitStack() as undo:
            undo.callback(backend.close, remove_files=True)
            self.store = BucketStore(
                backend,
                self.entries,
                self.buckets,
                formats,
                chunk_bytes=min(config.chunk_bytes, TRANSFER_BYTES),
                verify=config.verify,
            )
            self.engine = Engine(
                self.store,
                depth=config.depth,
                cache_bytes=config.host_cache_bytes,
                keep_slots=config.keep_slots,
                write_behind=config.write_behind,
                copies=self._copies,
                staged=device.type != "cpu" if staged is None else staged,
                observe=observe,
            )
            undo.callback(self.engine.close)
            self._write_main(source, range(len(self.entries)))
            undo.pop_all()
        self._finalizer = Finalizer(self, _abandon, self.engine, self.store)

    @property
    def counts(self):
        """Updates had by each entry and group (`StepCounts`)."""
        return self._updater.counts

    @property
    def counts_per_parameter(self) -> bool:
        """Whether the optimizer class counts steps in each parameter's state, not in the group."""
        return self._updater.counts_per_parameter

    def step(self, gradient: Gradient, publish: Publish, updated: Collection[int]) -> StepRecord:
        """One optimizer step over the entries in `updated` (those that have a gradient).

        Raises what storage raised; the state is then half-updated, and the streamer refuses until `reset`.
        """
        active = sorted({bucket for entry in updated for bucket in self._buckets_of[entry]})

        def update(bucket: int, memory: torch.Tensor) -> None:
            layout = self.store.layouts[bucket]
            self._updater.update(self.buckets[bucket], layout, memory, gradient, publish)

        try:
            record = self.engine.step(active, update, step=self.steps + 1)
            self.steps += 1
            self.counts.advance(sorted(updated))
        except BaseException as error:
            # Interrupted between the two, the counts would be behind the moments, and nobody would notice.
            self.engine.poison(error)
            raise
        return record

    def read_ahead(self) -> None:
        """Fetch the first buckets of the next step while its gradients are still being computed."""
        if self.config.read_ahead:
            self.engine.read_ahead()

    def reload(self, source: Source, entries: Collection[int] | None = None) -> None:
        """The main params of `entries` (all by default) start again from `source`; moments and step counts
        stay. A failure half-way poisons the streamer, as that of a step does."""
        self.engine.drain()
        try:
            self._write_main(source, range(len(self.entries)) if entries is None else entries)
        except BaseException as error:
            self.engine.poison(error)
            raise

    def leave_device(self) -> None:
        """The state is in its files, and none of it on the device, until the next step.

        Raises the failure of an earlier operation that has left it half-updated."""
        self.engine.drain()
        if self.engine.staged and self.engine.slots:
            self.engine.reset()  # Slots that were kept; the next step reads their buckets again.

    def state(self) -> Iterator[PieceState]:
        """Every piece's state, bucket by bucket: at most one bucket in host memory at a time."""
        self.engine.drain()
        place = self._copies.allocate_place(self.store.place_bytes)
        for bucket, layout in zip(self.buckets, self.store.layouts, strict=True):
            self.store.read_bucket(bucket.index, place)
            values = {}
            for name in SEGMENTS:
                extent = layout.segments[name]
                values[name] = self.store.formats[name].decode(place[extent.offset : extent.end])
            for piece in bucket.pieces:
                yield PieceState(piece, **{name: values[name][piece.span].clone() for name in SEGMENTS})

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """The caller writes every bucket meanwhile. What is in memory, and any earlier failure, is forgotten.

        An error leaves the streamer refusing to step or save: some buckets are restored, others are not."""
        self.engine.reset()
        try:
            self.store.replace_damaged_files()
            yield
        except BaseException as error:
            self.engine.poison(error)
            raise
        # Whatever failed before is mended now.
        self.engine.reset()

    def close(self) -> None:
        """Stop, and remove the files. What was not saved is gone. Idempotent.

        Raises, when all that is done, the failure of a pending write or read that no call has raised yet."""
        self._finalizer()

    def _index_buckets(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in self.entries]
        for bucket in self.buckets:
            for piece in bucket.pieces:
                found[piece.entry].append(bucket.index)
        return found

    def _write_main(self, source: Source, entries: Collection[int]) -> None:
        wanted = frozenset(entries)
        place = self._copies.allocate_place(self.store.place_bytes)
        for bucket, layout in zip(self.buckets, self.store.layouts, strict=True):
            pieces = [piece for piece in bucket.pieces if piece.entry in wanted]
            if not pieces:
                continue
            extent = layout.segments["main"]
            values = place[extent.offset : extent.end].view(torch.float32)
            if len(pieces) < len(bucket.pieces):
                self.store.read_bucket(bucket.index, place)
            else:
                for padding in bucket.padding(len(values)):
                    values[padding].zero_()
            for piece in pieces:
                # Cast where the values are: a cross-dtype copy to pinned memory is far slower.
                values[piece.span].copy_(source(piece).detach().float())
            step = self.store.step_of(bucket.index)
            self.store.write_bucket(
                bucket.index, place, step=step, segments=("main",), workers=self.engine.writers
            )


def _abandon(engine: Engine, store: BucketStore) -> None:
    if engine.runs(threading.current_thread()):
        # The garbage collector may run anywhere, also on a thread that closing has to wait for.
        threading.Thread(target=_abandon, args=(engine, store), name="optstream-close").start()
        return
    try:
        engine.close()
    finally:
        store.close(remove_files=True)
