"""Claim: four constants per GPU generation say what a GEMM of any shape takes, one what a streaming kernel does.

Times kernels of one GPU, compares them with the constants of `machine/profile.py` as they are, fits those again
to every second GEMM, and compares what was left out:

    python benchmarks/kernel_efficiency.py                              # one GPU, a minute; results/
    python benchmarks/kernel_efficiency.py --from results/kernel-efficiency.json     # fit again what was measured
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean, median
from typing import Any

import msgspec
from provenance import provenance, read_result, write_result
from tables import print_table

from counterpoint.errors import Misconfigured, Unsupported
from counterpoint.machine.profile import Efficiency
from counterpoint.plan.compute.operations import FlashAttentionOp, MatmulOp, MemoryBoundOp, Operation
from counterpoint.plan.compute.roofline import GpuRates, cost
from counterpoint.plan.job.cluster import GPUS, find_gpu

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = ("kernel", "measured, µs", "of peak", "profile, µs", "error", "fitted, µs", "error", "fitted to")
DEPTHS = (0, 64, 128, 192, 256, 320, 384, 512)
EDGES = (0, 4, 8, 12, 16, 24)
LOADS = (0, 40, 56, 72, 80, 88, 96, 112)
ROUNDS, RUNS = 7, 5
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
    gemms = [MatmulOp(name=f"{m} x {n} x {k}", m=m, n=n, k=k) for m, n, k in SHAPES]
    flash = [
        FlashAttentionOp(name=f"flash {tokens}{' backward' if back else ''}", batch=32 * 8192 // tokens, queries=tokens,
              keys=tokens, width=128, causal=True, backward=back)
        for tokens in (1024, 2048, 4096, 8192) for back in (False, True)
    ]  # fmt: skip
    streams = [MemoryBoundOp(name=f"add {mib} MiB", num_bytes=3.0 * mib * 2**20) for mib in (32, 64, 128, 256)]
    return [*gemms, *flash, *streams]


def fit_matmuls(rows: Sequence[Row], rates: GpuRates) -> Efficiency:
    """Depth, edge and load from their grids; `matmul` then makes the median error zero.

    Deviations count as they are, not squared: a few kernels that ran at other clocks do not move the others. Whatever
    would need more than the data sheet's peak is left out.

    Raises:
        Misconfigured: every choice needs more than the peak; the times are of another GPU or precision.
    """
    best, found = math.inf, None
    launch_us = rates.efficiency.launch_us
    for depth, edge, load in product(DEPTHS, EDGES, LOADS):
        trial = msgspec.structs.replace(rates.efficiency, matmul=1.0, depth=depth, edge=edge, load=load)
        at = msgspec.structs.replace(rates, efficiency=trial)
        ratios = [math.log(cost(op, at).math_us / max(us - launch_us, 1e-3)) for op, us in rows]
        middle = median(ratios)
        spread = fmean(abs(ratio - middle) for ratio in ratios)
        if middle <= 0 and spread < best:
            best, found = spread, msgspec.structs.replace(trial, matmul=math.exp(middle))
    if found is None:
        raise Misconfigured(f"GEMMs faster than the peak of {rates.gpu}: give times of that GPU, in bf16")
    return found


def fit_memory(rows: Sequence[Row], rates: GpuRates) -> float:
    """Part of the data sheet's bandwidth, the median of streams."""
    launch = rates.efficiency.launch_us
    return median(op.num_bytes / (us - launch) / rates.memory for op, us in rows if isinstance(op, MemoryBoundOp))


def fitted_rows(rows: Sequence[Row]) -> list[Row]:
    """Every second GEMM, and the streams."""
    gemms = [row for row in rows if isinstance(row[0], MatmulOp)]
    return [*gemms[::2], *(row for row in rows if isinstance(row[0], MemoryBoundOp))]


def fit(rows: Sequence[Row], rates: GpuRates) -> Efficiency:
    kept = fitted_rows(rows)
    matmuls = fit_matmuls([row for row in kept if isinstance(row[0], MatmulOp)], rates)
    return msgspec.structs.replace(matmuls, memory=fit_memory(kept, rates))


def measure() -> tuple[str, list[Row]]:
    """The GPU's name, and µs of every operation: median over rounds, in another order each, of random data.

    A kernel's clocks depend on what ran before it: in one round after the other, every kernel has other neighbours.
    """
    import torch

    if not torch.cuda.is_available():
        raise Unsupported("no GPU: kernels are timed on one; give --from FILE to fit what was measured")
    runs = [(operation, kernel(operation)) for operation in operations()]
    times: dict[str, list[float]] = {operation.name: [] for operation, _ in runs}
    for turn in range(ROUNDS + 1):
        for operation, run in random.Random(turn).sample(runs, len(runs)):
            each = queued_us([run] * RUNS)
            times[operation.name] += each if turn else []  # the first round is to warm up
    return torch.cuda.get_device_name(), [(operation, median(times[operation.name])) for operation, _ in runs]


