"""Claim: three constants per GPU generation say what a GEMM of any shape takes, one what a streaming kernel does.

Times kernels of one GPU, fits the constants of `plan/efficiency.py` to every second GEMM, and compares the others:

    python benchmarks/kernel_efficiency.py                              # one GPU, a minute; results/
    python benchmarks/kernel_efficiency.py --from results/kernel-efficiency.json     # fit again what was measured
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import msgspec
from provenance import provenance, write_result
from rich.console import Console
from rich.table import Table

from counterpoint.errors import Unsupported
from counterpoint.plan.compute_cost import Machine, cost
from counterpoint.plan.efficiency import Efficiency, efficiency_of
from counterpoint.plan.gpus import GPUS, find_gpu
from counterpoint.plan.layers import Flash, Matmul, Operation, Traffic

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = ("kernel", "measured, µs", "predicted, µs", "error", "of peak", "fitted")
DEPTHS = (0, 32, 64, 96, 128, 192, 256, 384, 512)
EDGES = (0, 4, 8, 12, 16, 24, 32)
SHAPES = [  # layers of 8B, 70B and 405B after tp, thin and deep ones, and sizes around a wave
    (4096, 4096, 4096), (8192, 8192, 8192), (4096, 14336, 4096), (4096, 4096, 14336), (14336, 4096, 4096),
    (4096, 1024, 4096), (4096, 4096, 1024), (8192, 7168, 8192), (8192, 8192, 3584), (8192, 13312, 16384),
    (2048, 4096, 4096), (2048, 1024, 4096), (1024, 4096, 4096), (2048, 12288, 1536), (2048, 1536, 12288),
    (8192, 2304, 6144), (8192, 6144, 768), (8192, 3072, 6144), (16384, 2304, 2304), (16384, 9216, 2304),
    (4096, 4096, 256), (4096, 4096, 512), (4096, 512, 4096), (4096, 256, 4096), (512, 512, 8192),
    (4224, 4096, 4096), (4352, 4096, 4096), (2816, 1536, 8192), (2817, 1536, 8192), (4096, 128256, 4096),
]  # fmt: skip
Row = tuple[Operation, float]


def operations() -> list[Operation]:
    """Everything that is timed."""
    gemms = [Matmul(name=f"{m} x {n} x {k}", m=m, n=n, k=k) for m, n, k in SHAPES]
    flash = [
        Flash(name=f"flash {tokens}{' backward' if back else ''}", batch=32 * 8192 // tokens, queries=tokens,
              keys=tokens, width=128, causal=True, backward=back)
        for tokens in (1024, 2048, 4096, 8192) for back in (False, True)
    ]  # fmt: skip
    streams = [Traffic(name=f"add {mib} MiB", num_bytes=3.0 * mib * 2**20) for mib in (32, 64, 128, 256)]
    return [*gemms, *flash, *streams]


def fit_matmuls(rows: Sequence[Row], machine: Machine) -> Efficiency:
    """Depth and edge from their grids; `matmul` is then what makes the mean error zero."""
    best, found = math.inf, machine.efficiency
    for depth in DEPTHS:
        for edge in EDGES:
            trial = msgspec.structs.replace(machine.efficiency, matmul=1.0, depth=depth, edge=edge, launch_us=0.0)
            at = msgspec.structs.replace(machine, efficiency=trial)
            ratios = [math.log(cost(op, at).math_us / max(us - machine.efficiency.launch_us, 1e-3)) for op, us in rows]
            middle = fmean(ratios)
            spread = fmean((ratio - middle) ** 2 for ratio in ratios)
            if spread < best:
                best = spread
                found = msgspec.structs.replace(
                    machine.efficiency, matmul=min(math.exp(middle), 1.0), depth=depth, edge=edge
                )
    return found


def fit_memory(rows: Sequence[Row], machine: Machine) -> float:
    """Part of the data sheet's bandwidth, the median of streams."""
    launch = machine.efficiency.launch_us
    return median(op.num_bytes / (us - launch) / machine.memory for op, us in rows if isinstance(op, Traffic))


