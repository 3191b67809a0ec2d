"""Interpolate, between measured points, the time that a GEMM or a collective takes alone.

`GemmCurve`  GEMMs by number of SMs. Between two points it follows the steps of the waves, not a straight line.
`CommCurve`  a collective by bytes, one curve for each number of CTAs and cluster size. latency + bytes / bandwidth
             between two sizes; the rate is linear in the CTAs between two curves (each CTA drives its own channel).
`RowCurve`   a matmul by its rows, measured, or estimated by the data sheet; for one that depends on communication.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from counterpoint.errors import Misconfigured, Unsupported, printable
from counterpoint.machine.gpus import find_gpu
from counterpoint.machine.matmul import matmul_math_us
from counterpoint.machine.profile import Profile, default_profile
from counterpoint.pair.sm_split import SmLayout, SmSplit
from counterpoint.pair.together import GemmKernel, Product, gemm_kernels, steps_of
from counterpoint.records.measurement import BlockRow

REACH = 2.0  # sizes up to this much beyond the measured ones are extrapolated
DTYPES = {  # torch's names: the precision of data sheets, and bytes of an element
    "bfloat16": ("bf16", 2),
    "float16": ("fp16", 2),
    "float32": ("fp32", 4),
    "float8_e4m3fn": ("fp8", 1),
    "float8_e5m2": ("fp8", 1),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmCurve:
    """Holds the measured µs of a sequence of GEMMs without communication, by number of SMs."""

    workload: str  # the name of the GEMMs in a suite
    products: tuple[Product, ...]  # M, N and K of each GEMM
    points: tuple[tuple[int, float], ...]  # (SMs allowed, µs), ascending
    # rows and columns that one block works on
    tile: tuple[int, int] = field(default_factory=lambda: default_profile().chip.matmul_tile)

    def __post_init__(self) -> None:
        if not self.products:
            raise Unsupported(f"{printable(self.workload)}: waves are known of GEMMs only; measure such a pair instead")

    def kernels(self, num_sms: int) -> tuple[GemmKernel, ...]:
        """Return a `GemmKernel` for each GEMM on `num_sms` SMs; the kernels' times add up to `time_us(num_sms)`."""
        return gemm_kernels(self.products, self.time_us(num_sms), num_sms, self.tile)

    def time_us(self, num_sms: int) -> float:
        """Return the µs of the GEMMs on `num_sms` SMs; between two measured points the time follows the waves."""
        for (few, slow_us), (many, fast_us) in pairwise(self.points):
            if few <= num_sms <= many:
                slow, fast, here = (sum(steps_of(self.products, sms, self.tile)) for sms in (few, many, num_sms))
                part = (here - fast) / (slow - fast) if slow != fast else (many - num_sms) / (many - few)
                return fast_us + (slow_us - fast_us) * part
        if self.points and self.points[0][0] == num_sms:
            return self.points[0][1]
        measured = ", ".join(str(sms) for sms, _ in self.points)
        raise Misconfigured(f"{self.workload} was not measured at {num_sms} SMs or around; measured at: {measured}")


@dataclass(frozen=True, kw_only=True, slots=True)
class CommPoint:
    """Holds a collective's µs alone at one size, and how many CTAs NCCL used (for small arrays below the limit)."""

    size_bytes: int  # of the full array
    time_us: float
    num_ctas: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CommCurve:
    """Holds the µs of a collective alone under one limit of CTAs, by ascending array size."""

    points: tuple[CommPoint, ...]

    def reaches(self, size_bytes: int) -> bool:
        """Return whether `at` can predict this size: at most a factor `REACH` outside the measured sizes."""
        sizes = [point.size_bytes for point in self.points]
        return len(sizes) > 1 and sizes[0] / REACH <= size_bytes <= sizes[-1] * REACH

    def at(self, size_bytes: int) -> CommPoint:
        """Return the `CommPoint` of a size: latency + bytes / bandwidth, by a line through the two nearest points."""
        sizes = [point.size_bytes for point in self.points]
        if not self.reaches(size_bytes):
            raise Misconfigured(f"{size_bytes} bytes are too far from the measured sizes {sizes}; measure nearer ones")
        upper = next((i for i, size in enumerate(sizes) if size >= size_bytes), len(sizes) - 1)
        low, high = self.points[max(upper, 1) - 1], self.points[max(upper, 1)]
        slope = (high.time_us - low.time_us) / (high.size_bytes - low.size_bytes)
        # noise can make the line through two small points steep: half the array never takes less than half the time
        time_us = max(low.time_us + slope * (size_bytes - low.size_bytes), low.time_us / REACH)
        return CommPoint(size_bytes=size_bytes, time_us=time_us, num_ctas=self.points[upper].num_ctas)


CommKey = tuple[str, int | None, int | None]
"""A collective, its limit of CTAs and its cluster size; None: NCCL's own split."""


