"""One bucket's update by the wrapped class, for classes that count steps in the group as TE's and Apex's
FusedAdam do, and for torch's own."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from optstream.backends.fake import FakeSystem
from optstream.backends.nvme import NvmeBackend
from optstream.core.config import StreamConfig
from optstream.core.errors import UnsupportedError
from optstream.core.formats import segment_formats
from optstream.core.plan import Entry, Piece
from optstream.core.streamer import StateStreamer
from optstream.core.update import BucketUpdater, keeps_step_per_parameter, worker_of

pytestmark = pytest.mark.unit


class GroupStepAdam(torch.optim.Optimizer):
    """Adam that counts steps as fused Adams do: `group["step"]`, none for a group without params, and an
    attribute of the instance that its `step` needs."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, adam_w_mode=True):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.adam_w_mode = int(adam_w_mode)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)

    def _update(self, param, group) -> None:
        state = self.state[param]
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
        beta1, beta2 = group["betas"]
        grad = param.grad
        if not self.adam_w_mode:
            grad = grad + group["weight_decay"] * param
        # Replaced, not updated in place: nothing promises that a class keeps its tensors.
        state["exp_avg"] = beta1 * state["exp_avg"] + (1 - beta1) * grad
        state["exp_avg_sq"] = beta2 * state["exp_avg_sq"] + (1 - beta2) * grad * grad
        denominator = (state["exp_avg_sq"] / (1 - beta2 ** group["step"])).sqrt() + group["eps"]
        update = state["exp_avg"] / (1 - beta1 ** group["step"]) / denominator
        if self.adam_w_mode:
            update = update + group["weight_decay"] * param
        param.sub_(group["lr"] * update)


class Streamed:
    """A StateStreamer for a master optimizer whose params hold the initial values and the gradients."""

    def __init__(self, master: torch.optim.Optimizer, **fields) -> None:
        self.params = [param for group in master.param_groups for param in group["params"]]
        group_of = [i for i, group in enumerate(master.param_groups) for _ in group["params"]]
        self.published = [param.detach().clone() for param in self.params]
        self.streamer = StateStreamer(
            StreamConfig(True, ("/unused",), **{"bucket_numel": 256, "depth": 2, **fields}),
            master,
            [Entry(f"p{i}", p.numel(), group_of[i]) for i, p in enumerate(self.params)],
            lambda piece: self.published[piece.entry][piece.start : piece.stop],
            device=torch.device("cpu"),
            backend=NvmeBackend("/disk", subdirectory="test/update", system=FakeSystem()),
        )

    def step(self, gradients: list[torch.Tensor | None]) -> None:
        def gradient(piece: Piece) -> torch.Tensor | None:
            whole = gradients[piece.entry]
            return None if whole is None else whole[piece.start : piece.stop]

        def publish(piece: Piece, main: torch.Tensor) -> None:
            self.published[piece.entry][piece.start : piece.stop] = main

        updated = [entry for entry, whole in enumerate(gradients) if whole is not None]
        self.streamer.step(gradient, publish, updated)


@contextlib.contextmanager
def streamed(master: torch.optim.Optimizer, **fields) -> Iterator[Streamed]:
    made = Streamed(master, **fields)
    with contextlib.closing(made.streamer):
        yield made


def params_of(sizes: list[int], seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(size, generator=generator)) for size in sizes]


def random_gradients(params, seed: int, without=()) -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(param.shape, generator=generator) for param in params]
    return [None if index in without else grad for index, grad in enumerate(drawn)]


def groups_of(sizes: list[list[int]]) -> list[dict]:
    rates = (1e-2, 3e-2, 1e-3)
    return [
        {"params": params_of(group, seed=i), "lr": rates[i % 3], "weight_decay": 0.1 * i}
        for i, group in enumerate(sizes)
    ]


# ---- steps counted in the group ----------------------------------------------------------------------------


@given(
    sizes=st.lists(st.lists(st.integers(1, 1500), max_size=3), min_size=1, max_size=3).filter(any),
    bucket_numel=st.sampled_from([64, 256, 4096]),
    adam_w_mode=st.booleans(),
    data=st.data(),
)
def test_a_group_step_adam_gives_its_own_bits(sizes, bucket_numel, adam_w_mode, data):
    resident = GroupStepAdam(groups_of(sizes), adam_w_mode=adam_w_mode)
    twins = [param for group in resident.param_groups for param in group["params"]]
    master = GroupStepAdam(groups_of(sizes), adam_w_mode=adam_w_mode)
    with streamed(master, bucket_numel=bucket_numel) as made:
        for step in range(3):
            without = data.draw(st.sets(st.integers(0, len(twins))), label="no gradient")
            gradients = random_gradients(twins, step, without)
            for twin, grad in zip(twins, gradients, strict=True):
                twin.grad = grad
            made.step(gradients)
            resident.step()
            for group in (*master.param_groups, *resident.param_groups):
                group["lr"] *= 0.5
        assert all(torch.equal(p, t) for p, t in zip(made.published, twins, strict=True))
        for part in made.streamer.state():
            state, span = resident.state[twins[part.piece.entry]], slice(part.piece.start, part.piece.stop)
            assert torch.equal(part.main, twins[part.piece.entry][span])
            for name in ("exp_avg", "exp_avg_sq"):
                expected = state[name][span] if state else torch.zeros(part.piece.numel)
                assert torch.equal(getattr(part, name), expected)
        assert not master.state
        counts = made.streamer.counts.groups
        for count, group in zip(counts, resident.param_groups, strict=True):
            assert count == 3
            assert group.get("step", 3) == 3, "the resident class skips a group that is empty here"


