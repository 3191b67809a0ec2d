"""What the host needs to issue a tensor-parallel matmul, in µs and in launches of a matmul by torch.

    torchrun --nproc-per-node 2 benchmarks/tensor_host.py --out results/tensor-host.json
    torchrun --nproc-per-node 2 benchmarks/tensor_host.py --device cpu --rows 64 --size 32

Calls whose matmuls are short are issued behind one another; what one takes is the median over rounds of `--calls`, each
begun when all GPUs are idle, on the slowest rank. `torch`: its own collective and one matmul, through the same
operation. `layer`: a linear layer in eager mode, with derivatives to come, so without the dispatcher of
`torch.ops`. On CPUs the collective itself is part of it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from step_rig import finish, formatted, start, synchronize

from counterpoint.collectives.host.group import gather_values
from counterpoint.parallel.options import TensorChoice, TensorOptions
from counterpoint.parallel.tensor import operations  # noqa: F401 - registers them
from counterpoint.parallel.tensor.group import tensor_group
from counterpoint.parallel.tensor.linear import all_gather_linear, linear_reduce_scatter

MECHANISMS: tuple[TensorChoice, ...] = ("torch", "serial", "cuts")
COLUMNS = ("call", "mechanism", "µs", "launches")
FORMATS = {"call": "", "mechanism": "", "us": ".0f", "launches": ".1f"}


def calls(args: argparse.Namespace, device: torch.device, name: str) -> dict[str, Callable[[], Any]]:
    """The calls, by name; the last one is a matmul alone."""
    ops = torch.ops.counterpoint
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(dist.get_rank())
    rows = torch.randn(args.rows, args.size, device=device, dtype=dtype)
    shard = rows[: args.rows // dist.get_world_size()].clone()
    weight, out = torch.randn(args.size, args.size, device=device, dtype=dtype), torch.empty_like(rows)
    b, parameter = weight.t(), weight.clone().requires_grad_()
    return {
        "all_gather_matmul": lambda: ops.all_gather_matmul(shard, [b], 0, name, return_gathered=False),
        "all_gather_matmul, 3 weights": lambda: ops.all_gather_matmul(shard, [b] * 3, 0, name, return_gathered=False),
        "matmul_reduce_scatter": lambda: ops.matmul_reduce_scatter(rows, b, "sum", 0, name),
        "matmul_all_reduce": lambda: ops.matmul_all_reduce(rows, b, "sum", name),
        "layer, all_gather": lambda: all_gather_linear(shard, [parameter], [None], 0, name),
        "layer, reduce_scatter": lambda: linear_reduce_scatter(rows, parameter, None, 0, name),
        "mm": lambda: torch.mm(rows, b, out=out),
    }


def host_us(call: Callable[[], Any], args: argparse.Namespace, device: torch.device) -> float:
    """What a call takes the slowest rank's host."""
    times = []
    for turn in range(args.rounds + 1):
        synchronize(device)
        began = time.perf_counter()
        for _ in range(args.calls):
            call()
        if turn:
            times.append(1e6 * (time.perf_counter() - began) / args.calls)
    slowest: float = max(gather_values(dist.group.WORLD, median(times)))
    return slowest


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096, help="of all ranks")
    parser.add_argument("--size", type=int, default=1024, help="n and k")
    parser.add_argument("--calls", type=int, default=20, help="of a round")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="where to keep the result")
    args = parser.parse_args()
    device = start(args.device)
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    rows: list[dict[str, Any]] = []
    for mechanism in MECHANISMS:
        tensor_group(name, TensorOptions(mechanism=mechanism))
        found = {call: host_us(run, args, device) for call, run in calls(args, device, name).items()}
        rows += [
            {"call": call, "mechanism": mechanism, "us": us, "launches": us / found["mm"]} for call, us in found.items()
        ]
    tensor_group(name).close()
    finish(args, device, rows, [list(COLUMNS), *(formatted(row, FORMATS) for row in rows)])


if __name__ == "__main__":
    main()