def comm_key(collective: str, split: SmSplit) -> CommKey:
    """Return a collective's key in `Curves.comms` under the NCCL limits of `split`."""
    return collective, split.max_ctas, split.cga_cluster


@dataclass(frozen=True, kw_only=True)
class Curves:
    """Holds the measured curves of a machine, from which `choose_split` predicts times."""

    layout: SmLayout
    gemms: Mapping[str, GemmCurve]  # by workload
    comms: Mapping[CommKey, CommCurve]

    def gemm(self, workload: str) -> GemmCurve:
        """Return the curve of a workload; raise Misconfigured if the workload was not measured."""
        if workload not in self.gemms:
            raise Misconfigured(f"no curve of {printable(workload)!r}; measured: {', '.join(self.gemms) or 'none'}")
        return self.gemms[workload]

    def comm(self, collective: str, size_bytes: int, split: SmSplit) -> CommPoint:
        """Return a collective's `CommPoint` under a split's limits; rates are interpolated between CTA counts."""
        if (key := comm_key(collective, split)) in self.comms:
            return self.comms[key].at(size_bytes)
        limit, cluster = split.max_ctas, split.cga_cluster
        alike = [curve for (name, _, c), curve in self.comms.items() if (name, c) == (collective, cluster)]
        known = [curve.at(size_bytes) for curve in alike if curve.reaches(size_bytes)]
        points = sorted(known, key=lambda point: point.num_ctas)
        for few, many in pairwise(points):
            if limit is not None and few.num_ctas <= limit <= many.num_ctas:
                part = (limit - few.num_ctas) / max(many.num_ctas - few.num_ctas, 1)
                rate = (1.0 - part) / few.time_us + part / many.time_us
                return CommPoint(size_bytes=size_bytes, time_us=1.0 / rate, num_ctas=limit)
        measured = ", ".join(str(point.num_ctas) for point in points) or "none"
        clusters = f" in clusters of {cluster}" if cluster else ""
        raise Misconfigured(
            f"{collective} was not measured at or around {limit or 'NCCL’s own'} CTAs{clusters}, but at: {measured}"
        )

    def fastest_us(self, collective: str, size_bytes: int) -> float:
        """Return a collective's µs alone with its fastest setting at this size; raise Misconfigured if unmeasured."""
        curves = [curve for (name, _, _), curve in self.comms.items() if name == collective]
        found = [curve.at(size_bytes).time_us for curve in curves if curve.reaches(size_bytes)]
        if not found:
            near = f" around {size_bytes} bytes" if curves else ""
            raise Misconfigured(f"no curve of {printable(collective)!r}{near}; measure it alone, by size and max_ctas")
        return min(found)

    def most_ctas(self, collective: str) -> int:
        """Return the most CTAs that plain NCCL used at any size; raise Misconfigured if plain NCCL was not measured."""
        if (plain := comm_key(collective, SmSplit())) not in self.comms:
            raise Misconfigured(f"no curve of {printable(collective)!r} by plain nccl; measure it alone, by size")
        return max(point.num_ctas for point in self.comms[plain].points)

    def cover(self, workload: str, collective: str, size_bytes: int, split: SmSplit) -> bool:
        """Return whether the curves give GEMM and collective times under this split, measured or interpolated."""
        try:
            self.gemm(workload).time_us(split.gemm_sms or self.layout.num_sms)
        except Misconfigured:
            return False
        return self.cover_comm(collective, size_bytes, split)

    def cover_comm(self, collective: str, size_bytes: int, split: SmSplit) -> bool:
        """Return whether the curves give the time of the collective under this split, measured or interpolated."""
        try:
            self.comm(collective, size_bytes, split)
        except Misconfigured:
            return False
        return True

    def clusters(self, collective: str) -> tuple[int, ...]:
        """Return the cluster sizes measured besides NCCL's own, ascending."""
        return tuple(sorted({cluster for name, _, cluster in self.comms if name == collective and cluster is not None}))


