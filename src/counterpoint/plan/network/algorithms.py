"""Compute the hops and the bytes of each algorithm of a collective at each network level, for any group.

n ranks; level i joins u_i units into u_(i+1), f_i = u_i / u_(i+1); m_i = n / u_i ranks share a link into it
(`group.py`). Bytes are parts of S, the full array, per GPU and direction; hops are those of the longest chain.

    all_gather            hops at level i                bytes at level i
    ring                  u_i - u_(i+1)                  (n - 1)/n / m_i               one pipeline over all levels
    hierarchical          f_i - 1                        (f_i - 1)/f_i / m_i           one level after another
    recursive_doubling    log2 f_i                       (f_i - 1)/f_i / m_i           as NCCL's PAT, one rank per node
    direct                1 + (peers - 1)/8              (n - m_i)/n, see below        every rank to every other at once

reduce_scatter is the same backwards, all_reduce both: twice the hops, twice the bytes. peers = m_(i+1) - m_i, those
that are met at level i. What goes further up takes the NIC, too, but no NVLink: there, it is peers/n. Further:

    tree                  all_reduce: f_i - 1 over NVLink, log2 f_i above, up and down; 2/m_i bytes (NCCL: chains
                          inside a node, double binary trees above); broadcast: half of both
    in_network            hierarchical where switches do not reduce; where they do (SHARP, NVLS), one hop up (and one
                          down), 1/m_i bytes
    all_to_all            direct; hierarchical: f_i - 1 peers at each level, (f_i - 1)/f_i bytes
    broadcast             ring: a chain, 1/m_i bytes (every link into a unit carries a part); hierarchical: a chain of
                          single links per level; recursive_doubling: a binomial tree, log2 f_i times everything;
                          direct: the root sends to everyone
    send_recv             direct: one hop, S bytes, at the highest level that is crossed

Sources: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH" (2005) for ring and
recursive doubling; NCCL's src/graph/tuning.cc for steps of ring and tree; NCCL runs 8 point-to-point operations of a
channel at once (NCCL_MAX_DEV_WORK_P2P_PER_BATCH).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import log2

from counterpoint.plan.network.group import Reach

PEERS_AT_ONCE = 8
PAT_SINCE = (2, 23)  # NCCL: parallel aggregated trees for all_gather and reduce_scatter, one rank per node


Crossing = tuple[int, float, float]
"""Index of a network level, its hops, and the bytes over one GPU's link there as a part of S, the full array."""

Schedule = tuple[tuple[Crossing, ...], ...]
"""Phases, one after the other. Within a phase, levels work at once: the slowest decides; all hops count."""

PASSES = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}


def _ring(operation: str, at: Reach) -> Schedule | None:
    n = at.ranks
    if operation in PASSES:
        passes, part = PASSES[operation], (n - 1) / n
    elif operation == "broadcast":
        passes, part = 1, 1.0
    else:
        return None
    return (tuple((i, passes * (at.units[i] - at.units[i + 1]), passes * part / at.members(i)) for i in at.crossed),)


def _hierarchical(operation: str, at: Reach) -> Schedule | None:
    if len(at.crossed) < 2:
        return None  # equal to the ring, or to the direct algorithm
    if operation in PASSES:
        return _level_by_level(operation, at, hops=lambda fan: fan - 1)
    if operation == "all_to_all":
        return tuple(((i, _waves(at.fan(i) - 1), 1 - 1 / at.fan(i)),) for i in at.crossed)
    if operation == "broadcast":
        return tuple(((i, at.fan(i) - 1, 1.0),) for i in at.crossed)
    return None


def _recursive_doubling(operation: str, at: Reach) -> Schedule | None:
    if operation in PASSES:
        return _level_by_level(operation, at, hops=log2)
    if operation == "broadcast":
        return tuple(((i, log2(at.fan(i)), log2(at.fan(i))),) for i in at.crossed)
    return None


def _level_by_level(operation: str, at: Reach, *, hops: Callable[[float], float]) -> Schedule:
    passes = PASSES[operation]
    return tuple(((i, passes * hops(at.fan(i)), passes * (1 - 1 / at.fan(i)) / at.members(i)),) for i in at.crossed)


def _direct(operation: str, at: Reach) -> Schedule | None:
    if operation == "send_recv":
        return (((at.crossed[-1], 1.0, 1.0),),)
    passes = PASSES.get(operation, 1)
    each = 1.0 if operation == "broadcast" else 1 / at.ranks
    near = {i: at.members(i + 1) - at.members(i) for i in at.crossed}
    sent = {i: at.ranks - at.members(i) if at.shares_uplink[i] else near[i] for i in at.crossed}
    return (tuple((i, passes * _waves(near[i]), passes * sent[i] * each) for i in at.crossed),)


def _waves(peers: float) -> float:
    """Return the hops that messages to `peers` peers take, of which 8 are sent to at once."""
    return 1 + max(peers - 1, 0) / PEERS_AT_ONCE


def _tree(operation: str, at: Reach) -> Schedule | None:
    if operation not in ("all_reduce", "broadcast"):
        return None
    passes = 2 if operation == "all_reduce" else 1
    return (
        tuple(
            (i, passes * (log2(at.fan(i)) if at.shares_uplink[i] else at.fan(i) - 1), passes / at.members(i))
            for i in at.crossed
        ),
    )


def _in_network(operation: str, at: Reach) -> Schedule | None:
    if operation not in ("all_reduce", "reduce_scatter") or not any(at.reduces_in_network[i] for i in at.crossed):
        return None
    passes = PASSES[operation]
    return tuple(
        ((i, passes, 1 / at.members(i)),)
        if at.reduces_in_network[i]
        else ((i, passes * (at.fan(i) - 1), passes * (1 - 1 / at.fan(i)) / at.members(i)),)
        for i in at.crossed
    )


ALGORITHMS: dict[str, Callable[[str, Reach], Schedule | None]] = {
    "ring": _ring,
    "tree": _tree,
    "direct": _direct,
    "in_network": _in_network,
    "recursive_doubling": _recursive_doubling,
    "hierarchical": _hierarchical,
}


@lru_cache(maxsize=65536)
def schedule(operation: str, algorithm: str, at: Reach) -> Schedule | None:
    """Return an algorithm's hops and bytes, by phase, in a group of two ranks or more; None: it cannot run in it."""
    return ALGORITHMS[algorithm](operation, at)


def own_share(operation: str, algorithm: str, at: Reach) -> float:
    """Return the fraction of S that a rank copies or adds without sending: in a ring, the shard that ends there."""
    return 1 / at.ranks if algorithm == "ring" and operation in PASSES else 0.0


@lru_cache(maxsize=65536)
def nccl_algorithms(operation: str, at: Reach, nccl: tuple[int, int]) -> tuple[str, ...]:
    """Return the algorithms from which this version of NCCL chooses for an operation in a group."""
    if operation in ("all_to_all", "send_recv"):
        return ("direct",)
    names = ["ring"]
    if operation == "all_reduce":
        names.append("tree")
    if schedule(operation, "in_network", at) is not None:
        names.append("in_network")
    one_per_node = all(at.shares_uplink[i] for i in at.crossed)
    if operation in ("all_gather", "reduce_scatter") and one_per_node and nccl >= PAT_SINCE:
        names.append("recursive_doubling")
    return tuple(names)
