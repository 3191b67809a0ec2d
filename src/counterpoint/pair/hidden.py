"""Compute `hidden`, the share of the shorter side's time that overlap saves, and the other measures of overlap.

T_g is the time of compute alone, T_c that of the collective alone, and T that of both together, measured or predicted:

    serial = T_g + T_c + h              h: the head start of the side that goes first; the other side waits that long
    ideal  = max(T_g', T_c')            T_g' = T_g, plus h if compute waits; T_c' = T_c, plus h if the collective waits
    hidden = (serial - T) / min(T_g', T_c')                 1 perfect, 0 as slow as one after the other, below 0 worse
    ideal_fraction = (serial / T - 1) / (serial / ideal - 1) = hidden * ideal / T     ConCCL's "% of ideal" (2412.14335)
"""

from __future__ import annotations

from dataclasses import dataclass

from counterpoint.records.measurement import Order, PairClass

CLASS_BORDER = 1.15  # a side that takes this many times as long as the other makes the pair `G-long` or `C-long`


@dataclass(frozen=True, kw_only=True, slots=True)
class OverlapRatios:
    """Holds what overlap was worth to one pair, measured or predicted, by the equations of this module."""

    serial_us: float
    ideal_us: float
    hidden: float
    ideal_fraction: float


def overlap(*, compute_us: float, comm_us: float, both_us: float, order: Order, head_us: float) -> OverlapRatios:
    """Return what overlap was worth, from T_g (`compute_us`), T_c (`comm_us`), T (`both_us`) and h (`head_us`)."""
    waiting_compute = compute_us + (head_us if order == "comm_first" else 0.0)
    waiting_comm = comm_us + (head_us if order == "compute_first" else 0.0)
    serial = compute_us + comm_us + (head_us if order != "together" else 0.0)
    ideal = max(waiting_compute, waiting_comm)
    hidden = (serial - both_us) / min(waiting_compute, waiting_comm)
    return OverlapRatios(serial_us=serial, ideal_us=ideal, hidden=hidden, ideal_fraction=hidden * ideal / both_us)


def pair_class(compute_us: float, comm_us: float) -> PairClass:
    """Return which side takes more than 15 % longer alone: `G-long` (compute), `C-long` (collective) or neither."""
    if compute_us > CLASS_BORDER * comm_us:
        return "G-long"
    return "C-long" if comm_us > CLASS_BORDER * compute_us else "GC-equal"
