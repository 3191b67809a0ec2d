"""Format numbers and causes in the same way for every medium: one function for each unit.

Scaling happens here and nowhere else; records hold µs, bytes and fractions.
"""

from __future__ import annotations

import math

from counterpoint.records import causes
from counterpoint.rendering.table import UNKNOWN

CAUSES = {cause.name: cause.short for cause in causes.STRAGGLER_CAUSES.values()}
KERNEL_CAUSES = {cause.name: cause.short for cause in causes.KERNEL_CAUSES.values()}
IDLE_CAUSES = {cause.name: cause.short for cause in causes.IDLE_CAUSES.values()}


def milliseconds(us: float | None, digits: int = 2) -> str:
    """Format µs as milliseconds without the unit, grouped by thousands: `1234.5` as `1.23`."""
    return UNKNOWN if us is None or not math.isfinite(us) else f"{us / 1e3:,.{digits}f}"


def tenth_milliseconds(us: float | None) -> str:
    """Format µs as milliseconds with one digit behind the point: `1234.5` as `1.2`."""
    return milliseconds(us, 1)


def fine_milliseconds(us: float | None) -> str:
    """Format µs as milliseconds with three digits behind the point: `1234.5` as `1.234`."""
    return milliseconds(us, 3)


def interval(low_us: float | None, high_us: float | None) -> str:
    """Format an interval's ends as milliseconds without the unit; empty if one is None."""
    if low_us is None or high_us is None:
        return ""
    digits = 1 if low_us < 1e5 else 0
    return f"{milliseconds(low_us, digits)} to {milliseconds(high_us, digits)}"


def duration(us: float) -> str:
    """Format µs with the unit: as ms, or below 0.1 ms as µs."""
    return f"{milliseconds(us)} ms" if us >= 100.0 else f"{us:.3g} µs"


def percent(fraction: float | None, *, digits: int = 0, sign: bool = False) -> str:
    """Format `0.123` as `12%`."""
    if fraction is None or not math.isfinite(fraction):
        return UNKNOWN
    return f"{fraction * 100:{'+' if sign else ''}z.{digits}f}%"


def tenth_percent(fraction: float | None) -> str:
    """Format `0.123` as `12.3%`."""
    return percent(fraction, digits=1)


def change(fraction: float | None) -> str:
    """Format `0.123` as `+12.3%`."""
    return percent(fraction, digits=1, sign=True)


def count(number: int | None) -> str:
    """Format `12345` as `12,345`."""
    return UNKNOWN if number is None else f"{number:,}"


def whole(value: float | None) -> str:
    """Format `1234.56` as `1,235`."""
    return UNKNOWN if value is None or not math.isfinite(value) else f"{value:,.0f}"


def decimal(value: float | None) -> str:
    """Format `1234.56` as `1,234.6`."""
    return UNKNOWN if value is None or not math.isfinite(value) else f"{value:,.1f}"


def ratio(value: float | None) -> str:
    """Format `0.876` as `0.88`."""
    return UNKNOWN if value is None or not math.isfinite(value) else f"{value:z.2f}"


def factor(ratio: float | None) -> str:
    """Format a factor: `1.5` as `1.50×`."""
    return UNKNOWN if ratio is None or not math.isfinite(ratio) else f"{ratio:.2f}×"


def bandwidth(gb_per_s: float | None) -> str:
    """Format GB/s as a number without the unit."""
    return UNKNOWN if gb_per_s is None or not math.isfinite(gb_per_s) else f"{gb_per_s:,.{0 if gb_per_s >= 10 else 1}f}"


def size(count: int | None) -> str:
    """Format `1048576` as `1.0 MiB`."""
    if count is None:
        return UNKNOWN
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
