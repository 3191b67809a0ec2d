"""Claim: digests of 4,096 ranks are diagnosed in a minute and 4 GB on two cores, and name the late rank.

The ranks are made from one generated trace (2 steps, 24 500 events): a mesh of tp 8 x dp N/8, whose collectives are of
a rank's tp group and dp group by turns, and one in each step of all ranks. Each rank has noise of its own in its
arrivals, each host of 8 ranks a clock of its own within 5 ms, and one rank comes 12 ms late to the collective of all
ranks, of which some is hidden. Writing the digests is not counted. Prints a table and writes results/many-digests.*;
it fails if the late rank, and no other, is not named, or its delay is 10 % off.

    python benchmarks/many_digests.py                # 256, 1,024, 4,096 and 10,240 ranks: 20 minutes, 1 GB of disk
    python benchmarks/many_digests.py --ranks 512    # does it run? writes no result
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import sys
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from process_cost import run
from provenance import provenance, write_table
from synthetic_job import Job, write_traces
from tables import print_table

from counterpoint.diagnosis.api import read_ranks
from counterpoint.diagnosis.reading.digest import RankDigest
from counterpoint.diagnosis.summary import digest_content
from counterpoint.trace.timeline import Kind

RESULTS = Path(__file__).resolve().parents[1] / "results"
RANKS = (256, 1024, 4096, 10240)
COLUMNS = ("ranks", "digests, MB", "s", "CPU s", "peak MB", "late rank named", "its delay, ms a step", "planted")
TP = 8
STALL_US = 12_000.0
CLOCK_US = 5000.0  # clocks of hosts differ by up to this, either way
TIMES = {"start", "end", "launch", "launch_start", "launch_end", "wait_call", "stream_wait_at"}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--ranks", type=int, nargs="*", help="numbers of ranks, multiples of 8; then nothing is kept")
    options.add_argument("--cache", type=Path, help="folder for the digests, by default a temporary one")
    args = options.parse_args()
    with TemporaryDirectory() as scratch:
        folder = args.cache or Path(scratch)
        base = base_digest(Path(scratch) / "trace")
        rows = [measured(base, ranks, folder / f"{ranks}") for ranks in args.ranks or RANKS]
    print_table(COLUMNS, rows, title="many_digests")
    if not args.ranks:
        write_table(RESULTS / "many-digests.json", COLUMNS, rows, provenance=provenance(("counterpoint", "numpy")))


def base_digest(folder: Path) -> RankDigest:
    """Return the digest of rank 0 of a generated job."""
    write_traces(Job(world_size=8, steps=2, micro_batches=1, layers=14), folder, [0])
    (digest,), _ = read_ranks(folder, [])
    return digest


def measured(base: RankDigest, ranks: int, folder: Path) -> list[str]:
    """Return the row of a diagnosis of so many ranks, in a process of its own."""
    write_digests(base, ranks, folder)
    cost = run([sys.executable, "-m", "counterpoint", "diagnose", str(folder), "--json", "-"])
    found = json.loads(cost.output)
    late = late_rank(ranks)
    named = [each["rank"] for each in found["stragglers"]]
    delay_us = sum(each["delay_us"] for each in found["stragglers"] if each["rank"] == late)
    delay_ms = delay_us / 1e3 / len(found["steps"])
    if len(found["per_rank"]) != ranks or named != [late] or abs(delay_ms / (STALL_US / 1e3) - 1) > 0.1:
        raise SystemExit(f"{ranks} ranks: late are {named} by {delay_ms:.2f} ms, not {late}")
    size_mb = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
    shutil.rmtree(folder)
    cells = (f"{ranks:,}", f"{size_mb:.0f}", f"{cost.seconds:.1f}", f"{cost.cpu_seconds:.1f}", f"{cost.peak_mb:.0f}")
    return [*cells, "yes", f"{delay_ms:.2f}", f"{STALL_US / 1e3:.2f}"]


def late_rank(ranks: int) -> int:
    """Return the number of the rank that is late."""
    return ranks * 3 // 5 + 1


def write_digests(base: RankDigest, ranks: int, folder: Path) -> None:
    """Write the digests of a job of so many ranks, with a process for each core."""
    folder.mkdir(parents=True)
    with multiprocessing.get_context("fork").Pool() as pool:
        pool.starmap(_write, ((base, rank, ranks, folder) for rank in range(ranks)), chunksize=16)


def _write(base: RankDigest, rank: int, ranks: int, folder: Path) -> None:
    (folder / f"rank{rank}.digest").write_bytes(digest_content(of_rank(base, rank, ranks)))


def of_rank(base: RankDigest, rank: int, ranks: int) -> RankDigest:
    """Return the digest of one rank: the base with groups, noise, clock and stall of this rank."""
    random = np.random.default_rng(rank)
    host_clock_us = np.random.default_rng(1 << 20 | rank // TP).uniform(-CLOCK_US, CLOCK_US)
    comm, gpu, late = base.comm, base.gpu, delayed_rows(base)
    names = tuple("all" if row in late else "tp" if row % 2 else "dp" for row in range(len(comm)))
    members = {"all": tuple(range(ranks)), "tp": tp_group(rank), "dp": dp_group(rank, ranks)}
    start = comm.start + random.uniform(0.0, np.minimum(30.0, 0.5 * (comm.end - comm.start)))
    end = comm.end + random.uniform(0.0, 3.0, len(comm))
    gpu_start, gpu_end = gpu.start.copy(), gpu.end.copy()
    gpu_start[comm.first], gpu_end[comm.last] = start, end
    digest = replace(
        base,
        rank=rank,
        world_size=ranks,
        job={**base.job, "world_size": ranks},
        path=f"rank{rank}.json",
        origin_ns=base.origin_ns + int(host_clock_us * 1000),
        gpu=replace(gpu, start=gpu_start, end=gpu_end),
        comm=replace(
            comm,
            group=names,
            group_desc=names,
            group_ranks=tuple(members[name] for name in names),
            size=np.array([len(members[name]) for name in names], np.int32),
            start=start,
            end=end,
        ),
    )
    for row in late:
        is_late = rank == late_rank(ranks)
        at = comm.start[row] + (-1.0 if is_late else 31.0) + STALL_US * late.index(row)
        digest = stalled(digest, at, all_end=is_late)
    return digest


def delayed_rows(base: RankDigest) -> list[int]:
    """Return the collective in the middle of each step, for which the late rank is late."""
    comm, steps = base.comm, zip(base.steps.start.tolist(), base.steps.end.tolist(), strict=True)
    inside = [np.flatnonzero((comm.start > low) & (comm.end < high)) for low, high in steps]
    return [int(rows[len(rows) // 2]) for rows in inside]


def stalled(digest: RankDigest, at: float, *, all_end: bool) -> RankDigest:
    """Return a digest in which all after `at` is `STALL_US` later.

    What runs at that time ends as it did; collectives take longer instead unless `all_end`.
    """
    gpu, comm = digest.gpu, digest.comm
    kept = (gpu.start <= at) & (gpu.end > at) & (all_end | (gpu.kind != Kind.COMM))
    called = (comm.start <= at) & (comm.end > at) & all_end

    def later(value: Any) -> Any:
        if not is_dataclass(value) or isinstance(value, type):
            return value
        moved = {}
        for field in fields(value):
            column = getattr(value, field.name)
            moved[field.name] = (
                np.where(column > at, column + STALL_US, column) if field.name in TIMES else later(column)
            )
        return replace(value, **moved)

    moved: RankDigest = later(digest)
    return replace(
        moved,
        gpu=replace(moved.gpu, end=np.where(kept, gpu.end, moved.gpu.end)),
        comm=replace(moved.comm, end=np.where(called, comm.end, moved.comm.end)),
    )


def tp_group(rank: int) -> tuple[int, ...]:
    """Return the ranks of a rank's host, which is its tensor-parallel group."""
    return tuple(range(rank // TP * TP, rank // TP * TP + TP))


def dp_group(rank: int, ranks: int) -> tuple[int, ...]:
    """Return the ranks with the same place in their hosts, which is a rank's data-parallel group."""
    return tuple(range(rank % TP, ranks, TP))


if __name__ == "__main__":
    main()
