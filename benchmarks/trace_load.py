"""Claim: counterpoint diagnoses a rank's trace, whole, in half the time that Python takes to load its JSON.

One run measures all on one machine, in fresh processes, in interleaved rounds: `counterpoint diagnose FILE --json -`
and `json.load` of the same file, for generated traces of 1.3 M events: a job whose GPUs are busy, one that is
host-bound and has Python stacks, and the first one again by gzip; HolisticTraceAnalysis' load of the first file
(`pip install traceinsight`, in an environment of its own, with each of its two recommended parsers; the faster one
counts, and its imports are not counted); a diagnosis of eight ranks of 40 MB each, and of 256 ranks of 24 500 events
each. Other work on the machine spoils the ratios: our processes for several ranks need as many cores. Prints
a table and writes results/trace-load.json.

    python benchmarks/trace_load.py            # about 10 minutes, after a first download
    python benchmarks/trace_load.py --quick    # small traces, no peer, no targets: does it run?
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import shlex
import shutil
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
JSON_LOAD = """
import gzip, json, sys
with (gzip.open if sys.argv[1].endswith(".gz") else open)(sys.argv[1]) as file:
    json.load(file)
print("{}")
"""
BIG = Job(steps=23)  # 1.28 M events, 336 MB
HOST_BOUND = Job(steps=10, kernel_scale=0.02, stacks=True)  # 1.28 M events, of which 0.83 M are of Python functions
EIGHT = Job(steps=3)  # 44 MB a rank
MANY = Job(world_size=256, steps=2, micro_batches=1, layers=14)  # 24 500 events a rank
QUICK = Job(steps=3, micro_batches=1, layers=2)
COLUMNS = ("what", "s, median", "min-max", "peak MB", "of json.load", "ratio to ours")
OURS, OURS_EIGHT, OURS_MANY = "counterpoint, 1 rank", "counterpoint, 8 ranks", "counterpoint, 256 ranks"
OURS_HOST_BOUND, OURS_GZIP = "counterpoint, host-bound", "counterpoint, gzip"
LOADED = {OURS: "json.load", OURS_HOST_BOUND: "json.load, host-bound", OURS_GZIP: "json.load, gzip"}
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
        one, eight, many = (
            traces(args.cache, QUICK if args.quick else job, range(ranks))
            for job, ranks in ((BIG, 1), (EIGHT, 8), (MANY, 2 if args.quick else 256))
        )
        files = {
            OURS: one / "rank0.json",
            OURS_HOST_BOUND: traces(args.cache, QUICK if args.quick else HOST_BOUND, [0]) / "rank0.json",
            OURS_GZIP: packed(one / "rank0.json"),
        }
        rows = []
        for name, file in files.items():
            rows.append(Row(name, [*ours, str(file), "--json", "-"]))
            rows.append(Row(LOADED[name], [sys.executable, "-c", JSON_LOAD, str(file)]))
        rows += [Row(name, [*ours, str(d), "--json", "-"]) for name, d in ((OURS_EIGHT, eight), (OURS_MANY, many))]
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
        write_result(args.out, record(rows, claims), COLUMNS, cells(rows))
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


def packed(file: Path) -> Path:
    """The file by gzip, in a folder of its own, written once."""
    target = file.parent.with_name(f"{file.parent.name}-gzip") / f"{file.name}.gz"
    if not target.exists():
        target.parent.mkdir(exist_ok=True)
        unfinished = target.with_suffix(".unfinished")
        with file.open("rb") as source, gzip.open(unfinished, "wb", compresslevel=6) as copy:
            shutil.copyfileobj(source, copy, 1 << 20)
        unfinished.rename(target)
    return target


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
    one, eight, many = by_name[OURS], by_name[OURS_EIGHT], by_name[OURS_MANY]
    peer_s = min(row.median_s for row in rows if row.times_itself)
    values = [
        ("whole diagnosis of 1.3 M events, s, at most 4", one.median_s, one.median_s <= 4),
        (
            "times faster than the peer's faster load alone, at least 8",
            peer_s / one.median_s,
            peer_s / one.median_s >= 8,
        ),
        ("whole diagnosis of eight ranks of 40 MB, s, at most 6", eight.median_s, eight.median_s <= 6),
        ("whole diagnosis of 256 ranks, s, at most 10", many.median_s, many.median_s <= 10),
    ]
    for name, loaded in LOADED.items():
        row = by_name[name]
        share = row.median_s / by_name[loaded].median_s
        values.append((f"{name}: share of the time of {loaded}, at most 0.45", share, share <= 0.45))
        values.append((f"{name}: peak memory, MB, at most 350", row.median_mb, row.median_mb <= 350))
    return [{"claim": claim, "value": round(value, 2), "met": met} for claim, value, met in values]


def cells(rows: Sequence[Row]) -> list[list[str]]:
    """The table: the peer's seconds also as a multiple of ours."""
    by_name = {row.name: row for row in rows}
    return [
        [
            row.name,
            f"{row.median_s:.2f}",
            f"{min(row.seconds):.2f}-{max(row.seconds):.2f}",
            f"{row.median_mb:.0f}",
            f"{row.median_s / by_name[LOADED[row.name]].median_s:.2f}" if row.name in LOADED else "",
            f"{row.median_s / by_name[OURS].median_s:.1f}x" if row.times_itself else "",
        ]
        for row in rows
    ]


def record(rows: Sequence[Row], claims: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What results/trace-load.json keeps."""
    peer = next(row.answer["versions"] for row in rows if row.times_itself)
    ours = [row for row in rows if "source" in row.answer]
    return {
        "provenance": provenance(("counterpoint", "msgspec", "numpy", "polars")) | {"peer_versions": peer},
        "traces": {
            row.name: {"bytes": _size(Path(row.command[-3])), "events": row.answer["source"]["events"]} for row in ours
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


def _size(given: Path) -> int:
    return sum(path.stat().st_size for path in (given.iterdir() if given.is_dir() else [given]))


if __name__ == "__main__":
    main()
