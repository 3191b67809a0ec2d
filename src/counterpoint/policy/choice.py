"""How the SMs of one pair may be divided: a limit for each side, as a mechanism's name says it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from counterpoint.errors import Misconfigured, printable

__all__ = ["Choice"]

_LIMIT = re.compile(r"(max_ctas|cga_cluster|gemm_sms)=([1-9]\d{0,3})")


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """`max_ctas` and `cga_cluster` of NCCL, `gemm_sms` of the GEMM; None leaves that setting as it is."""

    max_ctas: int | None = None
    cga_cluster: int | None = None
    gemm_sms: int | None = None

    @property
    def mechanism(self) -> str:
        """As in a suite: `nccl+max_ctas=16+cga_cluster=2+gemm_sms=116`."""
        limits = {"max_ctas": self.max_ctas, "cga_cluster": self.cga_cluster, "gemm_sms": self.gemm_sms}
        return "+".join(["nccl", *(f"{key}={value}" for key, value in limits.items() if value is not None)])

    @classmethod
    def of(cls, mechanism: str) -> Choice | None:
        """The choice of that name; None if the mechanism is something else than a division of SMs."""
        base, *limits = mechanism.split("+")
        matches = [_LIMIT.fullmatch(limit) for limit in limits]
        found = {match[1]: int(match[2]) for match in matches if match}
        if base != "nccl" or len(found) != len(limits):
            return None
        return cls(**found)

    @classmethod
    def parse(cls, mechanism: str) -> Choice:
        """The choice of that name.

        Raises:
            Misconfigured: the mechanism is something else than a division of SMs.
        """
        choice = cls.of(mechanism)
        if choice is None:
            allowed = "nccl, with any of +max_ctas=N, +cga_cluster=N and +gemm_sms=N"
            raise Misconfigured(f"{printable(mechanism)!r} does not divide SMs; write {allowed}")
        return choice
