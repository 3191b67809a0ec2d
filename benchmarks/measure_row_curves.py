"""Claim: the time of a matmul is no straight line of its rows: it rises where a wave of tiles begins.

Times x[rows, k] @ w[n, k]^T on one GPU at many row counts, for the shapes of tensor_clock.py, which reads the result:
queued behind a spin, random data, shapes and rows in another order each round, medians over rounds.

    python benchmarks/measure_row_curves.py                                  # one GPU, two minutes; ranks 8
    python benchmarks/measure_row_curves.py --ranks 2 4 8 --out results/row-curves-h200.json
    python benchmarks/measure_row_curves.py --device cpu --shapes 64x32 --rows 256 --out /tmp/curves.json

The result is JSON: `provenance`, and `curves`, each {"n", "k", "dtype", "points": [[rows, us], ...]}.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from kernel_efficiency import queued_us
from provenance import gpu_provenance, provenance, write_result
from tables import print_table
from tensor_clock import DTYPE, layers

from counterpoint.errors import Misconfigured

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = ("n", "k", "points", "most rows", "µs", "TFLOP/s", "best TFLOP/s", "at rows")
FINE = 8192  # rows up to which every tile is a point; beyond, one of `COARSE` rows
TILE, COARSE = 128, 1024
Shape = tuple[int, int]


def shape(text: str) -> Shape:
    """The n and k of `7168x8192`."""
    n, _, k = text.partition("x")
    if not (n.isdecimal() and k.isdecimal() and int(n) and int(k)):
        raise argparse.ArgumentTypeError(f"{text!r}: give n and k as in 7168x8192")
    return int(n), int(k)


def row_counts(most: int) -> list[int]:
    """The rows at which a curve has points."""
    return sorted({*range(TILE, min(most, FINE) + 1, TILE), *range(FINE, most + 1, COARSE), most})


def measure(shapes: Sequence[Shape], counts: Sequence[int], *, device: str, rounds: int) -> dict[Shape, list[float]]:
    """The µs of every shape at every count; operands and results are parts of three buffers."""
    sizes = [max(sizes) for sizes in zip(*((counts[-1] * k, n * k, counts[-1] * n) for n, k in shapes), strict=True)]
    dtype = getattr(torch, DTYPE)
    x, w, out = (torch.randn(size, device=device, dtype=dtype) for size in sizes)
    times: dict[Shape, list[list[float]]] = {each: [[] for _ in counts] for each in shapes}
    for turn in range(rounds + 1):
        order = random.Random(turn)
        for n, k in order.sample(list(shapes), len(shapes)):
            weight = w[: n * k].view(n, k).t()
            places = order.sample(range(len(counts)), len(counts))
            runs = [
                partial(torch.mm, x[: m * k].view(m, k), weight, out=out[: m * n].view(m, n))
                for m in (counts[place] for place in places)
            ]
            found = queued_us(runs) if device == "cuda" else host_us(runs)
            for place, us in zip(places, found, strict=True):
                if turn:  # the first round is to warm up
                    times[n, k][place].append(us)
    return {each: [median(some) for some in points] for each, points in times.items()}


def host_us(runs: Sequence[Callable[[], Any]]) -> list[float]:
    """Of each, one after the other on the CPU."""
    found = []
    for run in runs:
        began = time.perf_counter()
        run()
        found.append(1e6 * (time.perf_counter() - began))
    return found


def line_of(size: Shape, counts: Sequence[int], times: Sequence[float]) -> list[str]:
    """The line of the table."""
    n, k = size
    rates = [2e-6 * m * n * k / us for m, us in zip(counts, times, strict=True)]
    best = max(range(len(rates)), key=rates.__getitem__)
    ends = (f"{times[-1]:,.1f}", f"{rates[-1]:,.2f}", f"{rates[best]:,.2f}")
    return [str(n), str(k), str(len(counts)), str(counts[-1]), *ends, str(counts[best])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8], help="of the layers whose shapes are measured")
    parser.add_argument("--shapes", type=shape, nargs="+", help="n x k, such as 7168x8192, instead")
    parser.add_argument("--rows", type=int, default=32768, help="the most")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "row-curves-h200.json")
    args = parser.parse_args()
    if args.rows < 1 or args.rounds < 1:
        raise Misconfigured(f"--rows {args.rows} --rounds {args.rounds}: give 1 or more of each")
    shapes = args.shapes or list(dict.fromkeys((layer.n, layer.k) for layer in layers(args.ranks)))
    counts = row_counts(args.rows)
    times = measure(shapes, counts, device=args.device, rounds=args.rounds)
    lines = [line_of(size, counts, times[size]) for size in shapes]
    print_table(COLUMNS, lines, title=f"matmuls by their rows, {DTYPE}")
    packages = ["torch"]
    facts = gpu_provenance(packages, world_size=1) if args.device == "cuda" else provenance(packages)
    curves = [
        {"n": n, "k": k, "dtype": DTYPE, "points": [[m, round(us, 2)] for m, us in zip(counts, some, strict=True)]}
        for (n, k), some in times.items()
    ]
    write_result(args.out, {"provenance": facts | {"torch": torch.__version__}, "curves": curves}, COLUMNS, lines)


if __name__ == "__main__":
    main()
