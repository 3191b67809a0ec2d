"""GEMM SM limit by rule: as many SMs as `machine/sums.py` finds for a pair, or no limit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from counterpoint.controls.control import Control
from counterpoint.controls.gemm_sms import GemmSmLimit
from counterpoint.controls.kinds import matmul_kernels, written
from counterpoint.controls.requirements import no_gpu
from counterpoint.records.evidence import Evidence, Seen

__all__ = ["GemmSmFit"]


@dataclass(frozen=True, kw_only=True)
class GemmSmFit(Control):
    """The wish for a number; `found` makes it a `GemmSmLimit`. As it is, it limits nothing, which may be the best."""

    remedy: ClassVar[str] = "give a number of SMs, as in gemm_sms=124"

    @property
    def name(self) -> str:
        return "gemm_sms=fit"

    def found(self, num_sms: int | None) -> Control:
        """What the rule said for a pair; None: no limit."""
        return self if num_sms is None else GemmSmLimit(num_sms=num_sms)

    def available(self) -> str | None:
        return no_gpu()

    def verify(self, seen: Seen) -> Evidence:
        now, before = (
            [one.num_blocks for one in matmul_kernels(side)] for side in (seen.compute, seen.compute_without)
        )
        return Evidence(
            control=self.name,
            asked="all SMs: the rule found no limit that pays",
            seen=f"GEMM grids of {written(sorted(set(now)))} blocks, without it {written(sorted(set(before)))}",
            took_effect=now == before,
        )
