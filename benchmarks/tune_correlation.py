"""Claim: noise that lasts over rounds gives a pair a choice without a gain in at most 3 % of cases.

    python benchmarks/tune_correlation.py

In each draw stock and three mechanisms are measured as `tune` does: by forty rounds less two, and by twelve times as
many if those leave open what is faster. The noise of each mechanism is normal, and that of a round has a correlation
with that of the round before. `wrong` counts choices where all mechanisms take equally long, `found` those of the one
that takes 2 % less than all others, and `at first` what of both the first look chose. The budget is taken to suffice.
"""

from __future__ import annotations

import argparse
import itertools
import math
from pathlib import Path
from statistics import fmean

import numpy as np
from provenance import provenance, write_table
from tables import print_table
from tune_noise import ROOT, STOCK, tried

from counterpoint.records.tuning import LEAVE, StepPair, TunedPair
from counterpoint.tuning.api import MOST_MORE
from counterpoint.tuning.decide import decide, is_open
from counterpoint.tuning.experiment import MOST, against_stock

CORRELATIONS = (0.0, 0.4, 0.8)
NOISE = (0.01, 0.02, 0.03)  # standard deviation of a round
GAIN = 0.02
ROUNDS, DROPPED = 40, 2
FASTER = "m0"
US = 1000.0
PAIR = StepPair(operation="all_gather", compute="gemm 8192x8192x8192", bytes_per_rank=64 << 20, ranks=2)
COLUMNS = ("correlation", "noise", "draws", "wrong at first", "wrong", "found at first", "found")


def look(random: np.random.Generator, rounds: int, *, correlation: float, noise: float, gain: float) -> TunedPair:
    """What is decided by so many rounds."""
    names = (STOCK, *(f"m{place}" for place in range(MOST)))
    steps = random.standard_normal((rounds, len(names))) * math.sqrt(1 - correlation**2)
    steps[0] = random.standard_normal(len(names))
    rows = itertools.accumulate(steps, lambda before, step: correlation * before + step)
    found = []
    for name, column in zip(names, zip(*rows, strict=True), strict=True):
        us = US * (1 - gain * (name == FASTER))
        times = [us * (1 + noise * float(each)) for each in column]
        found.append((tried(name, times), times))
    return decide(PAIR, against_stock(found, STOCK), stock=STOCK)


def looks(random: np.random.Generator, **truth: float) -> tuple[str, str]:
    """What is chosen at first, and in the end."""
    first = look(random, ROUNDS - DROPPED, **truth)
    last = look(random, MOST_MORE * ROUNDS - DROPPED, **truth) if is_open(first) else first
    return first.mechanism, last.mechanism


def main() -> None:
    """Print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=2000, help="measurements of each kind")
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "tune-correlation.json")
    asked = parser.parse_args()
    random = np.random.default_rng(asked.seed)
    table = []
    for correlation, noise in itertools.product(CORRELATIONS, NOISE):
        equal, faster = (
            [looks(random, correlation=correlation, noise=noise, gain=gain) for _ in range(asked.draws)]
            for gain in (0.0, GAIN)
        )
        shares = (
            fmean(first != LEAVE for first, _ in equal),
            fmean(last != LEAVE for _, last in equal),
            fmean(first == FASTER for first, _ in faster),
            fmean(last == FASTER for _, last in faster),
        )
        table.append((f"{correlation:g}", f"{noise:.0%}", str(asked.draws), *(f"{share:.1%}" for share in shares)))
    print_table(COLUMNS, table)
    write_table(asked.out, COLUMNS, table, provenance=provenance(["counterpoint", "numpy"]), seed=asked.seed)


if __name__ == "__main__":
    main()
