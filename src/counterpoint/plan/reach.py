"""Which levels of a cluster a group crosses, and how many of its ranks share a link there.

    units[0] = ranks of the group;  units[i + 1] = units of level i (nodes, racks, pods) that hold at least one of them
    level i joins units[i] into units[i + 1]; it is crossed where that is fewer
    members(i) = ranks / units[i] = ranks of the group below one link into level i, whose bandwidths add up

Groups of an axis tile the cluster: rank 0 of the first is GPU 0. Where a group's extent does not divide a unit, some
groups straddle a border that others do not: the one that straddles most is meant, since all wait for it.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd
from typing import NamedTuple

from counterpoint.plan.cluster import Cluster, Level
from counterpoint.plan.groups import Group

__all__ = ["Reach", "reach"]


class Reach(NamedTuple):
    """A group, seen from the levels of its cluster."""

    ranks: int
    units: tuple[int, ...]
    adds: tuple[bool, ...]
    """By level: its switches reduce."""
    passes: tuple[bool, ...]
    """By level: what goes further up takes its links, too. NICs are on the way to the spine, NVLinks are not."""

    @property
    def crossed(self) -> tuple[int, ...]:
        """Levels that join some of its ranks, inside out."""
        return tuple(i for i in range(len(self.adds)) if self.units[i] > self.units[i + 1])

    def members(self, level: int) -> float:
        """Ranks below one link into this level."""
        return self.ranks / self.units[level]

    def fan(self, level: int) -> float:
        """Units that one unit of this level joins."""
        return self.units[level] / self.units[level + 1]


def reach(group: Group, cluster: Cluster) -> Reach:
    """The levels that the worst placed group of this shape crosses.

    Raises:
        Misconfigured: the cluster has fewer GPUs.
    """
    cluster.level_of(group.ranks, group.stride)
    return _reach(group.ranks, group.stride, cluster.levels)


@lru_cache(maxsize=4096)
def _reach(ranks: int, stride: int, levels: tuple[Level, ...]) -> Reach:
    num_gpus = levels[-1].size
    below = [min(ranks, _touched(ranks, stride, level.size, num_gpus)) for level in levels[:-1]]
    return Reach(
        ranks=ranks,
        units=(ranks, *below, 1),
        adds=tuple(level.in_network_reduction for level in levels),
        passes=tuple(level.kind == "network" for level in levels),
    )


def _touched(ranks: int, stride: int, size: int, num_gpus: int) -> int:
    """Most units of `size` GPUs that hold a rank of one group."""
    if stride >= size:
        return ranks
    extent = ranks * stride
    step = gcd(extent, size) if num_gpus >= 2 * extent else size  # one group alone begins at GPU 0
    last = (ranks - 1) * stride
    firsts = (start + inside for start in range(0, size, step) for inside in (0, stride - 1))
    return max((first + last) // size - first // size for first in firsts) + 1
