"""Placement: the cost is the formula, and the order found is as good as claimed."""

from itertools import combinations
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from placement import fat_tree, matrix_traffic, renamed, slot_distance

from counterpoint.errors import Misconfigured
from counterpoint.plan.job.parallel import Parallel
from counterpoint.plan.placement.place import Placement, place, placement_cost
from counterpoint.plan.placement.read_topology import of_matrix
from counterpoint.plan.placement.topology import Topology
from counterpoint.plan.placement.traffic import RankTraffic

F64 = NDArray[np.float64]
JOB = RankTraffic.of_job(Parallel(tp=2, dp=4, pp=2), {"tp": 90.0, "dp": 7.0, "pp": 5.0})
GB = 1e9


def links(gpus: int, seed: int = 0) -> F64:
    """Distances inside a host, or between hosts."""
    found = np.random.default_rng(seed).random((gpus, gpus)) + 0.1
    found = found + found.T
    np.fill_diagonal(found, 0.0)
    return found


TOPOLOGIES = {
    "tree": fat_tree([4, 2, 2]),
    "measured": of_matrix([f"h{i}" for i in range(4)], links(4, seed=1), gpus=4, inside=0.1),
    "irregular": Topology.of_units(list("abcd"), np.array([[0, 0, 0, 1], [0, 0, 0, 0]]), 4),
}


def by_hand(traffic: RankTraffic, topology: Topology, slots: NDArray[np.int64]) -> float:
    """Σ d · M, pair by pair."""
    distance, total = slot_distance(topology), 0.0
    for part in traffic.parts:
        for i, j, num_bytes in zip(*part.pairs(), strict=True):
            total += distance[slots[i], slots[j]] * num_bytes
    return total


@pytest.mark.parametrize("name", TOPOLOGIES)
@given(seed=st.integers(0, 1000))
def test_the_cost_is_the_sum_over_pairs(name: str, seed: int) -> None:
    slots = np.random.default_rng(seed).permutation(16)
    found = placement_cost("x", JOB, TOPOLOGIES[name], slots).cost
    assert found == pytest.approx(by_hand(JOB, TOPOLOGIES[name], slots), rel=1e-5)


@given(seed=st.integers(0, 1000))
def test_every_byte_is_at_one_level(seed: int) -> None:
    slots = np.random.default_rng(seed).permutation(16)
    found = placement_cost("x", JOB, TOPOLOGIES["irregular"], slots)
    assert sum(level.num_bytes for level in found.levels) == pytest.approx(
        sum(part.pairs()[2].sum() for part in JOB.parts)
    )


def test_the_time_of_a_level_is_that_of_its_busiest_gpu() -> None:
    """GPU 0 sends 2 GB and GPU 1 sends 1 GB over 50 GB/s: 40 ms, whatever the others do."""
    topology = fat_tree([1, 3])
    levels = tuple(type(level)(name=level.name, distance=1.0, gb_per_s=50.0) for level in topology.levels)
    known = Topology(hosts=topology.hosts, gpus=1, levels=levels, units=topology.units)
    matrix = np.array([[0, 1, 1], [1, 0, 0], [1, 0, 0]]) * GB
    assert placement_cost("x", matrix_traffic(matrix), known, np.arange(3)).time_us == pytest.approx(40_000)


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 10_000), name=st.sampled_from(["2x2x2", "4x2", "2x4", "measured", "7 ranks"]))
def test_no_swap_of_two_ranks_on_two_hosts_would_help(seed: int, name: str) -> None:
    draw = np.random.default_rng(seed)
    topology = {
        "2x2x2": fat_tree([2, 2, 2]),
        "4x2": fat_tree([4, 2]),
        "2x4": fat_tree([2, 4]),
        "measured": of_matrix([f"h{i}" for i in range(8)], links(8, seed)),
        "7 ranks": fat_tree([4, 2]),
    }[name]
    ranks = 7 if name == "7 ranks" else 8
    traffic = matrix_traffic(draw.random((ranks, ranks)) * (draw.random((ranks, ranks)) < 0.5))
    found = place(traffic, topology)
    rows = [*found.slots, *sorted(set(range(8)) - set(found.slots))]
    for i, j in combinations(range(8), 2):
        other = np.array(rows)
        other[[i, j]] = other[[j, i]]
        assert placement_cost("x", traffic, topology, other[:ranks]).cost >= found.found.cost * (1 - 1e-4)


