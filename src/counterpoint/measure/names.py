"""Mechanisms by name, without torch: what the command line can refuse before any process is started.

A name is a base and any number of controls: `nccl`, `nccl+priority=high`, `nccl+max_ctas=8+gemm_sms=124`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from counterpoint.controls.control import Control
from counterpoint.controls.gemm_sms_fit import GemmSmFit
from counterpoint.controls.nccl_windows import NcclWindows
from counterpoint.controls.parse import parse_mechanism
from counterpoint.errors import Misconfigured, printable

__all__ = ["BASES", "Mechanism", "find_mechanism"]

BASES: dict[str, tuple[str, ...]] = {"cuda": ("nccl", "nccl_zero_cta", "zero_sm"), "cpu": ("gloo", "zero_sm")}
_MADE_OF = {"nccl_zero_cta": "nccl+cta_policy=zero+windows"}
_BY_COPIES = ("all_gather", "all_to_all", "broadcast")  # what NCCL 2.28 moves by copy engines, of ours
_BY_PROGRAMS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")  # keys of comm.BY_PROGRAMS


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """A parsed name."""

    name: str
    controls: tuple[Control, ...]

    @property
    def base(self) -> str:
        """The name without its controls."""
        return self.name.partition("+")[0]

    @property
    def settings(self) -> str:
        """The base and every control as it is set now: what tells two mechanisms apart that have one name."""
        return "+".join([self.base, *(control.name for control in self.controls)])

    @property
    def fits_sms(self) -> bool:
        """Whether its GEMM gets as many SMs as the rule finds for a pair."""
        return any(isinstance(control, GemmSmFit) for control in self.controls)

    def with_gemm_sms(self, num_sms: int | None) -> Mechanism:
        """`gemm_sms=fit` as what was found; None: the GEMM keeps all."""
        found = tuple(one.found(num_sms) if isinstance(one, GemmSmFit) else one for one in self.controls)
        return replace(self, controls=found)

    @property
    def windows(self) -> NcclWindows | None:
        """The control that allocates the buffers, if one does."""
        return next((control for control in self.controls if isinstance(control, NcclWindows)), None)

    def why_unavailable(self, collective: str) -> str | None:
        """The reason why it cannot run this collective here; None if it can."""
        if self.base == "zero_sm" and collective not in _BY_PROGRAMS:
            return f"zero_sm offers {', '.join(_BY_PROGRAMS)}, not {collective}"
        if self.base == "nccl_zero_cta" and collective not in _BY_COPIES:
            return f"NCCL moves {', '.join(_BY_COPIES)} by copy engines, not {collective}"
        reasons = (control.available() for control in self.controls)
        return next((reason for reason in reasons if reason is not None), None)


def find_mechanism(name: str, device_type: str) -> Mechanism:
    """Parses a mechanism's name.

    Raises:
        Misconfigured: no such base on this device, or no such control; the text lists what there is.
    """
    base, plus, rest = name.partition("+")
    if base not in BASES[device_type]:
        there = ", ".join(BASES[device_type])
        raise Misconfigured(f"there is no mechanism {printable(name)!r} on {device_type}; choose from: {there}")
    _, controls = parse_mechanism(_MADE_OF.get(base, base) + plus + rest)
    if controls and device_type == "cpu":
        raise Misconfigured(f"{name}: {controls[0].name} is a control of GPUs; on a CPU there is only {base!r}")
    if base != "zero_sm" and any(isinstance(control, GemmSmFit) for control in controls):
        raise Misconfigured(f"{name}: gemm_sms=fit leaves SMs to the sums of zero_sm; give {base} a number of SMs")
    of_nccl = [control.name for control in controls if type(control).configure is not Control.configure]
    if base == "zero_sm" and of_nccl:
        raise Misconfigured(f"{name}: {of_nccl[0]} is a control of NCCL, which {base} does not use; leave it out")
    return Mechanism(name=name, controls=controls)
