"""The ledger sees what is really alive, whoever keeps it, and forgets what nobody keeps."""

from __future__ import annotations

import gc
import threading
from types import SimpleNamespace

import pytest
import torch

from optstream.core.config import StreamConfig
from optstream.core.evicted import evicted
from optstream.core.optimizer import StreamingAdamW
from optstream.harness.ledger import GRADIENTS, STATE, TEMPORARIES, Ledger, gradient_roots, torch_roots

pytestmark = pytest.mark.unit

MIB = 1 << 20
# A segment of that many elements is 64 KiB, which no alignment rounds up.
NUMEL = 16 << 10


def streaming(params: list[torch.nn.Parameter], tmp_path, ledger: Ledger, **config) -> StreamingAdamW:
    optimizer = StreamingAdamW(
        params,
        StreamConfig(enabled=True, directories=(str(tmp_path),), **config),
        staged=True,
        observe=ledger.sample,
    )
    ledger.follow(STATE, torch_roots(optimizer))
    return optimizer


def parameters(*sizes: int) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(size)) for size in sizes]


def step(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    optimizer.step()


class TestFollowing:
    def test_counts_what_roots_reach_and_remembers_the_peak(self):
        pool = [torch.empty(1000, dtype=torch.uint8), torch.empty(500, dtype=torch.uint8)]
        ledger = Ledger()
        ledger.follow(STATE, lambda: pool)
        assert ledger.current_bytes(STATE) == 1500
        pool.pop()
        ledger.sample()
        assert (ledger.current_bytes(STATE), ledger.peak_bytes(STATE)) == (1000, 1500)

    def test_a_slot_that_somebody_keeps_alive_after_its_owner_dropped_it_still_counts(self):
        pool = [torch.empty(100, dtype=torch.uint8) for _ in range(3)]
        ledger = Ledger()
        ledger.follow(STATE, lambda: pool)
        kept = pool.pop()[10:20]
        ledger.sample()
        assert ledger.current_bytes(STATE) == 300
        del kept
        ledger.sample()
        assert ledger.current_bytes(STATE) == 200

    def test_what_only_autograd_keeps_alive_counts_too(self):
        weight = torch.ones(50, requires_grad=True)
        pool = [weight * 2]
        ledger = Ledger()
        ledger.follow(STATE, lambda: pool)
        loss = (pool[0] * pool[0]).sum()
        pool.clear()
        gc.collect()
        ledger.sample()
        assert ledger.current_bytes(STATE) == 200
        loss.backward()
        del loss
        ledger.sample()
        assert ledger.current_bytes(STATE) == 0

    def test_views_share_one_storage_which_counts_once_and_whole(self):
        whole = torch.empty(100)
        ledger = Ledger()
        ledger.follow(STATE, lambda: [whole[:10], whole[50:], whole])
        assert ledger.current_bytes(STATE) == 400

    def test_a_storage_counts_at_its_present_size(self):
        tensor = torch.empty(100)
        ledger = Ledger()
        ledger.follow(STATE, lambda: [tensor])
        tensor.untyped_storage().resize_(0)
        ledger.sample()
        assert ledger.current_bytes(STATE) == 0

    def test_an_evicted_main_param_costs_one_element(self):
        main = evicted(10 * MIB, torch.device("cpu"))
        ledger = Ledger()
        ledger.follow(STATE, lambda: [main])
        assert ledger.current_bytes(STATE) == 4

    def test_roots_add_up_under_one_label_and_labels_stay_apart(self):
        first, second, other = torch.empty(1), torch.empty(2), torch.empty(3)
        ledger = Ledger()
        ledger.follow(STATE, lambda: [first])
        ledger.follow(STATE, lambda: [second])
        ledger.follow("other", lambda: [other])
        assert (ledger.current_bytes(STATE), ledger.current_bytes("other")) == (12, 12)

    def test_only_the_device_asked_for_counts(self):
        here = torch.empty(10)
        cuda = Ledger(torch.device("cuda", 0))
        cuda.follow(STATE, lambda: [here])
        cpu = Ledger(torch.device("cpu"))
        cpu.follow(STATE, lambda: [here])
        assert (cuda.current_bytes(STATE), cpu.current_bytes(STATE)) == (0, 40)

    def test_a_label_nobody_uses_is_empty(self):
        ledger = Ledger()
        assert (ledger.current_bytes("x"), ledger.peak_bytes("x"), ledger.timeline("x")) == (0, 0, [])

    def test_the_timeline_has_every_change_and_the_last_sample(self):
        pool: list[torch.Tensor] = []
        ledger = Ledger()
        ledger.follow(STATE, lambda: pool)
        for change in (lambda: pool.append(torch.empty(1)), lambda: None, pool.clear, lambda: None):
            change()
            ledger.sample()
        seconds, sizes = zip(*ledger.timeline(STATE), strict=True)
        assert sizes == (0, 4, 0, 0)
        assert list(seconds) == sorted(seconds)

    def test_samples_from_many_threads_lose_nothing(self):
        pools: list[list[torch.Tensor]] = [[] for _ in range(4)]
        ledger = Ledger()
        ledger.follow(STATE, lambda: [tensor for pool in pools for tensor in list(pool)])
        kept: list[torch.Tensor] = []
        errors: list[BaseException] = []

        def work(pool: list[torch.Tensor]) -> None:
            try:
                for turn in range(60):
                    pool.append(torch.empty(25))
                    ledger.sample()
                    dropped = pool.pop()
                    if turn % 20 == 0:
                        kept.append(dropped)
                    del dropped
                    ledger.sample()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(pool,)) for pool in pools]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ledger.sample()
        assert errors == []
        assert ledger.current_bytes(STATE) == 4 * 3 * 100
        assert 12 * 100 <= ledger.peak_bytes(STATE) <= 16 * 100


