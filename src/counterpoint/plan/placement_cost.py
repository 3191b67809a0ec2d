"""What a placement costs: C = Σ d(i, j) · M(i, j) over pairs of ranks, by level.

    cost of a level = distance · bytes of pairs on the same rail + off_rail · bytes of the other pairs
    time of a level = bytes that its busiest GPU sends there / GB/s of one GPU

Groups are counted, not expanded: c ranks of a group in one unit are c · (c - 1) / 2 pairs that stay inside it.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from counterpoint.plan.topology import Topology
from counterpoint.plan.traffic import Block, Traffic
from counterpoint.records.base import Record

__all__ = ["Layout", "LevelCost", "layout"]

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
CHUNK = 1 << 22  # values of an intermediate array


class LevelCost(Record, frozen=True, kw_only=True):
    """What crosses one level.

    Args:
        level: its name.
        distance: of the topology.
        num_bytes: of pairs that this level joins and no lower one does, both ways, in one step.
        off_rail_bytes: of them, those between different places of two hosts.
        busiest_bytes: of them, what the GPU with most of them sends.
        cost: distance · bytes, in the unit of the topology's distances times bytes.
        time_us: `busiest_bytes` at the level's bandwidth; None where that is unknown.
    """

    level: str
    distance: float
    num_bytes: float
    off_rail_bytes: float
    busiest_bytes: float
    cost: float
    time_us: float | None = None


class Layout(Record, frozen=True, kw_only=True):
    """One way to place the ranks, and its cost.

    Args:
        name: "in order", "rail-optimised", "random", "found".
        cost: C, the sum over the levels.
        levels: inside out.
        time_us: the longest of the levels' times: they are different links and run at the same time; None: unknown.
    """

    name: str
    cost: float
    levels: tuple[LevelCost, ...]
    time_us: float | None = None


def layout(name: str, traffic: Traffic, topology: Topology, slots: I64) -> Layout:
    """The cost of one placement.

    Args:
        name: for people.
        traffic: M.
        topology: d.
        slots: of each rank: host · gpus + place.
    """
    sent = np.zeros((len(topology.levels), 2, traffic.world_size))  # per level, on and off the rail, by rank
    inside = 0.0
    for block in traffic.blocks:
        add = _add_pairs if block.in_pairs else _add_groups
        add(sent, block, topology, slots)
        inside += 0.0 if topology.inside is None else _inside_cost(block, topology, slots)
    measured = None if topology.matrix is None else _matrix_costs(traffic, topology, slots)
    levels = []
    for index, level in enumerate(topology.levels):
        on, off = sent[index].sum(axis=1) / 2  # a pair was counted at both of its ranks
        cost = level.distance * on + (level.distance if level.off_rail is None else level.off_rail) * off
        if index == 0 and topology.inside is not None:
            cost = inside
        if index > 0 and measured is not None:
            cost = measured[index]
        busiest = float(sent[index].sum(axis=0).max() / 2)  # bytes count both ways
        levels.append(
            LevelCost(
                level=level.name, distance=level.distance, num_bytes=float(on + off), off_rail_bytes=float(off),
                busiest_bytes=busiest, cost=float(cost),
                time_us=None if level.gb_per_s is None else busiest / (level.gb_per_s * 1e3),
            )
        )  # fmt: skip
    times = [level.time_us for level in levels if level.time_us is not None]
    return Layout(
        name=name,
        cost=sum(level.cost for level in levels),
        levels=tuple(levels),
        time_us=max(times) if len(times) == len(levels) else None,
    )


def _unit_rows(topology: Topology) -> list[I64]:
    """Unit of every host, level by level, the host itself first."""
    return [np.arange(len(topology.hosts)), *topology.units]


def _add_groups(sent: F64, block: Block, topology: Topology, slots: I64) -> None:
    """Bytes of each rank by level: partners in its unit less those in the unit below."""
    where = slots[block.members]
    host, place = where // topology.gpus, where % topology.gpus
    group = np.arange(len(block.members))[:, None]
    bytes_each = np.repeat(block.pair_bytes, block.members.shape[1])
    ranks = block.members.ravel()
    before = before_rail = np.zeros(len(ranks))
    for index, row in enumerate(_unit_rows(topology)):
        unit = group * len(topology.hosts) + row[host]
        near = _partners(unit)
        rail = _partners(unit * topology.gpus + place) if index else near  # inside a host there are no rails
        on = rail - before_rail if index else near
        sent[index, 0] += np.bincount(ranks, on * bytes_each, minlength=sent.shape[2])
        sent[index, 1] += np.bincount(ranks, (near - before - on) * bytes_each, minlength=sent.shape[2])
        before, before_rail = near, rail if index else np.zeros(len(ranks))


def _partners(key: I64) -> F64:
    """Of each entry, how many others have its key."""
    _, inverse, count = np.unique(key.ravel(), return_inverse=True, return_counts=True)
    return (count[inverse] - 1).astype(np.float64)


def _add_pairs(sent: F64, block: Block, topology: Topology, slots: I64) -> None:
    """The same for neighbours in a line or ring."""
    first, second, num_bytes = block.pairs()
    hosts = slots[first] // topology.gpus, slots[second] // topology.gpus
    apart = np.stack([row[hosts[0]] != row[hosts[1]] for row in _unit_rows(topology)]).sum(axis=0)
    off = (slots[first] % topology.gpus != slots[second] % topology.gpus) & (apart > 0)
    flat = sent.reshape(-1)
    for ranks in (first, second):
        flat += np.bincount((apart * 2 + off) * sent.shape[2] + ranks, num_bytes, minlength=flat.size)


def _inside_cost(block: Block, topology: Topology, slots: I64) -> float:
    """Σ inside · bytes over pairs of one host."""
    assert topology.inside is not None
    links = topology.inside - np.diag(np.diag(topology.inside))
    if block.in_pairs:
        first, second, num_bytes = block.pairs()
        near = slots[first] // topology.gpus == slots[second] // topology.gpus
        pair = slots[first[near]] % topology.gpus, slots[second[near]] % topology.gpus
        return float((links[pair] * num_bytes[near]).sum())
    where = slots[block.members]
    group = np.broadcast_to(np.arange(len(where))[:, None], where.shape)
    keys, row = np.unique((group * len(topology.hosts) + where // topology.gpus).ravel(), return_inverse=True)
    taken = np.zeros((len(keys), topology.gpus))  # places that a group has in a host
    taken[row, (where % topology.gpus).ravel()] = 1.0
    each = block.pair_bytes[keys // len(topology.hosts)]
    return float(((taken @ links) * taken).sum(axis=1) @ each / 2)


def _matrix_costs(traffic: Traffic, topology: Topology, slots: I64) -> list[float]:
    """Σ matrix · bytes by level: half of c' D c for the hosts' counts c of each group, D within units of the level."""
    assert topology.matrix is not None
    reached = [0.0]  # inside a host there is no distance between hosts
    for row in topology.units:
        near = np.where(np.equal.outer(row, row), topology.matrix, 0.0)
        np.fill_diagonal(near, 0.0)
        reached.append(sum(_reached(block, near, slots // topology.gpus) for block in traffic.blocks))
    return [0.0, *(above - below for below, above in pairwise(reached))]


def _reached(block: Block, near: F64, host: I64) -> float:
    """Σ near · bytes of one block."""
    if block.in_pairs:
        first, second, num_bytes = block.pairs()
        return float((near[host[first], host[second]] * num_bytes).sum())
    total, step = 0.0, max(1, CHUNK // len(near))
    for start in range(0, len(block.members), step):
        where = host[block.members[start : start + step]]
        row = np.repeat(np.arange(len(where)), where.shape[1])
        counts = sparse.csr_array((np.ones(row.size), (row, where.ravel())), shape=(len(where), len(near)))
        inner = counts.multiply(counts @ near).sum(axis=1)
        total += float(np.asarray(inner).ravel() @ block.pair_bytes[start : start + step] / 2)
    return total
