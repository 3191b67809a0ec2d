"""Describe how a GPU's SMs are divided between a GEMM and a collective, and which thread blocks find free SMs.

A cluster of k blocks needs k free SMs of one GPC. The driver does not tell where it puts clusters. Assumed are one
block per SM (true of cuBLAS' persistent kernels and of NCCL beside them), and that clusters are dealt in turn, one to
each GPC, smallest GPC first. That order explains which clusters of 2 and 4 found room beside which GEMMs on 4 x H200
(2026-11-21, docs/design/pair.md).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from counterpoint.errors import Misconfigured, printable
from counterpoint.machine.profile import Chip, default_profile

_LIMIT = re.compile(r"(max_ctas|cga_cluster|gemm_sms)=([1-9]\d{0,3})")


@dataclass(frozen=True, kw_only=True, slots=True)
class SmSplit:
    """Limits NCCL by `max_ctas` and `cga_cluster`, and the GEMM by `gemm_sms`; None sets no limit."""

    max_ctas: int | None = None
    cga_cluster: int | None = None
    gemm_sms: int | None = None

    @property
    def mechanism(self) -> str:
        """Return this split as a mechanism's name, such as `nccl+max_ctas=16+cga_cluster=2+gemm_sms=116`."""
        limits = {"max_ctas": self.max_ctas, "cga_cluster": self.cga_cluster, "gemm_sms": self.gemm_sms}
        return "+".join(["nccl", *(f"{key}={value}" for key, value in limits.items() if value is not None)])

    @classmethod
    def of(cls, mechanism: str) -> SmSplit | None:
        """Return the split that a mechanism's name stands for; None if the mechanism does not divide SMs."""
        base, *limits = mechanism.split("+")
        matches = [_LIMIT.fullmatch(limit) for limit in limits]
        found = {match[1]: int(match[2]) for match in matches if match}
        if base != "nccl" or len(found) != len(limits):
            return None
        return cls(**found)

    @classmethod
    def parse(cls, mechanism: str) -> SmSplit:
        """Return the split that a mechanism's name stands for; raise Misconfigured if it does not divide SMs."""
        split = cls.of(mechanism)
        if split is None:
            allowed = "nccl, with any of +max_ctas=N, +cga_cluster=N and +gemm_sms=N"
            raise Misconfigured(f"{printable(mechanism)!r} does not divide SMs; write {allowed}")
        return split


@dataclass(frozen=True, kw_only=True, slots=True)
class SmLayout:
    """Describes the SMs of a GPU by GPC, and how many blocks of a GEMM form a cluster."""

    gpc_sms: tuple[int, ...]
    gemm_cluster: int = 2  # blocks; as cuBLAS' nvjet kernels on Hopper, with a grid of 2 x 66

    @classmethod
    def even(cls, num_sms: int, chip: Chip | None = None) -> SmLayout:
        """Return a layout of GPCs as equal as whole TPCs (pairs of SMs) allow: 132 SMs are 6 GPCs of 16 and 2 of 18."""
        if num_sms < 2 or num_sms % 2:
            raise Misconfigured(f"{num_sms} SMs cannot be laid out; give an even number, such as 132 for an H200")
        chip = chip or default_profile().chip
        num_gpcs = -(-num_sms // chip.largest_gpc)
        each, more = divmod(num_sms // 2, num_gpcs)
        gpcs = tuple(2 * (each + (gpc < more)) for gpc in range(num_gpcs))
        return cls(gpc_sms=gpcs, gemm_cluster=chip.gemm_cluster)

    @property
    def num_sms(self) -> int:
        """Return the number of SMs of the GPU."""
        return sum(self.gpc_sms)

    def gemm_sms_beside(self, num_ctas: int, *, comm_cluster: int = 1) -> int:
        """Return how many SMs a GEMM's clusters can use while `num_ctas` CTAs of a collective hold one SM each."""
        free, unplaced = _deal(sorted(self.gpc_sms), num_ctas, _cluster(num_ctas, comm_cluster))
        usable = sum(room - room % self.gemm_cluster for room in free)
        if unplaced or not usable:
            raise Misconfigured(f"{num_ctas} CTAs leave a GEMM no SM of {self.num_sms}; give the collective fewer")
        return usable

    def waiting_ctas(self, *, gemm_sms: int, num_ctas: int, comm_cluster: int = 1) -> int:
        """Return how many CTAs of a collective find no SM while a GEMM of `gemm_sms` blocks is resident."""
        free, unplaced = _deal(sorted(self.gpc_sms), gemm_sms, _cluster(gemm_sms, self.gemm_cluster))
        return num_ctas if unplaced else _deal(free, num_ctas, _cluster(num_ctas, comm_cluster))[1]


def _cluster(blocks: int, wanted: int) -> int:
    """Return the cluster size `wanted`, or 1 if it does not divide the grid (NCCL and cuBLAS then use no clusters)."""
    return wanted if blocks % wanted == 0 else 1


def _deal(free: list[int], blocks: int, cluster: int) -> tuple[list[int], int]:
    """Return the free SMs of each GPC after clusters were dealt to the GPCs in turn, and how many blocks have no SM."""
    while blocks > 0 and max(free) >= cluster:
        for gpc, room in enumerate(free):
            if blocks > 0 and room >= cluster:
                free[gpc] -= cluster
                blocks -= cluster
    return free, max(blocks, 0)
