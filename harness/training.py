"""A small Megatron GPT trainer: a byte-level model on real text, with the distributed optimizer.

It knows nothing of streaming. Whoever wants the optimizer state elsewhere passes `construction`, a context
around the making of the optimizer, and `after_construction`, which is called with it. Everything else is
Megatron's own code, the same on GPUs and under `simulated_cuda`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from optstream.harness.data import ByteDataset, load_text
from optstream.harness.simulated_cuda import quiet_megatron_import
from optstream.harness.training_config import VOCABULARY, TrainingConfig

with quiet_megatron_import():
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer.optimizer import MegatronOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module


@dataclass(frozen=True)
class StepResult:
    """One training step, the same on every rank.

    `loss` is the mean over microbatches and data-parallel ranks before the update; `grad_norm` the norm
    before clipping (NaN if Megatron gave none); `step_ok` False if the optimizer skipped the step, as fp16
    does on overflow.
    """

    loss: float
    grad_norm: float
    step_ok: bool


class Trainer:
    """Builds model and optimizer on this rank; `train_step` trains. torch.distributed must be initialised.

    Attributes: `config`, `model` (a list of DistributedDataParallel chunks), `optimizer` (Megatron's, usually
    a ChainedOptimizer), `rank`, `step` (steps done). The same seed gives the same initial weights, also for a
    second Trainer in one process once the first was closed.
    """

    def __init__(
        self,
        config: TrainingConfig,
        *,
        rank: int,
        construction: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
        after_construction: Callable[[MegatronOptimizer], None] | None = None,
    ) -> None:
        self.config, self.rank, self.step = config, rank, 0
        self._data = ByteDataset(load_text(config.data), seq=config.seq, seed=config.seed)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=config.tp,
            pipeline_model_parallel_size=config.pp,
            virtual_pipeline_model_parallel_size=config.virtual_stages if config.virtual_stages > 1 else None,
            expert_model_parallel_size=config.ep,
            num_distributed_optimizer_instances=config.optimizer_instances,
        )
        try:
            torch.manual_seed(config.seed)
            model_parallel_cuda_manual_seed(config.seed, force_reset_rng=True)
            self._transformer_config = transformer_config(config)
            self.model = [
                _model_chunk(config, self._transformer_config, stage)
                for stage in range(config.virtual_stages)
            ]
            with construction():
                self.optimizer = get_megatron_optimizer(_optimizer_config(config), self.model)
            if after_construction is not None:
                after_construction(self.optimizer)
            self._scheduler = _constant_scheduler(config, self.optimizer)
            self._connect_schedule()
        except BaseException:
            parallel_state.destroy_model_parallel()
            raise

    def _connect_schedule(self) -> None:
        """Gives the pipeline schedule the hooks that Megatron's own training loop gives it."""
        hooks = self._transformer_config
        hooks.finalize_model_grads_func = finalize_model_grads
        hooks.grad_scale_func = self.optimizer.scale_loss
        if self.config.overlap_grad_reduce:
            no_sync = [chunk.no_sync for chunk in self.model]
            hooks.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]

    def train_step(self) -> StepResult:
        """One optimizer step over `microbatches` microbatches. Collective."""
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=[self._batches() for _ in self.model],
            model=self.model,
            num_microbatches=self.config.microbatches,
            seq_length=self.config.seq,
            micro_batch_size=self.config.batch,
            forward_only=False,
        )
        step_ok, grad_norm, _ = self.optimizer.step()
        if step_ok:
            self._scheduler.step(increment=1)
        self.step += 1
        return StepResult(
            loss=_mean_over_last_stages([float(each["loss"]) for each in losses]),
            grad_norm=math.nan if grad_norm is None else float(grad_norm),
            step_ok=bool(step_ok),
        )

    def close(self) -> None:
        """Forgets Megatron's process groups, so that another Trainer can be built in this process."""
        parallel_state.destroy_model_parallel()

    def _batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        dp_rank = parallel_state.get_data_parallel_rank()
        for microbatch in range(self.config.microbatches):
            tokens, labels = self._data.batch(
                step=self.step, microbatch=microbatch, dp_rank=dp_rank, batch=self.config.batch
            )
            yield tokens.cuda(), labels.cuda()


def _forward_step(batches: Iterator, model: torch.nn.Module):
    tokens, labels = next(batches)
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    # Without a mask, Megatron's attention makes the causal one.
    return model(tokens, positions, None, labels=labels), _mean_loss


