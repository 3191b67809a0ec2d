"""Record training of a mixture of experts, whose tokens go to the ranks of their experts, healthy or with a fault.

It is the job of train_moe.py. The fault of its own is `hot_experts`: tokens of all ranks prefer those of one rank, so
that the others wait for it.

    torchrun --nproc-per-node 8 examples/record_moe.py --out traces/moe-healthy
    torchrun --nproc-per-node 8 examples/record_moe.py --out traces/moe-hot --fault hot_experts --fault-rank 5
    torchrun --nproc-per-node 8 examples/record_moe.py --out traces/moe-hot-gather --fault hot_experts --overlap
    torchrun --nproc-per-node 2 examples/record_moe.py --out traces/moe-gloo --device cpu --shape tiny --tokens 128
"""

from __future__ import annotations

import argparse

import faults
import recording
import torch
from faults import Fault
from llama import rotary_table
from moe import MixtureOfExperts
from recording import Job
from train_moe import SHAPES, expert_parallel_model


def main() -> None:
    """Parse, join the other ranks, train."""
    parser = recording.parser(__doc__)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="qwen3")
    parser.add_argument("--tokens", type=int, default=8192, help="per rank and step")
    parser.add_argument("--overlap", action="store_true", help="tokens travel by counterpoint, in two parts")
    parser.add_argument("--mechanism", default="auto", help="with --overlap")
    faults.add_arguments(parser, (*(kind for kind in faults.KINDS if kind != "uneven_batch"), *faults.OF_EXPERTS))
    args = parser.parse_args()
    with recording.joined(args) as job:
        train(args, job)


def train(args: argparse.Namespace, job: Job) -> None:
    """Build the job with its fault, run and record it."""
    fault = Fault.from_arguments(args, rank=job.rank, world_size=job.world_size, warmup=job.warmup, steps=job.steps)
    args.ep, args.parts = job.world_size, 2
    shape, tokens = SHAPES[args.shape], args.tokens
    model = expert_parallel_model(args, shape, job.device)
    fault.plant(model.layers)
    fault.plant_in_routers([part.router for part in model.modules() if isinstance(part, MixtureOfExperts)], args.ep)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    table = rotary_table(tokens, shape.head_dim, job.device)

    def step(index: int) -> None:
        fault.step = index
        fault.in_input()
        text = torch.randint(shape.vocabulary, (1, tokens + 1)).to(job.device)
        model(text[:, :-1], text[:, 1:], table).backward()
        optimizer.step()
        optimizer.zero_grad()

    with fault.neighbour(job.device):
        recording.record(step, job, planted=fault.describe())


if __name__ == "__main__":
    main()