def queued_us(runs: Sequence[Callable[[], Any]]) -> list[float]:
    """Of each, queued one behind the other."""
    import torch

    marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(runs) + 1)]
    torch.cuda._sleep(20_000_000)  # launches are queued behind it: the host's time is not measured
    marks[0].record()
    for run, mark in zip(runs, marks[1:], strict=True):
        run()
        mark.record()
    torch.cuda.synchronize()
    return [1e3 * a.elapsed_time(b) for a, b in pairwise(marks)]


def kernel(operation: Operation) -> Callable[[], Any]:
    """Something to call that launches it."""
    import torch
    import torch.nn.functional as F

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    if isinstance(operation, MatmulOp):
        x, w = normal(operation.m, operation.k), normal(operation.n, operation.k)
        out = normal(operation.m, operation.n)
        return lambda: torch.mm(x, w.t(), out=out)
    if isinstance(operation, MemoryBoundOp):
        size = int(operation.num_bytes / 6)
        a, b, c = normal(size), normal(size), normal(size)
        return lambda: torch.add(a, b, out=c)
    q, k, v = (normal(operation.batch // 32, 32, operation.queries, operation.width) for _ in range(3))
    if not operation.backward:
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=operation.causal)
    leaves = [each.requires_grad_() for each in (q, k, v)]
    y = F.scaled_dot_product_attention(q, k, v, is_causal=operation.causal)
    dy = torch.randn_like(y)
    return lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True)


def table_of(rows: Iterable[Row], kept: Iterable[Row], known: GpuRates, fitted: GpuRates) -> list[list[str]]:
    """A line for each kernel: measured, by the constants of profile, by those fitted to `kept`."""
    names = {operation.name for operation, _ in kept}
    lines = []
    for operation, us in rows:
        flops = 0.0 if isinstance(operation, MemoryBoundOp) else operation.flops
        line = [operation.name, f"{us:.1f}", f"{flops / us / known.peak:.0%}" if flops else ""]
        for rates in (known, fitted):
            found = cost(operation, rates).us
            line += [f"{found:.1f}", f"{found / us - 1:+.1%}"]
        lines.append([*line, "yes" if operation.name in names else ""])
    return lines


def summary(rows: Sequence[Row], kept: Iterable[Row], known: GpuRates, fitted: GpuRates) -> dict[str, float]:
    """Mean |error| of GEMMs: of all by profile, and of those that were left out, by it and by the fit."""
    names = {operation.name for operation, _ in kept}
    gemms = [row for row in rows if isinstance(row[0], MatmulOp)]
    left = [row for row in gemms if row[0].name not in names]

    def mean(some: Sequence[Row], rates: GpuRates) -> float:
        return fmean(abs(cost(operation, rates).us / us - 1) for operation, us in some)

    return {
        "profile, all GEMMs": mean(gemms, known),
        "profile, GEMMs left out": mean(left, known),
        "fitted, GEMMs left out": mean(left, fitted),
    }


def measured(source: Path | None) -> tuple[dict[str, Any], list[Row]]:
    """Where the times are from, and the times: of this GPU, or of a record."""
    if source is None:
        name, rows = measure()
        return provenance(("counterpoint", "torch")) | {"gpu": name}, rows
    record = json.loads(read_result(source))
    us = record["us"]
    return record["provenance"], [(operation, us[operation.name]) for operation in operations() if operation.name in us]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="source", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "kernel-efficiency.json")
    args = parser.parse_args()
    facts, rows = measured(args.source)
    gpu = find_gpu(next((known for known in GPUS if known in facts["gpu"]), facts["gpu"]))
    rates, kept = GpuRates.of(gpu, burst=True), fitted_rows(rows)
    again = msgspec.structs.replace(rates, efficiency=fit(rows, rates))
    lines, errors = table_of(rows, kept, rates, again), summary(rows, kept, rates, again)
    print_table(COLUMNS, lines, title=facts["gpu"], width=120)
    names = ("matmul", "depth", "edge", "load", "memory")
    constants = {key: getattr(again.efficiency, key) for key in names}
    print(f"profile has { ({key: getattr(rates.efficiency, key) for key in names}) }, fitted: {constants}")
    print("; ".join(f"{what}: {error:.1%}" for what, error in errors.items()))
    now = provenance(("counterpoint",))  # constants of now, beside times of then
    result = {"provenance": facts, "compared": {key: now[key] for key in ("date", "commit", "uncommitted_changes")},
              "fitted": constants, "errors": errors, "us": {operation.name: us for operation, us in rows}}  # fmt: skip
    write_result(args.out, result, COLUMNS, lines)


if __name__ == "__main__":
    main()
