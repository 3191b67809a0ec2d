"""Which ranks talk to each other: one kind of group per axis of the mesh.

Ranks count tp first, then cp, dp, pp. Every axis is then a set of equal groups of equally spaced ranks:

    rank = ((p · dp + d) · cp + c) · tp + t
    group of an axis with n ranks, s apart = {base + i · s, i < n}

    axis        ranks         stride        what it exchanges
    tp          tp            1             activations of every matrix
    cp          cp            tp            keys and values
    dp          dp            tp·cp         gradients, and parameters with zero
    pp          pp            tp·cp·dp      activations of a stage, between neighbours only
    dp_cp       dp·cp         tp            gradients where cp > 1: its ranks hold the same parameters
    ep          ep            tp            tokens to their experts and back
    expert_dp   dp·cp/ep      tp·ep         gradients of experts
    shard       shard         tp·cp         zero's shards (HSDP); all of dp where `shard` is not given
    replicate   dp/shard      tp·cp·shard   gradients between replicas of the shards
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from counterpoint.errors import Misconfigured
from counterpoint.plan.model import positive
from counterpoint.plan.parallel import Parallel
from counterpoint.records.base import Record

__all__ = ["AXES", "Axis", "Group", "axes", "groups"]

Axis = Literal["tp", "cp", "dp", "pp", "dp_cp", "ep", "expert_dp", "shard", "replicate"]
AXES: tuple[Axis, ...] = get_args(Axis)


class Group(Record, frozen=True, kw_only=True):
    """Equally spaced ranks; all groups of an axis look like this one.

    Args:
        ranks: how many.
        stride: from one to the next.
    """

    ranks: int
    stride: int = 1

    def __post_init__(self) -> None:
        for name in ("ranks", "stride"):
            positive(f"group.{name}", getattr(self, name))

    def members(self, world_size: int) -> NDArray[np.int64]:
        """Ranks of every group of this kind in a job, `[world_size / ranks, ranks]`.

        Raises:
            Misconfigured: the job cannot be divided into such groups.
        """
        unit = self.ranks * self.stride
        if world_size < 1 or world_size % unit:
            what = f"groups of {self.ranks} ranks, {self.stride} apart"
            raise Misconfigured(f"world_size = {world_size}: {what}, need a multiple of {unit}")
        mesh = np.arange(world_size).reshape(-1, self.ranks, self.stride)
        return mesh.swapaxes(1, 2).reshape(-1, self.ranks)


def axes(parallel: Parallel) -> dict[Axis, Group]:
    """The group of each axis; axes that are not used have one rank."""
    tp, cp, dp, pp, ep = parallel.tp, parallel.cp, parallel.dp, parallel.pp, parallel.ep
    shard = parallel.shard or dp
    return {
        "tp": Group(ranks=tp),
        "cp": Group(ranks=cp, stride=tp),
        "dp": Group(ranks=dp, stride=tp * cp),
        "pp": Group(ranks=pp, stride=tp * cp * dp),
        "dp_cp": Group(ranks=dp * cp, stride=tp),
        "ep": Group(ranks=ep, stride=tp),
        "expert_dp": Group(ranks=dp * cp // ep, stride=tp * ep),
        "shard": Group(ranks=shard, stride=tp * cp),
        "replicate": Group(ranks=dp // shard, stride=tp * cp * shard),
    }


def groups(parallel: Parallel) -> dict[Axis, tuple[tuple[int, ...], ...]]:
    """Ranks of every group by axis; each rank is in exactly one group of an axis."""
    return {
        axis: tuple(map(tuple, group.members(parallel.world_size).tolist())) for axis, group in axes(parallel).items()
    }
