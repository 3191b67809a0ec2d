"""What each mechanism is worth over all pairs of a measurement, as numbers; and the rows of each pair together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, geometric_mean

from counterpoint.records import Measurement, Row

__all__ = ["Standing", "by_scenario", "mean_hidden", "standings", "summary"]

SUMMARY_SCHEMA = "counterpoint.measurement-summary/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """One mechanism over all its rows that are not marked; None without any."""

    mechanism: str
    hidden: float | None  # mean
    lowest: float | None  # the worst pair and order: a mechanism that works in one order only does not work
    speedup: float | None  # over serial, geometric mean
    compute_kept: float | None  # the lowest
    rows: int
    marked: int


def standings(rows: Sequence[Row]) -> list[Standing]:
    """Every mechanism, the one that hides most first."""
    by_mechanism: dict[str, list[Row]] = {}
    for row in rows:
        by_mechanism.setdefault(row.mechanism, []).append(row)
    found = [_standing(mechanism, of) for mechanism, of in by_mechanism.items()]
    return sorted(found, key=lambda it: -math.inf if it.hidden is None else it.hidden, reverse=True)


def _standing(mechanism: str, rows: Sequence[Row]) -> Standing:
    good = [row for row in rows if row.marked is None]
    return Standing(
        mechanism=mechanism,
        hidden=fmean(row.hidden for row in good) if good else None,
        lowest=min((row.hidden for row in good), default=None),
        speedup=geometric_mean(row.speedup for row in good) if good else None,
        compute_kept=min((row.compute_kept for row in good), default=None),
        rows=len(good),
        marked=len(rows) - len(good),
    )


def mean_hidden(rows: Sequence[Row], of: Callable[[Row], str]) -> dict[str, dict[str, float]]:
    """Mean of `hidden` by mechanism and by `of(row)`, such as its collective; without marked rows."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        if row.marked is None:
            found.setdefault(row.mechanism, {}).setdefault(of(row), []).append(row.hidden)
    return {mechanism: {key: fmean(values) for key, values in by.items()} for mechanism, by in found.items()}


def by_scenario(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows of each scenario, in the order in which they were measured."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.scenario, []).append(row)
    return found


def summary(measurement: Measurement, out: str | None) -> dict[str, object]:
    """The last line of `counterpoint measure`: figures of every mechanism, and where all the rest is."""
    where = measurement.environment
    found = standings(measurement.rows)
    return {
        "schema": SUMMARY_SCHEMA,
        "suite": measurement.suite,
        "device": where.device,
        "gpu": where.gpu,
        "world_size": where.world_size,
        "rows": len(measurement.rows),
        "marked": sum(row.marked is not None for row in measurement.rows),
        "blocks": len(measurement.blocks),
        "hidden": {it.mechanism: _rounded(it.hidden) for it in found},
        "lowest_hidden": {it.mechanism: _rounded(it.lowest) for it in found},
        "speedup": {it.mechanism: _rounded(it.speedup) for it in found},
        "out": out,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
