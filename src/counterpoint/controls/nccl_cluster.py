"""NCCL's cluster size: how many of its CTAs are placed together in one GPC (compute capability 9.0 and up)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from counterpoint.controls.control import Control
from counterpoint.controls.kinds import nccl_kernels, written
from counterpoint.controls.requirements import nccl_config, no_gpu, no_nccl_option
from counterpoint.errors import Misconfigured
from counterpoint.records.evidence import Evidence, Launched, Seen

__all__ = ["NcclCluster"]

_MOST = 8  # portable cluster size


@dataclass(frozen=True, kw_only=True)
class NcclCluster(Control):
    """Sets the cluster size of NCCL's kernels of one process group.

        options = dist.ProcessGroupNCCL.Options()
        NcclCluster(cga_cluster=1).configure(options)  # then dist.new_group(pg_options=options)

    0 launches without clusters. Does nothing for a grid that the size does not divide (NCCL drops the clusters) and
    where it is NCCL's default (4 on Hopper).

    Args:
        cga_cluster: CTAs per cluster, 0..8.

    Raises:
        Misconfigured: out of range.
    """

    remedy: ClassVar[str] = (
        "give a size that divides the CTAs and is not NCCL's default, and a process group made with these options"
    )

    cga_cluster: int

    def __post_init__(self) -> None:
        if not 0 <= self.cga_cluster <= _MOST:
            raise Misconfigured(f"cga_cluster={self.cga_cluster} is not a cluster size; choose 0 (none) to {_MOST}")

    @property
    def name(self) -> str:
        return f"cga_cluster={self.cga_cluster}"

    def available(self) -> str | None:
        reason = no_gpu()
        if reason is None:
            import torch

            if torch.cuda.get_device_capability()[0] < 9:
                return "thread block clusters need compute capability 9.0"
        return reason or no_nccl_option("cga_cluster_size")

    def configure(self, options: Any) -> None:
        nccl_config(options).cga_cluster_size = self.cga_cluster

    def verify(self, seen: Seen) -> Evidence:
        now, before = _sizes(nccl_kernels(seen.comm)), _sizes(nccl_kernels(seen.comm_without))
        return Evidence(
            control=self.name,
            asked=f"clusters of {max(self.cga_cluster, 1)} CTAs, other than without it",
            seen=f"clusters of {written(now)} CTAs, without it {written(before)}",
            took_effect=now == [max(self.cga_cluster, 1)] and None not in before and before not in ([], now),
        )


def _sizes(kernels: tuple[Launched, ...]) -> list[int | None]:
    """CTAs per cluster of every kernel, each number once; None where nobody saw it."""
    sizes = {None if one.cluster is None else one.cluster[0] * one.cluster[1] * one.cluster[2] for one in kernels}
    return sorted(sizes, key=lambda size: -1 if size is None else size)