def _mean_loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = losses.float().mean()
    # A copy: the schedule divides the loss by the number of microbatches in place.
    return loss, {"loss": loss.detach().clone()}


def _mean_over_last_stages(losses: list[float]) -> float:
    """Only the last pipeline stage has losses (one per microbatch); every rank gets their mean."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    total = torch.tensor([sum(losses), len(losses)], dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def _dtype(config: TrainingConfig) -> torch.dtype:
    if config.bf16:
        return torch.bfloat16
    return torch.float16 if config.fp16 else torch.float32


def transformer_config(config: TrainingConfig) -> TransformerConfig:
    experts = {}
    if config.experts:
        experts = {
            "num_moe_experts": config.experts,
            "moe_router_topk": min(2, config.experts),
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "alltoall",
            # Megatron adds the experts' bias in place to a view, which autograd refuses.
            "add_bias_linear": False,
        }
    return TransformerConfig(
        num_layers=config.layers,
        hidden_size=config.hidden,
        num_attention_heads=config.heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=_dtype(config),
        pipeline_dtype=_dtype(config),
        bf16=config.bf16,
        fp16=config.fp16,
        tensor_model_parallel_size=config.tp,
        pipeline_model_parallel_size=config.pp,
        virtual_pipeline_model_parallel_size=config.virtual_stages if config.virtual_stages > 1 else None,
        expert_model_parallel_size=config.ep,
        # Fused kernels need TransformerEngine or Apex.
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        **experts,
    )


def gpt_model(
    config: TrainingConfig, transformer: TransformerConfig, virtual_stage: int = 0
) -> torch.nn.Module:
    """This rank's part of the model, or one virtual stage of it, on the device, in the precision that
    Megatron's `get_model` gives it."""
    # The rollout engine builds models without stages while the trainer's ranks are those of a pipeline.
    whole = config.pp == 1
    stage = {"ignore_virtual": False, "vp_stage": virtual_stage}
    model = GPTModel(
        config=transformer,
        transformer_layer_spec=get_gpt_layer_local_spec(num_experts=config.experts or None),
        vocab_size=VOCABULARY,
        max_sequence_length=config.seq,
        pre_process=whole or parallel_state.is_pipeline_first_stage(**stage),
        post_process=whole or parallel_state.is_pipeline_last_stage(**stage),
        share_embeddings_and_output_weights=config.tied_embeddings,
        position_embedding_type="rope",
        vp_stage=virtual_stage if config.virtual_stages > 1 else None,
    ).cuda()
    # As Megatron's own `get_model`. Without it, the local spec's norms stay fp32.
    if (config.bf16 or config.fp16) and not config.native_fp32_norms:
        model = Float16Module(transformer, model)
    return model


def _model_chunk(
    config: TrainingConfig, transformer: TransformerConfig, virtual_stage: int
) -> DistributedDataParallel:
    return DistributedDataParallel(
        config=transformer,
        ddp_config=DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            grad_reduce_in_fp32=config.grad_reduce_in_fp32,
            overlap_grad_reduce=config.overlap_grad_reduce,
            overlap_param_gather=config.overlap_param_gather,
            num_distributed_optimizer_instances=config.optimizer_instances,
        ),
        # As Megatron: later chunks wait for nobody, so that cutting them would gain nothing.
        disable_bucketing=virtual_stage > 0,
        module=gpt_model(config, transformer, virtual_stage),
    )


def _optimizer_config(config: TrainingConfig) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=config.lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.adam_beta1,
        adam_beta2=config.adam_beta2,
        adam_eps=config.adam_eps,
        clip_grad=config.clip_grad,
        params_dtype=_dtype(config),
        bf16=config.bf16,
        fp16=config.fp16,
        initial_loss_scale=config.initial_loss_scale,
        use_distributed_optimizer=True,
        overlap_param_gather=config.overlap_param_gather,
    )


def _constant_scheduler(config: TrainingConfig, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    # The rate is constant, but only a scheduler applies each group's weight-decay multiplier.
    return OptimizerParamScheduler(
        optimizer,
        init_lr=config.lr,
        max_lr=config.lr,
        min_lr=config.lr,
        lr_warmup_steps=0,
        lr_decay_steps=config.steps,
        lr_decay_style="constant",
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=config.steps,
        wd_incr_style="constant",
    )
