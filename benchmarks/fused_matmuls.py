"""Claim: matmuls with their collective by `torch.ops.counterpoint` are never slower than by torch's fused operations.

    torchrun --nproc-per-node 2 benchmarks/fused_matmuls.py --out results/fused-matmuls-2xh200.json
    torchrun --nproc-per-node 2 benchmarks/fused_matmuls.py --device cpu --shapes 256x64x64 --rounds 2

`torch` is torch's collective and one matmul, `fused` are `torch.ops.symm_mem.fused_all_gather_matmul` and
`fused_matmul_reduce_scatter` (GPUs only), `ours` is what `torch.ops.counterpoint` chooses. Shapes are M x N x K: M rows
of all ranks, N and K of each rank, exchanged for the scatter. Each first result is compared with `torch`'s, and ends
the program where it differs by more than 1 % of its norm. Variants take turns in rounds of `--steps` calls.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory  # noqa: F401 - registers torch's fused operations
from step_rig import Step, finish, formatted, in_turns, start

import counterpoint.parallel.tensor.operations  # noqa: F401 - registers torch.ops.counterpoint
from counterpoint.collectives.host.group import torch_function

SHAPES = ("8192x7168x8192", "8192x7168x4096", "8192x5120x8192", "8192x28672x8192", "4096x7168x8192", "8192x1280x8192")
FORMATS = {"what": "", "variant": "", "ms": ".3f", "times torch": ".2f"}


def gathered(m: int, n: int, k: int, device: torch.device, dtype: torch.dtype) -> dict[str, Step]:
    """The variants of an all_gather and a matmul."""
    rows, weight = operands(m // dist.get_world_size(), n, k, device, dtype)
    whole, name = rows.new_empty(m, k), dist.group.WORLD.group_name  # type: ignore[union-attr]

    def by_torch() -> torch.Tensor:
        torch_function("all_gather")(whole, rows)
        return whole @ weight

    ours, fused = torch.ops.counterpoint.all_gather_matmul, torch.ops.symm_mem.fused_all_gather_matmul
    return {
        "torch": by_torch,
        "fused": lambda: fused(rows, [weight], 0, name, return_A=False)[1][0],
        "ours": lambda: ours(rows, [weight], 0, name, return_gathered=False)[1][0],
    }


def scattered(m: int, n: int, k: int, device: torch.device, dtype: torch.dtype) -> dict[str, Step]:
    """The variants of a matmul and a reduce_scatter."""
    rows, weight = operands(m, n, k, device, dtype)
    own, name = rows.new_empty(m // dist.get_world_size(), n), dist.group.WORLD.group_name  # type: ignore[union-attr]

    def by_torch() -> torch.Tensor:
        torch_function("reduce_scatter")(own, rows @ weight)
        return own

    ours, fused = torch.ops.counterpoint.matmul_reduce_scatter, torch.ops.symm_mem.fused_matmul_reduce_scatter
    return {
        "torch": by_torch,
        "fused": lambda: fused(rows, weight, "sum", 0, name),
        "ours": lambda: ours(rows, weight, "sum", 0, name),
    }


def operands(m: int, n: int, k: int, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Random rows of this rank, and the transposed view that nn.Linear multiplies by."""
    torch.manual_seed(dist.get_rank())
    rows = torch.randn(m, k, device=device, dtype=dtype)
    return rows, torch.randn(n, k, device=device, dtype=dtype).div_(math.sqrt(k)).t()


@torch.no_grad()
def main() -> None:
    """Compare, measure, and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), help="MxNxK")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20, help="calls of each variant in a round")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = start(args.device)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    rows: list[dict[str, Any]] = []
    for shape in args.shapes:
        m, n, k = map(int, shape.split("x"))
        for what, steps in (
            (f"all_gather_matmul {m}x{n}x{k}", gathered(m, n, k, device, dtype)),
            (f"matmul_reduce_scatter {m}x{k}x{n}", scattered(m, k, n, device, dtype)),
        ):
            if args.device == "cpu":
                del steps["fused"]
            right = steps["torch"]().clone()
            for variant, step in steps.items():
                error = float((step() - right).norm() / right.norm())
                if not error < 0.01:
                    raise SystemExit(f"{what} by {variant} differs from torch's: relative error {error:.1e}")
            times = in_turns(steps, device, rounds=args.rounds, steps_each=args.steps)
            rows += [
                {"what": what, "variant": variant, "ms": ms, "times torch": times["torch"][0] / ms}
                for variant, (ms, _) in times.items()
            ]
    finish(args, device, rows, [list(FORMATS), *(formatted(row, FORMATS) for row in rows)])


if __name__ == "__main__":
    main()
