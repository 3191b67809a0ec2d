"""Fit the groups of a profile that depend on collectives alone: `rates`, `nccl` and `nccl_rates`.

`rates`, by which the clock (`collectives/program/clock.py`) simulates programs, are fitted thus:

    minimise   sum over times of 2 (sqrt(1 + e²) - 1) + sum over figures of (log(figure / start) / WIDTH)²
    e = log(predicted / measured) / NOISE

by Gauss-Newton steps in the logarithms of the figures. The first sum is e² for small e and 2 |e| for large ones: a few
calls that the clock predicts badly do not spoil the fit of the others. The second sum keeps figures at their start if
the times do not determine them, such as the latencies of a signal and of a batch, since every call has both. A first
fit has two unknowns, a factor of all GB/s and one of all µs, and the second fit starts from the first one's result: so
a machine ten times as slow as the start is fitted as well as a similar machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from counterpoint.collectives.program.calls import Call
from counterpoint.collectives.program.clock import simulate
from counterpoint.collectives.program.operations import even_call, plan_all
from counterpoint.collectives.program.steps import Tuning
from counterpoint.collectives.program.tuning import best_tuning, with_link_turns
from counterpoint.errors import Misconfigured
from counterpoint.machine.bus_bandwidth import bus_factor
from counterpoint.machine.profile import Profile, Rates
from counterpoint.pair.sm_split import SmSplit
from counterpoint.records.measurement import BlockRow, Measurement
from counterpoint.tuning.fit import Fitted, alone
from counterpoint.tuning.pairs import STOCK

ALWAYS = 1 << 50  # bytes: a crossover that no array reaches
FULL_SPEED = 0.85  # fraction of the bandwidth with all CTAs that counts as full speed
LARGE = 1 / 64  # fraction of the largest size measured, from which bandwidth counts, not latency
NOISE = 0.03  # relative difference of medians between two runs
WIDTH = 1.0  # of the logarithm of a figure: factors up to about 2 are plausible
FEWEST = 6  # times that a fit needs: two sizes of three collectives
_STEP = 0.01  # step of a logarithm for numeric derivatives
_PASSES = 12  # at most; four are usual
_ENOUGH = 1e-4  # relative change of the error at which the fit ends

_SPEEDS: tuple[tuple[str, ...], ...] = (("push_gb_per_s", "link_gb_per_s"), ("hbm_gb_per_s",))
_LATENCIES = tuple((f"{name}_us",) for name in ("copy", "kernel", "batch", "signal", "event", "launch"))
Figures = tuple[tuple[str, ...], ...]
Vector = NDArray[np.floating]


def fit_rates(measured: Measurement, known: Profile) -> Fitted:
    """Return `rates`, the step costs of zero-SM collectives, fitted to measured times of calls tuned by `known`."""
    world_size = measured.environment.world_size
    found = {
        even_call(name, world_size, size): time
        for name, by_size in alone(measured, "zero_sm").items()
        for size, time in by_size.items()
    }
    calls = [TimedCall(call=call, tuning=_tuning(call, measured, known), us=time.us) for call, time in found.items()]
    best = rates_of(calls, known.rates)
    error = error_of_rates(calls, best)
    return Fitted(
        figures=msgspec.to_builtins(best),
        said=f"fitted to {len(calls)} times of zero_sm alone, {error:.1%} off in the mean",
        times=tuple(found.values()),
    )


def fit_nccl(measured: Measurement, known: Profile) -> Fitted:
    """Return `nccl`: the array sizes below which NCCL's collectives are faster alone, and the CTAs that NCCL needs."""
    nccl = STOCK[measured.environment.device]
    stock, own = alone(measured, nccl), alone(measured, "zero_sm")
    both = [name for name in stock if len(stock[name].keys() & own.get(name, {}).keys()) > 1]
    if not both:
        raise Misconfigured(f"no collective was measured by {nccl} and by zero_sm at the same sizes")
    times = [time for name in both for time in (*stock[name].values(), *own[name].values())]
    us = {name: [{size: time.us for size, time in of[name].items()} for of in (stock, own)] for name in both}
    figures = {"crossover_bytes": {name: crossover_bytes(*sides) for name, sides in us.items()}}
    if measured.environment.device == "cpu":
        return Fitted(figures=figures | {"full_speed_ctas": 1}, said="gloo for NCCL; it has no CTAs", times=times)
    ctas, all_ctas = full_speed_ctas(measured.blocks)
    return Fitted(
        figures=figures | {"full_speed_ctas": ctas},
        said=f"{len(both)} collectives by both; {ctas} of {all_ctas} CTAs for {FULL_SPEED:.0%} of the speed",
        times=times,
    )


