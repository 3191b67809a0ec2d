"""Fit the groups of a profile's figures that depend on matmuls, alone and beside collectives.

    efficiency       GEMMs, streaming kernels and launches alone
    sums             zero-SM reductions beside GEMMs on fewer SMs
    contention       pairs that divide the SMs: what each side loses, who wins when both start, NCCL's cluster
    mechanisms       pairs in which the collective came first: the speeds that both sides keep

Contention is fitted by least squares of log(T predicted / T measured), one parameter after the other on a fixed grid
until nothing changes: the same rows give the same answer, to the last digit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median, pstdev
from typing import Any

import msgspec
from msgspec.structs import replace

from counterpoint.errors import Misconfigured
from counterpoint.machine.gpus import GpuSheet, find_gpu
from counterpoint.machine.matmul import matmul_math_us
from counterpoint.machine.profile import Contention, Disturbance, Efficiency, Profile, default_profile
from counterpoint.measurement.suites import BURSTS, LASTING, SMS, STREAM, SUM, capped, few_sms
from counterpoint.measurement.workloads import find_workload
from counterpoint.pair.choice import predict
from counterpoint.pair.curves import Curves, curves_from
from counterpoint.pair.sm_split import SmLayout, SmSplit
from counterpoint.pair.together import REDUCTIONS, Pair, reduced_us
from counterpoint.records.measurement import BlockRow, Measurement, Row
from counterpoint.tuning.fit import (
    Fitted,
    beside,
    comm_kept,
    compute_kept,
    mean_us,
    pair_of,
    sheet_of,
    stock_rows,
    within,
)

_HOST = {"launch kernel": "host_us", "launch collective": "host_collective_us"}
_ITEM_BYTES = 2  # of bfloat16, in which GPUs are measured
_SM_RATES = tuple(10.0 * 1.02**step for step in range(200))  # GB/s: 10 to 515
_LOSSES = tuple(step / 100 for step in range(41))
_GRID: tuple[tuple[str, Sequence[Any]], ...] = (
    ("comm_cluster", (1, 2, 4)),
    ("gemm_wins", tuple(step / 10 for step in range(11))),
    ("compute_loss", _LOSSES),
    ("comm_loss", _LOSSES),
)
_PASSES = 10  # at most; three are usual


def fit_efficiency(measured: Measurement, known: Profile) -> Fitted:
    """Return those fields of `efficiency` that were measured; raise Misconfigured if none was measured."""
    rows, sheet = stock_rows(measured), find_gpu(measured.environment.gpu)
    figures: dict[str, Any] = {field: rows[what].time.us for what, field in _HOST.items() if what in rows}
    if sheet is not None and sheet.memory_gb_per_s is not None:
        figures |= _of_gemms(rows, sheet, known.efficiency)
        if STREAM in rows:
            moved = find_workload(STREAM).memory_bytes(_ITEM_BYTES)
            figures["memory"] = moved / mean_us(rows[STREAM]) / 1e3 / sheet.memory_gb_per_s
    if not figures:
        raise Misconfigured("no launch was measured, and no GEMM of a GPU whose data sheet is known (machine/gpus.py)")
    used = [row.time for what, row in rows.items() if what in (*_HOST, *BURSTS, LASTING, STREAM)]
    return Fitted(figures=figures, said=f"{', '.join(figures)} measured", times=used)


def _of_gemms(rows: Mapping[str, BlockRow], sheet: GpuSheet, known: Efficiency) -> dict[str, Any]:
    """Return the fraction of peak FLOPS that short GEMMs reach, and the clock's factor under sustained load."""
    launch_us = known.launch_us
    bursts = [
        (predicted_us(what, sheet, known) - launch_us) / (mean_us(rows[what]) - launch_us)
        for what in BURSTS
        if what in rows and mean_us(rows[what]) > launch_us
    ]
    if not bursts:
        return {}
    figures: dict[str, Any] = {"matmul": known.matmul * median(bursts)}
    if LASTING in rows:
        here = replace(known, **figures)
        figures["clock"] = min(predicted_us(LASTING.partition(" ")[2], sheet, here) / mean_us(rows[LASTING]), 1.0)
        by_rank = rows[LASTING].time.per_rank_us
        figures["spread"] = min(pstdev(by_rank) / fmean(by_rank), 1.0)
    return figures


def predicted_us(gemm: str, sheet: GpuSheet, known: Efficiency) -> float:
    """Return the µs of a GEMM by the wave model, at the clock of short bursts."""
    bandwidth = (sheet.memory_gb_per_s or 0.0) * 1e3 * known.memory
    peak, sms = sheet.bf16_tflops * 1e6, sheet.sm.num_sms
    return sum(
        matmul_math_us(m, n, k, peak=peak, sms=sms, bandwidth=bandwidth, known=known) + known.launch_us
        for m, n, k in find_workload(gemm).products
    )


def fit_sums(measured: Measurement, known: Profile) -> Fitted:
    """Return `sums`: GB/s of one SM and of all SMs that add up, and how much copies slow a GEMM beside them.

    The GB/s of one SM are those that predict zero-SM reductions beside GEMMs on fewer SMs best.

    Raises:
        Misconfigured: the sum alone, a reduction beside a GEMM, or a GEMM beside an all_gather was not measured.
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
    """Return the predicted µs of a zero-SM reduction beside a GEMM on the SMs that the row's mechanism names."""
    gemm_sms = SmSplit.parse(row.mechanism.replace("zero_sm", "nccl")).gemm_sms
    return reduced_us(pair, gemm_sms or pair.layout.num_sms, profile)


def fit_contention(measured: Measurement, known: Profile) -> Fitted:
    """Return `contention`: how much GEMMs and NCCL slow each other down, by the model that divides the SMs."""
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
    best = contention_of(rows, curves)
    return Fitted(
        figures=msgspec.to_builtins(best),
        said=f"fitted to {len(rows)} pairs, {error_of_contention(rows, curves, best):.1%} off (root mean square)",
        times=[row.together for row in rows],
    )


def contention_of(rows: Iterable[Row], curves: Curves) -> Contention:
    """Return the contention that fits the valid `rows` best; raise Misconfigured without any, or with a wrong one."""
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
            best = min(tried, key=lambda contention: error_of_contention(usable, curves, contention))
        if best == before:
            break
    return best


def error_of_contention(rows: Sequence[Row], curves: Curves, contention: Contention) -> float:
    """Return the root mean square of log(T predicted / T measured) over rows; 0.05 means an error of 5 %."""
    return math.sqrt(fmean(_log_error(row, curves, contention) ** 2 for row in rows))


def _log_error(row: Row, curves: Curves, contention: Contention) -> float:
    split = SmSplit.parse(row.mechanism)
    budget = predict(
        curves, row.workload, row.collective, row.size_bytes, split, orders=(row.order,), contention=contention
    )
    return math.log(budget.objective_us / row.together.us)


def fit_mechanisms(measured: Measurement, known: Profile) -> dict[str, Fitted]:
    """Return `mechanisms`: by name, the speeds that GEMM and collective keep, and the hidden part of the shorter one.

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
    """Return one mechanism's figures: speeds from rows with the collective first, `hidden` from all launch orders."""
    rows = [row for row in measured.rows if row.mechanism == name and row.marked is None]
    first = beside(measured, name)
    # reductions by zero_sm wait for SMs, which `hidden` covers
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