def curves_from(
    blocks: Iterable[BlockRow],
    products: Mapping[str, Sequence[Product]],
    *,
    layout: SmLayout,
    default_ctas: int | None = None,
) -> Curves:
    """Return curves from rows of GEMMs and collectives measured alone; skip marked rows and rows of no `SmSplit`.

    GEMMs are measured as `stock` and `gemm_sms=N`, collectives as `nccl[+max_ctas=N][+cga_cluster=N]`; of rows with
    equal settings the last counts. `products` has the GEMMs of each workload that counts; `default_ctas` are the CTAs
    of plain NCCL, for rows whose kernels the profiler did not look at.

    Raises:
        Misconfigured: CTAs are not known and `default_ctas` is not given; a time or size is not above 0.
    """
    gemms: dict[str, dict[int, float]] = {}
    comms: dict[CommKey, dict[int, CommPoint]] = {}
    for row in blocks:
        alone = "nccl" if row.mechanism == "stock" else f"nccl+{row.mechanism}"  # of GEMMs, which leave out the base
        split = SmSplit.of(alone if row.size_bytes is None else row.mechanism)
        if row.marked is not None or split is None:
            continue
        if not row.time.us > 0 or (row.size_bytes is not None and row.size_bytes < 1):
            what = f"{printable(row.what)} by {printable(row.mechanism)}"
            raise Misconfigured(f"{what}: {row.size_bytes} bytes in {row.time.us} µs cannot be; measure it again")
        if row.size_bytes is None:
            if products.get(row.what):
                gemms.setdefault(row.what, {})[split.gemm_sms or layout.num_sms] = row.time.us
            continue
        num_ctas = row.num_ctas or split.max_ctas or default_ctas
        if num_ctas is None:
            raise Misconfigured(f"{row.what} by {row.mechanism}: its CTAs are not known; give default_ctas, such as 24")
        point = CommPoint(size_bytes=row.size_bytes, time_us=row.time.us, num_ctas=num_ctas)
        comms.setdefault(comm_key(row.what, split), {})[row.size_bytes] = point
    return Curves(
        layout=layout,
        gemms={
            what: GemmCurve(workload=what, products=tuple(products[what]), points=tuple(sorted(at.items())))
            for what, at in gemms.items()
        },
        comms={key: CommCurve(points=tuple(at[size] for size in sorted(at))) for key, at in comms.items()},
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RowCurve:
    """Holds the µs of one matmul x[rows, k] @ w[k, n], alone on one GPU, by number of rows."""

    n: int
    k: int
    dtype: str  # torch's name: bfloat16
    points: tuple[tuple[int, float], ...]  # (rows, µs), ascending
    estimated: bool = False  # by data sheet and profile, not measured

    def __post_init__(self) -> None:
        rows = [rows for rows, _ in self.points]
        real = all(0 < us < math.inf for _, us in self.points)
        if not rows or not real or min(self.n, self.k, rows[0]) < 1 or any(a >= b for a, b in pairwise(rows)):
            what = f"points of {self._name} at {rows[:8]} rows"
            raise Misconfigured(f"{what}: give at least one, with ascending positive rows and µs above 0")
        _dtype(self.dtype)

    def us(self, rows: int) -> float:
        """Return the matmul's µs for `rows` rows: linear between two points, proportional beyond the last point.

        Fewer rows than at the first point take as long as the first point's rows, which should be one tile.

        Raises:
            Misconfigured: there are over twice as many rows as were measured.
        """
        if rows <= 0:
            return 0.0
        most, most_us = self.points[-1]
        if rows > most * REACH:
            raise Misconfigured(f"{self._name} was measured up to {most} rows; {rows} are too many, measure them")
        if rows >= most:
            return most_us * rows / most
        upper = bisect_left(self.points, (rows, 0.0))
        if upper == 0:
            return self.points[0][1]
        (low, low_us), (high, high_us) = self.points[upper - 1], self.points[upper]
        return low_us + (high_us - low_us) * (rows - low) / (high - low)

    @property
    def _name(self) -> str:
        return f"{printable(self.dtype)} rows x {self.n} x {self.k}"


def estimated_curve(
    n: int, k: int, dtype: str, rows: int, profile: Profile | None = None, *, step: int | None = None
) -> RowCurve:
    """Return an estimated (not measured) `RowCurve`: a launch plus waves of tiles at the GPU's usual speed.

    The product has `n` columns and sums of `k` elements; `dtype` is of the operands, by torch's name. `rows` are the
    most that the curve will be asked for, `step` those between two points (None: the rows of a tile); `profile` None:
    H200's.

    Raises:
        Unsupported: the GPU's data sheet is not known, or has no peak of this dtype.
    """
    profile = profile or default_profile()
    sheet, (precision, element_bytes) = find_gpu(profile.gpu), _dtype(dtype)
    if sheet is None or precision not in sheet.tflops:
        raise Unsupported(f"no peak of {printable(profile.gpu)} in {dtype} is known; measure the matmul by its rows")
    peak, bandwidth, known = sheet.tflops[precision] * 1e6, profile.rates.hbm_gb_per_s * 1e3, profile.efficiency

    def us(m: int) -> float:
        math_us = matmul_math_us(m, n, k, peak=peak, sms=sheet.sm.num_sms, bandwidth=bandwidth, known=known)
        moved = element_bytes * (m * k + k * n) + max(element_bytes, 2) * m * n
        return max(math_us, moved / bandwidth) + known.launch_us

    step = step or profile.chip.matmul_tile[0]
    counts = [*range(step, rows, step), max(rows, 1)]
    return RowCurve(n=n, k=k, dtype=dtype, points=tuple((m, us(m)) for m in counts), estimated=True)


def _dtype(name: str) -> tuple[str, int]:
    if name not in DTYPES:
        raise Misconfigured(f"dtype {printable(name)!r}: known are {', '.join(DTYPES)}; give one of them")
    return DTYPES[name]
