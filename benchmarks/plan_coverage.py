"""Claim: the interval of a step covers 80 % of measured steps, also of sources that it was not calibrated on.

`benchmarks/plan_published.py` prints it: each source's rows are predicted with intervals of the other sources' rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, median

import numpy as np

from counterpoint.plan.confidence import LEVEL, CalibrationRow, MeasuredErrors, MemoryNeed

COLUMNS = ("steps", "rows", "sources", "covered", "above", "below", "mean width", "median", "loss")


@dataclass(frozen=True, kw_only=True)
class Covered:
    """A row, with the interval of a step that takes 1 without it."""

    row: CalibrationRow
    low: float
    high: float

    @property
    def place(self) -> int:
        """-1: measured below the interval, 0: in it, 1: above."""
        measured = math.exp(self.row.error)
        return (measured > self.high) - (measured < self.low)

    @property
    def loss(self) -> float:
        """Mean pinball loss of both ends, of the logarithm: what LOST and its like were chosen by."""
        tail, error = (1 - LEVEL) / 2, self.row.error
        low, high = error - math.log(self.low), error - math.log(self.high)
        return (max(tail * low, (tail - 1) * low) + max((1 - tail) * high, -tail * high)) / 2


def left_out(rows: Sequence[CalibrationRow], group: Callable[[CalibrationRow], str]) -> list[Covered]:
    """Every row with an interval of the rows of other groups, such as other sources or other GPUs."""
    found = []
    for left in dict.fromkeys(map(group, rows)):
        rest = MeasuredErrors([row for row in rows if group(row) != left])
        for row in rows:
            if group(row) == left:
                interval = rest.interval(row.features, 1.0, row.slowest)
                found.append(Covered(row=row, low=interval.low_us, high=interval.high_us))
    return found


def line(name: str, found: Sequence[Covered]) -> list[str]:
    """One line of the table."""
    places = [each.place for each in found]
    widths = [each.high - each.low for each in found]
    return [
        name, str(len(found)), str(len({each.row.source for each in found})), f"{places.count(0) / len(found):.0%}",
        str(places.count(1)), str(places.count(-1)), f"{fmean(widths):.1%}", f"{median(widths):.1%}",
        f"{fmean(each.loss for each in found):.4f}",
    ]  # fmt: skip


def gpu_of(row: CalibrationRow) -> str:
    """GPU and precision."""
    return f"{row.features['GPU']}, {row.features['precision']}"


def coverage(rows: Sequence[CalibrationRow], own: str) -> list[list[str]]:
    """Lines by source and GPU, and in total, of each source left out; one of each GPU left out.

    The last line is of public rows: those of sources that are not `own`.
    """
    found = left_out(rows, lambda row: row.source)
    gpus = left_out(rows, lambda row: row.features["GPU"])
    sources = dict.fromkeys(row.source for row in rows)
    lines = [line(f"source: {name}", [each for each in found if each.row.source == name]) for name in sources]
    kinds = sorted({gpu_of(each.row) for each in found})
    lines += [line(f"GPU: {kind}", [each for each in found if gpu_of(each.row) == kind]) for kind in kinds]
    lines.append(line("all, each GPU left out", gpus))
    lines.append(line("all, each source left out", found))
    lines.append(line("public, each source left out", [each for each in found if each.row.source != own]))
    return lines


def coverage_summary(public: Sequence[str]) -> str:
    """The last line of `coverage` as a sentence."""
    _, count, sources, covered, _, _, width, middle, _ = public
    return (
        f"intervals of {LEVEL:.0%} cover {covered} of {count} public steps of {sources} sources, each predicted "
        f"without its own source; mean width {width}, median {middle} of the step"
    )


@dataclass(frozen=True, kw_only=True)
class Ran:
    """A configuration; `room` is ln(available / predicted) memory of its fullest GPU, `ran` whether that was enough."""

    source: str
    room: float
    ran: bool


def memory_need(rows: Sequence[Ran]) -> MemoryNeed | None:
    """The normal distribution of ln(needed / predicted) memory that explains best which rows ran: a probit regression.

    Only of sources that report both, as configurations that all ran say little; None without any. Each configuration
    counts once, as one source has only those that were close to the limit.
    """
    outcomes = {(row.source, row.ran) for row in rows}
    both = sorted({source for source, ran in outcomes if ran and (source, False) in outcomes})
    kept = [row for row in rows if row.source in both]
    if not kept:
        return None
    room, ran = np.array([row.room for row in kept]), np.array([row.ran for row in kept])

    def surprise(need: NormalDist) -> float:
        fits = np.array([need.cdf(each) for each in room])
        return -float(np.log(np.maximum(np.where(ran, fits, 1.0 - fits), 1e-12)).sum())

    grid = (NormalDist(mean / 50, spread / 50) for mean in range(-25, 26) for spread in range(1, 31))
    best = min(grid, key=surprise)
    return MemoryNeed(mean=best.mean, deviation=best.stdev, rows=len(kept), sources=tuple(both))
