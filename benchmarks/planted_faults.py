"""Claim: counterpoint names the rank that makes others wait, and why; and names none where nothing is planted.

Every set is a folder of 8 ranks that a recorder of examples/ wrote on real GPUs with a fault planted, or none, which
its `provenance.json` tells. Beside ours stands HolisticTraceAnalysis' `get_potential_stragglers` (`pip install
traceinsight`), which always answers with the two likeliest ranks. It knows communication by names that begin with
ncclKernel, which NCCL has not used since 2.20: as the traces are it fails on all of them, so it is given copies with
its spelling.

    python benchmarks/planted_faults.py TRACES    # TRACES/<set>/rank*.json.gz; prints a table, writes results/
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from peers import hta_python
from provenance import provenance, write_result
from tables import print_table

import counterpoint

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = ("set", "planted", "step, ms", "hidden", "counterpoint says", "replay error", "HTA suspects")
PEER_ASKS = """
import sys, json
from hta.trace_analysis import TraceAnalysis
suspects = TraceAnalysis(trace_dir=sys.argv[1]).get_potential_stragglers(num_candidates=2)
print(json.dumps([int(rank) for rank in suspects]))
"""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One set: what was planted, what we say, what the peer says."""

    name: str
    steps: int
    step_ms: float
    hidden: float | None
    planted: str
    planted_rank: int | None
    expected_cause: str | None
    found: list[dict[str, Any]]
    right: bool
    replay_error: float | None
    what_if_no_straggler_ms: float | None
    peer_as_recorded: list[int] | None
    peer: list[int] | None
    peer_right: bool
    recorded: dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="+", help="folders of sets, or sets")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "planted-faults.json")
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "trace-load")
    args = parser.parse_args()
    found = [p for folder in args.traces for p in (*folder.glob("provenance.json"), *folder.glob("*/provenance.json"))]
    sets = sorted({p.parent for p in found}, key=lambda p: p.name)
    args.cache.mkdir(parents=True, exist_ok=True)
    python = hta_python(args.cache)
    rows = [row(folder, python) for folder in sets if (folder / "rank0.json.gz").exists()]
    cells = [table_row(r) for r in rows]
    print_table(COLUMNS, cells, title="planted faults")
    ours, peers = sum(r.right for r in rows), sum(r.peer_right for r in rows)
    failed = sum(r.peer_as_recorded is None for r in rows)
    print(
        f"right: counterpoint {ours} of {len(rows)}, HolisticTraceAnalysis {peers} (as recorded, it fails on {failed})"
    )
    facts = provenance(("counterpoint", "msgspec", "numpy", "polars"))
    first = rows[0].recorded
    facts |= {"gpu": first["machine"]["device"], "gpu_count": first["machine"]["count"],
              "driver": first["machine"]["driver"], "torch": first["versions"]["torch"],
              "nccl": first["versions"]["nccl"], "peer": "traceinsight 0.6.1"}  # fmt: skip
    write_result(args.out, {"provenance": facts, "rows": [asdict(r) for r in rows]}, COLUMNS, cells)


def row(folder: Path, python: str) -> Row:
    """Diagnose one set with both tools."""
    recorded = json.loads((folder / "provenance.json").read_text())
    planted = recorded.get("planted") or {}
    rank, cause = planted.get("rank"), planted.get("expected_cause")
    d = counterpoint.diagnose(folder).diagnosis
    found = [{"rank": s.rank, "cause": s.cause, "detail": s.detail, "delay_ms": s.delay_us / 1e3} for s in d.stragglers]
    says = [(s.rank, s.cause) for s in d.stragglers]
    asked = ask_peer(folder, python, renamed=True)
    what_if = {w.name: w.step_us / 1e3 for w in d.replay.what_if} if d.replay else {}
    return Row(
        name=folder.name,
        steps=len(d.steps),
        step_ms=d.totals.duration_us / len(d.steps) / 1e3,
        hidden=d.totals.hidden,
        planted=planted.get("kind") or "nothing",
        planted_rank=rank,
        expected_cause=cause,
        found=found,
        right=says == ([] if rank is None or cause is None else [(rank, cause)]),
        replay_error=d.replay.error if d.replay else None,
        what_if_no_straggler_ms=what_if.get("no straggler"),
        peer_as_recorded=ask_peer(folder, python, renamed=False),
        peer=asked,
        peer_right=bool(asked) and rank is not None and asked is not None and asked[0] == rank,
        recorded={key: recorded[key] for key in ("recorded", "command", "machine", "versions", "planted")},
    )


def ask_peer(folder: Path, python: str, *, renamed: bool) -> list[int] | None:
    """The two ranks that the peer suspects, likeliest first; None where it fails."""
    with TemporaryDirectory() as scratch:
        for path in folder.glob("rank*.json.gz"):
            text = gzip.decompress(path.read_bytes())
            if renamed:
                text = text.replace(b"ncclDevKernel_", b"ncclKernel_")
            (Path(scratch) / path.name).write_bytes(gzip.compress(text, 1))
        done = subprocess.run([python, "-c", PEER_ASKS, scratch], capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    return json.loads(lines[-1]) if done.returncode == 0 and lines else None


def table_row(r: Row) -> list[str]:
    """One line of the table."""
    ours = "; ".join(f"rank {f['rank']}: {f['cause']}, {f['delay_ms']:.1f} ms" for f in r.found) or "nothing"
    return [
        r.name,
        r.planted if r.planted_rank is None else f"{r.planted}, rank {r.planted_rank}",
        f"{r.step_ms:.1f}",
        "–" if r.hidden is None else f"{r.hidden:.0%}",
        ("✓ " if r.right else "✗ ") + ours,
        "–" if r.replay_error is None else f"{r.replay_error:+.2%}",
        ("✓ " if r.peer_right else "✗ ") + ("fails" if r.peer is None else f"ranks {r.peer[0]}, {r.peer[1]}"),
    ]


if __name__ == "__main__":
    main()
