"""Topologies: levels, distances, order along the tree, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from placement import fat_tree, slot_distance

from counterpoint.errors import Misconfigured
from counterpoint.plan.job.cluster import Cluster, ClusterGpu, Level
from counterpoint.plan.placement.read_topology import of_matrix
from counterpoint.plan.placement.topology import Topology, TopologyLevel

SMALL = fat_tree([2, 2, 2])  # hosts 0, 1 at one leaf, 2, 3 at the other


def test_distance_is_that_of_the_lowest_common_level() -> None:
    """Host, leaf, spine: GPU 0 to its neighbour, to the next host, and across the spine."""
    found = slot_distance(SMALL)
    assert found[0, [1, 2, 4]].tolist() == pytest.approx([50 / 390, 2.0, 4.0])


def test_rates_are_those_of_the_level_that_has_room() -> None:
    """Hosts of 2, leaves of 4, 8 in all, on a cluster of 4 by NVLink: the host and the leaf are NVLink."""
    gpu = ClusterGpu(name="x", tflops={}, sms=1, memory_gib=1, memory_gb_per_s=1)
    nvlink = Level(name="nvlink", kind="nvlink", size=4, gb_per_s=400, latency_us=1)
    rail = Level(name="rail", kind="network", size=8, gb_per_s=50, latency_us=5, oversubscription=2)
    found = SMALL.rated(Cluster(gpu=gpu, levels=(nvlink, rail)))
    assert [(level.gb_per_s, level.distance) for level in found.levels] == [
        *((400, pytest.approx(50 / 390)), (400, 2.0), (25, 4.0))
    ]


@given(seed=st.integers(0, 1000))
def test_the_order_along_the_tree_keeps_units_together(seed: int) -> None:
    """However hosts are listed, the hosts of every unit are neighbours in `tree_order`."""
    draw = np.random.default_rng(seed)
    leaf = draw.integers(0, 4, size=12)
    units = np.stack([leaf, leaf // 2, np.zeros(12, dtype=np.int64)])
    found = Topology.of_units([f"h{i}" for i in range(12)], units, 2)
    changes = (np.diff(found.units[:, found.tree_order], axis=1) != 0).sum(axis=1)
    assert changes.tolist() == [len(np.unique(row)) - 1 for row in found.units]


@given(order=st.permutations(range(8)))
def test_listing_equal_hosts_otherwise_changes_no_distance(order: list[int]) -> None:
    """Between hosts of the same names, distances stay as they were."""
    tree = fat_tree([2, 4, 2])
    again = tree.only([tree.hosts[index] for index in order])
    assert (again.host_distance == tree.host_distance[np.ix_(order, order)]).all()


@given(seed=st.integers(0, 1000), block=st.integers(2, 3))
def test_packed_hosts_are_all_hosts_and_whole_where_a_leaf_has_room(seed: int, block: int) -> None:
    """As many blocks lie below one leaf as its hosts make, one leaf after the other, and no host is lost."""
    draw = np.random.default_rng(seed)
    leaf = draw.integers(0, 4, size=13)
    found = Topology.of_units([f"h{i}" for i in range(13)], np.stack([leaf, np.zeros(13, dtype=np.int64)]), 1)
    order = found.packed(block)
    blocks = leaf[order[: 13 // block * block]].reshape(-1, block)
    whole = sum(len(set(each)) == 1 for each in blocks.tolist())
    assert sorted(order.tolist()) == list(range(13))
    assert whole >= (np.bincount(leaf) // block).sum()


def test_measured_hosts_follow_the_closest() -> None:
    """Of two pairs, each is visited whole; the first host begins."""
    near, far = 1.0, 5.0
    matrix = np.array([[0, far, near, far], [far, 0, far, near], [near, far, 0, far], [far, near, far, 0]])
    assert of_matrix(list("abcd"), matrix).tree_order.tolist() == [0, 2, 1, 3]


def test_missing_hosts_and_units_that_cross_are_refused() -> None:
    with pytest.raises(Misconfigured, match="1 hosts are not in the topology: elsewhere"):
        SMALL.only(["host0", "elsewhere"])
    # A leaf that lies below two spines is no tree
    units = np.array([[0, 0, 1, 1], [0, 1, 1, 1], [0, 0, 0, 0]])
    with pytest.raises(Misconfigured, match="not nested"):
        Topology.of_units(list("abcd"), units, 2)


LEVELS = SMALL.levels


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"units": np.array([[0, 0, 1, 1], [0, 0, 1, 1]])}, "2 roots"),
        ({"units": np.array([[0, 1, 0, 1], [0, 0, 0, 0]]), "hosts": ("a", "b", "a", "d")}, '"?a"? occurs twice'),
        ({"units": np.array([[0, 0, 0, 0]])}, r"give \[levels - 1, hosts\]"),
        ({"hosts": ("a\nrank 0=b", "b", "c", "d")}, "give letters, digits"),
        ({"hosts": ()}, "empty"),
        ({"gpus": 0}, "gpus = 0"),
        ({"gpus": 1 << 20}, "at most"),
    ],
)
def test_what_is_no_topology_is_refused(change: dict[str, object], said: str) -> None:
    fields: dict[str, object] = {"hosts": SMALL.hosts, "gpus": 2, "levels": LEVELS, "units": SMALL.units}
    with pytest.raises(Misconfigured, match=said):
        Topology(**{**fields, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize("fields", [{"distance": -1.0}, {"distance": math.inf}])
def test_a_level_needs_a_distance(fields: dict[str, float]) -> None:
    with pytest.raises(Misconfigured, match="level x"):
        TopologyLevel(name="x", **fields)
