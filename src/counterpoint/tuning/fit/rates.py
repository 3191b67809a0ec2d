"""Fit the rates of the clock (`collectives/program/clock.py`) to times of collectives alone.

    minimise   sum over times of 2 (sqrt(1 + e²) - 1) + sum over figures of (log(figure / start) / WIDTH)²
    e = log(predicted / measured) / NOISE

by Gauss-Newton steps in the logarithms of the figures. The first sum is e² for small e and 2 |e| for large ones: a few
calls that the clock does not understand do not move the others. The second keeps figures where they were that the times
do not tell apart, such as the latencies of a signal and of a batch, which every call has both of. A first fit has two
unknowns, a factor of all GB/s and one of all µs, and the second starts from there: a machine ten times as slow is as
far from its start as one that is alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from counterpoint.collectives.program.calls import Call
from counterpoint.collectives.program.clock import simulate
from counterpoint.collectives.program.operations import plan_all
from counterpoint.collectives.program.steps import Tuning
from counterpoint.errors import Misconfigured
from counterpoint.machine.profile import Rates

NOISE = 0.03  # of a time: what medians of two runs differ by
WIDTH = 1.0  # of a figure's logarithm: twice or half as much is nothing special
FEWEST = 6  # times: two sizes of three collectives
_STEP = 0.01  # of a logarithm, for derivatives
_PASSES = 12  # four are usual
_ENOUGH = 1e-4  # relative change of the error at which the fit ends

_SPEEDS: tuple[tuple[str, ...], ...] = (("push_gb_per_s", "link_gb_per_s"), ("hbm_gb_per_s",))
_LATENCIES = tuple((f"{name}_us",) for name in ("copy", "kernel", "batch", "signal", "event", "launch"))
Figures = tuple[tuple[str, ...], ...]
Vector = NDArray[np.floating]


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedCall:
    """Holds the time of one collective alone, by the programs that ran."""

    call: Call
    tuning: Tuning
    us: float


def predicted_us(timed: TimedCall, rates: Rates) -> float:
    """Return the µs of the slowest rank on the clock."""
    return simulate(plan_all(timed.call, timed.tuning), rates).us


def fit_rates(times: Sequence[TimedCall], start: Rates) -> Rates:
    """Return the rates with which the clock misses these times least.

    Copies into one GPU do not meet in these programs, so one figure stands for the copy engine and the link.

    Args:
        times: collectives alone, with the host ahead of the device; at least `FEWEST`, of several sizes.
        start: rates of a machine that may be alike.

    Raises:
        Misconfigured: there are too few times, or one is not above 0.
    """
    if len(times) < FEWEST or len({timed.call for timed in times}) < FEWEST:
        raise Misconfigured(f"{len(times)} times of zero_sm alone; at least {FEWEST}, of several sizes and collectives")
    if wrong := [timed for timed in times if not timed.us > 0]:
        raise Misconfigured(f"{wrong[0].call.operation} in {wrong[0].us} µs cannot be; measure it again")
    alike: Figures = (sum(_SPEEDS, ()), sum(_LATENCIES, ()))
    scaled = _descend(times, start, alike, width=math.inf)
    return _descend(times, scaled, (*_SPEEDS, *_LATENCIES), width=WIDTH)


def error_of(times: Sequence[TimedCall], rates: Rates) -> float:
    """Return the mean of |predicted / measured - 1|."""
    return float(np.mean([abs(predicted_us(timed, rates) / timed.us - 1) for timed in times]))


def _descend(times: Sequence[TimedCall], start: Rates, figures: Figures, *, width: float) -> Rates:
    """Return the rates after Gauss-Newton steps from `start`; the figures of each tuple change by one factor."""
    moved = np.zeros(len(figures))
    best = _residuals(times, start, figures, moved, width)
    for _ in range(_PASSES):
        slopes = np.stack(
            [
                (_residuals(times, start, figures, moved + step, width) - best) / _STEP
                for step in _STEP * np.eye(len(moved))
            ],
            axis=1,
        )
        change: Vector = np.linalg.lstsq(slopes, -best, rcond=None)[0]
        before = float(best @ best)
        for part in (1.0, 0.3, 0.1):  # times have kinks: a whole step may go too far
            residuals = _residuals(times, start, figures, moved + part * change, width)
            if float(residuals @ residuals) < float(best @ best):
                moved, best = moved + part * change, residuals
                break
        if float(best @ best) > before * (1 - _ENOUGH):
            break
    return _scaled(start, figures, moved)


def _residuals(times: Sequence[TimedCall], start: Rates, figures: Figures, moved: Vector, width: float) -> Vector:
    rates = _scaled(start, figures, moved)
    missed = np.array([math.log(predicted_us(timed, rates) / timed.us) / NOISE for timed in times])
    softened = np.sign(missed) * np.sqrt(2 * (np.sqrt(1 + missed**2) - 1))  # its square grows with |missed|
    return np.concatenate((softened, moved / width))


def _scaled(start: Rates, figures: Figures, moved: Vector) -> Rates:
    """Return `start` with the figures of each tuple times the exponential of its entry in `moved`."""
    changed = {
        name: getattr(start, name) * math.exp(min(max(log, -20.0), 20.0))
        for names, log in zip(figures, moved.tolist(), strict=True)
        for name in names
    }
    return replace(start, **changed)
