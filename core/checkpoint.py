"""Saving and loading streamed state: collective, whole or not at all, in the foreground or behind the steps.

What is saved and where it lies is decided elsewhere (`checkpoint_planner`, `checkpoint_storage`, `publish`);
this is the order of events, and what happens when one of them fails.
"""

from __future__ import annotations

import logging
import secrets
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from optstream.backends.reader import DirectoryReader
from optstream.core import torch_dist
from optstream.core.agreement import raise_together
from optstream.core.checkpoint_planner import StateLoadPlanner, StateSavePlanner
from optstream.core.checkpoint_storage import Header, StateReader, StateWriter
from optstream.core.errors import CheckpointError, OptstreamError, RemoteRankError
from optstream.core.manifest import Manifest
from optstream.core.param_groups import GroupRecord
from optstream.core.placement import ITEM_NUMEL
from optstream.core.publish import CheckpointDirectory
from optstream.core.state_part import PartSnapshot, StatePart

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")
LOG_EVERY_S = 10.0


@dataclass(frozen=True)
class Ranks:
    """Who saves together. group: over which ranks speak, on the CPU (None: this process alone)."""

    group: dist.ProcessGroup | None = None
    topology: dict[str, int] = field(default_factory=lambda: {"ranks": 1})

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group) if self.group is not None else 0

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group) if self.group is not None else 1

    def raise_together(self, failure: Exception | None) -> None:
        if self.group is not None:
            raise_together(failure, self.group, CPU)
        elif failure is not None:
            raise failure


class Saver:
    """Saves one checkpoint at a time. In the background, `save` returns as soon as the state is snapshot.

    A background save's failure is logged at once, raised by the next `wait` (which `save` and whoever loads
    or closes call first), and reported when the process ends without that.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._running = _Running()
        weakref.finalize(self, _report_at_exit, self._running)

    @property
    def running(self) -> bool:
        """Whether a save is being written in the background now."""
        thread = self._running.thread
        return thread is not None and thread.is_alive()

    @property
    def progress(self) -> tuple[int, int]:
        """(bytes written, bytes in all) on this rank, of the save that is running or was the last."""
        return self._running.done_bytes, self._running.total_bytes

    def save(
        self,
        parts: Sequence[StatePart],
        groups: Sequence[GroupRecord],
        directory: CheckpointDirectory,
        *,
        iteration: int,
        background: bool = False,
        item_numel: int = ITEM_NUMEL,
    ) -> None:
        """Collective. Raises typed storage errors, CheckpointError, PoisonedError; all ranks raise together.

        What was in `directory` before stays loadable until the new checkpoint is there, whole."""
        self.wait()
        snapshots = self._snapshots(parts)
        header = Header(_generation(self._ranks, iteration), iteration, self._ranks.topology)
        running = self._running
        running.begin()

        def work() -> None:
            write = _Write(self._ranks, directory, header, item_numel)
            try:
                write.run(snapshots, groups, running.report)
            finally:
                with ExitStack() as closed:
                    for snapshot in snapshots:
                        closed.callback(snapshot.close)

        if not background:
            work()
            return
        running.thread = threading.Thread(target=running.keep, args=(work,), name="optstream-save")
        running.thread.start()

    def wait(self) -> None:
        """Return when no save is running. Raises the failure of one that nobody has been told of."""
        self._running.wait()

    def _snapshots(self, parts: Sequence[StatePart]) -> list[PartSnapshot]:
        """Of all parts or, where one fails on any rank, of none."""
        snapshots: list[PartSnapshot] = []
        failure = None
        try:
            for part in parts:
                snapshots.append(part.snapshot())
        except Exception as error:
            failure = error
        try:
            self._ranks.raise_together(failure)
        except BaseException:
            for snapshot in snapshots:
                snapshot.close()
            raise
        return snapshots


class _Running:
    """The save in the background. Apart from the `Saver`, so that its end can be reported after it."""

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self.failure: BaseException | None = None
        self.begin()

    def begin(self) -> None:
        self.done_bytes = self.total_bytes = 0
        self._logged_s = time.monotonic()

    def report(self, done_bytes: int, total_bytes: int) -> None:
        self.done_bytes, self.total_bytes = done_bytes, total_bytes
        if time.monotonic() - self._logged_s >= LOG_EVERY_S:
            self._logged_s = time.monotonic()
            logger.info("saving: %d of %d bytes", done_bytes, total_bytes)

    def keep(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self.failure = error
            logger.error("saving in the background failed: %s", error)

    def wait(self) -> None:
        thread, self.thread = self.thread, None
        if thread is not None:
            thread.join()
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure


def _report_at_exit(running: _Running) -> None:
    if running.failure is not None:
        print(f"optstream: error: a checkpoint was not saved: {running.failure}", file=sys.stderr)


@dataclass(frozen=True)
class _Write:
    """One rank's part of writing one generation."""

    ranks: Ranks
    directory: CheckpointDirectory
    header: Header
    item_numel: int

    def run(
        self,
        snapshots: Sequence[PartSnapshot],
        groups: Sequence[GroupRecord],
        progress: Callable[[int, int], None],
    ) -> None:
        planner = StateSavePlanner(snapshots, groups, item_numel=self.item_numel)
        writer = StateWriter(
            self.directory, self.header, rank=self.ranks.rank, ranks=self.ranks.size, progress=progress
        )
        with ExitStack() as closed:
            closed.callback(writer.close)
            closed.callback(planner.close)
            alone = self.ranks.group is None
            with own_errors(self.ranks.rank), without_torchs_warning() if alone else nullcontext():
                dcp.save(
                    {},
                    storage_writer=writer,
                    planner=planner,
                    process_group=self.ranks.group,
                    no_dist=alone,
                )
            writer.succeeded()


