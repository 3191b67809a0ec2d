"""Claim: counterpoint diagnoses a rank's trace, whole, in less time and memory than its peer takes to load it.

One run measures both on one machine, in fresh processes, in interleaved rounds: `counterpoint diagnose FILE --json -`
on a generated trace of 1.3 M events, HolisticTraceAnalysis' load of the same file (`pip install traceinsight`, in an
environment of its own, with each of its two recommended parsers; the faster one counts, and its imports are not
counted), and a diagnosis of eight ranks of 40 MB each. Prints a table and writes results/trace-load.json.

    python benchmarks/trace_load.py            # about 5 minutes, after a first download
    python benchmarks/trace_load.py --quick    # a small trace, no peer, no targets: does it run?
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import synthetic_job
import synthetic_model
from peers import hta_python
from process_cost import run
from provenance import provenance, write_result
from rich.console import Console
from rich.table import Table
from synthetic_job import Job, write_traces

ROOT = Path(__file__).resolve().parents[1]
PEER_LOAD = """
import json, sys, time
from importlib.metadata import version
from hta.common.trace import Trace
from hta.configs.parser_config import ParserBackend, ParserConfig
config = ParserConfig()
config.parser_backend = ParserBackend(sys.argv[2])
start = time.perf_counter()
trace = Trace(trace_dir=sys.argv[1], parser_config=config)
trace.load_traces()
seconds = time.perf_counter() - start
versions = {name: version(name) for name in ("traceinsight", "ijson", "pandas", "numpy")}
print(json.dumps({"seconds": seconds, "rows": sum(map(len, trace.traces.values())), "versions": versions}))
"""
BIG = Job(steps=23)  # 1.28 M events, 336 MB
EIGHT = Job(steps=3)  # 44 MB a rank
QUICK = Job(steps=3, micro_batches=1, layers=2)
COLUMNS = ("what", "s, median", "min-max", "peak MB", "ratio to ours")
OURS, OURS_EIGHT = "counterpoint, 1 rank", "counterpoint, 8 ranks"
PEER_PARSERS = {"json": "HTA load, json", "ijson_batch_and_compress": "HTA load, ijson"}


@dataclass
class Row:
    """The runs of one command; `times_itself`: it prints its own `seconds` (the peer, without its imports)."""

    name: str
    command: list[str]
    times_itself: bool = False
    seconds: list[float] = field(default_factory=list)
    peak_mb: list[float] = field(default_factory=list)
    answer: dict[str, Any] = field(default_factory=dict)

    def measure(self) -> None:
        """One more run."""
        cost = run(self.command)
        self.answer = json.loads(cost.output.splitlines()[-1] if self.times_itself else cost.output)
        self.seconds.append(float(self.answer["seconds"]) if self.times_itself else cost.seconds)
        self.peak_mb.append(cost.peak_mb)

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def median_mb(self) -> float:
        return statistics.median(self.peak_mb)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="a small trace, one round, no peer, no targets")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument(
        "--ours", default=f"{Path(sys.executable).parent / 'counterpoint'} diagnose", metavar="COMMAND"
    )
    options.add_argument("--cache", type=Path, default=ROOT / ".cache" / "trace-load")
    options.add_argument("--out", type=Path, default=ROOT / "results" / "trace-load.json", help="not with --quick")
    args = options.parse_args()
    console = Console()
    ours = shlex.split(args.ours)
    with console.status("writing the traces") as status:
        one = traces(args.cache, QUICK if args.quick else BIG, [0])
        eight = traces(args.cache, QUICK if args.quick else EIGHT, range(8))
        rows = [
            Row(OURS, [*ours, str(one / "rank0.json"), "--json", "-"]),
            Row(OURS_EIGHT, [*ours, str(eight), "--json", "-"]),
        ]
        if not args.quick:
            status.update("installing the peer")
            rows += peer_rows(args.cache, one)
        for number in range(1 if args.quick else args.rounds):
            for row in rows:
                status.update(f"round {number + 1}: {row.name}")
                row.measure()
    claims = [] if args.quick else targets(rows)
    shown = Table(*COLUMNS, title="trace_load")
    for line in cells(rows):
        shown.add_row(*line)
    console.print(shown)
    for claim in claims:
        console.print(f"{'met' if claim['met'] else 'MISSED':7} {claim['claim']}: {claim['value']}", highlight=False)
    if not args.quick:
        write_result(args.out, record(rows, claims, one, eight), COLUMNS, cells(rows))
    sys.exit(0 if all(claim["met"] for claim in claims) else 1)


def traces(cache: Path, job: Job, ranks: Sequence[int]) -> Path:
    """The folder with the job's traces, written once for each version of the generator."""
    source = "".join(Path(str(module.__file__)).read_text() for module in (synthetic_job, synthetic_model))
    key = hashlib.sha256(f"{job} {list(ranks)} {source}".encode()).hexdigest()[:16]
    if not (cache / key).exists():
        unfinished = cache / f"{key}-unfinished"
        write_traces(job, unfinished, ranks)
        unfinished.rename(cache / key)
    return cache / key


