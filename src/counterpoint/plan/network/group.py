"""Describe the groups of ranks that communicate, one kind per mesh axis, and the network levels that they cross.

Ranks count tp first, then cp, dp, pp. Every axis is then a set of equal groups of equally spaced ranks:

    rank = ((p · dp + d) · cp + c) · tp + t
    group of an axis with n ranks, s apart = {base + i · s, i < n}

    axis        ranks         stride        what it exchanges
    tp          tp            1             activations of every matrix
    cp          cp            tp            keys and values
    dp          dp            tp·cp         gradients, and parameters with zero
    pp          pp            tp·cp·dp      activations of a stage, between neighbours only
    dp_cp       dp·cp         tp            gradients where cp > 1: its ranks hold the same parameters
    ep          ep            cut           tokens to their experts and back
    expert_dp   dp·cp·tp/cut/ep  cut·ep     gradients of experts; cut: ranks that share a matrix of one, tp or 1
    shard       shard         tp·cp         zero's shards (HSDP); all of dp where `shard` is not given
    replicate   dp/shard      tp·cp·shard   gradients between replicas of the shards
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import gcd
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from counterpoint.errors import Misconfigured
from counterpoint.plan.job.cluster import Cluster, Level
from counterpoint.plan.job.model import positive
from counterpoint.plan.job.parallel import Parallel
from counterpoint.records import Record

Axis = Literal["tp", "cp", "dp", "pp", "dp_cp", "ep", "expert_dp", "shard", "replicate"]
AXES: tuple[Axis, ...] = get_args(Axis)


class Group(Record, frozen=True, kw_only=True):
    """Describes the shape of all groups of one mesh axis: `ranks` ranks, `stride` apart."""

    ranks: int  # ranks of one group
    stride: int = 1  # distance from one rank to the next

    def __post_init__(self) -> None:
        for name in ("ranks", "stride"):
            positive(f"group.{name}", getattr(self, name))

    def members(self, world_size: int) -> NDArray[np.int64]:
        """Return all groups of this shape in a job, each rank once: `[world_size / ranks, ranks]`."""
        unit = self.ranks * self.stride
        if world_size < 1 or world_size % unit:
            what = f"groups of {self.ranks} ranks, {self.stride} apart"
            raise Misconfigured(f"world_size = {world_size}: {what}, need a multiple of {unit}")
        mesh = np.arange(world_size).reshape(-1, self.ranks, self.stride)
        return mesh.swapaxes(1, 2).reshape(-1, self.ranks)


@lru_cache(maxsize=4096)
def axes(parallel: Parallel) -> Mapping[Axis, Group]:
    """Return the shape of the groups of each mesh axis, read-only; groups of an unused axis have one rank."""
    tp, cp, dp, pp, ep = parallel.tp, parallel.cp, parallel.dp, parallel.pp, parallel.ep
    shard, cut = parallel.shard or dp, parallel.experts_cut
    return {
        "tp": Group(ranks=tp),
        "cp": Group(ranks=cp, stride=tp),
        "dp": Group(ranks=dp, stride=tp * cp),
        "pp": Group(ranks=pp, stride=tp * cp * dp),
        "dp_cp": Group(ranks=dp * cp, stride=tp),
        "ep": Group(ranks=ep, stride=cut),
        "expert_dp": Group(ranks=dp * cp * tp // cut // ep, stride=cut * ep),
        "shard": Group(ranks=shard, stride=tp * cp),
        "replicate": Group(ranks=dp // shard, stride=tp * cp * shard),
    }


class Reach(NamedTuple):
    """Describes which network levels a group crosses, and into how many units each level divides it.

        units[0] = ranks of the group;  units[i + 1] = units of level i (nodes, racks, pods) that hold at least one
        level i joins units[i] into units[i + 1]; it is crossed where that is fewer
        members(i) = ranks / units[i] = ranks of the group below one link into level i, whose bandwidths add up

    Groups of an axis tile the cluster: rank 0 of the first is GPU 0. Where a group's extent does not divide a unit,
    some groups straddle a border that others do not: this is the group that straddles most, since all wait for it.
    """

    ranks: int
    units: tuple[int, ...]
    reduces_in_network: tuple[bool, ...]
    """By level: whether its switches reduce."""
    shares_uplink: tuple[bool, ...]
    """By level: whether traffic to higher levels takes its links. NICs are on the way to the spine, NVLinks are not."""

    @property
    def crossed(self) -> tuple[int, ...]:
        """Return the levels whose links the group crosses, the innermost first."""
        return tuple(i for i in range(len(self.shares_uplink)) if self.units[i] > self.units[i + 1])

    def members(self, level: int) -> float:
        """Return the mean number of ranks of the group in one unit of the level below; 1 at level 0."""
        return self.ranks / self.units[level]

    def fan(self, level: int) -> float:
        """Return the mean number of units, one level below, that hold ranks of the group in one unit of `level`."""
        return self.units[level] / self.units[level + 1]


def reach(group: Group, cluster: Cluster) -> Reach:
    """Return the levels that the worst-placed group of this shape crosses; raise Misconfigured if GPUs are too few."""
    cluster.level_of(group.ranks, group.stride)
    return _reach(group.ranks, group.stride, cluster.levels)


@lru_cache(maxsize=4096)
def _reach(ranks: int, stride: int, levels: tuple[Level, ...]) -> Reach:
    num_gpus = levels[-1].size
    below = [min(ranks, _units_touched(ranks, stride, level.size, num_gpus)) for level in levels[:-1]]
    return Reach(
        ranks=ranks,
        units=(ranks, *below, 1),
        reduces_in_network=tuple(level.in_network_reduction for level in levels),
        shares_uplink=tuple(level.kind == "network" for level in levels),
    )


def _units_touched(ranks: int, stride: int, size: int, num_gpus: int) -> int:
    """Return the largest number of units of `size` GPUs over which one group's ranks spread."""
    if stride >= size:
        return ranks
    extent = ranks * stride
    step = gcd(extent, size) if num_gpus >= 2 * extent else size  # one group alone begins at GPU 0
    last = (ranks - 1) * stride
    firsts = (start + inside for start in range(0, size, step) for inside in (0, stride - 1))
    return max((first + last) // size - first // size for first in firsts) + 1
