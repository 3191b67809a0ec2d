"""Parse names of mechanisms, without torch, so that the command line can refuse wrong names before it starts ranks.

A name is a base and any number of controls: `nccl`, `nccl+priority=high`, `nccl+max_ctas=8+gemm_sms=124`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from counterpoint.collectives.program.operations import measured_by
from counterpoint.controls.control import Control
from counterpoint.controls.gemm_sms import GemmSmFit
from counterpoint.controls.nccl import NcclWindows
from counterpoint.controls.parse import parse_mechanism
from counterpoint.errors import Misconfigured, printable

BASES: dict[str, tuple[str, ...]] = {"cuda": ("nccl", "nccl_zero_cta", "zero_sm"), "cpu": ("gloo", "zero_sm")}
_MADE_OF = {"nccl_zero_cta": "nccl+cta_policy=zero+windows"}


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """Represents a mechanism: a way to run collectives, such as `nccl`, with settings (controls)."""

    name: str
    controls: tuple[Control, ...]

    @property
    def base(self) -> str:
        """Return the mechanism's name without controls: `nccl` of `nccl+max_ctas=8`."""
        return self.name.partition("+")[0]

    @property
    def settings(self) -> str:
        """Return the base mechanism and its controls' settings as text, which differ between mechanisms of one name."""
        return "+".join([self.base, *(control.name for control in self.controls)])

    @property
    def fits_sms(self) -> bool:
        """Return whether a rule chooses the SMs of each pair's GEMM (`gemm_sms=fit`)."""
        return any(isinstance(control, GemmSmFit) for control in self.controls)

    def with_gemm_sms(self, num_sms: int | None) -> Mechanism:
        """Return the mechanism with `gemm_sms=fit` replaced by a limit of `num_sms`; None: the GEMM keeps all SMs."""
        found = tuple(one.found(num_sms) if isinstance(one, GemmSmFit) else one for one in self.controls)
        return replace(self, controls=found)

    @property
    def windows(self) -> NcclWindows | None:
        """Return the control that allocates the buffers as NCCL windows, or None."""
        return next((control for control in self.controls if isinstance(control, NcclWindows)), None)

    def why_unavailable(self, collective: str) -> str | None:
        """Return why the mechanism cannot run this collective on this machine; None if it can."""
        if self.base == "zero_sm" and collective not in (ours := measured_by("programs")):
            return f"zero_sm offers {', '.join(ours)}, not {collective}"
        if self.base == "nccl_zero_cta" and collective not in (copied := measured_by("nccl_copies")):
            return f"NCCL moves {', '.join(copied)} by copy engines, not {collective}"
        reasons = (control.available() for control in self.controls)
        return next((reason for reason in reasons if reason is not None), None)


def find_mechanism(name: str, device_type: str) -> Mechanism:
    """Return the mechanism called `name`; raise Misconfigured, which lists the choices, for a wrong base or control."""
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


def joined(*reasons: str | None) -> str | None:
    """Join the given reasons into one text; return None if all are None."""
    return "; ".join(filter(None, reasons)) or None
