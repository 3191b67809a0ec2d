"""Claim: a step measured on n ranks of a host says what it takes on others of that kind (`plan --from-trace`).

    torchrun --nproc-per-node 2 examples/record_fsdp.py --out traces/fsdp-2 --steps 3     # and 4
    python benchmarks/plan_from_trace.py samples/fsdp-2-ranks samples/fsdp-4-ranks samples/fsdp-healthy

Each recording predicts each of the others. They may be of several machines; what a rank computes has to be the same.
"""

from __future__ import annotations

import argparse
import json
from itertools import permutations
from pathlib import Path
from statistics import fmean

from plan_published import cluster
from provenance import provenance, write_table
from tables import print_table

from counterpoint.diagnosis.api import diagnose
from counterpoint.plan.from_trace import MeasuredStep, measured_step, predict_on

COLUMNS = ("from ranks", "to ranks", "measured ms", "predicted ms", "error", "compute", "exposed", "waits", "rest")


def predicted(of: MeasuredStep, there: MeasuredStep) -> tuple[str, ...]:
    """A row: the step of `there` from that of `of`."""
    here, elsewhere_ = (cluster(each.gpu, "nvlink-h100", each.ranks) for each in (of, there))
    found = predict_on(of, here, elsewhere_, ranks=there.ranks)
    parts = {part.name: part.us / 1e3 for part in found.parts}
    error = found.step_us / there.step_us - 1.0
    times = (f"{each:.1f}" for each in parts.values())
    both = (f"{us / 1e3:.1f}" for us in (there.step_us, found.step_us))
    return (str(of.ranks), str(there.ranks), *both, f"{error:+.1%}", *times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path, help="folders, of different numbers of ranks")
    parser.add_argument("--json", type=Path, help="where to keep the result")
    asked = parser.parse_args()
    seen = [measured_step(diagnose(folder).diagnosis) for folder in asked.traces]
    rows = [predicted(*pair) for pair in permutations(seen, 2)]
    errors = [abs(float(row[4].rstrip("%"))) for row in rows]
    print_table(COLUMNS, rows)
    print(f"mean {fmean(errors):.1f}%, worst {max(errors):.1f}% of {len(errors)}")
    if asked.json is not None:
        recorded = [json.loads((folder / "provenance.json").read_text()) for folder in asked.traces]
        write_table(asked.json, COLUMNS, rows, provenance=provenance(["numpy", "polars"]), traces=recorded)


if __name__ == "__main__":
    main()