@dataclass(frozen=True)
class Source:
    """What to load from. path: what messages call it. reader: of the folder that its items are named in."""

    path: str
    manifest: Manifest
    reader: DirectoryReader


def load(parts: Sequence[StatePart], source: Source, *, item_numel: int = ITEM_NUMEL) -> None:
    """Restore `parts` from a published checkpoint. Not collective: callers agree on failures.

    Raises CheckpointError where it is incomplete or damaged, or was saved from another model; parts may be
    half-restored then."""
    planner = StateLoadPlanner(parts, source.path, item_numel)
    reader = StateReader(source.manifest, source.reader)
    with own_errors(0), without_torchs_warning():
        dcp.load({}, storage_reader=reader, planner=planner, no_dist=True)
    planner.finish()


def find(directory: CheckpointDirectory) -> Source:
    """The checkpoint there: a streamed one or, where there is none, the optimizer state of one of Megatron's
    own. Raises CheckpointError where there is neither, or it is damaged."""
    manifest = directory.manifest()
    if manifest is not None:
        return Source(directory.path, manifest, directory.reader())
    whole = directory.reader_of_base()
    if torch_dist.is_torch_dist(whole):
        return Source(whole.path, torch_dist.read_manifest(whole), whole)
    files = directory.ranks()
    raise CheckpointError(
        f"{directory.base} holds no streamed optimizer state",
        why=f"{directory.manifest_path} is missing"
        + (", though there are data files: that save was never finished" if files else ""),
        remedy="Load another checkpoint, or accept a fresh optimizer state with --no-load-optim",
        path=directory.manifest_path,
    )


def _generation(ranks: Ranks, iteration: int) -> str:
    """A name for the files of this save that no earlier one has, the same on all ranks."""
    name = [f"step{iteration:08d}-{secrets.token_hex(4)}"]
    if ranks.group is not None:
        dist.broadcast_object_list(
            name, src=dist.get_global_rank(ranks.group, 0), group=ranks.group, device=CPU
        )
    return name[0]


@contextmanager
def own_errors(rank: int) -> Iterator[None]:
    """torch's CheckpointException holds every rank's failure: raise this rank's own, or name another's."""
    try:
        yield
    except CheckpointException as error:
        failures = error.failures
        own = failures[rank][0] if rank in failures else None
        failing = min(failures)
        cause = failures[failing][0]
    else:
        return
    if own is not None:
        raise own
    raise RemoteRankError(
        f"rank {failing} failed",
        why=str(cause) if isinstance(cause, OptstreamError) else f"{type(cause).__name__}: {cause}",
        remedy="No rank has saved anything",
        rank=failing,
    ) from cause


@contextmanager
def without_torchs_warning() -> Iterator[None]:
    """torch warns wherever it saves or loads without its process group, as intended here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield
