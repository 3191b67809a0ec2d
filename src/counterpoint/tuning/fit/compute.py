"""Fit what GEMMs, streaming kernels and launches tell of the group `efficiency`: some of its fields."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean, median, pstdev
from typing import Any

import msgspec

from counterpoint.errors import Misconfigured
from counterpoint.machine.gpus import GpuSheet, find_gpu
from counterpoint.machine.matmul import matmul_math_us
from counterpoint.machine.profile import Efficiency, Profile
from counterpoint.measurement.suites import BURSTS, LASTING, STREAM
from counterpoint.measurement.workloads import find_workload
from counterpoint.records.measurement import BlockRow, Measurement
from counterpoint.tuning.fit.fitted import Fitted, mean_us, stock_rows

_HOST = {"launch kernel": "host_us", "launch collective": "host_collective_us"}
_ITEM_BYTES = 2  # of bfloat16, in which GPUs are measured


def fit_efficiency(measured: Measurement, known: Profile) -> Fitted:
    """Return those fields of `efficiency` that were measured.

    Raises:
        Misconfigured: none was.
    """
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
    """Return the part of the peak that short GEMMs reach, and what of that stays under a lasting load."""
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
        here = msgspec.structs.replace(known, **figures)
        figures["clock"] = min(predicted_us(LASTING.partition(" ")[2], sheet, here) / mean_us(rows[LASTING]), 1.0)
        by_rank = rows[LASTING].time.per_rank_us
        figures["spread"] = min(pstdev(by_rank) / fmean(by_rank), 1.0)
    return figures


def predicted_us(gemm: str, sheet: GpuSheet, known: Efficiency) -> float:
    """Return the µs of a GEMM by the model of waves, at the clock of bursts."""
    bandwidth = (sheet.memory_gb_per_s or 0.0) * 1e3 * known.memory
    peak, sms = sheet.bf16_tflops * 1e6, sheet.sm.num_sms
    return sum(
        matmul_math_us(m, n, k, peak=peak, sms=sms, bandwidth=bandwidth, known=known) + known.launch_us
        for m, n, k in find_workload(gemm).products
    )
