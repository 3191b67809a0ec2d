"""What overlap is worth, as numbers: pure functions of T_g (compute alone), T_c (collective alone) and T (both).

    serial = T_g + T_c + h              h: the head start of the side that goes first; the other side waits that long
    ideal  = max(T_g', T_c')            T' = T, plus h for the side that waits
    hidden = (serial - T) / min(T_g', T_c')
    ideal_fraction = (serial / T - 1) / (serial / ideal - 1)  = hidden * ideal / T

`hidden`: 1 perfect, 0 as slow as one after the other, below 0 worse. `ideal_fraction` is ConCCL's "% of ideal"
(arXiv 2412.14335). All times in one unit, here µs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from counterpoint.records.measurement import Order, PairClass, Timing

__all__ = ["Overlap", "bus_gb_per_s", "overlap", "pair_class", "timing"]

CLASS_BORDER = 1.15

_BUS_TRAVELS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}  # times (n - 1) / n


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """The ratios of one row."""

    serial_us: float
    ideal_us: float
    hidden: float
    ideal_fraction: float


def overlap(*, compute_us: float, comm_us: float, both_us: float, order: Order, head_us: float) -> Overlap:
    """The ratios from times alone (`compute_us`, `comm_us`), together (`both_us`) and the head start."""
    waiting_compute = compute_us + (head_us if order == "comm_first" else 0.0)
    waiting_comm = comm_us + (head_us if order == "compute_first" else 0.0)
    serial = compute_us + comm_us + (head_us if order != "together" else 0.0)
    ideal = max(waiting_compute, waiting_comm)
    hidden = (serial - both_us) / min(waiting_compute, waiting_comm)
    return Overlap(serial_us=serial, ideal_us=ideal, hidden=hidden, ideal_fraction=hidden * ideal / both_us)


def pair_class(compute_us: float, comm_us: float) -> PairClass:
    """Which side is the longer one by more than 15 %."""
    if compute_us > CLASS_BORDER * comm_us:
        return "G-long"
    return "C-long" if comm_us > CLASS_BORDER * compute_us else "GC-equal"


def bus_gb_per_s(collective: str, size_bytes: int, time_us: float, world_size: int) -> float:
    """Bus bandwidth in GB/s, as nccl-tests counts (doc/PERFORMANCE.md there); `size_bytes` is the full array."""
    travels = _BUS_TRAVELS.get(collective)
    factor = 1.0 if travels is None else travels * (world_size - 1) / world_size
    return size_bytes / time_us / 1e3 * factor


def timing(per_rank: Sequence[Sequence[float]]) -> Timing:
    """Median, 10th and 90th percentile of the rank whose median is largest; `per_rank[r]` are its rounds, µs."""
    medians = tuple(quantile(sorted(rounds), 0.5) for rounds in per_rank)
    rank = max(range(len(medians)), key=medians.__getitem__)
    rounds = sorted(per_rank[rank])
    return Timing(
        us=medians[rank],
        p10_us=quantile(rounds, 0.1),
        p90_us=quantile(rounds, 0.9),
        rank=rank,
        per_rank_us=medians,
    )


def quantile(ordered: Sequence[float], q: float) -> float:
    """Linear interpolation between closest ranks (numpy's default)."""
    at = q * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)
