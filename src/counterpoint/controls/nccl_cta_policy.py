"""NCCL's CTA policy: as fast as it can, with few CTAs, or with none (copy engines)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from counterpoint.controls.control import Control
from counterpoint.controls.kinds import blocks, copies, nccl_kernels, written
from counterpoint.controls.requirements import nccl_config, no_nccl_option
from counterpoint.errors import Misconfigured
from counterpoint.records.evidence import Evidence, Seen

__all__ = ["NcclCtaPolicy"]

Policy = Literal["default", "efficiency", "zero"]
_NUMBER: dict[str, int] = {"default": 0, "efficiency": 1, "zero": 2}  # NCCL_CTA_POLICY_*


@dataclass(frozen=True, kw_only=True)
class NcclCtaPolicy(Control):
    """Sets the CTA policy of one process group.

        options = dist.ProcessGroupNCCL.Options()
        NcclCtaPolicy(policy="zero").configure(options)  # then dist.new_group(pg_options=options)

    `zero` uses copy engines for all_gather, all_to_all, gather and scatter of one node, and falls back to kernels
    without a word unless **both** buffers are registered as windows (`NcclWindows`) and the stream is not the default
    one; sums always need kernels. `efficiency` does nothing where NVLink multicast (NVLS) is off.

    Args:
        policy: "default", "efficiency" or "zero". Needs NCCL 2.28.

    Raises:
        Misconfigured: another word.
    """

    remedy: ClassVar[str] = (
        "zero: a process group made with these options, both buffers from NcclWindows.empty, not the default stream, "
        "no sums; efficiency needs NVLink multicast"
    )

    policy: Policy

    def __post_init__(self) -> None:
        if self.policy not in get_args(Policy):
            raise Misconfigured(f"cta_policy={self.policy} is unknown; choose from: {', '.join(get_args(Policy))}")

    @property
    def name(self) -> str:
        return f"cta_policy={self.policy}"

    def available(self) -> str | None:
        return no_nccl_option("cta_policy")

    def configure(self, options: Any) -> None:
        nccl_config(options).cta_policy = _NUMBER[self.policy]

    def verify(self, seen: Seen) -> Evidence:
        kernels, moved = nccl_kernels(seen.comm), copies(seen.comm)
        now, before = blocks(kernels), blocks(nccl_kernels(seen.comm_without))
        took_effect, asked = {
            "zero": (not kernels and bool(moved) and bool(before), "copies and no NCCL kernel, without it a kernel"),
            "efficiency": (bool(now and before) and now[-1] < before[-1], "fewer CTAs than without it"),
            "default": (bool(kernels), "NCCL's kernels"),
        }[self.policy]
        return Evidence(
            control=self.name,
            asked=asked,
            seen=f"NCCL kernels of {written(now, nothing='0')} CTAs and {len(moved)} copies, "
            f"without it kernels of {written(before, nothing='0')} CTAs",
            took_effect=took_effect,
        )
