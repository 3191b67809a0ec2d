"""Claim: the what-if "zero-SM collectives" of `diagnose` is within 5 % of the step that `counterpoint.overlap` takes.

    torchrun --nproc-per-node 2 examples/record_fsdp.py --overlap --warmup 10 --tokens 4096 --out traces/fsdp-4096
    python benchmarks/what_if_zero_sm.py traces/fsdp-* --out results/what-if-zero-sm-2xh200.json

Each folder holds two recordings of one training, `stock` and `overlap`. The first alone is replayed; the second is what
was really measured, under the profiler as the first was. `recorded on` is from the folder's own provenance.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from provenance import provenance, write_result
from tables import print_table

import counterpoint
from counterpoint.diagnosis.analysis.replay import ZERO_SM

COLUMNS = ("training", "ranks", "stock, ms", "what-if, ms", "overlap, ms", "error, %", "GPU idle, ms")


def compared(folder: Path) -> dict[str, Any]:
    """One training, replayed and measured; times in ms."""
    stock, overlap = (counterpoint.diagnose(folder / name).diagnosis for name in ("stock", "overlap"))
    if stock.replay is None or overlap.replay is None:
        raise SystemExit(f"{folder}: no GPU operations were recorded")
    what_if = {what.name: what.step_us for what in stock.replay.what_if}
    if ZERO_SM not in what_if:
        raise SystemExit(f"{folder}/stock: no collective that copy engines would move; what there is: {list(what_if)}")
    recorded = folder / "stock" / "provenance.json"
    measured = overlap.replay.measured_us
    return {
        "training": folder.name,
        "ranks": stock.world_size,
        "stock_ms": stock.replay.measured_us / 1e3,
        "what_if_ms": what_if[ZERO_SM] / 1e3,
        "overlap_ms": measured / 1e3,
        "error": what_if[ZERO_SM] / measured - 1.0,
        "overlap_idle_ms": overlap.totals.idle_us / len(overlap.steps) / 1e3,
        "gpu": stock.gpu,
        "recorded_on": json.loads(recorded.read_text()) if recorded.exists() else None,
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folders", type=Path, nargs="+", help="each with the recordings stock and overlap")
    options.add_argument("--out", type=Path, help="write the result here")
    asked = options.parse_args()
    found = [compared(folder) for folder in asked.folders]
    rows = [
        (
            row["training"],
            str(row["ranks"]),
            *(f"{row[key]:.1f}" for key in ("stock_ms", "what_if_ms", "overlap_ms")),
            f"{row['error'] * 100:+.1f}",
            f"{row['overlap_idle_ms']:.1f}",
        )
        for row in found
    ]
    print_table(COLUMNS, rows)
    print(f"largest error: {max(abs(row['error']) for row in found):.1%}")
    if asked.out is not None:
        write_result(asked.out, {"provenance": provenance(("numpy",)), "rows": found}, COLUMNS, rows)


if __name__ == "__main__":
    main()
