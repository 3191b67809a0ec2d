"""Bytes and hops of algorithms beside what is counted rank by rank."""

from __future__ import annotations

from math import log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.plan.job.cluster import Cluster, ClusterGpu, Level
from counterpoint.plan.network.algorithms import ALGORITHMS, Schedule, nccl_algorithms, schedule
from counterpoint.plan.network.group import Group, reach
from counterpoint.plan.network.network import OPERATIONS

SIZES = (4, 8, 32)
GPU = ClusterGpu(name="A100", tflops={"bf16": 312.0}, sms=108, memory_gib=80, memory_gb_per_s=2039)
CLUSTER = Cluster(
    gpu=GPU,
    levels=(
        Level(name="nvlink", kind="nvlink", size=4, gb_per_s=240.0, latency_us=0.0),
        Level(name="leaf", kind="network", size=8, gb_per_s=25.0, latency_us=0.0),
        Level(name="spine", kind="network", size=32, gb_per_s=25.0, latency_us=0.0),
    ),
)
REDUCING = ("all_gather", "reduce_scatter", "all_reduce")
divided = st.sampled_from([(2, 1), (4, 1), (8, 1), (32, 1), (2, 4), (8, 4), (4, 8), (2, 2), (16, 2), (4, 2)])


def plan(operation: str, algorithm: str, ranks: int, stride: int = 1) -> Schedule:
    """Of a group on 4 nodes of 4 GPUs, two by two below a switch."""
    found = schedule(operation, algorithm, reach(Group(ranks=ranks, stride=stride), CLUSTER))
    assert found is not None
    return found


def at_level(found: Schedule, level: int, what: int) -> float:
    """The sum over phases of hops (1) or bytes (2)."""
    return sum(crossing[what] for phase in found for crossing in phase if crossing[0] == level)


def joined_at(one: int, other: int) -> int:
    """The level that joins two GPUs."""
    return next(i for i, size in enumerate(SIZES) if one // size == other // size)


@given(group=divided)
def test_a_ring_crosses_each_border_as_often_as_its_edges_do(group: tuple[int, int]) -> None:
    """Hops of an all_gather at a level: edges of the ring between units there, without the one that closes it."""
    ranks, stride = group
    line = [joined_at(i * stride, (i + 1) * stride) for i in range(ranks - 1)]
    found = plan("all_gather", "ring", ranks, stride)
    assert [at_level(found, level, 1) for level in range(3)] == [line.count(level) for level in range(3)]


@given(group=divided)
def test_direct_sends_to_every_peer(group: tuple[int, int]) -> None:
    """Bytes of an all_to_all at a level: a shard for each peer beyond it, over NVLink for those of the node."""
    ranks, stride = group
    joined = [joined_at(0, i * stride) for i in range(1, ranks)]
    found = plan("all_to_all", "direct", ranks, stride)
    crossed = sorted(set(joined))
    counted = [joined.count(i) if i == 0 else sum(level >= i for level in joined) for i in crossed]
    assert [at_level(found, i, 2) for i in crossed] == pytest.approx([peers / ranks for peers in counted])


@given(group=divided, algorithm=st.sampled_from(["ring", "recursive_doubling"]))
def test_all_reduce_is_both_halves(group: tuple[int, int], algorithm: str) -> None:
    """An all_reduce has the hops and bytes of a reduce_scatter and an all_gather."""
    at = reach(Group(ranks=group[0], stride=group[1]), CLUSTER)
    whole = schedule("all_reduce", algorithm, at)
    halves = [schedule(operation, algorithm, at) for operation in ("reduce_scatter", "all_gather")]
    flat = [crossing for phase in whole or () for crossing in phase]
    sums = [
        (one[0], one[1] + other[1], one[2] + other[2])
        for phases in zip(*((half or ()) for half in halves), strict=True)
        for one, other in zip(*phases, strict=True)
    ]
    assert flat == sums


@given(group=divided, operation=st.sampled_from(REDUCING))
def test_level_by_level_moves_what_is_needed(group: tuple[int, int], operation: str) -> None:
    """Over the highest level goes the least that can: (f - 1)/f of what its units hold, once or twice."""
    at = reach(Group(ranks=group[0], stride=group[1]), CLUSTER)
    top = at.crossed[-1]
    least = (2 if operation == "all_reduce" else 1) * (1 - 1 / at.fan(top)) / at.members(top)
    assert at_level(plan(operation, "recursive_doubling", *group), top, 2) == pytest.approx(least)


def test_recursive_doubling_takes_log2_steps() -> None:
    """32 ranks: 5 steps in all."""
    found = plan("all_gather", "recursive_doubling", 32)
    assert sum(at_level(found, level, 1) for level in range(3)) == log2(32)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_nccl_offers_what_has_a_schedule(operation: str) -> None:
    """Every algorithm that NCCL offers is known for the operation."""
    for group in (Group(ranks=8), Group(ranks=8, stride=4)):
        at = reach(group, CLUSTER)
        assert all(schedule(operation, name, at) for name in nccl_algorithms(operation, at, (2, 28)))


def test_pat_is_for_one_rank_per_node() -> None:
    """NCCL offers recursive doubling (PAT) for ranks on nodes of their own, and since 2.23 only."""
    apart = reach(Group(ranks=8, stride=4), CLUSTER)
    beside = reach(Group(ranks=8), CLUSTER)
    found = [
        nccl_algorithms("all_gather", at, nccl) for at, nccl in ((apart, (2, 23)), (apart, (2, 22)), (beside, (2, 28)))
    ]
    assert ["recursive_doubling" in names for names in found] == [True, False, False]


def test_no_switch_adds_unless_told() -> None:
    assert schedule("all_reduce", "in_network", reach(Group(ranks=8), CLUSTER)) is None


def test_send_recv_knows_one_way() -> None:
    at = reach(Group(ranks=8), CLUSTER)
    assert [name for name in ALGORITHMS if schedule("send_recv", name, at)] == ["direct"]
