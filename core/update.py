"""One bucket's update, by the very optimizer class that would have updated the resident state.

Adam works element by element, so running the wrapped class on a bucket's pieces gives the bits it would have
given on whole parameters, provided that hyperparameters and step counts are those of the whole. The master
optimizer keeps the param groups (schedulers change them there); a worker of the same class, made for the
purpose, does the arithmetic.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence

import torch

from optstream.core.errors import UnsupportedError
from optstream.core.formats import Format
from optstream.core.plan import SEGMENTS, Bucket, Layout, Piece

# The gradient of a piece: 1-D, fp32, on the device of the update, or None to leave the piece alone.
Gradient = Callable[[Piece], torch.Tensor | None]
# Takes a piece and its new main values (1-D, fp32, on the device) into the model's own parameter.
Publish = Callable[[Piece, torch.Tensor], None]


def keeps_step_per_parameter(optimizer: torch.optim.Optimizer) -> bool:
    """torch's Adam(W) counts steps in each parameter's state; TE's and Apex's FusedAdam, in the group."""
    return isinstance(optimizer, torch.optim.Adam)


def step_tensor(group: dict, count: int, main: torch.Tensor) -> torch.Tensor:
    """A step count as torch's own `_init_group` makes it: where the kernel reads it, a tensor of its own."""
    on_device = group.get("capturable") or group.get("fused")
    return torch.tensor(float(count), dtype=torch.float32, device=main.device if on_device else "cpu")


def refuse_unstreamable(optimizer: torch.optim.Optimizer) -> None:
    """Raise UnsupportedError for options that keep more state than two moments and a step count."""
    for group in optimizer.param_groups:
        for option, why in (
            ("amsgrad", "it keeps a third moment"),
            ("differentiable", "it would need the state of every step for backward"),
        ):
            if group.get(option):
                raise UnsupportedError(
                    f"{option}=True cannot be streamed", why=why, remedy=f"Construct it with {option}=False"
                )


def worker_of(
    master: torch.optim.Optimizer, update_class: type[torch.optim.Optimizer]
) -> torch.optim.Optimizer:
    """An `update_class` with the settings of `master`, and with state and param groups of its own.

    Not built by its constructor (whose arguments the instance need not remember) nor by copy (torch's
    `__getstate__` drops attributes such as FusedAdam's `adam_w_mode`), but attribute by attribute.
    """
    worker = update_class.__new__(update_class)
    worker.__dict__.update(master.__dict__)
    # An LR scheduler, or the Megatron adapter, may have put a `step` on the instance: it is not the worker's.
    worker.__dict__.pop("step", None)
    for name, value in master.__dict__.items():
        if name.endswith("_hooks") and isinstance(value, OrderedDict):
            worker.__dict__[name] = OrderedDict()  # The master's hooks run once a step, not once a bucket.
    worker.state = defaultdict(dict)
    worker.param_groups = []
    return worker


class StepCounts:
    """How many updates each entry has had, and, for classes that count there, each group.

    An entry without a gradient is not updated and, with a per-parameter count, does not age. A group's count
    advances at every step, also where this rank holds none of the group, so that it is the same on all ranks.
    """

    def __init__(self, entries: int, groups: int) -> None:
        self.entries = [0] * entries
        self.groups = [0] * groups

    def advance(self, updated: Sequence[int]) -> None:
        for entry in updated:
            self.entries[entry] += 1
        self.groups = [count + 1 for count in self.groups]

    def restart_at(self, step: int) -> None:
        """Every entry and group has had `step` updates: what a checkpoint's common step count says."""
        self.entries = [step] * len(self.entries)
        self.groups = [step] * len(self.groups)


class BucketUpdater:
    """Runs Adam on one bucket at a time.

    master: the optimizer whose settings and param groups are used. entry_groups: each entry's group index.
    update_class: the class whose `step` does the arithmetic; by default the master's own.
    """

    def __init__(
        self,
        master: torch.optim.Optimizer,
        entry_groups: Sequence[int],
        formats: dict[str, Format],
        *,
        update_class: type[torch.optim.Optimizer] | None = None,
    ) -> None:
        refuse_unstreamable(master)
        self._master = master
        self._update_class = update_class or type(master)
        self._entry_groups = tuple(entry_groups)
        self._formats = formats
        self.counts_per_parameter = keeps_step_per_parameter(master)
        self.counts = StepCounts(len(entry_groups), len(master.param_groups))

    def update(
        self,
        bucket: Bucket,
        layout: Layout,
        memory: torch.Tensor,
        gradient: Gradient,
        publish: Publish,
    ) -> None:
        """Update the pieces of `bucket` that have a gradient, in `memory` (1-D uint8, the bucket's layout).

        Step counts are read here and advanced by the caller, once a step.
        """
        stored = {name: memory[layout.segments[name].offset : layout.segments[name].end] for name in SEGMENTS}
        values = {name: self._formats[name].decode(stored[name]) for name in SEGMENTS}
        worker = worker_of(self._master, self._update_class)
        groups = [
            {**{key: value for key, value in group.items() if key != "params"}, "params": []}
            for group in self._master.param_groups
        ]
        if not self.counts_per_parameter:
            for group, count in zip(groups, self.counts.groups, strict=True):
                group["step"] = count
        updated: list[tuple[Piece, torch.Tensor]] = []
        for piece in bucket.pieces:
            grad = gradient(piece)
            if grad is None:
                continue
            group = groups[self._entry_groups[piece.entry]]
            main = values["main"][piece.span]
            main.grad = grad
            worker.state[main] = {name: values[name][piece.span] for name in ("exp_avg", "exp_avg_sq")}
            if self.counts_per_parameter:
                worker.state[main]["step"] = step_tensor(group, self.counts.entries[piece.entry], main)
            group["params"].append(main)
            updated.append((piece, main))
        worker.param_groups = [group for group in groups if group["params"]]
        worker.step()
        for piece, main in updated:
            state = worker.state[main]
            for name in ("exp_avg", "exp_avg_sq"):
                own = values[name][piece.span]
                if state[name].data_ptr() != own.data_ptr():
                    own.copy_(state[name])  # The class replaced the tensor instead of updating it in place.
            publish(piece, main)
            main.grad = None
        for name in SEGMENTS:
            self._formats[name].encode(values[name], stored[name])
