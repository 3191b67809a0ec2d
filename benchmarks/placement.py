"""Placement against known optima, default orders, and the search that it had before.

    python benchmarks/placement.py             all cases, minutes: results/placement.json and .md
    python benchmarks/placement.py --quick     small cases, seconds

Optima are known where traffic was planted on the tree (in order is best by construction), for cubes of a torus (boxes
are best), and for eight GPUs, where all 40,320 orders are tried; there, ranks are renamed at random and only their
traffic is known. Jobs have a mesh, and hosts listed in random order, as an allocation gives them. Columns are costs
over the cost found: above 1 is worse. `optimum` and `search` below 1 are better orders than ours; `search` is that of
mesh boxes, spectral bisection and quadratic assignment, which was taken out in November 2026 (docs/log.md): its costs
are kept in results/placement_search.json.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import permutations
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from provenance import ROOT, provenance, write_result
from tables import print_table

from counterpoint.plan.job.cluster import Cluster, find_gpu
from counterpoint.plan.job.job import Job
from counterpoint.plan.job.model import find_model
from counterpoint.plan.job.parallel import Parallel, Training
from counterpoint.plan.network.network import levels
from counterpoint.plan.placement.place import Placement, place, placement_cost
from counterpoint.plan.placement.read_topology import of_matrix
from counterpoint.plan.placement.topology import Topology
from counterpoint.plan.placement.traffic import AxisTraffic, RankTraffic, sent_bytes

I64 = NDArray[np.int64]
F64 = NDArray[np.float64]
SEARCH = ROOT / "results" / "placement_search.json"
COLUMNS = ("case", "ranks", "s", "CPU s", "optimum", "search", "random", "in order", "rail-optimised")


@dataclass(frozen=True)
class Row:
    """One case. Ratios are costs over the found one; None: not known, or not tried."""

    case: str
    ranks: int
    seconds: float
    cpu_seconds: float
    optimum: float | None
    search: float | None
    random: float
    in_order: float
    rail_optimised: float
    steps: tuple[str, ...] = ()


def measure(case: str, traffic: RankTraffic, topology: Topology, optimum: float | None = None) -> tuple[Row, Placement]:
    """Place, and time it."""
    wall, cpu = time.perf_counter(), time.process_time()
    found = place(traffic, topology)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    cost = found.found.cost
    compared = {each.name: each.cost / cost for each in found.compared}
    searched = search_costs().get(case)
    row = Row(
        case=case,
        ranks=traffic.world_size,
        seconds=wall,
        cpu_seconds=cpu,
        optimum=None if optimum is None else optimum / cost,
        search=None if searched is None else searched / cost,
        random=compared["random"],
        in_order=compared["in order"],
        rail_optimised=compared["rail-optimised"],
        steps=found.steps,
    )
    return row, found


@cache
def search_costs() -> dict[str, float]:
    """Costs that the former search found, by case."""
    costs: dict[str, float] = json.loads(SEARCH.read_text())["costs"]
    return costs


def fat_tree(sizes: Sequence[int]) -> Topology:
    """A fat tree of equal units; `sizes` are GPUs of a host, hosts of a leaf, leaves of a spine."""
    hosts = math.prod(sizes[1:])
    index = np.arange(hosts)
    units = [index // math.prod(sizes[1 : k + 1]) for k in range(1, len(sizes))]
    return Topology.of_units([f"host{i}" for i in index], np.array(units), sizes[0])


def slot_distance(topology: Topology) -> F64:
    """Distances of every two GPUs, `[slots, slots]`."""
    host = np.arange(topology.num_slots) // topology.gpus
    found = topology.host_distance[np.ix_(host, host)].astype(np.float64)
    np.fill_diagonal(found, 0.0)
    return found


def matrix_traffic(matrix: F64) -> RankTraffic:
    """Exchanges of any matrix: entry (i, j) is what rank i sends to rank j, in bytes."""
    i, j = np.nonzero(np.triu(matrix + matrix.T, 1))
    members, pair_bytes = np.stack([i, j], axis=1), (matrix + matrix.T)[i, j]
    parts = (AxisTraffic(axis="given", members=members, pair_bytes=pair_bytes),) if len(i) else ()
    return RankTraffic(world_size=len(matrix), parts=parts)


def renamed(traffic: RankTraffic, to: I64) -> RankTraffic:
    """The same exchanges with rank r called `to[r]`; no mesh any more."""
    parts = tuple(
        AxisTraffic(axis=part.axis, members=to[part.members], pair_bytes=part.pair_bytes, pattern=part.pattern)
        for part in traffic.parts
    )
    return RankTraffic(world_size=traffic.world_size, parts=parts)


def scrambled(traffic: RankTraffic, seed: int = 1) -> RankTraffic:
    """The same exchanges, ranks renamed at random: no mesh, only a matrix."""
    return renamed(traffic, np.random.default_rng(seed).permutation(traffic.world_size))


def shuffled(topology: Topology, seed: int = 2) -> Topology:
    """The same hosts, listed at random."""
    return topology.only([topology.hosts[i] for i in np.random.default_rng(seed).permutation(len(topology.hosts))])


def planted(sizes: Sequence[int]) -> RankTraffic:
    """Ten times the traffic for each level that two ranks share: in order is the optimum."""
    ranks, parts = math.prod(sizes), []
    for level in range(len(sizes)):
        members = np.arange(ranks).reshape(-1, math.prod(sizes[: level + 1]))
        parts.append(
            AxisTraffic(axis=f"level {level}", members=members, pair_bytes=np.full(len(members), 10.0**-level))
        )
    return RankTraffic(world_size=ranks, parts=tuple(parts))


def noisy(sizes: Sequence[int], sigma: float) -> RankTraffic:
    """The same as a full matrix, each entry times a lognormal factor: in order is the optimum while noise is small."""
    found = np.zeros((math.prod(sizes), math.prod(sizes)))
    for part in planted(sizes).parts:
        i, j, num_bytes = part.pairs()
        np.add.at(found, (i, j), num_bytes)
    return matrix_traffic(found * np.random.default_rng(3).lognormal(0, sigma, found.shape))


def torus(edge: int) -> tuple[RankTraffic, I64]:
    """Six neighbours with equal traffic, and the slots of the best boxes on hosts of 2^3, leaves of 4^3, ..."""
    index = np.arange(edge**3).reshape(edge, edge, edge)
    pairs = np.concatenate([np.stack([index, np.roll(index, -1, axis)], axis=-1).reshape(-1, 2) for axis in range(3)])
    neighbours = AxisTraffic(axis="neighbours", members=pairs, pair_bytes=np.ones(len(pairs)))
    at = np.unravel_index(index.ravel(), index.shape)
    keys = [axis >> bit & 1 for bit in range(edge.bit_length() - 1) for axis in at]
    return RankTraffic(world_size=edge**3, parts=(neighbours,)), np.argsort(np.lexsort(keys))


def known(quick: bool) -> Iterator[tuple[str, RankTraffic, Topology, I64]]:
    """Cases whose optimum is known, with its slots."""
    trees = [(8, 8, 8)] if quick else [(8, 8, 8), (4, 6, 5, 7)]
    for sizes in trees:
        traffic = planted(sizes)
        yield f"planted {' x '.join(map(str, sizes))}", traffic, fat_tree(sizes), np.arange(traffic.world_size)
    for sizes in [(8, 8, 8)] if quick else [(8, 8, 16)]:
        name, traffic = f"planted {' x '.join(map(str, sizes))}, noise", noisy(sizes, 1.0)
        yield name, traffic, fat_tree(sizes), np.arange(traffic.world_size)
    traffic, slots = torus(8)
    yield "torus 8^3", traffic, fat_tree([8, 8, 8]), slots


def jobs(quick: bool) -> dict[str, tuple[Job, Topology]]:
    """Jobs on hosts of 8 H100, leaves of 16 hosts, spines of 8 leaves."""

    def job(name: str, parallel: Parallel, batch: int) -> tuple[Job, Topology]:
        ranks = parallel.world_size
        cluster = Cluster(gpu=find_gpu("H100"), levels=levels("h100-roce-400", ranks))
        training = Training(sequence=8192, global_batch=batch)
        hosts = ranks // 8
        leaves = max(1, hosts // 16)
        sizes = [8, min(16, hosts), min(8, leaves), max(1, leaves // 8)]
        found = Job(model=find_model(name), training=training, parallel=parallel, cluster=cluster)
        return found, fat_tree([size for size in sizes if size > 1])

    found = {"70B tp8 dp16 pp4": job("llama3-70b", Parallel(tp=8, dp=16, pp=4), 256)}
    if not quick:
        found |= {
            "70B hsdp 4096": job("llama3-70b", Parallel(tp=2, dp=2048, zero=3, shard=64), 2048),
            "405B tp8 pp16 dp32": job("llama3-405b", Parallel(tp=8, pp=16, dp=32, ends_count=True), 1024),
            "405B tp8 cp4 pp16 dp8": job("llama3-405b", Parallel(tp=8, cp=4, pp=16, dp=8, ends_count=True), 128),
            "405B tp8 pp16 dp128": job("llama3-405b", Parallel(tp=8, pp=16, dp=128, ends_count=True), 2048),
        }
    return found


def brute_force(cases: int) -> dict[str, float]:
    """Of random traffic between eight GPUs: worst and mean ratio to the best of all orders."""
    orders, (i, j) = np.array(list(permutations(range(8)))), np.triu_indices(8, 1)
    ratios = []
    for seed in range(cases):
        draw = np.random.default_rng(seed)
        matrix = draw.random((8, 8)) * (draw.random((8, 8)) < 0.5)
        topology = fat_tree([[2, 2, 2], [4, 2], [2, 4]][seed % 3])
        best = (slot_distance(topology)[orders[:, i], orders[:, j]] @ (matrix + matrix.T)[i, j]).min()
        ratios.append(place(matrix_traffic(matrix), topology).found.cost / best)
    return {"cases": cases, "worst": float(max(ratios)), "mean": float(np.mean(ratios))}


def measured(hosts: int) -> Topology:
    """Hosts of 8 with distances as measured: a tree of leaves of 8 hosts with 10 % noise, in random order."""
    draw = np.random.default_rng(5)
    leaf = draw.permutation(np.repeat(np.arange(hosts // 8), 8))
    matrix = np.where(np.equal.outer(leaf, leaf), 2.0, 4.0) * draw.lognormal(0, 0.1, (hosts, hosts))
    matrix = (matrix + matrix.T) / 2
    np.fill_diagonal(matrix, 0.0)
    return of_matrix([f"n{i}" for i in range(hosts)], matrix, gpus=8, inside=0.13)


def all_rows(quick: bool, show: Callable[[Row], None]) -> list[Row]:
    """Every case, shown as it is done."""
    rows: list[Row] = []

    def add(case: str, traffic: RankTraffic, topology: Topology, optimum: float | None = None) -> Placement:
        row, found = measure(case, traffic, topology, optimum)
        rows.append(row)
        show(row)
        return found

    for case, traffic, topology, slots in known(quick):
        add(case, scrambled(traffic), topology, placement_cost("known", traffic, topology, slots).cost)
    for case, (job, topology) in jobs(quick).items():
        traffic = RankTraffic.of_job(job.parallel, sent_bytes(job))
        add(f"{case}, hosts shuffled", traffic, shuffled(topology))
    some, _ = jobs(True)["70B tp8 dp16 pp4"]
    add("70B on a measured matrix", RankTraffic.of_job(some.parallel, sent_bytes(some)), measured(64))
    return rows


def cells(row: Row) -> list[str]:
    """One line of the table."""
    ratios = (row.optimum, row.search, row.random, row.in_order, row.rail_optimised)
    told = ["" if ratio is None else f"{ratio:.3f}" for ratio in ratios]
    return [row.case, str(row.ranks), f"{row.seconds:.1f}", f"{row.cpu_seconds:.1f}", *told]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small cases only; nothing is kept unless --out is given")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = all_rows(args.quick, lambda row: print(" | ".join(cells(row)), flush=True))
    brute = brute_force(12 if args.quick else 100)
    print_table(COLUMNS, map(cells, rows), title="placement: cost over the cost found", width=170)
    print(f"eight GPUs, all orders tried: worst {brute['worst']:.4f}, mean {brute['mean']:.4f} of {brute['cases']:.0f}")
    out = args.out or (None if args.quick else ROOT / "results" / "placement.json")
    if out is not None:
        record = {"provenance": provenance(("counterpoint", "numpy")), "rows": [asdict(row) for row in rows]}
        write_result(out, {**record, "brute_force": brute}, COLUMNS, [cells(row) for row in rows])


if __name__ == "__main__":
    main()
