"""Fit a machine's profile to measurements: define what a fit of one group of figures returns, and select its rows.

On CPUs gloo takes NCCL's place. Rows marked as invalid are not used.
collectives.py fits from collectives alone `rates`, `nccl` and `nccl_rates`; matmuls.py from matmuls, alone and beside
collectives, `efficiency`, `sums`, `contention` and `mechanisms`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from counterpoint.errors import Misconfigured
from counterpoint.machine.gpus import GpuSheet, find_gpu
from counterpoint.measurement.workloads import find_workload
from counterpoint.pair.sm_split import SmLayout
from counterpoint.pair.together import Pair
from counterpoint.records.measurement import BlockRow, Measurement, Row, Timing

_LEAST_OVERLAP = 0.25  # fraction of the shorter side: with less overlap its loss is noise


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """Holds the fitted figures of one group of a profile, the quality of the fit in words, and the times used."""

    figures: dict[str, Any]
    said: str
    times: Sequence[Timing]

    @property
    def spread(self) -> float:
        """Return the relative spread of the times: the median over times of (p90 - p10) / median."""
        return median((time.p90_us - time.p10_us) / time.us for time in self.times)


def sheet_of(measured: Measurement) -> GpuSheet:
    """Return the data sheet of the measured GPU; raise Misconfigured if it is unknown."""
    sheet = find_gpu(measured.environment.gpu)
    if sheet is None:
        raise Misconfigured("the GPU is not in machine/gpus.py, or there is none: its SMs are not known")
    return sheet


def alone(measured: Measurement, mechanism: str) -> dict[str, dict[int, Timing]]:
    """Return the times of collectives that ran alone, by one mechanism: by operation, then by full-array bytes."""
    found: dict[str, dict[int, Timing]] = {}
    for row in sorted(measured.blocks, key=lambda row: row.size_bytes or 0):
        if row.mechanism == mechanism and row.size_bytes and row.marked is None and row.time.us > 0:
            found.setdefault(row.what, {})[row.size_bytes] = row.time
    return found


def stock_rows(measured: Measurement) -> dict[str, BlockRow]:
    """Return the valid rows of mechanism `stock` (computations, sums, launches), by name."""
    return {row.what: row for row in measured.blocks if row.mechanism == "stock" and row.marked is None}


def mean_us(row: BlockRow) -> float:
    """Return the µs of a row as the mean over GPUs; `row.time.us` is the time of the slowest GPU."""
    return fmean(row.time.per_rank_us)


def beside(measured: Measurement, mechanism: str) -> list[Row]:
    """Return one mechanism's rows in which the collective started first, then overlapped long with the computation."""
    return [
        row
        for row in measured.rows
        if row.mechanism == mechanism
        and row.order == "comm_first"
        and row.marked is None
        and _overlap_us(row) > _LEAST_OVERLAP * min(row.compute_alone.us, row.comm_alone.us)
    ]


def compute_kept(row: Row) -> float:
    """Return the speed of the computation while both ran, as a fraction of its speed alone."""
    return 1.0 - (row.compute_together.us - row.compute_alone.us) / _overlap_us(row)


def comm_kept(row: Row) -> float:
    """Return the speed of the collective while both ran, as a fraction of its speed alone."""
    return 1.0 - (row.comm_together.us - row.comm_alone.us) / _overlap_us(row)


def _overlap_us(row: Row) -> float:
    return min(row.comm_together.us - row.head_start_us, row.compute_together.us)


def pair_of(row: Row, world_size: int, layout: SmLayout) -> Pair:
    """Return the `Pair` of a row, with the times of computation and collective measured alone."""
    return Pair(
        products=find_workload(row.workload).products, compute_us=row.compute_alone.us, collective=row.collective,
        size_bytes=row.size_bytes, comm_us=row.comm_alone.us, mechanism=row.mechanism.partition("+")[0],
        num_ctas=row.usage.comm_ctas or 0 if row.usage else 0, world_size=world_size, layout=layout, order=row.order,
    )  # fmt: skip


def within(figure: float, least: float, most: float) -> float:
    """Return `figure` clipped to `least` and `most`; only noise can take a figure past these."""
    return min(max(figure, least), most)
