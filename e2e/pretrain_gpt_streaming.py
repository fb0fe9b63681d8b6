"""A pretraining script in the manner of Megatron-LM's pretrain_gpt.py, through Megatron's own entry point.

    torchrun --nproc-per-node 8 pretrain_gpt_streaming.py MEGATRON-FLAGS... \\
        --use-distributed-optimizer --stream-optimizer-state-to-disk --offload-train-disk-dir /nvme0

What streaming adds to such a script are the lines that are marked. Without a GPU the same script runs under
`python -m optstream.harness.simulated_training`.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.training import get_args, get_tokenizer, pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args

from optstream.core.config import add_arguments
from optstream.core.megatron_training import streaming_pretraining

LOSSES: list[float] = []


def extra_args(parser):
    parser.add_argument("--run-summary", metavar="FOLDER", help="losses and streamed steps, a file a rank")
    return add_arguments(parser)  # streaming


def model_provider(pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
    args = get_args()
    return GPTModel(
        config=config or core_transformer_config_from_args(args),
        transformer_layer_spec=get_gpt_layer_local_spec(num_experts=args.num_experts),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        vp_stage=vp_stage,
    )


def datasets_provider(num_samples, vp_stage=None):
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        split=args.split or "98,1,1",
        tokenizer=get_tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    return BlendedMegatronDatasetBuilder(MockGPTDataset, num_samples, lambda: True, config).build()


datasets_provider.is_distributed = True  # every rank reads for itself


def forward_step(data_iterator, model):
    batch = {name: value.cuda(non_blocking=True) for name, value in next(data_iterator).items()}
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return losses, partial(mean_loss, batch["loss_mask"])


def mean_loss(mask, losses):
    total, tokens = (losses.float() * mask).sum(), mask.sum().int()
    LOSSES.append((total / tokens).item())
    return total, tokens, {"lm loss": torch.cat([total.detach().view(1), tokens.view(1).float()])}


def write_summary(path: Path, stores: list) -> None:
    """What was trained and what was streamed; bytes are those of the files as they lie now."""
    for store in stores:
        store.streamer.engine.drain()
    records = [record for store in stores for record in store.records]
    roots = [store.streamer.store.backend.root for store in stores]
    summary = {
        "losses": [loss.hex() for loss in LOSSES],
        "streamed_steps": [record.step for record in records],
        "written_bytes": [record.written_bytes for record in records],
        "roots": roots,
        "file_bytes": sum(
            path.stat().st_size for root in roots for path in Path(root).rglob("*.bin") if path.is_file()
        ),
    }
    path.write_text(json.dumps(summary))


def main() -> None:
    args = parse_and_validate_args(extra_args, args_defaults={"tokenizer_type": "NullTokenizer"})
    with streaming_pretraining(args) as stores:  # streaming
        pretrain(
            pretrain_cfg_container_from_args(args),
            datasets_provider,
            ModelType.encoder_or_decoder,
            forward_step,
            model_provider=model_provider,
        )
        if args.run_summary:
            write_summary(Path(args.run_summary, f"rank{args.rank}.json"), stores)


if __name__ == "__main__":
    main()
