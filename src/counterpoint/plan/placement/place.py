"""Find the order of a job's ranks with the least C = Σ d(i, j) · M(i, j), and compare it with launchers' defaults.

The search (docs/design/placement.md) starts along the tree and with the orders of `partition.py`, improves the two
cheapest by `swaps.py`, and takes the cheapest of all, the given order included. It is deterministic, and sees groups
above 65 ranks by a sample of their pairs; every cost printed is exact:

    cost of a level = distance · bytes of the pairs that it joins; with measured distances, Σ matrix · bytes of them
    time of a level = bytes that its busiest GPU sends there / GB/s of one GPU

Groups are counted, not expanded: c ranks of a group in one unit are c · (c - 1) / 2 pairs that stay inside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from msgspec import structs
from numpy.typing import NDArray
from scipy import sparse

from counterpoint.errors import Misconfigured
from counterpoint.plan.placement.partition import arrange, arrange_groups, contracted, heavy_groups, mesh_order
from counterpoint.plan.placement.swaps import MAX_SMALL, best_of_many, fits_memory, improve
from counterpoint.plan.placement.topology import Topology
from counterpoint.plan.placement.traffic import AxisTraffic, RankTraffic
from counterpoint.records import Record
from counterpoint.records.prediction import LevelLoad, RankOrder

I64 = NDArray[np.int64]
Csr = Any  # scipy.sparse.csr_array, which has no types
RANDOM_ORDERS = 5  # that "random" is the mean of
MAX_BISECTED = 20_000  # ranks; with a mesh, larger jobs do without bisection
IMPROVED = 2  # starts
CYCLES = 3  # of swapping ranks, then hosts
F64 = NDArray[np.float64]
CHUNK = 1 << 22  # values of an intermediate array


class Placement(Record, frozen=True, kw_only=True):
    """Records a rank order and what it saves."""

    hosts: tuple[str, ...]  # names, as the topology lists them
    gpus: int  # GPUs of each host
    # of each rank, index of its host · gpus + GPU there; ranks of a host have its first GPUs in their order
    slots: tuple[int, ...]
    found: RankOrder  # cost of these slots
    # costs of "in order" (as the hosts are listed), "rail-optimised" (in order along the tree, local rank k on rail k)
    # and "random" (mean of several)
    compared: tuple[RankOrder, ...]
    steps: tuple[str, ...]  # what was tried, and what it cost

    def host_of(self, rank: int) -> str:
        """Return the name of a rank's host."""
        return self.hosts[self.slots[rank] // self.gpus]

    def saved(self, name: str) -> float:
        """Return the share of the cost of a compared order that the found one saves."""
        other = next(each for each in self.compared if each.name == name)
        return 1 - self.found.cost / other.cost if other.cost else 0.0


def place(traffic: RankTraffic, topology: Topology, *, seed: int = 0) -> Placement:
    """Return the cheapest placement found, with the costs of others; `seed` is that of the random orders."""
    ranks, slots = traffic.world_size, topology.num_slots
    if ranks > slots:
        raise Misconfigured(
            f"world_size = {ranks}: the topology has {slots} GPUs ({len(topology.hosts)} hosts of {topology.gpus}); "
            "give more hosts or a smaller job"
        )
    tried = _starts(traffic, topology)
    costs = {name: placement_cost(name, traffic, topology, rows[:ranks]) for name, rows in tried.items()}
    steps = [f"{name}: {each.cost:.6g}" for name, each in costs.items()]
    if "bisection" not in tried:
        steps.append(f"no bisection: {slots} GPUs are more than {MAX_BISECTED}, and the mesh is known")
    for name, rows, done in _improved(_padded(traffic.sampled, slots), topology, tried, costs):
        tried[name], costs[name] = rows, placement_cost(name, traffic, topology, rows[:ranks])
        steps.append(f"{name} ({done}): {costs[name].cost:.6g}")
    best = min(costs, key=lambda name: costs[name].cost)
    return Placement(
        hosts=topology.hosts,
        gpus=topology.gpus,
        slots=tuple(_by_rank(tried[best], topology.gpus)[:ranks].tolist()),
        found=structs.replace(costs[best], name="found"),
        compared=(costs["in order"], costs["rail-optimised"], _random(traffic, topology, seed)),
        steps=(*steps, f"taken: {best}"),
    )


def _starts(traffic: RankTraffic, topology: Topology) -> dict[str, I64]:
    """Return, for each starting order, the slot of each row of M: ranks first, then a row for each free slot."""
    along = (topology.tree_order[:, None] * topology.gpus + np.arange(topology.gpus)).ravel()
    found = {"in order": np.arange(topology.num_slots), "rail-optimised": along}
    order = mesh_order(traffic, topology) if traffic.mesh else None
    if order is not None:
        found["mesh order"] = _slots_of(order, along)
    if topology.num_slots <= MAX_BISECTED or "mesh order" not in found:
        units = np.repeat(topology.units[:, topology.tree_order], topology.gpus, axis=1)
        hosts = np.repeat(np.arange(len(topology.hosts)), topology.gpus)
        matrix, units = _padded(traffic.sampled, topology.num_slots), np.vstack([hosts, units])
        found["bisection"] = _slots_of(arrange(matrix, units), along)
        groups = heavy_groups(matrix, topology.gpus)
        if groups is not None:
            found["bisection of heavy groups"] = _slots_of(arrange_groups(matrix, units, groups), along)
    return found


def _slots_of(order: I64, along: I64) -> I64:
    """Return the slot of each row if the rows of `order` fill `along` one by one; others get the slots left."""
    slots = along.copy()
    slots[order] = along[: len(order)]
    return slots


def _padded(matrix: Csr, size: int) -> Csr:
    """Return the matrix with an empty row and column for each free slot."""
    indptr = np.concatenate([matrix.indptr, np.full(size - matrix.shape[0], matrix.indptr[-1])])
    return sparse.csr_array((matrix.data, matrix.indices, indptr), shape=(size, size))


def _improved(
    matrix: Csr, topology: Topology, tried: Mapping[str, I64], costs: Mapping[str, RankOrder]
) -> Iterator[tuple[str, I64, str]]:
    """Yield name, slots after a local search and a note of the swaps, for each of the cheapest starting orders."""
    distinct = {costs[name].cost: name for name in reversed(tuple(costs)) if name != "in order"}
    names = [distinct[cost] for cost in sorted(distinct)[:IMPROVED]]
    found = []
    for name in names:
        slots, done = _swapped(matrix, topology, tried[name])
        found.append(slots)
        yield f"{name}, improved", slots, done
    if topology.num_slots <= MAX_SMALL:
        yield "quadratic assignment", best_of_many(matrix, topology, found), "single GPUs, many starts"


def _swapped(matrix: Csr, topology: Topology, slots: I64) -> tuple[I64, str]:
    """Return the slots after a local search that begins at `slots`, and a note of the swaps made."""
    hosts, count, done = slots // topology.gpus, len(topology.hosts), []
    if not fits_memory(len(slots), count):
        done.append(f"no swaps: {len(slots)} ranks on {count} hosts are too many")
    elif count > 1:
        for _ in range(CYCLES):
            hosts, ranks_swapped = improve(matrix, hosts, topology.host_distance)
            to, hosts_swapped = improve(contracted(matrix, hosts, count), np.arange(count), topology.host_distance)
            hosts = to[hosts]
            done.append(f"{ranks_swapped} swaps of ranks, {hosts_swapped} of hosts")
            if not hosts_swapped:
                break
    seated = np.empty_like(hosts)
    seated[np.lexsort([slots % topology.gpus, hosts])] = np.arange(len(hosts))
    return seated, "; ".join(done) or "nothing to swap"


def _by_rank(slots: I64, gpus: int) -> I64:
    """Return slots on the same hosts, with the GPUs of a host in the order of its ranks, as launchers count them."""
    seated = np.empty_like(slots)
    seated[np.argsort(slots // gpus, kind="stable")] = np.arange(len(slots))
    return seated


def _random(traffic: RankTraffic, topology: Topology, seed: int) -> RankOrder:
    """Return the mean cost of several random orders."""
    draw = np.random.default_rng(seed)
    found = [
        placement_cost("random", traffic, topology, draw.permutation(topology.num_slots)[: traffic.world_size])
        for _ in range(RANDOM_ORDERS)
    ]
    levels = tuple(_mean(each) for each in zip(*(one.levels for one in found), strict=True))
    times = [one.time_us for one in found if one.time_us is not None]
    cost, time_us = float(np.mean([one.cost for one in found])), float(np.mean(times)) if times else None
    return RankOrder(name="random", cost=cost, levels=levels, time_us=time_us)


def _mean(levels: Sequence[LevelLoad]) -> LevelLoad:
    """Return the mean of the numbers of one level."""
    values = {name: [getattr(level, name) for level in levels] for name in ("num_bytes", "cost", "time_us")}
    means = {name: None if each[0] is None else float(np.mean(each)) for name, each in values.items()}
    return structs.replace(levels[0], **means)


def placement_cost(name: str, traffic: RankTraffic, topology: Topology, slots: I64) -> RankOrder:
    """Return C of one placement, exact, and its parts by level.

    Args:
        name: Name of the result.
        traffic: M, the bytes between ranks.
        topology: d, the distances between GPUs.
        slots: `[ranks]`, index of each rank's host · gpus + GPU there.
    """
    sent = np.zeros((len(topology.levels), traffic.world_size))  # by level and rank
    for part in traffic.parts:
        add = _add_pairs if part.in_pairs else _add_groups
        add(sent, part, topology, slots)
    measured = None if topology.matrix is None else _matrix_costs(traffic, topology, slots)
    levels = []
    for index, level in enumerate(topology.levels):
        num_bytes = float(sent[index].sum() / 2)  # a pair was counted at both of its ranks
        busiest = float(sent[index].max() / 2)  # bytes count both ways
        cost = level.distance * num_bytes if measured is None or not index else measured[index]
        time_us = None if level.gb_per_s is None else busiest / (level.gb_per_s * 1e3)
        levels.append(LevelLoad(level=level.name, num_bytes=num_bytes, cost=cost, time_us=time_us))
    times = [level.time_us for level in levels if level.time_us is not None]
    # levels are different links and work at the same time: the longest counts, unless one of them is not known
    longest = max(times) if len(times) == len(levels) else None
    return RankOrder(name=name, cost=sum(level.cost for level in levels), levels=tuple(levels), time_us=longest)


def _unit_rows(topology: Topology) -> list[I64]:
    """Return the unit of every host, level by level, the host itself first."""
    return [np.arange(len(topology.hosts)), *topology.units]


def _add_groups(sent: F64, part: AxisTraffic, topology: Topology, slots: I64) -> None:
    """Add to `sent` the bytes of each rank by level: with partners in its unit there, less those in the unit below."""
    host = slots[part.members] // topology.gpus
    group = np.arange(len(part.members))[:, None]
    bytes_each = np.repeat(part.pair_bytes, part.members.shape[1])
    below = np.zeros(part.members.size)
    for index, row in enumerate(_unit_rows(topology)):
        unit = group * len(topology.hosts) + row[host]
        _, inverse, count = np.unique(unit.ravel(), return_inverse=True, return_counts=True)
        near = count[inverse] - 1.0
        sent[index] += np.bincount(part.members.ravel(), (near - below) * bytes_each, minlength=sent.shape[1])
        below = near


def _add_pairs(sent: F64, part: AxisTraffic, topology: Topology, slots: I64) -> None:
    """Add to `sent` the bytes of each rank by level, for traffic that is listed in pairs."""
    first, second, num_bytes = part.pairs()
    hosts = slots[first] // topology.gpus, slots[second] // topology.gpus
    level = np.stack([row[hosts[0]] != row[hosts[1]] for row in _unit_rows(topology)]).sum(axis=0)
    flat = sent.reshape(-1)
    for ranks in (first, second):
        flat += np.bincount(level * sent.shape[1] + ranks, num_bytes, minlength=flat.size)


def _matrix_costs(traffic: RankTraffic, topology: Topology, slots: I64) -> list[float]:
    """Return Σ matrix · bytes by level: half of c' D c for the hosts' counts c of each group, D within the units."""
    assert topology.matrix is not None
    reached = [0.0]  # inside a host there is no distance between hosts
    for row in topology.units:
        near = np.where(np.equal.outer(row, row), topology.matrix, 0.0)
        np.fill_diagonal(near, 0.0)
        reached.append(sum(_within(near, part, slots // topology.gpus) for part in traffic.parts))
    return [0.0, *(above - below for below, above in pairwise(reached))]


def _within(near: F64, part: AxisTraffic, host: I64) -> float:
    """Return Σ near · bytes over all pairs of one axis."""
    if part.in_pairs:
        first, second, num_bytes = part.pairs()
        return float((near[host[first], host[second]] * num_bytes).sum())
    total, step = 0.0, max(1, CHUNK // len(near))
    for start in range(0, len(part.members), step):
        where = host[part.members[start : start + step]]
        row = np.repeat(np.arange(len(where)), where.shape[1])
        counts = sparse.csr_array((np.ones(row.size), (row, where.ravel())), shape=(len(where), len(near)))
        inner = counts.multiply(counts @ near).sum(axis=1)
        total += float(np.asarray(inner).ravel() @ part.pair_bytes[start : start + step] / 2)
    return total