def peer_rows(cache: Path, folder: Path) -> list[Row]:
    """The peer's load with each parser it recommends, in an environment made once."""
    python = hta_python(cache)
    return [
        Row(name, [python, "-c", PEER_LOAD, str(folder), parser], times_itself=True)
        for parser, name in PEER_PARSERS.items()
    ]


def targets(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """What was promised, and whether this run keeps it."""
    by_name = {row.name: row for row in rows}
    one, eight = by_name[OURS], by_name[OURS_EIGHT]
    peer_s = min(row.median_s for row in rows if row.times_itself)
    values = (
        ("whole diagnosis of 1.3 M events, s, at most 4", one.median_s, one.median_s <= 4),
        ("its peak memory, MB, at most 350", one.median_mb, one.median_mb <= 350),
        (
            "times faster than the peer's faster load alone, at least 8",
            peer_s / one.median_s,
            peer_s / one.median_s >= 8,
        ),
        ("whole diagnosis of eight ranks of 40 MB, s, at most 6", eight.median_s, eight.median_s <= 6),
    )
    return [{"claim": claim, "value": round(value, 2), "met": met} for claim, value, met in values]


def cells(rows: Sequence[Row]) -> list[list[str]]:
    """The table: the peer's seconds also as a multiple of ours."""
    first = rows[0].median_s
    return [
        [
            row.name,
            f"{row.median_s:.2f}",
            f"{min(row.seconds):.2f}-{max(row.seconds):.2f}",
            f"{row.median_mb:.0f}",
            f"{row.median_s / first:.1f}x" if row.times_itself else "",
        ]
        for row in rows
    ]


def record(rows: Sequence[Row], claims: Sequence[dict[str, Any]], one: Path, eight: Path) -> dict[str, Any]:
    """What results/trace-load.json keeps."""
    peer = next(row.answer["versions"] for row in rows if row.times_itself)
    return {
        "provenance": provenance(("counterpoint", "msgspec", "numpy", "polars")) | {"peer_versions": peer},
        "traces": {
            "one": {"bytes": _size(one), "events": rows[0].answer["source"]["events"]},
            "eight": {"bytes": _size(eight), "events": rows[1].answer["source"]["events"]},
        },
        "memory": "largest sum of resident sizes over the process tree, 20 ms samples, 10^6 bytes",
        "rows": [
            {
                "name": row.name,
                "seconds": [round(value, 3) for value in row.seconds],
                "median_seconds": round(row.median_s, 3),
                "peak_mb": [round(value, 1) for value in row.peak_mb],
            }
            for row in rows
        ],
        "targets": list(claims),
    }


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


if __name__ == "__main__":
    main()
