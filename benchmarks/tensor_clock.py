"""Claim: a matmul that depends on communication runs at nearly its speed alone where the rule says that it can hide.

Predicts matmuls that follow an all_gather or precede a reduce_scatter, by curves of one GPU (measure_row_curves.py) and
the rates of a profile: the shapes of the results, and the layers of Llama-3 under tensor parallelism with sequence
parallelism. Every execution is given as its speed over that of the matmul alone.

    python benchmarks/tensor_clock.py results/row-curves-h200.json
    python benchmarks/tensor_clock.py --estimate --ranks 8 --rows 8192        # by the data sheet: nothing measured
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from provenance import provenance, read_result, write_result
from tables import print_table

from counterpoint.machine.profile import Profile, shipped_profile
from counterpoint.measurement.suites import GATHERED_MATMULS
from counterpoint.pair.arrivals import ShardedMatmul, TensorOperation
from counterpoint.pair.curves import RowCurve, estimated_curve
from counterpoint.pair.matmul_choice import MATMUL_MECHANISMS, MatmulPlan, choose_matmul

__all__ = ["DTYPE", "Layer", "layers"]

DTYPE = "bfloat16"
RANKS = (2, 4, 8)
ROWS = (2048, 4096, 8192, 16384, 32768)
LLAMAS = {"8B": (4096, 14336), "70B": (8192, 28672), "405B": (16384, 53248)}  # hidden size, and that of the MLP
KV_COLUMNS = 2 * 8 * 128  # keys and values: 8 heads of 128 each
COLUMNS = (
    "matmul",
    "collective",
    "rows",
    "n",
    "k",
    "ranks",
    "hides",
    "alone µs",
    *MATMUL_MECHANISMS,
    "chosen",
    "cuts, rows",
)
CurveOf = Mapping[tuple[int, int], RowCurve]


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A matmul of one rank with its collective."""

    name: str
    operation: TensorOperation
    rows: int
    n: int
    k: int
    ranks: int


def layers(ranks: Iterable[int] = RANKS, rows: Iterable[int] = ROWS) -> Iterator[Layer]:
    """The shapes of the results that have so many rows, and the layers of Llama-3."""
    counts = tuple(rows)
    for size in ranks:
        for m, wide, deep in GATHERED_MATMULS:
            if m in counts:
                yield Layer(name="plain", operation="all_gather_matmul", rows=m, n=wide, k=deep, ranks=size)
                yield Layer(name="plain", operation="matmul_reduce_scatter", rows=m, n=deep, k=wide, ranks=size)
        for model, (hidden, mlp) in LLAMAS.items():
            gathered = {"qkv": (hidden + KV_COLUMNS) // size, "gate, up": 2 * mlp // size}
            scattered = {"o": hidden // size, "down": mlp // size}
            for m in counts:
                for name, n in gathered.items():
                    label = f"{model} {name}"
                    yield Layer(name=label, operation="all_gather_matmul", rows=m, n=n, k=hidden, ranks=size)
                for name, k in scattered.items():
                    label = f"{model} {name}"
                    yield Layer(name=label, operation="matmul_reduce_scatter", rows=m, n=hidden, k=k, ranks=size)


def read_curves(path: Path) -> tuple[dict[str, Any], CurveOf]:
    """Where curves are from, and the curves by n and k."""
    record = json.loads(read_result(path))
    found = [
        RowCurve(n=each["n"], k=each["k"], dtype=each["dtype"], points=tuple((m, us) for m, us in each["points"]))
        for each in record["curves"]
    ]
    return record["provenance"], {(curve.n, curve.k): curve for curve in found if curve.dtype == DTYPE}


def plan_of(layer: Layer, curve: RowCurve, profile: Profile, chunks: int) -> MatmulPlan:
    """What is predicted of a layer on rank 0."""
    shard = layer.rows // layer.ranks
    task = ShardedMatmul(
        operation=layer.operation, curves=(curve,), shard_rows=(shard,) * layer.ranks, chunk_rows=-(-shard // chunks)
    )
    return choose_matmul(task, 0, profile)


def line_of(layer: Layer, plan: MatmulPlan) -> list[str]:
    """The line of the table."""
    shares = [
        f"{plan.alone_us / plan.predicted_us[name]:.0%}" if name in plan.predicted_us else ""
        for name in MATMUL_MECHANISMS
    ]
    sizes = ("all_gather" if layer.operation == "all_gather_matmul" else "reduce_scatter", str(layer.rows))
    cuts = " ".join(str(piece.rows) for piece in plan.pieces) if plan.mechanism == "cuts" else ""
    return [
        layer.name, *sizes, str(layer.n), str(layer.k), str(layer.ranks), "yes" if plan.hiding.hides else "",
        f"{plan.alone_us:,.0f}", *shares, plan.mechanism, cuts,
    ]  # fmt: skip


def summary(plans: Sequence[MatmulPlan]) -> Iterator[str]:
    """Sentences: of those that can hide and those that cannot, how near each execution comes to the matmul alone."""
    for hides in (True, False):
        some = [plan for plan in plans if plan.hiding.hides == hides]
        for name in MATMUL_MECHANISMS:
            shares = sorted(plan.alone_us / plan.predicted_us[name] for plan in some if name in plan.predicted_us)
            if shares:
                near = sum(share >= 0.97 for share in shares)
                spread = f"{shares[0]:.0%} to {shares[-1]:.0%}, {shares[len(shares) // 2]:.0%} in the middle"
                kind = "can hide" if hides else "cannot hide"
                yield f"{kind}: {name} {spread}; {near} of {len(shares)} at 97 % or above"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("curves", type=Path, nargs="?", help="what measure_row_curves.py wrote")
    source.add_argument("--estimate", action="store_true", help="take what data sheet and profile say")
    parser.add_argument("--gpu", default="H200", help="whose profile")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--chunks", type=int, default=1, help="in which a shard is sent")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    profile, most = shipped_profile(args.gpu), max(args.rows)

    @cache
    def estimate(n: int, k: int) -> RowCurve:
        return estimated_curve(n, k, DTYPE, most, profile, step=max(128, most // 64))

    origin, measured = ({}, {}) if args.estimate else read_curves(args.curves)
    lines, plans, missing = [], [], set()
    for layer in layers(args.ranks, args.rows):
        curve = estimate(layer.n, layer.k) if args.estimate else measured.get((layer.n, layer.k))
        if curve is None or curve.points[-1][0] < layer.rows:
            missing.add(f"{layer.rows} x {layer.n} x {layer.k}")
            continue
        plans.append(plan_of(layer, curve, profile, args.chunks))
        lines.append(line_of(layer, plans[-1]))
    print_table(COLUMNS, lines, title="speed over that of the matmul alone, predicted", width=190)
    report = [*summary(plans), f"not measured, left out: {', '.join(sorted(missing)) or 'nothing'}"]
    print("\n".join(report))
    if args.out:
        facts = provenance(["counterpoint"])
        record = {"provenance": facts, "curves_from": origin or "estimates", "report": report, "rows": lines}
        write_result(args.out, record, COLUMNS, lines)


if __name__ == "__main__":
    main()
