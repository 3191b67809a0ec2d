"""Train a small Llama with DistributedDataParallel, with or without gradient buckets that overlap.

It is train_fsdp.py with the whole model on every rank; gradients are averaged in buckets.

    torchrun --nproc-per-node 2 examples/train_ddp.py --device cpu
    torchrun --nproc-per-node 2 examples/train_ddp.py --device cpu --overlap --trace traces/overlap
    torchrun --nproc-per-node 8 examples/train_ddp.py --overlap
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from llama import Llama, Shape
from torch.nn.parallel import DistributedDataParallel
from train_fsdp import SHAPES, arguments, main, train

OURS = {"tiny": SHAPES["tiny"], "1b": Shape(layers=16, hidden=2048, ffn=8192, vocabulary=256)}
BUCKET_MB = {"cuda": 100.0, "cpu": 0.25}


def replicated_model(shape: Shape, device: torch.device) -> Any:
    """Build the model on every rank, with the weights of rank 0."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Llama(shape)
    if device.type == "cuda":
        model.to(torch.bfloat16)
    return DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB[device.type], gradient_as_bucket_view=True)


def training(args: argparse.Namespace, device: torch.device) -> None:
    """Train; `train` has the one line, `counterpoint.overlap(model)`."""
    train(args, device, replicated_model)


if __name__ == "__main__":
    main(arguments(__doc__, OURS, on_gpu="1b"), training)
