"""A small rollout engine: it takes a device, generates text greedily with the trainer's weights, and leaves.

As real engines do, it allocates its weights and a key-value cache of fixed size while it runs, and gives both
back to sleep. Megatron's own static inference batching keeps the keys and values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from optstream.core.device_memory import Parked, ReleasedStorages
from optstream.core.memory import allocate_host
from optstream.harness.device_budget import BudgetedStorages, CudaBudget, DeviceBudget
from optstream.harness.global_state import numbered_over_stages
from optstream.harness.simulated_cuda import quiet_megatron_import
from optstream.harness.training import Trainer, gpt_model, parallel_state, transformer_config
from optstream.harness.training_config import TrainingConfig
from optstream.harness.training_state import gather_model_params

with quiet_megatron_import():
    from megatron.core.inference.contexts import StaticInferenceContext


class RolloutEngine:
    """One rank of it, beside each rank of the trainer: tensor- and expert-parallel as the trainer is, and of
    the model's whole depth where that is a pipeline.

    config: the trainer's. budget: the device it runs on. cache_bytes: of keys and values, as far as whole
    sequences fill it; at least what one batch of prompts needs.
    """

    def __init__(self, config: TrainingConfig, budget: DeviceBudget, *, cache_bytes: int = 0) -> None:
        self._config = replace(config, pp=1, virtual_stages=1)
        self._budget, self._cache_bytes = budget, cache_bytes
        self._memory = ReleasedStorages() if isinstance(budget, CudaBudget) else BudgetedStorages(budget)
        self._weights: dict[str, torch.Tensor] = {}
        self._model: torch.nn.Module | None = None
        self._parked: list[Parked] = []
        self._context: StaticInferenceContext | None = None
        budget.name("rollout weights", self._weight_roots)
        budget.name("rollout cache", self._cache_roots)

    @property
    def host_bytes(self) -> int:
        """Host memory of the weights that wait for the next rollout."""
        return sum(weight.nbytes for weight in self._weights.values())

    def update_weights(self, trainer: Trainer) -> None:
        """Take the trainer's weights of this moment, by way of host memory, which outlives its sleep.
        Collective."""
        gather_model_params(trainer)
        for name, param in _whole_depth(trainer):
            if name not in self._weights:
                self._weights[name] = allocate_host(param.nbytes).view(param.dtype).view(param.shape)
            self._weights[name].copy_(param)

    def generate(self, prompts: Sequence[bytes], *, length: int) -> list[str]:
        """`length` bytes of greedy continuation of each prompt; prompts are of one length. Collective."""
        with self._budget.in_use(), torch.no_grad(), self._on_device(len(prompts)) as model:
            tokens = torch.tensor([list(prompt) for prompt in prompts]).cuda()
            generated = []
            for _ in range(length):
                logits = self._forward(model, tokens)
                tokens = logits[:, -1:].argmax(-1)
                generated.append(tokens)
            texts = torch.cat(generated, dim=1).tolist()
        return [bytes(text).decode("utf-8", "replace") for text in texts]

    def _forward(self, model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        context = self._context
        start = context.sequence_len_offset
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device).expand_as(tokens)
        logits = model(tokens, positions, None, inference_context=context, runtime_gather_output=True)
        context.sequence_len_offset += tokens.shape[1]
        context.enable_decode_mode()
        return logits

    @contextlib.contextmanager
    def _on_device(self, sequences: int) -> Iterator[torch.nn.Module]:
        config = self._config
        # Of one sequence: keys and values of every layer, in the model's precision.
        per_sequence_bytes = 2 * config.layers * config.seq * config.hidden // config.tp * 2
        capacity = max(sequences, self._cache_bytes // per_sequence_bytes)
        if self._model is None:
            self._model = self._build()
        else:
            self._memory.restore(self._parked)
        self._context = StaticInferenceContext(capacity, config.seq)
        try:
            for name, param in self._model.named_parameters():
                param.copy_(self._weights[name])
            yield self._model
        finally:
            self._context = None
            self._memory.release(self._parked)

    def _build(self) -> torch.nn.Module:
        # Its initial weights are overwritten, and drawing them must not change the trainer's random numbers.
        with torch.random.fork_rng(devices=[]):
            model = gpt_model(self._config, transformer_config(self._config)).eval()
        storages = {param.untyped_storage() for param in model.parameters()}
        self._parked = [Parked(storage, storage.nbytes()) for storage in storages]
        return model

    def _weight_roots(self) -> Iterator[torch.Tensor]:
        if self._model is not None:
            yield from self._model.parameters()

    def _cache_roots(self) -> Iterator[torch.Tensor]:
        if self._context is not None:
            for held in self._context.key_value_memory_dict.values():
                yield from (tensor for tensor in held if torch.is_tensor(tensor))


def _whole_depth(trainer: Trainer) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's weights on this tensor- and expert-parallel rank, by their names in a model without stages.

    A pipeline's ranks give each other theirs, one at a time. Collective over the pipeline's ranks.
    """
    own = dict(_numbered(trainer))
    if trainer.config.pp == 1:
        yield from own.items()
        return
    group = parallel_state.get_pipeline_model_parallel_group()
    of_stages: list = [None] * trainer.config.pp
    dist.all_gather_object(
        of_stages, {name: (weight.shape, weight.dtype) for name, weight in own.items()}, group=group
    )
    for stage, weights in enumerate(of_stages):
        for name, (shape, dtype) in weights.items():
            is_own = stage == parallel_state.get_pipeline_model_parallel_rank()
            weight = own[name] if is_own else torch.empty(shape, dtype=dtype, device="cuda")
            dist.broadcast(weight, dist.get_global_rank(group, stage), group=group)
            yield name, weight


def _numbered(trainer: Trainer) -> Iterator[tuple[str, torch.Tensor]]:
    """This stage's weights, their layers numbered over the whole model."""
    config = trainer.config
    for virtual_stage, chunk in enumerate(trainer.model):
        for name, param in chunk.module.named_parameters():
            # The last stage's copy of tied embeddings is no weight of a model without stages.
            if not (config.tied_embeddings and "output_layer" in name):
                yield numbered_over_stages(config, name, virtual_stage), param.detach()
