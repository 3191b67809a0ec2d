"""What overlap is worth, as numbers: pure functions of T_g (compute alone), T_c (collective alone) and T (both).

    serial = T_g + T_c + h              h: the head start of the side that goes first; the other side waits that long
    ideal  = max(T_g', T_c')            T' = T, plus h for the side that waits
    hidden = (serial - T) / min(T_g', T_c')
    ideal_fraction = (serial / T - 1) / (serial / ideal - 1)  = hidden * ideal / T

`hidden`: 1 perfect, 0 as slow as one after the other, below 0 worse. `ideal_fraction` is ConCCL's "% of ideal"
(arXiv 2412.14335). All times in one unit, here µs.
"""

from __future__ import annotations

from dataclasses import dataclass

from counterpoint.records.measurement import Order, PairClass

__all__ = ["OverlapRatios", "overlap", "pair_class"]

CLASS_BORDER = 1.15


@dataclass(frozen=True, kw_only=True, slots=True)
class OverlapRatios:
    """Holds the ratios of one measured pair."""

    serial_us: float
    ideal_us: float
    hidden: float
    ideal_fraction: float


def overlap(*, compute_us: float, comm_us: float, both_us: float, order: Order, head_us: float) -> OverlapRatios:
    """Return the ratios from times alone (`compute_us`, `comm_us`), together (`both_us`) and the head start."""
    waiting_compute = compute_us + (head_us if order == "comm_first" else 0.0)
    waiting_comm = comm_us + (head_us if order == "compute_first" else 0.0)
    serial = compute_us + comm_us + (head_us if order != "together" else 0.0)
    ideal = max(waiting_compute, waiting_comm)
    hidden = (serial - both_us) / min(waiting_compute, waiting_comm)
    return OverlapRatios(serial_us=serial, ideal_us=ideal, hidden=hidden, ideal_fraction=hidden * ideal / both_us)


def pair_class(compute_us: float, comm_us: float) -> PairClass:
    """Return which side is the longer one by more than 15 %."""
    if compute_us > CLASS_BORDER * comm_us:
        return "G-long"
    return "C-long" if comm_us > CLASS_BORDER * compute_us else "GC-equal"
