"""What the harness's GPT trainer can be told, checked before anything starts. Imports neither torch nor
Megatron."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from optstream.harness.errors import ConfigurationError

VOCABULARY = 256  # byte values

_AT_LEAST_ONE = (
    "steps",
    "layers",
    "hidden",
    "heads",
    "seq",
    "batch",
    "microbatches",
    "ranks",
    "tp",
    "pp",
    "ep",
    "virtual_stages",
    "optimizer_instances",
)
_AT_LEAST_ZERO = ("experts", "seed")


@dataclass(frozen=True)
class TrainingConfig:
    """A byte-level GPT and how it is trained. Raises ConfigurationError if it cannot run.

    `virtual_stages` are the model chunks of each pipeline stage (Megatron's interleaved schedule), and
    `optimizer_instances` the copies of the whole optimizer state among the data-parallel ranks.
    `batch` is in sequences per microbatch and data-parallel rank; `seq` in bytes; `experts` 0 means a dense
    model; `native_fp32_norms` keeps the norms of a half-precision model in fp32. The `ep` expert-parallel
    ranks are taken from the data-parallel ones, as in Megatron.
    """

    steps: int = 10
    layers: int = 2
    hidden: int = 64
    heads: int = 4
    seq: int = 64
    batch: int = 2
    microbatches: int = 1
    tied_embeddings: bool = False

    ranks: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    experts: int = 0
    virtual_stages: int = 1
    optimizer_instances: int = 1

    lr: float = 1e-3
    weight_decay: float = 0.01
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    clip_grad: float = 1.0

    bf16: bool = True
    fp16: bool = False
    native_fp32_norms: bool = False
    initial_loss_scale: float = 2.0**16
    grad_reduce_in_fp32: bool = True
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False

    seed: int = 1234
    data: str | None = None

    def __post_init__(self) -> None:
        for names, least in ((_AT_LEAST_ONE, 1), (_AT_LEAST_ZERO, 0)):
            for name in names:
                if getattr(self, name) < least:
                    raise ConfigurationError(
                        f"--{name} {getattr(self, name)} cannot run", why=f"it must be at least {least}"
                    )
        if self.bf16 and self.fp16:
            raise ConfigurationError("bf16 and fp16 exclude each other", remedy="Choose one")
        self._check_world()
        self._check_optimizer_instances()
        self._check_virtual_stages()
        self._check_experts()
        if self.overlap_param_gather and not self.overlap_grad_reduce:
            raise ConfigurationError(
                "overlap_param_gather cannot run alone",
                why="Megatron overlaps the gather only where gradients are reduced with overlap, too",
                remedy="Set overlap_grad_reduce as well",
            )

    def _check_world(self) -> None:
        model_ranks = self.tp * self.pp * self.ep
        if self.ranks % model_ranks:
            raise ConfigurationError(
                f"{self.ranks} ranks cannot be divided",
                why=f"--tp {self.tp} x --pp {self.pp} x --ep {self.ep} takes groups of {model_ranks}",
                remedy=f"Give --ranks as a multiple of {model_ranks}",
            )
        for size, size_name, parts, parts_name in (
            (self.hidden, "hidden", self.heads, "heads"),
            (self.heads, "heads", self.tp, "tp"),
            (VOCABULARY, "vocabulary", self.tp, "tp"),
            (self.layers, "layers", self.pp, "pp"),
        ):
            if size % parts:
                raise ConfigurationError(
                    f"{size_name} {size} cannot be divided by --{parts_name} {parts}",
                    remedy=f"Change one of them so that {size_name} is a multiple of {parts_name}",
                )
        if self.hidden // self.heads % 2:
            raise ConfigurationError(
                f"a head of {self.hidden // self.heads} cannot run",
                why="rotary position embeddings rotate pairs, so hidden / heads must be even",
                remedy="Change --hidden or --heads",
            )

    def _check_optimizer_instances(self) -> None:
        for name in ("dp", "expert_dp") if self.experts else ("dp",):
            if getattr(self, name) % self.optimizer_instances:
                raise ConfigurationError(
                    f"{self.optimizer_instances} optimizer_instances cannot run",
                    why=f"they divide the {getattr(self, name)} data-parallel ranks of each parameter evenly",
                    remedy="Use more --ranks, or fewer optimizer_instances",
                )

    def _check_virtual_stages(self) -> None:
        if self.virtual_stages == 1:
            return
        if self.pp == 1:
            raise ConfigurationError(
                "virtual_stages cannot run without --pp",
                why="they divide the stages of a pipeline",
                remedy="Set --pp to 2 or more",
            )
        if self.layers % (self.pp * self.virtual_stages):
            raise ConfigurationError(
                f"{self.layers} layers cannot be divided",
                why=f"--pp {self.pp} x {self.virtual_stages} virtual_stages take equal parts",
                remedy=f"Give --layers as a multiple of {self.pp * self.virtual_stages}",
            )
        if self.microbatches % self.pp:
            raise ConfigurationError(
                f"{self.microbatches} microbatches cannot be divided by --pp {self.pp}",
                why="the interleaved schedule takes them in groups of the pipeline's size",
                remedy="Change one of them so that microbatches is a multiple of pp",
            )

    def _check_experts(self) -> None:
        if self.ep > 1 and not self.experts:
            raise ConfigurationError(
                f"--ep {self.ep} has nothing to divide", why="the model is dense", remedy="Set --experts"
            )
        if self.experts % self.ep:
            raise ConfigurationError(
                f"{self.experts} experts cannot be divided by --ep {self.ep}",
                remedy=f"Give --experts as a multiple of {self.ep}",
            )
        if self.experts and self.tp > 1:
            raise ConfigurationError(
                "experts cannot be combined with --tp",
                why="Megatron's local layer spec does not run mixture-of-experts under tensor parallelism",
                remedy="Use --ep instead of --tp",
            )

    @property
    def dp(self) -> int:
        """Data-parallel size of the dense parameters."""
        return self.ranks // (self.tp * self.pp)

    @property
    def expert_dp(self) -> int:
        """Data-parallel size of the experts' parameters."""
        return self.dp // self.ep


def require_megatron() -> None:
    """Raises ConfigurationError where megatron-core is missing, before an import fails with a traceback."""
    # find_spec("megatron.core") itself raises where the parent package is missing.
    if any(importlib.util.find_spec(name) is None for name in ("megatron", "megatron.core")):
        raise ConfigurationError(
            "the trainer cannot start",
            why="megatron-core is not installed",
            remedy="Install it with: pip install 'optstream[megatron]'",
        )
