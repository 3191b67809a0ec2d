"""Train a small Llama with tensor and sequence parallelism, with or without matmuls that overlap their communication.

It is train_fsdp.py with another way to spread the model, by torch's own `parallelize_module`; all ranks read one text.

    torchrun --nproc-per-node 2 examples/train_tp.py --device cpu
    torchrun --nproc-per-node 2 examples/train_tp.py --device cpu --overlap --trace traces/overlap
    torchrun --nproc-per-node 8 examples/train_tp.py --overlap --tokens 8192
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from llama import Llama, Shape
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from train_fsdp import arguments, drawn, main, train

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


def parallel_model(shape: Shape, device: torch.device) -> Llama:
    """Build the model on the meta device, spread it over all ranks, then draw the weights shard by shard."""
    with torch.device("meta"):
        model = Llama(shape)
    if device.type == "cuda":
        model.to(torch.bfloat16)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    parallelize_module(model, mesh, MODEL, src_data_rank=None)
    for layer in model.layers:
        parallelize_module(layer, mesh, LAYER, src_data_rank=None)
    return drawn(model, device)


def training(args: argparse.Namespace, device: torch.device) -> None:
    """Train; `train` has the one line, `counterpoint.overlap(model)`."""
    train(args, device, parallel_model, same_text=True)


if __name__ == "__main__":
    main(arguments(__doc__), training)