def planted(sizes: list[int], weights: list[float]) -> F64:
    """RankTraffic that grows with each unit of the tree that two ranks share: in order is the optimum."""
    ranks, size = np.arange(np.prod(sizes)), 1
    found = np.zeros((len(ranks), len(ranks)))
    for each, weight in zip(sizes, weights, strict=True):
        size *= each
        found += weight * np.equal.outer(ranks // size, ranks // size)
    return found


@pytest.mark.parametrize("sizes", [[8, 4, 4], [4, 6, 5], [2, 8, 3, 4]])
def test_the_optimum_of_a_fat_tree_is_nearly_found_again(sizes: list[int]) -> None:
    """Ranks scrambled, only the matrix known: within 50 % of the known optimum."""
    traffic, topology = matrix_traffic(planted(sizes, [100, 10, 1, 0.5][: len(sizes)])), fat_tree(sizes)
    best = placement_cost("known", traffic, topology, np.arange(traffic.world_size)).cost
    scrambled = renamed(traffic, np.random.default_rng(1).permutation(traffic.world_size))
    assert best * (1 - 1e-9) <= place(scrambled, topology).found.cost <= 1.5 * best


LEAVES = Topology.of_units(["a1", "b1", "a2", "b2"], np.array([[0, 1, 0, 1], [0, 0, 0, 0]]), 8)


def test_a_ring_over_alternating_leaves_follows_the_tree() -> None:
    """Four replicas on hosts of the leaves A, B, A, B: A, A, B, B, although the all-to-all cost is the same."""
    job = RankTraffic.of_job(Parallel(tp=8, dp=4), {"tp": 90.0, "dp": 1.0})
    found = place(job, LEAVES)
    assert [found.host_of(rank) for rank in range(0, 32, 8)] == ["a1", "a2", "b1", "b2"]
    assert found.found.cost == pytest.approx(found.compared[0].cost)


def test_an_order_along_the_tree_is_left_as_it_is() -> None:
    """B, B, A, A is as good as A, A, B, B: no host changes its place."""
    found = place(
        RankTraffic.of_job(Parallel(tp=8, dp=4), {"tp": 90.0, "dp": 1.0}), LEAVES.only(["b1", "b2", "a1", "a2"])
    )
    assert found.slots == tuple(range(32))


@pytest.mark.parametrize("leaves", [[3, 2, 2, 1], [1, 2, 3, 2], [5, 3], [4, 1, 1, 2]])
@given(seed=st.integers(0, 1000))
def test_groups_keep_together_under_a_leaf_where_they_fit(leaves: list[int], seed: int) -> None:
    """Four groups of two hosts: as many have one leaf as the leaves have room for, however hosts are listed."""
    leaf = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(leaves)), leaves))
    topology = Topology.of_units([f"h{i}" for i in range(8)], np.stack([leaf, np.zeros(8, dtype=np.int64)]), 4)
    found = place(RankTraffic.of_job(Parallel(tp=4, cp=2, dp=4), {"tp": 90.0, "cp": 20.0, "dp": 1.0}), topology)
    of_groups = leaf[np.array(found.slots).reshape(4, 8) // 4]
    assert sum(len(set(each)) == 1 for each in of_groups.tolist()) == sum(size // 2 for size in leaves)


def test_a_job_is_far_below_random() -> None:
    job = RankTraffic.of_job(Parallel(tp=8, dp=16, pp=4), {"tp": 50 * GB, "dp": 4 * GB, "pp": GB})
    found = place(job, fat_tree([8, 8, 8]))
    assert found.found.cost <= 0.7 * found.compared[-1].cost


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 1000))
def test_listing_equal_hosts_otherwise_changes_nothing(seed: int) -> None:
    tree = fat_tree([4, 2, 2])
    again = tree.only([tree.hosts[index] for index in np.random.default_rng(seed).permutation(4)])
    one, other = place(JOB, tree), place(JOB, again)
    assert (one.found.cost, one.compared[1].cost) == pytest.approx((other.found.cost, other.compared[1].cost))


@settings(deadline=None, max_examples=8)
@given(seed=st.integers(0, 1000), name=st.sampled_from(list(TOPOLOGIES)))
def test_nothing_that_it_is_compared_with_is_better(seed: int, name: str) -> None:
    draw = np.random.default_rng(seed)
    found = place(matrix_traffic(draw.random((16, 16)) ** 4), TOPOLOGIES[name])
    assert found.found.cost <= min(each.cost for each in found.compared) * (1 + 1e-8)


@settings(deadline=None, max_examples=8)
@given(ranks=st.integers(1, 16), name=st.sampled_from(list(TOPOLOGIES)))
def test_every_rank_has_a_gpu_of_its_own(ranks: int, name: str) -> None:
    draw = np.random.default_rng(ranks)
    slots = place(matrix_traffic(draw.random((ranks, ranks))), TOPOLOGIES[name]).slots
    assert (len(set(slots)), set(slots) <= set(range(16))) == (ranks, True)


def test_the_cost_that_is_told_is_that_of_the_slots() -> None:
    """Also after the GPUs of a host have been put in the order of the ranks."""
    topology = fat_tree([4, 2, 2])
    found = place(renamed(JOB, np.random.default_rng(3).permutation(16)), topology)
    again = placement_cost(
        "again", renamed(JOB, np.random.default_rng(3).permutation(16)), topology, np.array(found.slots)
    )
    assert found.found.cost == pytest.approx(again.cost)


def test_the_same_question_has_the_same_answer() -> None:
    topology = fat_tree([8, 2, 2])
    traffic = matrix_traffic(np.random.default_rng(0).random((32, 32)))
    assert place(traffic, topology).slots == place(traffic, topology).slots


def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises(Misconfigured, match="world_size = 16: the topology has 8 GPUs"):
        place(JOB, fat_tree([4, 2]))


def test_no_traffic_is_no_cost() -> None:
    found = place(RankTraffic.of_job(Parallel(dp=8), {}), fat_tree([4, 2]))
    assert [order.cost for order in (found.found, *found.compared)] == [0.0] * 4


def test_a_large_job_is_placed_without_swaps() -> None:
    """40,960 ranks on 5,120 hosts: along the tree, and what was left out is told."""
    job = RankTraffic.of_job(Parallel(tp=8, dp=320, pp=16), {"tp": 50 * GB, "dp": 4 * GB, "pp": GB})
    assert "no swaps: 5120 hosts are more than 4096" in " ".join(place(job, fat_tree([8, 64, 80])).steps)


def test_a_placement_is_a_record() -> None:
    found = place(JOB, TOPOLOGIES["tree"])
    again: Any = msgspec.json.decode(msgspec.json.encode(found), type=Placement)
    assert again == found
