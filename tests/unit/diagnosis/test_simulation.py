"""Graphs simulated together, level by level, against the plain pass over each of them, to the last bit."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.diagnosis.analysis import simulation
from counterpoint.diagnosis.analysis.replay_graph import ReplayGraph
from counterpoint.diagnosis.analysis.simulation import simulate, simulate_all
from counterpoint.trace.timeline import F64

EDGES = ("host", "stream", "event", "seen")


def random_graph(rng: np.random.Generator, nodes: int, ranks: int, joints: int) -> ReplayGraph:
    """Random edges to earlier nodes, random collectives; a collective's arrivals and leavings may be apart."""
    here = np.arange(nodes)
    joint = np.where(rng.random(nodes) < 0.5, rng.integers(0, max(joints, 1), nodes), -1) if joints else here * 0 - 1
    joint[0] = -1
    arrives = (joint >= 0) & (rng.random(nodes) < 0.7)
    leaves = (joint >= 0) & (~arrives | (rng.random(nodes) < 0.7))
    last = np.zeros(int(joint.max()) + 1, np.int64)
    np.maximum.at(last, joint[arrives], here[arrives])
    known = np.where(leaves, np.maximum(here, last[joint] if len(last) else 0), here)
    edges: dict[str, Any] = {}
    for name in EDGES:
        to = np.minimum((rng.random(nodes) * here).astype(np.int64), np.maximum(here - 1, 0))
        edges[name] = np.where((known[to] < here) & (rng.random(nodes) < 0.8), to, 0)
    none = np.zeros(nodes)
    return ReplayGraph(
        column=np.concatenate(([-1], rng.integers(0, ranks, nodes - 1))),
        row=here - 1,
        kind=np.zeros(nodes, np.uint8),
        begin=none,
        end=none,
        order=none,
        host_gap=none,
        collective=joint,
        arrives=arrives,
        leaves=leaves,
        **edges,
        **random_times(rng, nodes),
    )


def random_times(rng: np.random.Generator, nodes: int) -> dict[str, Any]:
    """Times with many digits; a lag or host time may be below 0, and node 0 takes none."""
    low = {"after_host": -5.0, "lag": -5.0, "duration": 0.0, "transfer": 0.0}
    times = {name: rng.uniform(least, 100.0, nodes) for name, least in low.items()}
    for name in ("after_host", "lag", "duration"):
        times[name][0] = 0.0
    return times


def changed(rng: np.random.Generator, graph: ReplayGraph, what: str) -> ReplayGraph:
    """What what-ifs do to a graph: other times, fewer edges, or edges where there was none."""
    nodes = len(graph.row)
    if what == "times":
        return replace(graph, **random_times(rng, nodes))
    if what == "fewer":
        return replace(graph, seen=np.where(rng.random(nodes) < 0.5, 0, graph.seen))
    return replace(graph, event=np.where(graph.event == 0, graph.host, graph.event))


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    nodes=st.integers(2, 120),
    joints=st.integers(0, 8),
    whats=st.lists(st.sampled_from(["times", "fewer", "more"]), max_size=5),
)
def test_level_by_level_gives_the_bits_of_the_plain_pass(seed: int, nodes: int, joints: int, whats: list[str]) -> None:
    """Whatever the graph, however the others differ from it."""
    rng = np.random.default_rng(seed)
    first = random_graph(rng, nodes, 3, joints)
    graphs = [first, *(changed(rng, first, what) for what in whats)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulation, "_WIDE", 0)
        together = simulate_all(graphs)
    for graph, ends in zip(graphs, together, strict=True):
        np.testing.assert_array_equal(ends, simulate(graph))


def test_edges_that_no_graph_has_all_of_are_simulated_apart() -> None:
    """Two graphs that each have an edge which the other lacks have no common levels."""
    rng = np.random.default_rng(3)
    one = random_graph(rng, 60, 2, 3)
    two = replace(one, event=np.where(one.event > 0, 0, one.host))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulation, "_WIDE", 0)
        for graph, ends in zip((one, two), simulate_all([one, two]), strict=True):
            np.testing.assert_array_equal(ends, simulate(graph))


@pytest.mark.parametrize(("ranks", "together"), [(8, False), (100, True)])
def test_many_ranks_are_simulated_level_by_level(ranks: int, together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of chains of 20 nodes: levels of as many nodes as ranks; few ranks are faster node by node."""
    rng = np.random.default_rng(1)
    nodes = 1 + 20 * ranks
    chain = np.maximum(np.arange(nodes) - ranks, 0)
    edges: dict[str, Any] = dict.fromkeys(EDGES, chain)
    column = np.concatenate(([-1], np.arange(nodes - 1) % ranks))
    graph = replace(random_graph(rng, nodes, ranks, 0), column=column, **edges)
    graphs = [graph, changed(rng, graph, "times"), changed(rng, graph, "times")]
    passes: list[ReplayGraph] = []

    def counted(each: ReplayGraph) -> F64:
        passes.append(each)
        return simulate(each)

    monkeypatch.setattr(simulation, "simulate", counted)
    found = simulate_all(graphs)
    assert len(passes) == (1 if together else 3)  # one pass finds the levels
    for each, ends in zip(graphs, found, strict=True):
        np.testing.assert_array_equal(ends, simulate(each))
