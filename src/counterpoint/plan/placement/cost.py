"""What a placement costs: C = Σ d(i, j) · M(i, j) over pairs of ranks, by level.

    cost of a level = distance · bytes of the pairs that it joins; with measured distances, Σ matrix · bytes of them
    time of a level = bytes that its busiest GPU sends there / GB/s of one GPU

Groups are counted, not expanded: c ranks of a group in one unit are c · (c - 1) / 2 pairs that stay inside it.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from counterpoint.plan.placement.topology import Topology
from counterpoint.plan.placement.traffic import AxisTraffic, RankTraffic
from counterpoint.records.prediction import LevelLoad, RankOrder

__all__ = ["placement_cost"]

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
CHUNK = 1 << 22  # values of an intermediate array


def placement_cost(name: str, traffic: RankTraffic, topology: Topology, slots: I64) -> RankOrder:
    """Return C of one placement, exact, and its parts by level.

    Args:
        name: Name of the result.
        traffic: M.
        topology: d.
        slots: `[ranks]`, of each rank: host · gpus + place.
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
    """Add the bytes of each rank by level: to partners in its unit less those in the unit below."""
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
    """Add the same for neighbours in a line or ring."""
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
    """Return Σ near · bytes of one axis."""
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
