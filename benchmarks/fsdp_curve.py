"""Losses of a small Llama that learns Python's standard library byte by byte: stock FSDP2 twice, and with ours.

    torchrun --nproc-per-node 4 benchmarks/fsdp_curve.py --out results/fsdp-curve-4xh200.json
    torchrun --nproc-per-node 2 benchmarks/fsdp_curve.py --device cpu --steps 20

The three runs have the same weights and the same batches; two of stock differ by what GPUs do not reproduce. How far
ours is from either is shown beside how far these are from each other, in means over ten steps.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from fsdp_variants import Sharded
from llama import Shape, rotary_table
from provenance import gpu_provenance, provenance, write_table
from step_rig import NO_MULTICAST, show

from counterpoint.parallel.overlap import overlap

SHAPE = Shape(layers=8, hidden=512, ffn=1536, heads=8, kv_heads=4, vocabulary=256)
TOKENS, SEQUENCES = 512, 8  # of a rank's batch
COLUMNS = ("steps", "stock", "stock again", "overlap", "stock from stock", "overlap from stock")
MEAN_OF = 10


def text() -> torch.Tensor:
    """Sources of the standard library, one after the other, as bytes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    whole = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return torch.frombuffer(bytearray(whole), dtype=torch.uint8)


def losses(
    args: argparse.Namespace, device: torch.device, corpus: torch.Tensor, with_ours: Callable[[Any], Any]
) -> list[float]:
    """Mean over ranks, of every step of one run."""
    torch.manual_seed(dist.get_rank())
    sharded = Sharded(SHAPE, device, reduce_dtype=torch.float32, compiled=False, head_apart=False)
    model, seen = sharded.model, []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    table = rotary_table(TOKENS, SHAPE.head_dim, device).to(torch.bfloat16)
    with with_ours(model):
        for step in range(args.steps):
            state = torch.Generator().manual_seed(step * 1000 + dist.get_rank())
            starts = torch.randint(len(corpus) - TOKENS - 1, (SEQUENCES,), generator=state).tolist()
            rows = torch.stack([corpus[start : start + TOKENS + 1] for start in starts]).long().to(device)
            loss = model(rows[:, :-1], rows[:, 1:], table)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.detach())
        everyone = torch.stack(seen).float()
        dist.all_reduce(everyone)
    return [float(each) / dist.get_world_size() for each in everyone]


def rows(runs: list[list[float]]) -> list[tuple[str, ...]]:
    """Means over ten steps; the largest differences of such means so far."""
    means = [[fmean(run[at : at + MEAN_OF]) for at in range(0, len(run), MEAN_OF)] for run in runs]
    table, worst = [], [0.0, 0.0]
    for index, (first, second, ours) in enumerate(zip(*means, strict=True)):
        apart = abs(first - second), min(abs(ours - first), abs(ours - second))
        worst = [max(pair) for pair in zip(worst, apart, strict=True)]
        steps = f"{index * MEAN_OF + 1} to {min((index + 1) * MEAN_OF, len(runs[0]))}"
        table.append((steps, *(f"{each:.4f}" for each in (first, second, ours)), *(f"{each:.4f}" for each in worst)))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="where to keep the result")
    args = parser.parse_args()
    os.environ.update(NO_MULTICAST)
    device = torch.device("cpu")
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    corpus = text()

    def stock(model: Any) -> AbstractContextManager[object]:
        return nullcontext()

    runs = [losses(args, device, corpus, with_ours) for with_ours in (stock, stock, overlap)]
    table = rows(runs)
    if dist.get_rank() == 0:
        show([COLUMNS, *table])
        if args.out is not None:
            packages, size = ["torch", "triton", "cuda-bindings", "nvidia-nccl-cu13"], dist.get_world_size()
            facts = gpu_provenance(packages, world_size=size) if args.device == "cuda" else provenance(packages)
            write_table(args.out, COLUMNS, table, provenance=facts, corpus_bytes=len(corpus), losses=runs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
