"""StreamingAdamW: torch.optim.AdamW for plain torch parameters, with its state in files."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch

from optstream.backends.interface import Backend
from optstream.core.asleep import refuse_asleep
from optstream.core.config import StreamConfig
from optstream.core.errors import OptstreamError, UnsupportedError
from optstream.core.formats import moment_warning
from optstream.core.local_checkpoints import LocalCheckpoints
from optstream.core.plan import Entry, Piece
from optstream.core.publish import CheckpointDirectory, checkpoint_directory
from optstream.core.read_ahead import BackwardHook
from optstream.core.records import StepRecord
from optstream.core.scratch import process_subdirectory
from optstream.core.streamer import StateStreamer


class StreamingAdamW(torch.optim.AdamW):
    """AdamW whose fp32 main params and moments live in files and stream through the device during `step`.

    Bit for bit what `torch.optim.AdamW` does: on fp32 params directly; for bf16 and fp16 params on fp32 main
    params, which start from them and are copied back into them after every update, with gradients upcast.

    params: parameters or param groups, as for AdamW. Groups may differ in lr, betas, eps and weight_decay,
        and schedulers may change them; frozen params are left alone; more groups cannot be added later.
    config: where and how to stream. Other keywords are AdamW's.
    backend: an already claimed storage backend, instead of the config's directories.
    staged, observe: for harnesses; see `Engine`.

    `state` stays empty: `state_dict` says so by refusing, since a dict without moments would resume wrongly.
    Params changed in place between steps (weights loaded, for instance) are noticed, and the next step starts
    from them; only writing through `param.data` goes unnoticed, as it does for autograd: call
    `reload_model_params` then. `close` removes the files; so does the end of the process.

    Raises UnsupportedError for sparse or complex params, amsgrad and the like; storage errors as typed.
    """

    def __init__(
        self,
        params: Iterable,
        config: StreamConfig,
        *,
        lr: float = 1e-3,
        backend: Backend | None = None,
        staged: bool | None = None,
        observe: Callable[[], None] | None = None,
        **adamw: Any,
    ) -> None:
        self._streamer: StateStreamer | None = None
        super().__init__(params, lr=lr, **adamw)
        self._entries: list[Entry] = []
        self._params: list[torch.nn.Parameter] = []
        self._frozen: list[torch.nn.Parameter] = []
        for index, group in enumerate(self.param_groups):
            for position, param in enumerate(group["params"]):
                self._admit(param, index, position)
        if not self._params:
            raise UnsupportedError("there is nothing to stream", why="no parameter requires a gradient")
        devices = {param.device for param in self._params}
        if len(devices) > 1:
            raise UnsupportedError(
                "the parameters are on several devices",
                why=", ".join(sorted(map(str, devices))),
                remedy="Use one StreamingAdamW for each device",
            )
        for beta2 in {group["betas"][1] for group in self.param_groups}:
            if message := moment_warning(config.moment_dtype, float(beta2)):
                warnings.warn(message, stacklevel=2)
        self._streamer = StateStreamer(
            config,
            self,
            self._entries,
            self._values,
            device=devices.pop(),
            subdirectory=process_subdirectory(),
            staged=staged,
            backend=backend,
            update_class=torch.optim.AdamW,
            observe=observe,
        )
        self._read_ahead = BackwardHook(self._params if config.read_ahead else (), self._streamer.read_ahead)
        self._seen = [_version(param) for param in self._params]
        shapes = [tuple(param.shape) for param in self._params]
        self._checkpoints = LocalCheckpoints(self, self._streamer, shapes)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update. Raises typed storage errors; after one, PoisonedError until the state is restored."""
        refuse_asleep(self._params, "a step")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updated = [entry for entry, param in enumerate(self._params) if param.grad is not None]
        self._refuse_gradients(updated)
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None and found_inf.item():
            # A GradScaler leaves the skipping to fused optimizers: nothing is updated, no step counted.
            return loss
        if changed := self._changed_outside():
            self._reload(changed)
        self.streamer.step(self._gradient, self._publish, updated)
        self._read_ahead.rearm()
        return loss

    @property
    def streamer(self) -> StateStreamer:
        if self._streamer is None:
            raise OptstreamError("the optimizer is closed", remedy="Construct a new StreamingAdamW")
        return self._streamer

    @property
    def records(self) -> list[StepRecord]:
        """What each step moved and how long it took."""
        return self.streamer.engine.records

    def reload_model_params(self) -> None:
        """Take the main params anew from the parameters; moments and step counts stay."""
        refuse_asleep(self._params, "reloading")
        self._reload(range(len(self._params)))

    def full_state(self) -> dict[str, dict[str, torch.Tensor]]:
        """main, exp_avg, exp_avg_sq (fp32, the parameter's shape) and step of every parameter, by entry name.

        All of it in host memory at once: for tests and small models."""
        found = {
            entry.name: {
                **{key: torch.empty(entry.numel) for key in ("main", "exp_avg", "exp_avg_sq")},
                "step": self.streamer.counts.entries[index],
            }
            for index, entry in enumerate(self._entries)
        }
        for part in self.streamer.state():
            target = found[self._entries[part.piece.entry].name]
            for key in ("main", "exp_avg", "exp_avg_sq"):
                target[key][part.piece.start : part.piece.stop] = getattr(part, key)
        for index, entry in enumerate(self._entries):
            for key in ("main", "exp_avg", "exp_avg_sq"):
                found[entry.name][key] = found[entry.name][key].view(self._params[index].shape)
        return found

    def save_to(
        self,
        base_dir: str | os.PathLike | CheckpointDirectory,
        *,
        iteration: int | None = None,
        background: bool = False,
    ) -> None:
        """Save the state as a checkpoint below `base_dir`, whole or not at all.

        iteration: the trainer's count of steps; by default the optimizer's. background: return as soon as the
        state of this moment is sure to be what is saved; steps may go on. See `core.checkpoint.Saver`.
        The model's weights are not in it, but the main params are, from which the weights come back."""
        refuse_asleep(self._params, "saving")
        self._checkpoints.save(checkpoint_directory(base_dir), iteration=iteration, background=background)

    def load_from(
        self, base_dir: str | os.PathLike | CheckpointDirectory, *, keep_schedule: bool = False
    ) -> bool:
        """Restore the state, and the parameters with it, from what `save_to` has saved below `base_dir`.

        Params are matched by name (of their place in the groups, where they were given without names). What
        earlier steps left, also failed ones, is forgotten. keep_schedule: learning rates and weight decay
        stay as they are now. Returns True. Raises CheckpointError for what does not fit or is damaged."""
        refuse_asleep(self._params, "loading")
        self._checkpoints.load(checkpoint_directory(base_dir), self._publish, keep_schedule=keep_schedule)
        return True

    @property
    def saving(self) -> bool:
        """Whether a save is being written in the background now."""
        return self._checkpoints.saving

    @property
    def save_progress(self) -> tuple[int, int]:
        """(bytes written, bytes in all), of the save that is running or was the last."""
        return self._checkpoints.progress

    def wait_for_save(self) -> None:
        """Return when no save runs in the background. Raises its failure."""
        self._checkpoints.wait()

    def state_dict(self) -> dict[str, Any]:
        raise UnsupportedError(
            "StreamingAdamW has no state_dict",
            why="its state is in files, and a dict without it would resume wrongly",
            remedy="Use save_to",
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise UnsupportedError(
            "StreamingAdamW cannot load a state_dict",
            why="its state is in files",
            remedy="Use load_from",
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._streamer is not None:
            raise UnsupportedError(
                "a param group cannot be added to a StreamingAdamW",
                why="its files are laid out when it is constructed",
                remedy="Pass all groups to the constructor",
            )
        super().add_param_group(param_group)

    def close(self) -> None:
        """Remove the files. Idempotent."""
        if self._streamer is not None:
            self._read_ahead.remove()
            try:
                self._checkpoints.wait()
            finally:
                self._streamer.close()
                self._streamer = None

    def _admit(self, param: torch.nn.Parameter, group: int, position: int) -> None:
        if not param.requires_grad:
            self._frozen.append(param)
            return
        names = self.param_groups[group].get("param_names")
        name = names[position] if names else f"group{group}.param{position}"
        if not param.is_floating_point() or param.layout is not torch.strided:
            raise UnsupportedError(
                f"{name} cannot be streamed", why=f"it is {param.dtype}, {param.layout}, not a dense float"
            )
        if param.dtype is torch.float64:
            raise UnsupportedError(f"{name} cannot be streamed", why="it is float64 and main params are fp32")
        if not param.is_contiguous():
            raise UnsupportedError(
                f"{name} cannot be streamed",
                why="it is not contiguous",
                remedy="Call .contiguous() on it first",
            )
        if param.numel():
            self._entries.append(Entry(name, param.numel(), group))
            self._params.append(param)

    def _refuse_gradients(self, updated: Sequence[int]) -> None:
        if any(param.grad is not None for param in self._frozen):
            raise UnsupportedError(
                "a parameter has a gradient but is not streamed",
                why="it was frozen when the optimizer was constructed, so it has no files",
                remedy="Construct the optimizer after unfreezing, or set the gradient to None",
            )
        if sparse := [self._entries[entry].name for entry in updated if self._params[entry].grad.is_sparse]:
            raise UnsupportedError(f"sparse gradients cannot be streamed ({', '.join(sparse)})")

    def _changed_outside(self) -> list[int]:
        seen = zip(self._params, self._seen, strict=True)
        return [entry for entry, (param, version) in enumerate(seen) if _version(param) != version]

    def _reload(self, entries: Collection[int]) -> None:
        # Not those that did not change: half-precision params would lose what their main params have more.
        self.streamer.reload(self._values, entries)
        for entry in entries:
            self._seen[entry] = _version(self._params[entry])

    def _values(self, piece: Piece) -> torch.Tensor:
        return self._params[piece.entry].detach().view(-1)[piece.start : piece.stop]

    def _gradient(self, piece: Piece) -> torch.Tensor | None:
        grad = self._params[piece.entry].grad
        return None if grad is None else grad.reshape(-1)[piece.start : piece.stop].float()

    def _publish(self, piece: Piece, main: torch.Tensor) -> None:
        self._values(piece).copy_(main)
        # At once, not at the end of the step: an interrupt in between would look like a change from outside.
        self._seen[piece.entry] = _version(self._params[piece.entry])


def _version(param: torch.nn.Parameter) -> tuple[int, int, int]:
    """Differs once the values were written in place, or replaced by `param.data = ...`.

    Not by its address: that is another one after a sleep, when the storage is the object that it was."""
    return param._version, param.untyped_storage()._cdata, param.storage_offset()