class TestWatching:
    def test_a_construction_that_materialises_is_seen_though_it_evicts_before_any_sample(self):
        half = [torch.zeros(1000, dtype=torch.bfloat16) for _ in range(3)]
        ledger = Ledger()
        with ledger.watch_allocations(STATE):
            mains = [param.float() for param in half]
            for main in mains:
                main.data = evicted(main.numel(), main.device)
        ledger.follow(STATE, lambda: mains)
        assert ledger.peak_bytes(STATE) == 12_000
        assert ledger.current_bytes(STATE) == 3 * 4

    def test_one_at_a_time_is_a_smaller_peak_than_all_at_once(self):
        ledger = Ledger()
        with ledger.watch_allocations(STATE):
            for _ in range(3):
                torch.zeros(1000)
        assert ledger.peak_bytes(STATE) == 4000

    def test_what_construction_leaves_behind_counts_though_no_roots_reach_it(self):
        ledger = Ledger()
        with ledger.watch_allocations(STATE):
            forgotten = torch.zeros(1000)
        ledger.follow(STATE, list)
        assert ledger.current_bytes(STATE) == forgotten.nbytes

    def test_views_in_place_operations_other_dtypes_and_single_elements_are_no_allocations(self):
        given = torch.zeros(1000)
        ledger = Ledger()
        with ledger.watch_allocations(STATE):
            kept = [
                given[5:],
                given.add_(1),
                given.bfloat16(),
                torch.empty(9, dtype=torch.uint8),
                given.sum(),
            ]
        assert len(kept) == 5
        assert ledger.peak_bytes(STATE) == 0

    def test_outside_of_a_watch_nothing_is_seen(self):
        ledger = Ledger()
        with ledger.watch_allocations(STATE):
            pass
        tensor = torch.zeros(1000)
        ledger.sample()
        assert ledger.current_bytes(STATE) == 0
        del tensor

    def test_moments_born_during_an_update_are_state_and_only_the_rest_is_temporary(self):
        params = parameters(*[1000] * 8)
        optimizer = torch.optim.AdamW(params, foreach=False)
        ledger = Ledger()
        ledger.follow(STATE, torch_roots(optimizer))
        for param in params:
            param.grad = torch.ones_like(param)
        with ledger.watch_allocations(TEMPORARIES):
            optimizer.step()
        assert ledger.current_bytes(STATE) == 8 * 8000
        assert ledger.current_bytes(TEMPORARIES) == 0
        # A root, a quotient and the denominator of the parameter before; never eight parameters' moments.
        assert 4000 <= ledger.peak_bytes(TEMPORARIES) <= 3 * 4000

    def test_an_update_of_all_parameters_at_once_shows_its_temporaries(self):
        params = parameters(*[1000] * 8)
        optimizer = torch.optim.AdamW(params, foreach=True)
        ledger = Ledger()
        ledger.follow(STATE, torch_roots(optimizer))
        for param in params:
            param.grad = torch.ones_like(param)
        with ledger.watch_allocations(TEMPORARIES):
            optimizer.step()
        assert ledger.peak_bytes(TEMPORARIES) >= 8 * 4000

    def test_the_watched_computation_has_the_same_bits(self):
        results = []
        for watched in (False, True):
            (param,) = parameters(1001)
            optimizer = torch.optim.AdamW([param])
            for _ in range(3):
                param.grad = torch.sin(param.detach())
                if watched:
                    with Ledger().watch_allocations(TEMPORARIES):
                        optimizer.step()
                else:
                    optimizer.step()
            results.append(param.detach())
        assert torch.equal(*results)

    def test_upcast_gradients_are_told_apart_from_views_of_the_gradient_buffer(self):
        buffer = torch.zeros(100)
        viewed, upcast = evicted(40, buffer.device), evicted(60, buffer.device)
        viewed.grad = buffer[:40]
        part = SimpleNamespace(
            is_stub_optimizer=False,
            buffers=[SimpleNamespace(grad_data=buffer)],
            shard_fp32_from_float16_groups=[[viewed], [upcast]],
        )
        stub = SimpleNamespace(is_stub_optimizer=True)
        ledger = Ledger()
        ledger.follow(GRADIENTS, gradient_roots(SimpleNamespace(chained_optimizers=[part, stub])))
        assert ledger.current_bytes(GRADIENTS) == 0
        with ledger.watch_allocations(TEMPORARIES):
            upcast.grad = torch.ones(60, dtype=torch.bfloat16).float()
        assert ledger.current_bytes(GRADIENTS) == 240
        assert ledger.current_bytes(TEMPORARIES) == 0


