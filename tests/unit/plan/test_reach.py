"""Which levels a group crosses: closed forms beside all groups of small clusters, counted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.errors import Misconfigured
from counterpoint.plan.cluster import Cluster, Gpu, Level
from counterpoint.plan.groups import Group
from counterpoint.plan.reach import reach

GPU = Gpu(name="A100", tflops={"bf16": 312.0}, sms=108, memory_gib=80, memory_gb_per_s=2039)


def cluster(*sizes: int) -> Cluster:
    """Levels of these sizes: NVLink inside, networks above."""
    kinds = ("nvlink", *("network" for _ in sizes[1:]))
    return Cluster(
        gpu=GPU,
        levels=tuple(
            Level(name=f"level{i}", kind=kind, size=size, gb_per_s=100.0, latency_us=0.0)  # type: ignore[arg-type]
            for i, (size, kind) in enumerate(zip(sizes, kinds, strict=True))
        ),
    )


@given(
    ranks=st.integers(2, 16),
    stride=st.sampled_from([1, 2, 3, 4, 6, 8, 16]),
    groups=st.integers(1, 4),
    sizes=st.sampled_from([(4, 8), (8, 16), (2, 12), (8, 24)]),
)
def test_units_are_those_of_the_group_that_touches_most(
    ranks: int, stride: int, groups: int, sizes: tuple[int, int]
) -> None:
    """No group of a job touches more units of a level, and where the groups fill the cluster one touches as many."""
    world = groups * ranks * stride
    top = -(-world // sizes[-1]) * sizes[-1] * 2
    found = reach(Group(ranks=ranks, stride=stride), cluster(*sizes, top)).units
    members = Group(ranks=ranks, stride=stride).members(ranks * stride * (top // (ranks * stride)))
    for size, units in zip(sizes, found[1:], strict=False):
        counted = max(len(set(group // size)) for group in members)
        assert counted <= units <= counted + (len(members) < size * stride)


def test_a_group_that_divides_a_node_stays_inside() -> None:
    """4 of 8 GPUs side by side are joined by the node alone."""
    assert reach(Group(ranks=4), cluster(8, 64)).crossed == (0,)


def test_a_group_that_does_not_divide_a_node_leaves_it() -> None:
    """The second group of 6 GPUs lies on two nodes of 8."""
    assert reach(Group(ranks=6), cluster(8, 64)).units == (6, 2, 1)


def test_one_group_alone_begins_at_the_first_gpu() -> None:
    """A single group of 6 GPUs stays on its node: there is no second one."""
    assert reach(Group(ranks=6), cluster(8)).units == (6, 1)


def test_ranks_a_node_apart_share_no_link() -> None:
    """16 ranks, 8 apart: each has a node and a NIC for itself."""
    found = reach(Group(ranks=16, stride=8), cluster(8, 64, 128))
    assert (found.units, found.crossed, found.members(1)) == ((16, 16, 2, 1), (1, 2), 1.0)


def test_more_ranks_than_gpus_are_refused() -> None:
    """The error says how many GPUs there are."""
    with pytest.raises(Misconfigured, match=r"16 ranks, 1 apart, on 8 GPUs"):
        reach(Group(ranks=16), cluster(8))
