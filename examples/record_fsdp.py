"""Record FSDP2 training of a Llama-3-8B-shaped model, healthy or with a planted fault.

The job that most people run: sharded parameters in float32, gathered in bfloat16 one layer ahead, gradients scattered
while the backward pass goes on, a fused AdamW, batches from a DataLoader, the loss read once a step. One rank can be
given a fault (faults.py), so that a diagnosis of the traces has a known answer:

    torchrun --nproc-per-node 8 examples/record_fsdp.py --out traces/fsdp-healthy
    torchrun --nproc-per-node 8 examples/record_fsdp.py --out traces/fsdp-host-stall --fault host_stall --fault-rank 5
    torchrun --nproc-per-node 2 examples/record_fsdp.py --out traces/gloo --device cpu --tiny

`--overlap` records the same training twice in one process, into `stock` and `overlap` of the folder: first as it is,
then after `counterpoint.overlap(model)`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace

import faults
import recording
import torch
from faults import Fault
from llama import Llama, Shape, rotary_table
from recording import Job
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, IterableDataset

TINY = Shape(layers=4, hidden=128, ffn=256, heads=4, kv_heads=2, vocabulary=512)


class RandomTokens(IterableDataset[tuple[Tensor, Tensor]]):
    """An endless input pipeline: token ids and labels, one sequence a batch."""

    def __init__(self, tokens: int, vocabulary: int, fault: Fault) -> None:
        self.tokens = tokens
        self.vocabulary = vocabulary
        self.fault = fault

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            self.fault.in_input()
            text = torch.randint(self.vocabulary, (1, self.tokens + 1))
            yield text[:, :-1], text[:, 1:]


def sharded_model(shape: Shape, job: Job, *, reduce_dtype: torch.dtype) -> Llama:
    """The model, each layer and the whole sharded over all ranks; weights drawn shard by shard."""
    with torch.device("meta"):
        model = Llama(shape)
    mesh = init_device_mesh(job.device.type, (job.world_size,))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    model.to_empty(device=job.device)
    with torch.no_grad():
        for parameter in model.parameters():
            assert isinstance(parameter, DTensor)
            shard = parameter.to_local()
            shard.fill_(1.0) if parameter.dim() == 1 else shard.normal_(std=0.02)
    return model


def main() -> None:
    """Parse, join the other ranks, train."""
    parser = recording.parser(__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096, help="per rank and step")
    parser.add_argument("--vocabulary", type=int, default=Shape.vocabulary)
    parser.add_argument("--reduce-dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--overlap", action="store_true", help="record stock, then counterpoint.overlap(model)")
    parser.add_argument("--tiny", action="store_true", help="a very small model and 128 tokens, for CPUs")
    faults.add_arguments(parser)
    args = parser.parse_args()
    with recording.joined(args) as job:
        train(args, job)


def train(args: argparse.Namespace, job: Job) -> None:
    """Build the job with its fault, run and record it."""
    fault = Fault.from_arguments(args, rank=job.rank, world_size=job.world_size, warmup=job.warmup, steps=job.steps)
    shape = TINY if args.tiny else Shape(layers=args.layers, vocabulary=args.vocabulary)
    tokens = fault.tokens(128 if args.tiny else args.tokens, multiple=64)
    model = sharded_model(shape, job, reduce_dtype=getattr(torch, args.reduce_dtype))
    fault.plant(model.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    table = rotary_table(tokens, shape.head_dim, job.device)
    batches = iter(DataLoader(RandomTokens(tokens, shape.vocabulary, fault), batch_size=None, num_workers=0))
    losses: list[float] = []

    def step(index: int) -> None:
        fault.step = index
        text, labels = (part.to(job.device) for part in next(batches))
        loss = model(text, labels, table)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # waits for the GPU, as a loop that logs every step does

    with fault.neighbour(job.device):
        if args.overlap:
            import counterpoint  # without --overlap the recorder needs nothing but torch

            recording.record(step, replace(job, out=job.out / "stock"), planted=fault.describe())
            counterpoint.overlap(model)
            recording.record(step, replace(job, out=job.out / "overlap"), planted=fault.describe())
        else:
            recording.record(step, job, planted=fault.describe())
    if job.rank == 0:
        print("losses:", [round(loss, 3) for loss in losses], flush=True)


if __name__ == "__main__":
    main()
