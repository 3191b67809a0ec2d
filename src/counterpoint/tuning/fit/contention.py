"""Fit what only pairs can tell: contention, who wins when both start, and the cluster that NCCL's blocks form.

Least squares of log(T predicted / T measured), one parameter after the other on a fixed grid until nothing changes:
the same rows give the same answer, to the last digit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean, median
from typing import Any

from msgspec.structs import replace

from counterpoint.errors import Misconfigured
from counterpoint.machine.profile import Contention, default_profile
from counterpoint.pair.choice import predict
from counterpoint.pair.curves import Curves
from counterpoint.pair.sm_split import SmSplit
from counterpoint.records.measurement import Row

_LOSSES = tuple(step / 100 for step in range(41))
_GRID: tuple[tuple[str, Sequence[Any]], ...] = (
    ("comm_cluster", (1, 2, 4)),
    ("gemm_wins", tuple(step / 10 for step in range(11))),
    ("compute_loss", _LOSSES),
    ("comm_loss", _LOSSES),
)
_PASSES = 10  # three are usual


def fit(rows: Iterable[Row], curves: Curves) -> Contention:
    """Return the contention that explains these rows best; rows that are marked or divide no SMs are left out.

    Raises:
        Misconfigured: no row is left, or one lies outside the curves or took no time.
    """
    usable = [row for row in rows if row.marked is None and SmSplit.of(row.mechanism) is not None]
    if not usable:
        raise Misconfigured("no row to fit: give pairs of `nccl[+max_ctas=N][+gemm_sms=N]` that are not marked")
    if senseless := [row for row in usable if not row.together.us > 0]:
        raise Misconfigured(f"{senseless[0].scenario}: together in {senseless[0].together.us} µs; measure it again")
    heads = [row.head_start_us for row in usable if row.order != "together"]
    best = default_profile().contention
    best = replace(best, head_start_us=median(heads)) if heads else best
    for _ in range(_PASSES):
        before = best
        for name, values in _GRID:
            tried = (replace(best, **{name: value}) for value in values)
            best = min(tried, key=lambda contention: error_of(usable, curves, contention))
        if best == before:
            break
    return best


def error_of(rows: Sequence[Row], curves: Curves, contention: Contention) -> float:
    """Return the root mean square of log(T predicted / T measured): 0.05 is 5 %."""
    return math.sqrt(fmean(_log_error(row, curves, contention) ** 2 for row in rows))


def _log_error(row: Row, curves: Curves, contention: Contention) -> float:
    split = SmSplit.parse(row.mechanism)
    budget = predict(
        curves, row.workload, row.collective, row.size_bytes, split, orders=(row.order,), contention=contention
    )
    return math.log(budget.objective_us / row.together.us)
