"""From a wanted ratio T_c / T_g to the size of a collective, by curves measured once per mechanism."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

__all__ = ["Curve", "size_for_time", "time_at"]

Curve = Sequence[tuple[int, float]]  # (bytes, µs), ascending in bytes


def time_at(curve: Curve, size_bytes: float) -> float:
    """Log-log interpolation; outside of the measured sizes the nearest segment goes on (above: proportional)."""
    sizes = [size for size, _ in curve]
    if size_bytes >= sizes[-1]:
        return curve[-1][1] * size_bytes / sizes[-1]
    at = min(max(bisect.bisect(sizes, size_bytes), 1), len(sizes) - 1)
    (x0, y0), (x1, y1) = curve[at - 1], curve[at]
    slope = math.log(y1 / y0) / math.log(x1 / x0)
    return y0 * math.exp(slope * math.log(size_bytes / x0))


def size_for_time(curves: Sequence[Curve], time_us: float, *, smallest: int = 1 << 14, largest: int = 1 << 36) -> int:
    """Bytes for which the fastest of `curves` takes `time_us`, between the bounds; by bisection of the logarithm."""
    low, high = math.log(smallest), math.log(largest)
    for _ in range(60):
        middle = (low + high) / 2
        if min(time_at(curve, math.exp(middle)) for curve in curves) < time_us:
            low = middle
        else:
            high = middle
    return round(math.exp(high))
