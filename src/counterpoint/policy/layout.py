"""Which SMs a grid of clusters takes, and what is left for the other side.

A cluster of k blocks needs k free SMs of one GPC. Assumed, not told by the driver: one block per SM (true of cuBLAS'
persistent kernels and of NCCL beside them), and that clusters are dealt in turn, one to each GPC, smallest GPC first.
That order explains which clusters of 2 and 4 found room beside which GEMMs on 4 x H200 (2026-11-21, docs/budget.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from counterpoint.errors import Misconfigured

__all__ = ["SmLayout"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SmLayout:
    """SMs of a GPU by GPC, and how many blocks of a GEMM form a cluster."""

    gpc_sms: tuple[int, ...]
    gemm_cluster: int = 2  # nvjet on Hopper: grid 2 x 66

    @classmethod
    def even(cls, num_sms: int, *, largest_gpc: int = 18, gemm_cluster: int = 2) -> SmLayout:
        """GPCs as equal as whole TPCs (pairs of SMs) allow: 132 SMs are 6 GPCs of 16 and 2 of 18, an H200's usual."""
        if num_sms < 2 or num_sms % 2:
            raise Misconfigured(f"{num_sms} SMs cannot be laid out; give an even number, such as 132 for an H200")
        num_gpcs = -(-num_sms // largest_gpc)
        each, more = divmod(num_sms // 2, num_gpcs)
        return cls(gpc_sms=tuple(2 * (each + (gpc < more)) for gpc in range(num_gpcs)), gemm_cluster=gemm_cluster)

    @property
    def num_sms(self) -> int:
        return sum(self.gpc_sms)

    def gemm_sms_beside(self, num_ctas: int, *, comm_cluster: int = 1) -> int:
        """SMs that a GEMM's clusters can use while `num_ctas` of a collective are resident, one SM each.

        Raises:
            Misconfigured: the collective leaves no SM.
        """
        free, unplaced = _deal(sorted(self.gpc_sms), num_ctas, _cluster(num_ctas, comm_cluster))
        usable = sum(room - room % self.gemm_cluster for room in free)
        if unplaced or not usable:
            raise Misconfigured(f"{num_ctas} CTAs leave a GEMM no SM of {self.num_sms}; give the collective fewer")
        return usable

    def waiting_ctas(self, *, gemm_sms: int, num_ctas: int, comm_cluster: int = 1) -> int:
        """CTAs of a collective that find no SM while a GEMM of `gemm_sms` blocks is resident; 0 if all can start."""
        free, unplaced = _deal(sorted(self.gpc_sms), gemm_sms, _cluster(gemm_sms, self.gemm_cluster))
        return num_ctas if unplaced else _deal(free, num_ctas, _cluster(num_ctas, comm_cluster))[1]


def _cluster(blocks: int, wanted: int) -> int:
    """NCCL and cuBLAS launch without clusters where the grid is not a multiple of them."""
    return wanted if blocks % wanted == 0 else 1


def _deal(free: list[int], blocks: int, cluster: int) -> tuple[list[int], int]:
    """What is free by GPC after `blocks` were placed in turn, and how many found no room."""
    while blocks > 0 and max(free) >= cluster:
        for gpc, room in enumerate(free):
            if blocks > 0 and room >= cluster:
                free[gpc] -= cluster
                blocks -= cluster
    return free, max(blocks, 0)
