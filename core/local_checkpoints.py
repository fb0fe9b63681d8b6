"""Checkpoints of an optimizer over whole parameters, by one process: those of `StreamingAdamW`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from optstream.core import checkpoint, param_groups
from optstream.core.checkpoint import Ranks, Saver
from optstream.core.placement import whole
from optstream.core.publish import CheckpointDirectory
from optstream.core.streamed_part import StreamedPart
from optstream.core.streamer import StateStreamer
from optstream.core.update import Publish


class LocalCheckpoints:
    """master: whose param groups are saved. shapes: of the parameter of each entry."""

    def __init__(
        self,
        master: torch.optim.Optimizer,
        streamer: StateStreamer,
        shapes: Sequence[tuple[int, ...]],
    ) -> None:
        # Not the optimizer itself: it holds this object, and goes when nobody else holds it.
        self._groups = master.param_groups
        self._streamer, self._shapes = streamer, shapes
        self._saver = Saver(Ranks())

    def save(self, directory: CheckpointDirectory, *, iteration: int | None, background: bool) -> None:
        counts = self._streamer.counts
        self._saver.save(
            [self._part()],
            param_groups.describe(self._groups, counts.groups, self._names()),
            directory,
            iteration=max(counts.entries, default=0) if iteration is None else iteration,
            background=background,
        )

    def load(self, directory: CheckpointDirectory, publish: Publish, *, keep_schedule: bool) -> None:
        """publish: takes restored main values into the parameters."""
        self._saver.wait()
        source = checkpoint.find(directory)
        records = [
            param_groups.match(source.manifest.groups, names, group, source.path)
            for names, group in zip(self._names(), self._groups, strict=True)
        ]
        with self._streamer.restoring():
            checkpoint.load([self._part(publish)], source)
            for index, record in enumerate(records):
                if record is not None:
                    keep = param_groups.SCHEDULED if keep_schedule else ()
                    param_groups.restore(self._groups[index], record, keep=keep)
                    self._streamer.counts.groups[index] = record.step

    @property
    def saving(self) -> bool:
        return self._saver.running

    @property
    def progress(self) -> tuple[int, int]:
        return self._saver.progress

    def wait(self) -> None:
        self._saver.wait()

    def _part(self, publish: Publish | None = None) -> StreamedPart:
        entries = self._streamer.entries
        placements = [[whole(e.name, shape)] for e, shape in zip(entries, self._shapes, strict=True)]
        return StreamedPart(self._streamer, placements, [0] * len(entries), publish)

    def _names(self) -> list[list[str]]:
        names: list[list[str]] = [[] for _ in self._groups]
        for entry in self._streamer.entries:
            names[entry.group].append(entry.name)
        return names
