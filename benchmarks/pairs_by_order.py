"""Claim: zero-SM collectives hide beside a GEMM in every launch order, and the GEMM keeps its speed.

    counterpoint measure pairs --rounds 7 --out results/pairs-8xh200.json     # and conccl, resource-aware, forum
    python benchmarks/pairs_by_order.py results/pairs-8xh200.json --out results/pairs-by-order-8xh200.json

A line for each file, collective and mechanism: the mean of `hidden` over its pairs in each launch order, the lowest of
all, and which part of its speed the GEMM keeps, mean and lowest. `bar` says whether the bar of `BARS` is reached in
every order, and if not, what is short; sums are judged with SMs left to them (`gemm_sms=fit`). Marked rows do not
count.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

from provenance import provenance, read_measurement, write_table
from tables import print_table

from counterpoint.pair.choice import ORDERS
from counterpoint.records.measurement import Measurement, Row

FIT = "zero_sm+gemm_sms=fit"
BARS = {  # mean of `hidden`, in every order
    ("all_gather", "zero_sm"): 0.88,
    ("all_to_all", "zero_sm"): 0.88,
    ("reduce_scatter", FIT): 0.87,
    ("all_reduce", FIT): 0.82,
}
LOWEST = 0.5  # above which `hidden` of each pair and order has to be
KEPT = 0.95  # of a GEMM's speed, in the mean
COLUMNS = (
    "from", "GPUs", "collective", "mechanism", "pairs", *(order.replace("_", " ") for order in ORDERS), "lowest",
    "GEMM keeps", "GEMM, lowest", "marked", "bar",
)  # fmt: skip


def lines(name: str, measured: Measurement) -> Iterator[tuple[str, ...]]:
    """Yield a line for each collective and mechanism."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in measured.rows:
        groups.setdefault((row.operation, row.mechanism), []).append(row)
    where = measured.environment
    gpus = f"{where.world_size} x {(where.gpu or where.device).removeprefix('NVIDIA ')}"
    for (collective, mechanism), rows in sorted(groups.items(), key=lambda each: each[0][0]):
        good = [row for row in rows if row.marked is None]
        marked = str(len(rows) - len(good)) if len(rows) > len(good) else ""
        pairs = str(len({row.scenario for row in good}))
        yield (name, gpus, collective, mechanism, pairs, *cells(good), marked, bar(rows))


def cells(rows: Sequence[Row]) -> tuple[str, ...]:
    """Return the figures of a line; empty cells where all rows are marked."""
    means = by_order(rows)
    figures = [f"{means[order]:.2f}" if order in means else "" for order in ORDERS]
    if not rows:
        return *figures, "", "", ""
    kept = [row.compute_kept for row in rows]
    return *figures, f"{min(row.hidden for row in rows):.2f}", f"{fmean(kept):.1%}", f"{min(kept):.1%}"


def by_order(rows: Sequence[Row]) -> dict[str, float]:
    """Return the mean of `hidden` in each order that was measured."""
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(row.order, []).append(row.hidden)
    return {order: fmean(values) for order, values in found.items()}


def bar(rows: Sequence[Row]) -> str:
    """Return `reached`, or what is short of the bar; nothing where there is none for this collective and mechanism."""
    wanted = BARS.get((rows[0].operation, rows[0].mechanism))
    if wanted is None:
        return ""
    good = [row for row in rows if row.marked is None]
    if not good:
        return "all rows are marked"
    means, kept = by_order(good), fmean(row.compute_kept for row in good)
    short = [f"{order.replace('_', ' ')} below {wanted}" for order in ORDERS if means.get(order, wanted) < wanted]
    short += [f"{order.replace('_', ' ')} was not measured" for order in ORDERS if order not in means]
    short += [f"a pair at or below {LOWEST}"] if min(row.hidden for row in good) <= LOWEST else []
    short += [f"GEMM keeps less than {KEPT:.0%}"] if kept < KEPT else []
    return "; ".join(short) or "reached"


def main() -> None:
    """Print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path, nargs="+", help="files of counterpoint measure")
    parser.add_argument("--out", type=Path, help="where to keep the table")
    asked = parser.parse_args()
    table: list[tuple[str, ...]] = []
    for path in asked.measured:
        table += lines(path.name.partition(".")[0], read_measurement(path))
    print_table(COLUMNS, table, width=200)
    if asked.out is not None:
        names = [path.name for path in asked.measured]
        write_table(asked.out, COLUMNS, table, provenance=provenance([]), measured=names)


if __name__ == "__main__":
    main()
