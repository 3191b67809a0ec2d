"""Claim: NCCL's rows of the suite `pairs` are those that were measured first, on 8 x H200.

    python benchmarks/pairs_baseline.py results/pairs-4xh200.json     # prints a table, writes results/pairs-baseline.*

`hidden` takes T_c from the fastest mechanism of a pair, and `zero_sm` is faster now than anything was then. So it is
computed again here with the fastest of NCCL's own; the baseline (4 loads x 4 ratios x 3 orders, 2026-11-20) is a table
of means.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

from provenance import provenance, read_measurement, write_table
from tables import print_table

from counterpoint.pair.together import overlap
from counterpoint.records.measurement import Row

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = ("mechanism", "collective", "rows", "hidden", "8 x H200", "difference")
BASELINE = {  # mean of `hidden`
    "nccl": {"all_gather": 0.46, "all_to_all": 0.40, "reduce_scatter": 0.54, "all_reduce": 0.53},
    "nccl+priority=high": {"all_gather": 0.42, "all_to_all": 0.37, "reduce_scatter": 0.52, "all_reduce": 0.50},
    "nccl_zero_cta": {"all_gather": 0.57, "all_to_all": 0.63},
}


def lines(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """A line for each mechanism and collective of the baseline."""
    for mechanism, means in BASELINE.items():
        for collective, then in means.items():
            mine = [row for row in rows if (row.mechanism, row.collective) == (mechanism, collective)]
            now = fmean(hidden(row, rows) for row in mine)
            yield mechanism, collective, str(len(mine)), f"{now:.2f}", f"{then:.2f}", f"{now - then:+.2f}"


def hidden(row: Row, rows: Sequence[Row]) -> float:
    """With T_c of the fastest of NCCL's mechanisms at this pair."""
    same = (each for each in rows if each.scenario == row.scenario and each.mechanism in BASELINE)
    best_us = min(each.comm_alone.us for each in same)
    return overlap(
        compute_us=row.compute_alone.us, comm_us=best_us, both_us=row.together.us, order=row.order,
        head_us=row.head_start_us,
    ).hidden  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "pairs-baseline.json")
    asked = parser.parse_args()
    rows = read_measurement(asked.measured).rows
    table = list(lines([row for row in rows if row.marked is None]))
    print_table(COLUMNS, table, width=100)
    write_table(asked.out, COLUMNS, table, provenance=provenance([]), measured=asked.measured.name)


if __name__ == "__main__":
    main()
