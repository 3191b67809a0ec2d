"""What the blocks of the pages take for granted: small models, their meshes and one training step, on CPUs.

A page names them in a comment that its readers do not see (tests/process/test_docs_run.py).
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel
from torch.distributed.tensor.parallel.style import ParallelStyle

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from llama import FeedForward, Llama, Shape, rotary_table

SHAPE = Shape(layers=2, hidden=32, ffn=64, heads=4, kv_heads=2, vocabulary=64)
TOKENS = 16
FFN_PLAN: dict[str, ParallelStyle] = {
    "": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    "gate": ColwiseParallel(),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(output_layouts=Shard(1)),
}


def start(backend: str = "gloo") -> None:
    if not dist.is_initialized():
        dist.init_process_group(backend)


def llama() -> Llama:
    """Return a small Llama with equal weights on all ranks."""
    torch.manual_seed(0)
    return Llama(SHAPE)


def feed_forward() -> FeedForward:
    """Return one feed-forward block with equal weights on all ranks."""
    torch.manual_seed(0)
    return FeedForward(SHAPE)


def rows() -> Tensor:
    """Return this rank's rows for a feed-forward block, cut along the sequence."""
    return torch.randn(1, TOKENS // dist.get_world_size(), SHAPE.hidden, requires_grad=True)


def train(model: nn.Module, steps: int = 2) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        tokens = torch.randint(SHAPE.vocabulary, (1, TOKENS))
        model(tokens, tokens, rotary_table(TOKENS, SHAPE.head_dim, torch.device("cpu"))).backward()
        optimizer.step()
        optimizer.zero_grad()
