"""Train a small Llama with tensor and sequence parallelism, with or without matmuls that overlap their communication.

It is train_fsdp.py with another way to spread the model, by torch's own `parallelize_module`; all ranks read one text.
With `--shards 2` half of the ranks do, and FSDP2 shards over both halves what tensor parallelism has left.

    torchrun --nproc-per-node 2 examples/train_tp.py --device cpu
    torchrun --nproc-per-node 2 examples/train_tp.py --device cpu --overlap --trace traces/overlap
    torchrun --nproc-per-node 8 examples/train_tp.py --overlap --tokens 8192
    torchrun --nproc-per-node 8 examples/train_tp.py --overlap --shards 2
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from llama import Llama, Shape
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from train_fsdp import SHAPES, arguments, drawn, main, train

OURS = SHAPES | {"tiny": replace(SHAPES["tiny"], heads=8, kv_heads=8)}  # for up to 8 ranks
ROWS = Shard(1)  # each rank has a part of the sequence
MODEL = {
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=ROWS),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=ROWS, output_layouts=Replicate()),
}
LAYER = {
    "attention_norm": SequenceParallel(),
    "attention": PrepareModuleInput(input_layouts=(ROWS, None), desired_input_layouts=(Replicate(), None)),
    "attention.query": ColwiseParallel(),
    "attention.key": ColwiseParallel(),
    "attention.value": ColwiseParallel(),
    "attention.output": RowwiseParallel(output_layouts=ROWS),
    "ffn_norm": SequenceParallel(),
    "ffn": PrepareModuleInput(input_layouts=ROWS, desired_input_layouts=Replicate()),
    "ffn.gate": ColwiseParallel(),
    "ffn.up": ColwiseParallel(),
    "ffn.down": RowwiseParallel(output_layouts=ROWS),
}


def parallel_model(shape: Shape, device: torch.device, *, shards: int = 1) -> Llama:
    """Build the model on the meta device, spread it over all ranks, then draw the weights shard by shard.

    With several `shards` it is spread over as many times fewer ranks, and each of these parts is sharded by FSDP2.
    """
    with torch.device("meta"):
        model = Llama(shape)
    if device.type == "cuda":
        model.to(torch.bfloat16)
    axes = init_device_mesh(device.type, (shards, dist.get_world_size() // shards), mesh_dim_names=("shard", "tensor"))
    parallelize_module(model, axes["tensor"], MODEL, src_data_rank=None)
    for layer in model.layers:
        parallelize_module(layer, axes["tensor"], LAYER, src_data_rank=None)
        if shards > 1:
            fully_shard(layer, mesh=axes["shard"])
    if shards > 1:
        fully_shard(model, mesh=axes["shard"])
    return drawn(model, device)


def training(args: argparse.Namespace, device: torch.device) -> None:
    """Train; `train` has the one line, `counterpoint.overlap(model)`."""
    if dist.get_world_size() % args.shards:
        raise SystemExit(f"--shards {args.shards}: it has to divide {dist.get_world_size()} ranks")
    train(args, device, partial(parallel_model, shards=args.shards), readers=args.shards)


def arguments_of_tp() -> argparse.Namespace:
    """Read the command line."""
    return arguments(__doc__, OURS, extend=_own_arguments)


def _own_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shards", type=int, default=1, help="of FSDP2, over as many groups of tensor-parallel ranks")


if __name__ == "__main__":
    main(arguments_of_tp(), training)
