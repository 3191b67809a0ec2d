"""Hold what one matmul takes by its rows, alone on one GPU: measured at some rows, or estimated by the data sheet."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise

from counterpoint.errors import Misconfigured, Unsupported, printable
from counterpoint.machine.gpus import find_gpu
from counterpoint.machine.matmul import matmul_math_us
from counterpoint.machine.profile import Profile, default_profile
from counterpoint.pair.curves import REACH

DTYPES = {  # torch's names: the precision of data sheets, and bytes of an element
    "bfloat16": ("bf16", 2),
    "float16": ("fp16", 2),
    "float32": ("fp32", 4),
    "float8_e4m3fn": ("fp8", 1),
    "float8_e5m2": ("fp8", 1),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RowCurve:
    """Holds the µs of one matmul, x[rows, k] @ w[k, n], by its rows, alone on one GPU."""

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
        """Return the µs of so many rows: between two points on their line, beyond the last one in proportion.

        Fewer rows than at the first point take as long as that: at most a tile of them is missing if it is one tile.

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
    """Return a curve that nobody measured: waves of tiles by the GPU's data sheet and what it reaches, and a launch.

    Args:
        n: columns of the product.
        k: elements of each sum.
        dtype: of the operands, by torch's name.
        rows: the most that will be asked for.
        profile: of the GPU; None: the default one, H200.
        step: rows between two points; None: those of a tile.

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
