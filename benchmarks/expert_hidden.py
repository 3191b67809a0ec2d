"""Claim: beside the experts' matmuls a dispatch or a combine takes little more than its kernels that move rows.

Measures exchanges of one MoE layer as `counterpoint measure expert` does, but only those asked for: each leg alone and
beside the experts of as many tokens. `hidden` is of the fastest mechanism's time, kernels and all; `saved` is what
overlap saves of the time of both in turn, in µs. A minute for each exchange.

    python benchmarks/expert_hidden.py --out results/expert-hidden-2xh200.json
    python benchmarks/expert_hidden.py --device cpu --exchanges "exchange tiny 128 uniform" --rounds 5
"""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec
from provenance import gpu_provenance, provenance, write_result
from tables import print_table

from counterpoint.measurement.api import count_ranks, measure_parts
from counterpoint.measurement.suites import EXPERT_MECHANISMS
from counterpoint.records.measurement import Block, Row

EXCHANGES = tuple(f"exchange qwen3-30b-a3b {tokens} uniform" for tokens in (4096, 8192))
COLUMNS = (
    "leg", "beside", "mechanism", "alone µs", "fastest µs", "beside µs", "together µs", "saved µs", "hidden",
    "compute kept", "marked",
)  # fmt: skip


def cells(row: Row) -> list[str]:
    """One row, in the order of `COLUMNS`."""
    alone, compute, both = row.comm_alone.us, row.compute_alone.us, row.together.us
    saved = compute + row.best_comm_alone_us - both
    times = [f"{us:,.0f}" for us in (alone, row.best_comm_alone_us, compute, both, saved)]
    kept = [f"{row.hidden:.2f}", f"{row.compute_kept:.2f}"]
    return [row.collective, row.workload, row.mechanism, *times, *kept, row.marked or ""]


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exchanges", nargs="+", default=list(EXCHANGES), help="as `counterpoint measure` names them")
    parser.add_argument(
        "--mechanisms", nargs="+", choices=EXPERT_MECHANISMS, default=["torch", "gather"], help="in one run"
    )
    parser.add_argument("--rounds", type=int, default=10, help="of which two are dropped")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--nproc", type=int, help="ranks; by default all GPUs")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    ranks = count_ranks(args.device, args.nproc)
    parts = [Block(name=name, what=name, mechanisms=tuple(args.mechanisms)) for name in args.exchanges]
    measured = measure_parts(
        "expert", parts, device=args.device, world_size=ranks, rounds=args.rounds, timeout_s=150.0,
        progress=lambda done, total, now: print(f"{done} of {total}: {now}", flush=True),
    )  # fmt: skip
    rows = [row for row in measured.rows if row.workload.startswith("experts")]
    table = [cells(row) for row in rows]
    print_table(COLUMNS, table, title=f"{ranks} ranks", width=220)
    print("\n".join(f"not run: {name}: {why}" for name, why in measured.unavailable.items()))
    if args.out is not None:
        packages = ["torch", "triton"]
        facts = gpu_provenance(packages, world_size=ranks) if args.device == "cuda" else provenance(packages)
        record = {"provenance": facts, "ranks": ranks, "exchanges": args.exchanges, "rows": msgspec.to_builtins(rows)}
        write_result(args.out, record, COLUMNS, table)


if __name__ == "__main__":
    main()
