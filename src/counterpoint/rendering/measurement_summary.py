"""Summarize a measurement by mechanism: over its pairs, and over its matmuls."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, geometric_mean
from typing import TypeVar

from counterpoint.records.measurement import BlockRow, Measurement, Row

SUMMARY_SCHEMA = "counterpoint.measurement-summary/1"
T = TypeVar("T")


def summary(measurement: Measurement, out: str | None) -> dict[str, object]:
    """Return the last output of `counterpoint measure`: each mechanism's figures, and the file with all results."""
    where = measurement.environment
    found, matmuls = mechanism_summaries(measurement.rows), matmul_summaries(measurement.blocks)
    times_torch = {it.mechanism: _rounded(it.times_torch) for it in matmuls}
    own: dict[str, object] = {"times_torch": times_torch} if times_torch else {}
    return {
        "schema": SUMMARY_SCHEMA,
        "suite": measurement.suite,
        "device": where.device,
        "gpu": where.gpu,
        "world_size": where.world_size,
        "rows": len(measurement.rows),
        "marked": sum(one.marked is not None for rows in (measurement.rows, measurement.blocks) for one in rows),
        "blocks": len(measurement.blocks),
        "hidden": {it.mechanism: _rounded(it.hidden) for it in found},
        "lowest_hidden": {it.mechanism: _rounded(it.lowest) for it in found},
        "speedup": {it.mechanism: _rounded(it.speedup) for it in found},
        "out": out,
    } | own


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


@dataclass(frozen=True, kw_only=True, slots=True)
class MechanismSummary:
    """Summarizes one mechanism over its rows that are not marked; without such rows figures are None."""

    mechanism: str
    hidden: float | None  # mean
    lowest: float | None  # the worst pair and order: a mechanism that works in one order only does not work
    speedup: float | None  # over serial, geometric mean
    compute_kept: float | None  # the lowest
    rows: int
    marked: int


def mechanism_summaries(rows: Sequence[Row]) -> list[MechanismSummary]:
    """Return a summary of every mechanism, the one that hides most first."""
    found = [_summarize(mechanism, of) for mechanism, of in grouped(rows, lambda row: row.mechanism).items()]
    return sorted(found, key=lambda it: -math.inf if it.hidden is None else it.hidden, reverse=True)


def _summarize(mechanism: str, rows: Sequence[Row]) -> MechanismSummary:
    good = [row for row in rows if row.marked is None]
    return MechanismSummary(
        mechanism=mechanism,
        hidden=fmean(row.hidden for row in good) if good else None,
        lowest=min((row.hidden for row in good), default=None),
        speedup=geometric_mean(row.speedup for row in good) if good else None,
        compute_kept=min((row.compute_kept for row in good), default=None),
        rows=len(good),
        marked=len(rows) - len(good),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class MatmulSummary:
    """Summarizes one mechanism over its dependent matmuls that are not marked; without such rows figures are None."""

    mechanism: str
    over_hiding: float | None  # mean of `over_longer` where the communication can hide
    over_others: float | None  # and where it cannot
    times_torch: float | None  # speed over that of torch's collective and one matmul, geometric mean
    lowest: float | None  # of them: below 1 it is slower somewhere
    rows: int
    marked: int


def matmul_summaries(blocks: Iterable[BlockRow]) -> list[MatmulSummary]:
    """Return a summary of every mechanism that ran dependent matmuls, in the order in which they were measured."""
    by_mechanism: dict[str, list[tuple[BlockRow, float | None]]] = {}
    for matmul in by_matmul(blocks).values():
        for block in matmul:
            if block.over_longer is not None:
                by_mechanism.setdefault(block.mechanism, []).append((block, times_of_torch(block, matmul)))
    return [_summarize_matmuls(mechanism, of) for mechanism, of in by_mechanism.items()]


def _summarize_matmuls(mechanism: str, found: Sequence[tuple[BlockRow, float | None]]) -> MatmulSummary:
    good = [(block, times) for block, times in found if block.marked is None]
    times_torch = [times for _, times in good if times is not None]

    def over(can_hide: bool) -> float | None:
        shares = [one.over_longer for one, _ in good if one.can_hide == can_hide and one.over_longer is not None]
        return fmean(shares) if shares else None

    return MatmulSummary(
        mechanism=mechanism,
        over_hiding=over(True),
        over_others=over(False),
        times_torch=geometric_mean(times_torch) if times_torch else None,
        lowest=min(times_torch, default=None),
        rows=len(good),
        marked=len(found) - len(good),
    )


def mean_hidden(rows: Sequence[Row], of: Callable[[Row], str]) -> dict[str, dict[str, float]]:
    """Return the mean of `hidden` by mechanism and by `of(row)` (for instance the collective), without marked rows."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        if row.marked is None:
            found.setdefault(row.mechanism, {}).setdefault(of(row), []).append(row.hidden)
    return {mechanism: {key: fmean(values) for key, values in by.items()} for mechanism, by in found.items()}


def grouped(rows: Iterable[T], of: Callable[[T], str]) -> dict[str, list[T]]:
    """Return the rows by key `of(row)`, in the order in which they were measured."""
    found: dict[str, list[T]] = {}
    for each in rows:
        found.setdefault(of(each), []).append(each)
    return found


def by_matmul(blocks: Iterable[BlockRow]) -> dict[str, list[BlockRow]]:
    """Return the rows of each dependent matmul, in the order in which they were measured."""
    return grouped((block for block in blocks if block.can_hide is not None), lambda block: block.what)


def times_of_torch(block: BlockRow, blocks: Iterable[BlockRow]) -> float | None:
    """Return the speed-up of a block over torch's collective and one matmul; None if that was not measured."""
    stock = next((one.time.us for one in blocks if one.mechanism == "torch" and one.marked is None), None)
    return None if stock is None or block.over_longer is None else stock / block.time.us
