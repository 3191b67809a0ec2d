"""Groups of a mesh: who is in them, and how they are spaced."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.errors import Misconfigured
from counterpoint.plan.groups import AXES, Axis, Group, axes, groups
from counterpoint.plan.parallel import Parallel

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
    """The groups of an axis are a partition of the job."""
    ranks = [rank for group in groups(parallel)[axis] for rank in group]
    assert sorted(ranks) == list(range(parallel.world_size))


@given(parallel=parallels())
def test_mesh_axes_are_the_dims_of_the_mesh(parallel: Parallel) -> None:
    """tp, cp, dp and pp are the lines of an array of ranks with tp innermost."""
    mesh = np.arange(parallel.world_size).reshape(parallel.pp, parallel.dp, parallel.cp, parallel.tp)
    lines = {
        axis: {tuple(line) for line in np.moveaxis(mesh, dim, -1).reshape(-1, mesh.shape[dim]).tolist()}
        for dim, axis in enumerate(("pp", "dp", "cp", "tp"))
    }
    found = groups(parallel)
    assert lines == {axis: set(found[axis]) for axis in ("pp", "dp", "cp", "tp")}


@given(parallel=parallels(), parts=st.sampled_from([("ep", "expert_dp", "dp_cp"), ("shard", "replicate", "dp")]))
def test_two_axes_make_the_one_that_they_divide(parallel: Parallel, parts: tuple[Axis, Axis, Axis]) -> None:
    """Experts times their replicas are dp · cp, shards times their replicas are dp."""
    inner, outer, whole = (axes(parallel)[axis] for axis in parts)
    assert (whole.ranks, whole.stride) == (inner.ranks * outer.ranks, inner.stride)


def test_a_known_job() -> None:
    """405B on 16,384 GPUs: the data-parallel ranks of one parameter are eight apart."""
    parallel = Parallel(tp=8, pp=16, dp=128)
    assert groups(parallel)["dp"][1][:3] == (1, 9, 17)


def test_groups_that_do_not_divide_are_refused() -> None:
    """A job of 12 ranks has no groups of 4 that are 2 apart; the error says what it needs."""
    with pytest.raises(Misconfigured, match="world_size = 12: groups of 4 ranks, 2 apart, need a multiple of 8"):
        Group(ranks=4, stride=2).members(12)