class TestOptimizers:
    def test_adamw_keeps_two_moments_of_every_parameter(self):
        optimizer = torch.optim.AdamW(parameters(1000, 23))
        ledger = Ledger()
        ledger.follow(STATE, torch_roots(optimizer))
        step(optimizer)
        ledger.sample()
        assert ledger.peak_bytes(STATE) == 8 * 1023

    def test_main_params_beside_half_precision_ones_make_it_twelve_bytes(self):
        mains = parameters(1000, 23)
        optimizer = torch.optim.AdamW(mains)
        ledger = Ledger()
        ledger.follow(STATE, torch_roots(optimizer))
        ledger.follow(STATE, lambda: mains)
        step(optimizer)
        ledger.sample()
        assert ledger.peak_bytes(STATE) == 12 * 1023

    @pytest.mark.parametrize("depth", [1, 2, 3])
    def test_streaming_takes_depth_times_the_largest_bucket(self, tmp_path, depth):
        ledger = Ledger()
        optimizer = streaming(parameters(*[NUMEL] * 10), tmp_path, ledger, bucket_numel=NUMEL, depth=depth)
        for _ in range(3):
            step(optimizer)
        optimizer.close()
        assert ledger.peak_bytes(STATE) == depth * 12 * NUMEL
        assert ledger.current_bytes(STATE) == 0

    def test_a_slot_leaked_from_every_step_is_seen(self, tmp_path):
        ledger = Ledger()
        optimizer = streaming(parameters(*[NUMEL] * 10), tmp_path, ledger, bucket_numel=NUMEL, depth=2)
        engine = optimizer.streamer.engine
        publish, leaked = optimizer._publish, {}

        def publish_and_leak(piece, main):
            publish(piece, main)
            leaked[len(optimizer.records)] = engine.slots[0]

        optimizer._publish = publish_and_leak
        for _ in range(3):
            step(optimizer)
        ledger.sample()
        assert len(leaked) == 3
        assert ledger.current_bytes(STATE) == 3 * engine.store.slot_bytes
        assert ledger.peak_bytes(STATE) > engine.device_bytes_bound
        leaked.clear()
        ledger.sample()
        assert ledger.current_bytes(STATE) == 0
        optimizer.close()

    def test_several_engines_share_a_ledger_without_a_deadlock(self, tmp_path):
        ledger = Ledger()
        optimizers = [
            streaming(
                parameters(*[NUMEL] * 5), tmp_path, ledger, bucket_numel=NUMEL, depth=2, keep_slots=True
            )
            for _ in range(2)
        ]
        done = []

        def train() -> None:
            for _ in range(10):
                for optimizer in optimizers:
                    step(optimizer)
            done.append(True)

        thread = threading.Thread(target=train, daemon=True)
        thread.start()
        thread.join(60)
        assert done
        for optimizer in optimizers:
            optimizer.close()
        assert ledger.peak_bytes(STATE) <= 2 * 2 * 12 * NUMEL
