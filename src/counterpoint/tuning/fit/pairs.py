"""Fit the groups of a profile that pairs tell: `sums`, `contention` and `mechanisms`."""

from __future__ import annotations

import math
from statistics import fmean, median

import msgspec
from msgspec.structs import replace

from counterpoint.errors import Misconfigured
from counterpoint.machine.gpus import find_gpu
from counterpoint.machine.profile import Disturbance, Profile
from counterpoint.measurement.suites import SMS, SUM, capped, few_sms
from counterpoint.measurement.workloads import find_workload
from counterpoint.pair.curves import curves_from
from counterpoint.pair.sm_split import SmLayout, SmSplit
from counterpoint.pair.together import REDUCTIONS, Pair, reduced_us
from counterpoint.records.measurement import Measurement, Row
from counterpoint.tuning.fit import contention
from counterpoint.tuning.fit.fitted import (
    Fitted,
    beside,
    comm_kept,
    compute_kept,
    pair_of,
    sheet_of,
    stock_rows,
    within,
)

_SM_RATES = tuple(10.0 * 1.02**step for step in range(200))  # GB/s: 10 to 515


def fit_sums(measured: Measurement, known: Profile) -> Fitted:
    """Return `sums`: GB/s of one SM and of all that add up, and what a GEMM loses while copies run beside it.

    That of one SM is the one with which zero-SM reductions beside GEMMs on fewer SMs are predicted best.

    Raises:
        Misconfigured: the sum alone, such a pair, or a GEMM beside an all_gather was not measured.
    """
    num_sms = sheet_of(measured).sm.num_sms
    layout, summed = SmLayout.even(num_sms, known.chip), few_sms(num_sms)
    alone = stock_rows(measured).get(SUM)
    copied = [row for row in beside(measured, "zero_sm") if row.collective not in REDUCTIONS]
    rows = [
        row
        for row in measured.rows
        if row.mechanism in summed and row.collective in REDUCTIONS and row.order == "together" and row.marked is None
    ]
    if alone is None or alone.gb_per_s is None or not copied or not rows:
        raise Misconfigured(f"{SUM} alone, a GEMM beside an all_gather by zero_sm, or {summed[0]} was not measured")
    lost = within(1.0 - median(map(compute_kept, copied)), 0.0, 0.99)
    pairs = [(pair_of(row, measured.environment.world_size, layout), row) for row in rows]
    found = {}
    for rate in _SM_RATES:
        sums = replace(known.sums, sm_gb_per_s=rate, memory_gb_per_s=alone.gb_per_s, contention=lost)
        logs = [math.log(summed_us(pair, row, replace(known, sums=sums)) / row.together.us) for pair, row in pairs]
        found[math.sqrt(fmean(log**2 for log in logs))] = sums
    error = min(found)
    return Fitted(
        figures=msgspec.to_builtins(found[error]),
        said=f"a sum alone, {len(copied)} GEMMs beside copies, {len(rows)} beside reductions: {error:.1%} off",
        times=[alone.time, *(row.together for row in rows)],
    )


def summed_us(pair: Pair, row: Row, profile: Profile) -> float:
    """Return the predicted µs of a zero-SM reduction beside a GEMM that has the SMs of the row's mechanism."""
    gemm_sms = SmSplit.parse(row.mechanism.replace("zero_sm", "nccl")).gemm_sms
    return reduced_us(pair, gemm_sms or pair.layout.num_sms, profile)


def fit_contention(measured: Measurement, known: Profile) -> Fitted:
    """Return `contention`: what GEMMs and NCCL lose beside each other, by the model that divides the SMs."""
    sheet = sheet_of(measured)
    products = {row.what: find_workload(row.what).products for row in measured.blocks if row.what.startswith("gemm ")}
    curves = curves_from(measured.blocks, products, layout=SmLayout.even(sheet.sm.num_sms, known.chip))
    rows = [
        row
        for row in measured.rows
        if row.marked is None
        and (split := SmSplit.of(row.mechanism)) is not None
        and curves.cover(row.workload, row.collective, row.size_bytes, split)
    ]
    best = contention.fit(rows, curves)
    return Fitted(
        figures=msgspec.to_builtins(best),
        said=f"fitted to {len(rows)} pairs, {contention.error_of(rows, curves, best):.1%} off (root mean square)",
        times=[row.together for row in rows],
    )


def fit_mechanisms(measured: Measurement, known: Profile) -> dict[str, Fitted]:
    """Return `mechanisms`: by the name in a profile the speeds kept, and what of the shorter side was hidden.

    Raises:
        Misconfigured: no pair was measured in which the collective came first and both sides ran for a while.
    """
    sheet = find_gpu(measured.environment.gpu)
    names = {row.mechanism: row.mechanism for row in measured.rows if "+" not in row.mechanism}
    names["nccl_capped"] = capped(SMS if sheet is None else sheet.sm.num_sms)
    found = {
        name: _kept(measured, mechanism, known.mechanisms.get(name))
        for name, mechanism in names.items()
        if beside(measured, mechanism)
    }
    if not found:
        raise Misconfigured("no pair was measured in which the collective came first and both sides ran for a while")
    return found


def _kept(measured: Measurement, name: str, shipped: Disturbance | None) -> Fitted:
    """Return the figures of one mechanism: speeds where the collective came first, `hidden` over all orders."""
    rows = [row for row in measured.rows if row.mechanism == name and row.marked is None]
    first = beside(measured, name)
    # sums of zero_sm wait for SMs, which `hidden` tells
    unsummed = [row for row in first if name != "zero_sm" or row.collective not in REDUCTIONS] or first
    hidden = {
        collective: within(fmean(row.hidden for row in rows if row.collective == collective), -10.0, 1.0)
        for collective in dict.fromkeys(row.collective for row in rows)
    }
    return Fitted(
        figures={
            "compute_kept": within(median(map(compute_kept, first)), 0.0, 1.0),
            "comm_kept": within(median(map(comm_kept, unsummed)), 0.01, 1.0),
            "hidden": hidden,
            "copies": shipped is None or shipped.copies,
        },
        said=f"{name}: {len(rows)} rows, speeds from {len(first)} in which the collective came first",
        times=[row.together for row in rows],
    )
