"""Simulate replay graphs: compute when every node ends, in µs after node 0.

One pass in the order of the nodes does it, since every node follows all that it depends on. Graphs of many ranks that
share most edges, as what-ifs do, are simulated together, level by level: a level is all nodes that depend on those of
earlier levels only, and each level is a few operations of numpy. Both ways give the same values, to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from counterpoint.diagnosis.analysis.replay_graph import ReplayGraph
from counterpoint.trace.timeline import F64, I64

_WIDE = 64  # from so many nodes in a level on, numpy is faster than a loop
_EDGES = ("host", "stream", "event", "seen")


def simulate(graph: ReplayGraph) -> F64:
    """Simulate one graph in one pass over its nodes; return the end of every node in µs after node 0."""
    ends = [0.0] * len(graph.row)
    last_arrival = [0.0] * (int(graph.collective.max()) + 1)
    to_come = np.bincount(graph.collective[graph.arrives], minlength=len(last_arrival)).tolist()
    inside: list[list[int]] = [[] for _ in last_arrival]
    arrives, leaves, transfer = graph.arrives.tolist(), graph.leaves.tolist(), graph.transfer.tolist()
    edges = (graph.host, graph.after_host, graph.stream, graph.event, graph.seen, graph.collective)
    columns = [column.tolist() for column in (*edges, graph.lag, graph.duration)]
    for node, (host, after, stream, event, seen, joint, lag, duration) in enumerate(zip(*columns, strict=True)):
        begin = ends[host] + after
        if ends[stream] > begin:
            begin = ends[stream]
        if ends[event] > begin:
            begin = ends[event]
        if ends[seen] > begin:
            begin = ends[seen]
        begin += lag
        ends[node] = begin + duration
        if joint < 0:
            continue
        if arrives[node]:
            to_come[joint] -= 1
            last_arrival[joint] = max(last_arrival[joint], begin)
        if leaves[node]:
            ends[node] = begin
            inside[joint].append(node)
        if not to_come[joint]:
            for left in inside[joint]:
                ends[left] = max(ends[left], last_arrival[joint] + transfer[left])
            inside[joint].clear()
    return np.array(ends)


def simulate_all(graphs: Sequence[ReplayGraph]) -> list[F64]:
    """Simulate graphs with equal nodes and collectives; return, per graph, the end of every node in µs after node 0."""
    if not graphs:
        return []
    largest = max(graphs, key=_number_of_edges)
    together = [i for i, graph in enumerate(graphs) if _has_no_other_edges(graph, largest)]
    ranks = len(np.unique(graphs[0].column))
    levels = _levels(largest) if ranks > _WIDE and len(together) > 1 else None
    if levels is None or len(largest.row) < _WIDE * int(levels[1].max()):
        return [simulate(graph) for graph in graphs]
    by_level = dict(zip(together, _by_level([graphs[i] for i in together], *levels), strict=True))
    return [by_level[i] if i in by_level else simulate(graph) for i, graph in enumerate(graphs)]


def _number_of_edges(graph: ReplayGraph) -> int:
    return sum(int(np.count_nonzero(getattr(graph, edge))) for edge in _EDGES)


def _has_no_other_edges(graph: ReplayGraph, other: ReplayGraph) -> bool:
    pairs = [(getattr(graph, edge), getattr(other, edge)) for edge in _EDGES]
    return all(mine is theirs or bool(((mine == theirs) | (mine == 0)).all()) for mine, theirs in pairs)


def _levels(graph: ReplayGraph) -> tuple[I64, I64]:
    """Return each node's depth in the graph: the level at which it begins, and the level at which its end is known.

    Levels are times of a simulation in which each node takes no time and begins 1 after the nodes it depends on.
    """
    none, one = np.zeros(len(graph.row)), np.ones(len(graph.row))
    one[0] = 0.0
    known = simulate(replace(graph, after_host=none, lag=one, duration=none, transfer=none)).astype(np.int64)
    begun = 1 + np.max([known[getattr(graph, edge)] for edge in _EDGES], axis=0)
    begun[0] = 0
    return begun, known


def _by_level(graphs: Sequence[ReplayGraph], begun: I64, known: I64) -> list[F64]:
    """Simulate graphs level by level, on arrays with a row per node, sorted by level, and a column per graph."""
    order = np.argsort(begun, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    width, lane = len(graphs), np.arange(len(graphs))

    def table(name: str) -> F64:
        return np.stack([getattr(g, name)[order] for g in graphs], axis=1)

    after, lag, duration, transfer = (table(name) for name in ("after_host", "lag", "duration", "transfer"))
    sources = [_flat(graphs, edge, order, place) for edge in _EDGES]
    joint, arrives, leaves = (getattr(graphs[0], name)[order] for name in ("collective", "arrives", "leaves"))
    last_arrival = np.zeros((int(joint.max()) + 1, width))
    arriving = np.flatnonzero(arrives)
    leaving = np.flatnonzero(leaves)
    leaving = leaving[np.argsort(known[order[leaving]], kind="stable")]
    numbers = np.arange(int(known.max()) + 2)
    bounds = np.searchsorted(begun[order], numbers).tolist()
    came = np.searchsorted(begun[order[arriving]], numbers).tolist()
    left = np.searchsorted(known[order[leaving]], numbers).tolist()
    duration[leaving] = 0.0
    ends = np.zeros((len(order), width))
    flat = ends.reshape(-1)
    for level in range(1, len(numbers) - 1):
        rows = slice(bounds[level], bounds[level + 1])
        begin = flat.take(sources[0][rows] + lane) + after[rows]
        for source in sources[1:]:
            np.maximum(begin, flat.take(source[rows] + lane), out=begin)
        begin += lag[rows]
        np.add(begin, duration[rows], out=ends[rows])
        if came[level] < came[level + 1]:
            here = arriving[came[level] : came[level + 1]]
            np.maximum.at(last_arrival, joint[here], begin[here - rows.start])
        if left[level] < left[level + 1]:
            here = leaving[left[level] : left[level + 1]]
            ends[here] = np.maximum(ends[here], last_arrival[joint[here]] + transfer[here])
    return list(ends[place].T)


def _flat(graphs: Sequence[ReplayGraph], edge: str, order: I64, place: I64) -> I64:
    """Return, per edge, its source node's index in the flattened ends; one column if all graphs share the edges."""
    columns = [getattr(graph, edge) for graph in graphs]
    if all(column is columns[0] for column in columns):
        columns = columns[:1]
    return np.stack([place[column[order]] * len(graphs) for column in columns], axis=1)
