"""Record FSDP2 training of a `transformers` Llama, as it is and after `counterpoint.overlap(model)`.

The model is somebody else's and knows nothing of counterpoint; shapes are options, weights are random.

    torchrun --nproc-per-node 2 examples/record_transformers.py --out traces/llama-8b
    torchrun --nproc-per-node 2 examples/record_transformers.py --out traces/llama-3b --hidden 3072 --ffn 8192 --compile

`stock` and `overlap` of the folder are recorded one after the other in one process.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import recording
import torch
from recording import Job
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import counterpoint

HEAD = 128  # elements of an attention head


def sharded_model(args: argparse.Namespace, job: Job) -> LlamaForCausalLM:
    """The model on the device, each layer and the whole sharded over all ranks."""
    config = LlamaConfig(
        hidden_size=args.hidden,
        intermediate_size=args.ffn,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // HEAD,
        num_key_value_heads=max(args.hidden // HEAD // 4, 1),
        vocab_size=args.vocabulary,
        max_position_embeddings=args.tokens,
        use_cache=False,
    )
    with job.device:
        model = LlamaForCausalLM(config)
    precision = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=getattr(torch, args.reduce_dtype)
    )  # fmt: skip
    for layer in model.model.layers:
        if args.compile:
            layer.compile()
        fully_shard(layer, mp_policy=precision)
    fully_shard(model, mp_policy=precision)
    return model


def main() -> None:
    """Parse, join the other ranks, record twice."""
    parser = recording.parser(__doc__)
    parser.set_defaults(warmup=10)  # `overlap` needs some steps until it replays what it has learnt
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--ffn", type=int, default=14336)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--tokens", type=int, default=4096, help="per rank and step")
    parser.add_argument("--reduce-dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--compile", action="store_true", help="each layer by torch.compile")
    args = parser.parse_args()
    with recording.joined(args) as job:
        train(args, job)


def train(args: argparse.Namespace, job: Job) -> None:
    """Train on random tokens, and record."""
    model = sharded_model(args, job)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    losses: list[float] = []

    def step(index: int) -> None:
        text = torch.randint(args.vocabulary, (1, args.tokens)).to(job.device, non_blocking=True)
        loss = model(input_ids=text, labels=text).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    recording.record(step, replace(job, out=args.out / "stock"), planted=None)
    counterpoint.overlap(model)
    recording.record(step, replace(job, out=args.out / "overlap"), planted=None)
    if job.rank == 0:
        print("losses:", [round(loss, 3) for loss in losses], flush=True)


if __name__ == "__main__":
    main()
