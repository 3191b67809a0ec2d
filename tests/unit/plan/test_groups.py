"""Groups of a mesh hold the right ranks, and cross the levels that were counted on small clusters."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.errors import Misconfigured
from counterpoint.plan.job.cluster import Cluster, ClusterGpu, Level
from counterpoint.plan.job.parallel import Parallel
from counterpoint.plan.network.group import AXES, Axis, Group, axes, reach

GPU = ClusterGpu(name="A100", tflops={"bf16": 312.0}, sms=108, memory_gib=80, memory_gb_per_s=2039)
degree = st.sampled_from([1, 2, 3, 4])


@st.composite
def parallels(draw: st.DrawFn) -> Parallel:
    """Small meshes, with experts and shards that divide."""
    dp, cp = draw(degree), draw(degree)
    divisors = [n for n in range(1, dp * cp + 1) if dp * cp % n == 0]
    shards = [n for n in range(1, dp + 1) if dp % n == 0]
    return Parallel(
        dp=dp, cp=cp, tp=draw(degree), pp=draw(degree),
        ep=draw(st.sampled_from(divisors)), shard=draw(st.sampled_from([None, *shards])),
    )  # fmt: skip


@given(parallel=parallels(), axis=st.sampled_from(AXES))
def test_every_rank_is_in_one_group_of_an_axis(parallel: Parallel, axis: Axis) -> None:
    ranks = [rank for group in axes(parallel)[axis].members(parallel.world_size) for rank in group]
    assert sorted(ranks) == list(range(parallel.world_size))


@given(parallel=parallels())
def test_mesh_axes_are_the_dims_of_the_mesh(parallel: Parallel) -> None:
    """tp, cp, dp and pp are the lines of an array of ranks with tp innermost."""
    mesh = np.arange(parallel.world_size).reshape(parallel.pp, parallel.dp, parallel.cp, parallel.tp)
    lines = {
        axis: {tuple(line) for line in np.moveaxis(mesh, dim, -1).reshape(-1, mesh.shape[dim]).tolist()}
        for dim, axis in enumerate(("pp", "dp", "cp", "tp"))
    }
    assert lines == {
        axis: set(map(tuple, axes(parallel)[axis].members(parallel.world_size).tolist()))
        for axis in ("pp", "dp", "cp", "tp")
    }


@given(parallel=parallels(), parts=st.sampled_from([("ep", "expert_dp", "dp_cp"), ("shard", "replicate", "dp")]))
def test_two_axes_make_the_one_that_they_divide(parallel: Parallel, parts: tuple[Axis, Axis, Axis]) -> None:
    """Experts times their replicas are dp · cp, shards times their replicas are dp."""
    inner, outer, whole = (axes(parallel)[axis] for axis in parts)
    assert (whole.ranks, whole.stride) == (inner.ranks * outer.ranks, inner.stride)


def test_a_known_job() -> None:
    """405B on 16,384 GPUs: the data-parallel ranks of one parameter are eight apart."""
    parallel = Parallel(tp=8, pp=16, dp=128)
    assert axes(parallel)["dp"].members(parallel.world_size)[1][:3].tolist() == [1, 9, 17]


def test_groups_that_do_not_divide_or_fit_are_refused() -> None:
    """A job of 12 ranks has no groups of 4 that are 2 apart; the error says what it needs."""
    with pytest.raises(Misconfigured, match="world_size = 12: groups of 4 ranks, 2 apart, need a multiple of 8"):
        Group(ranks=4, stride=2).members(12)
    with pytest.raises(Misconfigured, match=r"16 ranks, 1 apart, on 8 GPUs"):
        reach(Group(ranks=16), cluster(8))


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


def test_a_group_stays_inside_a_node_that_it_divides_or_has_alone() -> None:
    """4 of 8 GPUs side by side are joined by the node alone."""
    assert reach(Group(ranks=4), cluster(8, 64)).crossed == (0,)
    # the second group of 6 GPUs lies on two nodes of 8
    assert reach(Group(ranks=6), cluster(8, 64)).units == (6, 2, 1)
    # A single group of 6 GPUs stays on its node: there is no second one
    assert reach(Group(ranks=6), cluster(8)).units == (6, 1)


def test_ranks_a_node_apart_share_no_link() -> None:
    """16 ranks, 8 apart: each has a node and a NIC for itself."""
    found = reach(Group(ranks=16, stride=8), cluster(8, 64, 128))
    assert (found.units, found.crossed, found.members(1)) == ((16, 16, 2, 1), (1, 2), 1.0)


def test_whole_experts_are_spread_over_ranks_of_tp() -> None:
    """With expert_tp = 1, neighbours have different experts; every expert has as many replicas as is left."""
    cut, whole = (axes(Parallel(tp=4, dp=8, ep=8, expert_tp=how)) for how in (None, 1))
    assert (cut["ep"], cut["expert_dp"]) == (Group(ranks=8, stride=4), Group(ranks=1, stride=32))
    assert (whole["ep"], whole["expert_dp"]) == (Group(ranks=8, stride=1), Group(ranks=4, stride=8))
    assert axes(Parallel(tp=4, dp=8, ep=32, expert_tp=1))["expert_dp"].ranks == 1
