"""NCCL CTAs: how many thread blocks, and so how many SMs, a collective takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from counterpoint.controls.control import Control
from counterpoint.controls.kinds import blocks, nccl_kernels, written
from counterpoint.controls.requirements import first_reason, nccl_config, no_nccl_option
from counterpoint.errors import Misconfigured
from counterpoint.records.evidence import Evidence, Seen

__all__ = ["NcclCtas"]

_MOST = 64  # NCCL's MAXCHANNELS


@dataclass(frozen=True, kw_only=True)
class NcclCtas(Control):
    """Limits the CTAs of every collective of one process group.

        options = dist.ProcessGroupNCCL.Options()
        NcclCtas(max_ctas=8).configure(options)  # then dist.new_group(pg_options=options)

    Does nothing where NCCL would stay within the limits anyway, and for kernels of other limits: all-to-all and
    send/recv round up to a power of two, NCCL's symmetric kernels choose for themselves. Bandwidth falls with the CTAs.

    Args:
        max_ctas: most blocks of a collective, 1..64.
        min_ctas: fewest blocks, 1..64; NCCL may still use fewer for small sizes.

    Raises:
        Misconfigured: neither is given, one is out of range, or min_ctas > max_ctas.
    """

    remedy: ClassVar[str] = (
        "give limits that NCCL breaks by itself (powers of two for all-to-all), and a process group made with these "
        "options"
    )

    max_ctas: int | None = None
    min_ctas: int | None = None

    def __post_init__(self) -> None:
        given = [number for number in (self.min_ctas, self.max_ctas) if number is not None]
        if not given or not all(1 <= number <= _MOST for number in given) or given != sorted(given):
            raise Misconfigured(
                f"max_ctas={self.max_ctas}, min_ctas={self.min_ctas}: give one or both, from 1 to {_MOST}, "
                "min_ctas not above max_ctas"
            )

    @property
    def name(self) -> str:
        parts = {"max_ctas": self.max_ctas, "min_ctas": self.min_ctas}
        return "+".join(f"{key}={value}" for key, value in parts.items() if value is not None)

    def available(self) -> str | None:
        return first_reason(no_nccl_option("max_ctas"), no_nccl_option("min_ctas"))

    def configure(self, options: Any) -> None:
        config = nccl_config(options)
        config.max_ctas = self.max_ctas or _MOST  # NCCL 2.28 refuses a minimum without a maximum
        if self.min_ctas is not None:
            config.min_ctas = self.min_ctas

    def verify(self, seen: Seen) -> Evidence:
        now, before = blocks(nccl_kernels(seen.comm)), blocks(nccl_kernels(seen.comm_without))
        low, high = self.min_ctas or 1, self.max_ctas or _MOST

        def within(counts: list[int]) -> bool:
            return low <= counts[0] and counts[-1] <= high

        return Evidence(
            control=self.name,
            asked=f"{low} to {high} CTAs, fewer or more without it",
            seen=f"{written(now, nothing='no NCCL kernel')} CTAs, without it {written(before)}",
            took_effect=bool(now) and bool(before) and within(now) and not within(before),
        )
