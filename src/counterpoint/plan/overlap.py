"""Compute beside communication: how long both take together, by the mechanism that moves the bytes.

g compute alone, c communication alone. While both run, compute keeps `compute_kept` of its speed and communication
`comm_kept`; whichever is longer then goes on alone:

    side by side     c / comm_kept <= g / compute_kept:  T = g + (1 - compute_kept) · c / comm_kept
                     otherwise                           T = c + (1 - comm_kept) · g / compute_kept
    behind           T = g + c             a persistent matmul has all SMs, the collective waits for its end
    together         T = (1 - held) · side by side + held · behind                            never more than g + c

`held`, the part of collectives that wait, follows from the mean `hidden` = (g + c - T) / min(g, c) that was measured
over launch orders: held = 1 - hidden / hidden of side by side. It is 0 where matmuls are not persistent: before Hopper
their blocks come and go with every wave, and a collective gets in.

Figures: 8 × H200 (4 where that is said), NCCL 2.28.9, 4 GEMM loads × 4 length ratios × 3 launch orders, 2026-11-20 and
21. Nothing else has been measured; on other GPUs they are assumptions.
"""

from __future__ import annotations

from counterpoint.errors import Misconfigured, printable
from counterpoint.records.base import Record

__all__ = ["MECHANISMS", "Mechanism", "find_mechanism", "together_us"]


class Mechanism(Record, frozen=True, kw_only=True):
    """One way to run a collective beside a matmul.

    Args:
        compute_kept: speed of compute beside it, over its speed alone.
        comm_kept: the same of communication.
        hidden: mean over launch orders, by operation; what is missing counts as the mean of those given.
        copies: FSDP2 copies between its buffers and parameters.
        source: of the figures.
    """

    name: str
    compute_kept: float
    comm_kept: float
    hidden: dict[str, float]
    source: str
    copies: bool = True

    def held(self, operation: str) -> float:
        """Part of collectives that wait for a persistent matmul to end."""
        if not self.hidden:
            return 0.0
        hidden = self.hidden.get(operation, sum(self.hidden.values()) / len(self.hidden))
        best = 1.0 - (1.0 - self.compute_kept) / self.comm_kept
        return min(max(1.0 - hidden / best, 0.0), 1.0) if best > 0 else 1.0


MECHANISMS: dict[str, Mechanism] = {
    mechanism.name: mechanism
    for mechanism in (
        Mechanism(
            name="nccl",
            compute_kept=0.82,
            comm_kept=0.93,
            hidden={"all_gather": 0.46, "all_to_all": 0.40, "reduce_scatter": 0.54, "all_reduce": 0.53},
            source="GEMMs keep 80-85 % beside 24 CTAs; hidden 0.75 where the collective is first, mean as given",
        ),
        Mechanism(
            name="nccl_zero_cta",
            compute_kept=0.95,
            comm_kept=0.97,
            hidden={"all_gather": 0.57, "all_to_all": 0.63},
            source="copy engines; hidden 0.92 where the collective is first; no reductions are offered",
        ),
        Mechanism(
            name="nccl_capped",
            compute_kept=0.84,
            comm_kept=0.91,
            hidden={"all_gather": 0.77, "reduce_scatter": 0.77, "all_reduce": 0.77},
            source="16 CTAs in clusters of 2 beside a GEMM on 116 of 132 SMs: 8192³ beside an all_gather, 3 orders, "
            "4 × H200; of reductions not measured",
        ),
        Mechanism(
            name="zero_sm",
            compute_kept=0.965,
            comm_kept=0.97,
            hidden={"all_gather": 0.97, "all_to_all": 0.91, "reduce_scatter": 0.87, "all_reduce": 0.71},
            copies=False,
            source="counterpoint.collectives, under FSDP2 straight to parameters and from gradients: 4 × H200, "
            "results/pairs-4xh200.md",
        ),
        Mechanism(
            name="zero_sm_copied",
            compute_kept=0.955,
            comm_kept=0.97,
            hidden={"all_gather": 0.88, "all_to_all": 0.61, "reduce_scatter": 0.86, "all_reduce": 0.63},
            source="its prototype, with FSDP2's copies: GEMMs keep 94-97 %",
        ),
        Mechanism(name="ideal", compute_kept=1.0, comm_kept=1.0, hidden={}, copies=False, source="by definition"),
        Mechanism(name="serial", compute_kept=0.0, comm_kept=1.0, hidden={}, source="by definition"),
    )
}


def find_mechanism(name: str) -> Mechanism:
    """Raises Misconfigured if it is unknown."""
    if name not in MECHANISMS:
        raise Misconfigured(f"mechanism = {printable(name)!r}: known are {', '.join(MECHANISMS)}; give one of them")
    return MECHANISMS[name]


def together_us(
    compute_us: float, comms: tuple[tuple[str, float], ...], mechanism: Mechanism, *, persistent: bool
) -> float:
    """Compute beside collectives that run one after another, as (operation, µs alone).

    Args:
        compute_us: alone.
        comms: operations by PyTorch's name, with their time alone.
        mechanism: of all of them.
        persistent: matmuls hold their SMs to their end (Hopper and later).
    """
    comm_us = sum(us for _, us in comms)
    serial = compute_us + comm_us
    if not comm_us or not compute_us or not mechanism.compute_kept:
        return serial
    slow_g, slow_c = compute_us / mechanism.compute_kept, comm_us / mechanism.comm_kept
    if slow_c <= slow_g:
        beside = compute_us + (1.0 - mechanism.compute_kept) * slow_c
    else:
        beside = comm_us + (1.0 - mechanism.comm_kept) * slow_g
    held = sum(us * mechanism.held(operation) for operation, us in comms) / comm_us if persistent else 0.0
    return min((1.0 - held) * beside + held * serial, serial)