def crossover_bytes(stock: Mapping[int, float], own: Mapping[int, float]) -> int:
    """Return the size in bytes from which `own` is faster than `stock`, given µs by size; `ALWAYS`: at no size.

    This size makes the sum of log(time taken / least time) smallest, so that one noisy size does not move it. It lies
    where the lines of both times, in logarithms between the next smaller and larger measured sizes, meet.
    """
    sizes = sorted(stock.keys() & own.keys())
    gains = [math.log(stock[size] / own[size]) for size in sizes]  # above 0: own is faster
    lost = [
        sum(max(gain, 0.0) for gain in gains[:at]) + sum(max(-gain, 0.0) for gain in gains[at:])
        for at in range(len(sizes) + 1)
    ]
    at = min(range(len(lost)), key=lost.__getitem__)
    if at in (0, len(sizes)):
        return ALWAYS if at else 0
    before, after = gains[at - 1], gains[at]
    part = -before / (after - before) if before <= 0.0 < after else 1.0
    return round(math.exp((1.0 - part) * math.log(sizes[at - 1]) + part * math.log(sizes[at])))


def full_speed_ctas(blocks: Iterable[BlockRow]) -> tuple[int, int]:
    """Return the fewest CTAs with which NCCL nearly fills the links, and its default; Misconfigured: no such rows."""
    found: dict[tuple[str, int], dict[int, float]] = {}
    for row in blocks:
        split = SmSplit.of(row.mechanism)
        if row.size_bytes and row.num_ctas and row.marked is None and split is not None and split.cga_cluster is None:
            found.setdefault((row.what, row.size_bytes), {})[row.num_ctas] = row.time.us
    several = {key: by_ctas for key, by_ctas in found.items() if len(by_ctas) > 1}
    if not several:
        raise Misconfigured("no collective was measured by nccl and by nccl+max_ctas=N")
    largest = max(several, key=lambda key: (key[1], len(several[key])))
    by_ctas = several[largest]
    whole = min(by_ctas.values())
    return min(ctas for ctas, us in by_ctas.items() if us * FULL_SPEED <= whole), max(by_ctas)


def fit_nccl_rates(measured: Measurement, known: Profile) -> Fitted:
    """Return `nccl_rates`: one latency, and a bus bandwidth per operation, by least squares of relative errors."""
    nccl = STOCK[measured.environment.device]
    rows = [
        (name, bus_factor(name, measured.environment.world_size) * size, time)
        for name, by_size in alone(measured, nccl).items()
        for size, time in by_size.items()
        if size >= LARGE * max(by_size)
    ]
    names = list(dict.fromkeys(name for name, _, _ in rows))
    if len(rows) < len(names) + 2:
        raise Misconfigured(f"{len(rows)} times of {nccl} alone; give large sizes of several collectives")
    us = np.array([time.us for _, _, time in rows])
    moved = np.array([[(name == row[0]) * row[1] for name in names] for row in rows])
    design = np.column_stack([np.ones(len(us)), moved]) / us[:, None]
    solved = np.linalg.lstsq(design, np.ones(len(us)), rcond=None)[0]
    if solved[0] < 0:  # noise
        solved = np.concatenate([[0.0], np.linalg.lstsq(design[:, 1:], np.ones(len(us)), rcond=None)[0]])
    if not (solved[1:] > 0).all():
        raise Misconfigured(f"times of {nccl} do not grow with the size: measure again on a quiet machine")
    error = float(np.mean(np.abs(design @ solved - 1)))
    bus = {name: 1e-3 / float(each) for name, each in zip(names, solved[1:], strict=True)}
    return Fitted(
        figures={"latency_us": float(solved[0]), "bus_gb_per_s": bus},
        said=f"fitted to {len(rows)} times of {nccl} alone, {error:.1%} off in the mean",
        times=[time for _, _, time in rows],
    )


def _tuning(call: Call, measured: Measurement, known: Profile) -> Tuning:
    """Return the `Tuning` by which a communicator ran a call; on CPUs, where blocks are cut, only roughly."""
    if measured.environment.device == "cpu":
        return Tuning()
    best = best_tuning(call, known.rates)
    return with_link_turns(best) if call.reduces else best


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedCall:
    """Holds one `Call`, its time alone, and the `Tuning` with which the communicator planned it."""

    call: Call
    tuning: Tuning
    us: float


def predicted_us(timed: TimedCall, rates: Rates) -> float:
    """Return the predicted µs of a collective: the time of the slowest rank in the simulation with `rates`."""
    return simulate(plan_all(timed.call, timed.tuning), rates).us


def rates_of(times: Sequence[TimedCall], start: Rates) -> Rates:
    """Return the rates with which the simulation of collectives fits `times` best, starting from a similar machine's.

    The times are of collectives alone, with the host ahead of the device: at least `FEWEST`, of several sizes. Copies
    into one GPU never overlap in these programs, so one figure serves for the copy engine and the link.

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


def error_of_rates(times: Sequence[TimedCall], rates: Rates) -> float:
    """Return the mean relative error of predictions by `rates`, |predicted / measured - 1|."""
    return float(np.mean([abs(predicted_us(timed, rates) / timed.us - 1) for timed in times]))


def _descend(times: Sequence[TimedCall], start: Rates, figures: Figures, *, width: float) -> Rates:
    """Return the rates after Gauss-Newton steps from `start`; the fields of one tuple are scaled by a common factor."""
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
    """Return `start` with the fields of each tuple multiplied by exp of its entry in `moved`."""
    changed = {
        name: getattr(start, name) * math.exp(min(max(log, -20.0), 20.0))
        for names, log in zip(figures, moved.tolist(), strict=True)
        for name in names
    }
    return replace(start, **changed)