def test_one_group_over_five_buckets_advances_by_one():
    with streamed(GroupStepAdam(params_of([5 * 256]))) as made:
        assert len(made.streamer.buckets) == 5
        for step in range(1, 4):
            made.step(random_gradients(made.params, step))
            assert made.streamer.counts.groups == [step]
            assert made.streamer.counts.entries == [step]


def test_ranks_of_unequal_groups_agree_on_every_count():
    """Sizes 10 + 2 over 2 ranks: rank 0 holds 6 of the first group, rank 1 holds 4 of it and the second."""
    ranks = [GroupStepAdam(groups_of([[6], []])), GroupStepAdam(groups_of([[4], [2]]))]
    counts = []
    for master in ranks:
        with streamed(master) as made:
            for step in range(3):
                made.step(random_gradients(made.params, step))
            counts.append(made.streamer.counts.groups)
    assert counts == [[3, 3], [3, 3]]


def test_the_master_keeps_its_own_groups():
    """The worker's step count must not leak into the groups that schedulers and checkpoints see."""
    master = GroupStepAdam(groups_of([[600], [100]]))
    params = [list(group["params"]) for group in master.param_groups]
    with streamed(master) as made:
        made.step(random_gradients(made.params, 1))
    for group, before in zip(master.param_groups, params, strict=True):
        assert "step" not in group
        assert all(one is other for one, other in zip(group["params"], before, strict=True))


# ---- torch's own -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_torch_classes_count_per_parameter(kind):
    """A master that is driven directly, as the Megatron adapter does: Adam's L2 decay included."""
    resident = kind(params_of([600, 100]), lr=1e-2, weight_decay=0.1)
    twins = resident.param_groups[0]["params"]
    with streamed(kind(params_of([600, 100]), lr=1e-2, weight_decay=0.1)) as made:
        assert made.streamer.counts_per_parameter
        for step in range(4):
            gradients = random_gradients(twins, step, without={1} if step % 2 else ())
            for twin, grad in zip(twins, gradients, strict=True):
                twin.grad = grad
            made.step(gradients)
            resident.step()
        assert all(torch.equal(p, t) for p, t in zip(made.published, twins, strict=True))
        assert made.streamer.counts.entries == [4, 2]
        assert [int(resident.state[twin]["step"]) for twin in twins] == [4, 2]
    assert not keeps_step_per_parameter(GroupStepAdam(params_of([1])))


def test_first_step_by_hand():
    """m = 0.1 g, v = 0.05 g^2, both corrected to g and g^2: a step of lr x sign(g), from bare arithmetic."""
    with streamed(torch.optim.Adam(params_of([3]), lr=0.5, betas=(0.9, 0.95))) as made:
        before = made.published[0].clone()
        gradient = torch.tensor([2.0, -0.25, 4.0])
        made.step([gradient])
        (part,) = made.streamer.state()
        assert part.exp_avg.tolist() == pytest.approx([0.2, -0.025, 0.4])
        assert part.exp_avg_sq.tolist() == pytest.approx([0.2, 0.003125, 0.8])
        assert (before - part.main).tolist() == pytest.approx([0.5, -0.5, 0.5])
        made.step([gradient])
        (part,) = made.streamer.state()
        m = [0.9 * 0.1 * g + 0.1 * g for g in (2.0, -0.25, 4.0)]
        v = [0.95 * 0.05 * g * g + 0.05 * g * g for g in (2.0, -0.25, 4.0)]
        assert part.exp_avg.tolist() == pytest.approx(m)
        for start, now, first, second in zip(before.tolist(), part.main.tolist(), m, v, strict=True):
            moved = 0.5 * (first / (1 - 0.9**2)) / math.sqrt(second / (1 - 0.95**2))
            assert start - now == pytest.approx(math.copysign(0.5, first) + moved)


# ---- the worker --------------------------------------------------------------------------------------------


def test_a_worker_shares_settings_and_no_state():
    master = GroupStepAdam(params_of([10]), adam_w_mode=False)
    master.state[master.param_groups[0]["params"][0]]["exp_avg"] = torch.zeros(10)
    calls = []
    master.register_step_pre_hook(lambda *_: calls.append(1))
    master.step = lambda: calls.append("a scheduler's wrapper")
    worker = worker_of(master, GroupStepAdam)
    assert worker.adam_w_mode == 0
    assert worker.param_groups == []
    assert not worker.state
    worker.step()
    assert calls == []
    worker.param_groups.append({})
    worker.state["x"] = {}
    assert len(master.param_groups) == 1
    assert len(master.state) == 1


@pytest.mark.parametrize("option", ["amsgrad", "differentiable"])
def test_options_that_keep_more_state_are_refused(option):
    master = torch.optim.Adam(params_of([10]), **{option: True})
    with pytest.raises(UnsupportedError, match=f"{option}=True cannot be streamed"):
        BucketUpdater(master, [0], segment_formats("fp32"))


def test_bf16_moments_of_a_piece_without_gradient_stay():
    """They are decoded and encoded with their bucket, and must come out as they went in."""
    with streamed(torch.optim.Adam(params_of([100, 100])), moment_dtype="bf16") as made:
        assert len(made.streamer.buckets) == 1
        made.step(random_gradients(made.params, 1))
        before = list(made.streamer.state())[1]
        for step in range(5):
            made.step(random_gradients(made.params, step, without={1}))
        after = list(made.streamer.state())[1]
        for name in ("main", "exp_avg", "exp_avg_sq"):
            assert torch.equal(getattr(after, name), getattr(before, name))