def fitted_rows(rows: Sequence[Row]) -> list[Row]:
    """Every second GEMM, and the streams."""
    gemms = [row for row in rows if isinstance(row[0], Matmul)]
    return [*gemms[::2], *(row for row in rows if isinstance(row[0], Traffic))]


def fit(rows: Sequence[Row], machine: Machine) -> Efficiency:
    kept = fitted_rows(rows)
    matmuls = fit_matmuls([row for row in kept if isinstance(row[0], Matmul)], machine)
    return msgspec.structs.replace(matmuls, memory=fit_memory(kept, machine))


def measure() -> tuple[str, list[Row]]:
    """The GPU's name, and µs of every operation: median of 20, queued one behind the other, random data."""
    import torch

    if not torch.cuda.is_available():
        raise Unsupported("no GPU: kernels are timed on one; give --from FILE to fit what was measured")
    rows = []
    for operation in operations():
        run = kernel(operation)
        for _ in range(3):
            run()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(21)]
        torch.cuda._sleep(20_000_000)  # launches are queued behind it: the host's time is not measured
        marks[0].record()
        for mark in marks[1:]:
            run()
            mark.record()
        torch.cuda.synchronize()
        rows.append((operation, 1e3 * median(a.elapsed_time(b) for a, b in pairwise(marks))))
    return torch.cuda.get_device_name(), rows


def kernel(operation: Operation) -> Callable[[], Any]:
    """Something to call that launches it."""
    import torch
    import torch.nn.functional as F

    def random(*shape: int) -> Any:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    if isinstance(operation, Matmul):
        x, w = random(operation.m, operation.k), random(operation.n, operation.k)
        out = random(operation.m, operation.n)
        return lambda: torch.mm(x, w.t(), out=out)
    if isinstance(operation, Traffic):
        size = int(operation.num_bytes / 6)
        a, b, c = random(size), random(size), random(size)
        return lambda: torch.add(a, b, out=c)
    q, k, v = (random(operation.batch // 32, 32, operation.queries, operation.width) for _ in range(3))
    if not operation.backward:
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=operation.causal)
    leaves = [each.requires_grad_() for each in (q, k, v)]
    y = F.scaled_dot_product_attention(q, k, v, is_causal=operation.causal)
    dy = torch.randn_like(y)
    return lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True)


def table_of(rows: Iterable[Row], kept: Iterable[Row], machine: Machine) -> list[list[str]]:
    names = {operation.name for operation, _ in kept}
    lines = []
    for operation, us in rows:
        found = cost(operation, machine)
        flops = 0.0 if isinstance(operation, Traffic) else operation.flops
        line = [operation.name, f"{us:.1f}", f"{found.us:.1f}", f"{found.us / us - 1:+.1%}",
                f"{flops / us / machine.peak:.0%}", "yes" if operation.name in names else ""]  # fmt: skip
        lines.append(line)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="source", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "kernel-efficiency.json")
    args = parser.parse_args()
    if args.source:
        record = json.loads(args.source.read_text())
        name, us = record["gpu"], record["us"]
        rows = [(operation, us[operation.name]) for operation in operations() if operation.name in us]
    else:
        name, rows = measure()
    gpu = find_gpu(next((known for known in GPUS if known in name), name))
    machine = Machine.of(gpu, efficiency=efficiency_of(gpu.name))
    efficiency = fit(rows, machine)
    lines = table_of(rows, fitted_rows(rows), msgspec.structs.replace(machine, efficiency=efficiency))
    table = Table(*COLUMNS, title=f"{name}, constants of efficiency.py fitted again")
    for line in lines:
        table.add_row(*line)
    Console(width=110).print(table)
    constants = {key: getattr(efficiency, key) for key in ("matmul", "depth", "edge", "memory")}
    known = {key: getattr(machine.efficiency, key) for key in constants}
    print(f"fitted {constants}; efficiency.py has {known}, of the mean GPU")
    result = {"provenance": provenance(("counterpoint", "torch")), "gpu": name, "fitted": constants,
              "us": {operation.name: us for operation, us in rows}}  # fmt: skip
    write_result(args.out, result, COLUMNS, lines)


if __name__ == "__main__":
    main()
