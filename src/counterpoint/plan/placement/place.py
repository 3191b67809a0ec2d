"""Order a job's ranks along the network so that C = Σ d(i, j) · M(i, j) is small, and compare with default orders.

    cost of a level = distance · bytes of the pairs that it joins; with measured distances, Σ matrix · bytes of them
    time of a level = bytes that its busiest GPU sends there / GB/s of one GPU

Hosts are taken as listed, in tree order, and in tree order with the hosts of a group kept together (`Topology.packed`).
From the cheapest of these orders, ranks of two hosts and whole hosts are swapped while that lowers C, for at most
`MAX_WORK`. Of orders that cost the same, rings and groups that follow the tree win: over leaves A, B, A, B a ring runs
A, A, B, B. Every reported cost is exact: groups are counted, not expanded.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from counterpoint.errors import Misconfigured
from counterpoint.plan.placement.topology import Topology
from counterpoint.plan.placement.traffic import AxisTraffic, RankTraffic
from counterpoint.records import Record
from counterpoint.records.prediction import LevelLoad, RankOrder

I64 = NDArray[np.int64]
F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
RANDOM_ORDERS = 5  # number of random orders whose mean is reported as "random"
CYCLES = 3  # of swapping ranks, then hosts
MAX_SWAPPED = 4_096  # most ranks, or hosts, that are swapped: it takes a matrix of all pairs
MAX_WORK = 1.3e9  # pairs that are tried, half of them in the first cycle: some 20 s of CPU for 4,096 ranks
BINS_OF_A_PAIR = 800  # a sum over so many bins takes as long as one pair
ROWS = 128  # of a matrix that are held in the cache
WORTH = 1e-6  # fraction of a vertex's mean cost: smaller gains are float32 rounding errors


class Placement(Record, frozen=True, kw_only=True):
    """Records the order of ranks that was found, with its cost and the costs of default orders."""

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
        """Return the name of the host on which a rank runs."""
        return self.hosts[self.slots[rank] // self.gpus]


def place(traffic: RankTraffic, topology: Topology) -> Placement:
    """Return the cheapest placement found, with the costs of default orders."""
    ranks, slots = traffic.world_size, topology.num_slots
    if ranks > slots:
        raise Misconfigured(
            f"world_size = {ranks}: the topology has {slots} GPUs ({len(topology.hosts)} hosts of {topology.gpus}); "
            "give more hosts or a smaller job"
        )
    searched = traffic.with_rings()
    seats = np.arange(topology.gpus)  # ranks fill all GPUs host by host
    tried = {
        name: (order[:, None] * topology.gpus + seats).ravel()[:ranks]
        for name, order in _host_orders(traffic, topology).items()
    }
    costs = {name: placement_cost(name, traffic, topology, each) for name, each in tried.items()}

    def rank_by(name: str) -> tuple[float, float]:
        exact = costs[name].cost, placement_cost(name, searched, topology, tried[name]).cost
        return float(f"{exact[0]:.9g}"), float(f"{exact[1]:.9g}")  # sums in another order differ in the last digits

    start = min(tried, key=rank_by)
    tried["swapped"], done = _improved(searched, topology, tried[start])
    costs["swapped"] = placement_cost("swapped", traffic, topology, tried["swapped"])
    best = min(tried, key=rank_by)
    steps = [f"{name}: {each.cost:.6g}" for name, each in costs.items()]
    steps[-1] += f", from {start}, {done}"
    return Placement(
        hosts=topology.hosts,
        gpus=topology.gpus,
        slots=tuple(tried[best].tolist()),
        found=structs.replace(costs[best], name="found"),
        compared=(costs["in order"], costs["rail-optimised"], _random(traffic, topology)),
        steps=(*steps, f"taken: {best}"),
    )


def _host_orders(traffic: RankTraffic, topology: Topology) -> dict[str, I64]:
    """Return orders of the hosts: as listed, along the network's tree, and along the tree with groups kept together."""
    found = {"in order": np.arange(len(topology.hosts)), "rail-optimised": topology.tree_order}
    for part in traffic.parts:
        block = -(-int(np.ptp(part.members[0]) + 1) // topology.gpus)  # hosts that a group spans
        if part.pattern == "all" and 1 < block < len(topology.hosts):
            found[f"groups of {block} hosts"] = topology.packed(block)
    return found


def _improved(traffic: RankTraffic, topology: Topology, slots: I64) -> tuple[I64, str]:
    """Return the ranks' slots after swaps of ranks and of whole hosts that lower the cost, and a note on the swaps."""
    count, size = len(topology.hosts), topology.num_slots
    if count > MAX_SWAPPED:
        return slots, f"no swaps: {count} hosts are more than {MAX_SWAPPED}"
    free = np.setdiff1d(np.arange(size), slots)
    hosts, done = np.concatenate([slots, free]) // topology.gpus, []  # a row for each rank, then one for each free slot
    matrix = traffic.between(np.arange(traffic.world_size), size) if size <= MAX_SWAPPED else None
    work = MAX_WORK
    for _ in range(CYCLES):
        ranks_swapped = 0
        work /= 2
        if matrix is not None:
            hosts, ranks_swapped = _swapped(matrix, hosts, topology.host_distance, work=work)
        apart = traffic.between(hosts[: traffic.world_size], count)
        to, hosts_swapped = _swapped(apart, np.arange(count), topology.host_distance, work=work)
        hosts = to[hosts]
        done.append(f"{ranks_swapped} swaps of ranks, {hosts_swapped} of hosts")
        if not hosts_swapped:
            break
    return _seated(hosts[: traffic.world_size], topology.gpus), "; ".join(done)


def _swapped(matrix: F64, bins: I64, distance: F32, *, work: float) -> tuple[I64, int]:
    """Return each vertex's bin after swaps of two vertices that lower Σ D · M, and the number of swaps.

    With E[i, j] = Σ_k M(i, k) · D(bin of j, bin of k), the cost of i in the bin of j, a swap of i and j changes the
    sum by E[i, j] - E[i, i] + E[j, i] - E[j, j] + M(i, j) · (2 D(i, j) - D(i, i) - D(j, j)); the last term, because E
    has the other vertex in its old bin. A round looks at all pairs, and makes as many of the best swaps as lower the
    sum together, no bin twice: the local search of quadratic assignment (Koopmans and Beckmann 1957).

    `matrix` is M, `[vertices, vertices]`, symmetric, its diagonal 0; `bins` `[vertices]` keep their sizes; `distance`
    is D, `[bins, bins]`, symmetric, its diagonal the distance inside a bin. At most `work` pairs are tried, or two
    rounds.
    """
    traffic, swaps = (matrix / (matrix.max(initial=0.0) or 1.0)).astype(np.float32), 0
    cost = _cost(traffic, bins, distance)
    for _ in range(max(2, int(work / (matrix.size * (1 + len(distance) / BINS_OF_A_PAIR))))):
        first, second = _best_swaps(traffic, bins, distance, worth=WORTH * cost / len(bins))
        while len(first):
            trial = bins.copy()
            trial[first], trial[second] = bins[second], bins[first]
            if (found := _cost(traffic, trial, distance)) < cost * (1 - WORTH / len(bins)):
                break
            first, second = first[: len(first) // 2], second[: len(second) // 2]
        else:
            break
        bins, cost, swaps = trial, found, swaps + len(first)
    return bins, swaps


def _cost(traffic: F32, bins: I64, distance: F32) -> float:
    """Return Σ D · M over all pairs of vertices, with the distance D between their bins."""
    return float(np.einsum("ij,ij->", traffic, distance[np.ix_(bins, bins)], dtype=np.float64) / 2)


def _best_swaps(traffic: F32, bins: I64, distance: F32, *, worth: float) -> tuple[I64, I64]:
    """Return two arrays of vertices to swap pairwise: the best pair first, and no bin in two pairs."""
    count, inside = len(bins), np.diag(distance)
    apart = 2 * distance - inside - inside[:, None]
    moved = traffic @ distance[bins]
    moved -= moved[np.arange(count), bins][:, None]  # E[i, j] - E[i, i], for each bin of j
    to = np.ascontiguousarray(moved.T)
    partner, gain = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.float32)
    for rows in np.split(np.arange(count), np.arange(ROWS, count, ROWS)):
        change = moved[rows][:, bins]
        change += to[bins[rows]]
        change += traffic[rows] * apart[bins[rows]][:, bins]
        partner[rows] = change.argmin(axis=1)
        gain[rows] = change[np.arange(len(rows)), partner[rows]]
    keep, used = [], np.zeros(len(distance), dtype=bool)
    for i in np.argsort(gain, kind="stable"):
        here, there = bins[i], bins[partner[i]]
        if gain[i] < -worth and not used[here] and not used[there]:
            used[here] = used[there] = True
            keep.append(i)
    return np.array(keep, dtype=np.int64), partner[keep]


def _seated(hosts: I64, gpus: int) -> I64:
    """Return each rank's slot: the ranks of a host take its GPUs in ascending order, as launchers number them."""
    order = np.argsort(hosts, kind="stable")
    starts = np.searchsorted(hosts[order], hosts[order])  # index of the first rank on each rank's host
    seated = np.empty_like(hosts)
    seated[order] = hosts[order] * gpus + np.arange(len(hosts)) - starts
    return seated


def _random(traffic: RankTraffic, topology: Topology) -> RankOrder:
    """Return the mean cost of several random rank orders."""
    draw = np.random.default_rng(0)
    found = [
        placement_cost("random", traffic, topology, draw.permutation(topology.num_slots)[: traffic.world_size])
        for _ in range(RANDOM_ORDERS)
    ]
    levels = tuple(_mean(each) for each in zip(*(one.levels for one in found), strict=True))
    times = [one.time_us for one in found if one.time_us is not None]
    cost, time_us = float(np.mean([one.cost for one in found])), float(np.mean(times)) if times else None
    return RankOrder(name="random", cost=cost, levels=levels, time_us=time_us)


def _mean(levels: Sequence[LevelLoad]) -> LevelLoad:
    """Return the mean load of one level over several rank orders."""
    values = {name: [getattr(level, name) for level in levels] for name in ("num_bytes", "cost", "time_us")}
    means = {name: None if each[0] is None else float(np.mean(each)) for name, each in values.items()}
    return structs.replace(levels[0], **means)


def placement_cost(name: str, traffic: RankTraffic, topology: Topology, slots: I64) -> RankOrder:
    """Return the exact cost C of one placement, in total and by level of the topology.

    `slots` `[ranks]` has the index of each rank's host · gpus + GPU there.
    """
    sent = np.zeros((len(topology.levels), traffic.world_size))  # by level and rank
    for part in traffic.parts:
        add = _add_pairs if part.in_pairs else _add_groups
        add(sent, part, topology, slots)
    levels = []
    for index, level in enumerate(topology.levels):
        num_bytes = float(sent[index].sum() / 2)  # a pair was counted at both of its ranks
        busiest = float(sent[index].max() / 2)  # bytes count both ways
        cost = level.distance * num_bytes
        if index and topology.matrix is not None:
            cost = float((topology.matrix * traffic.between(slots // topology.gpus, len(topology.hosts))).sum() / 2)
        time_us = None if level.gb_per_s is None else busiest / (level.gb_per_s * 1e3)
        levels.append(LevelLoad(level=level.name, num_bytes=num_bytes, cost=cost, time_us=time_us))
    times = [level.time_us for level in levels if level.time_us is not None]
    # levels are different links and work at the same time: the longest counts, unless one of them is not known
    longest = max(times) if len(times) == len(levels) else None
    return RankOrder(name=name, cost=sum(level.cost for level in levels), levels=tuple(levels), time_us=longest)


def _unit_rows(topology: Topology) -> list[I64]:
    """Return the unit of every host at each level of the topology; at the first level each host is its own unit."""
    return [np.arange(len(topology.hosts)), *topology.units]


def _add_groups(sent: F64, part: AxisTraffic, topology: Topology, slots: I64) -> None:
    """Add each rank's bytes for each partner to `sent`, at the lowest level that joins the rank and the partner."""
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
    """Add each rank's bytes to `sent` by level, for traffic that is listed as pairs of ranks."""
    first, second, num_bytes = part.pairs()
    hosts = slots[first] // topology.gpus, slots[second] // topology.gpus
    level = np.stack([row[hosts[0]] != row[hosts[1]] for row in _unit_rows(topology)]).sum(axis=0)
    flat = sent.reshape(-1)
    for ranks in (first, second):
        flat += np.bincount(level * sent.shape[1] + ranks, num_bytes, minlength=flat.size)
