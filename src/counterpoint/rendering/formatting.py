"""Format numbers, causes and parts of an account, the same in the terminal and in HTML.

Scaling happens here and nowhere else. Totals are shown **per step** (the mean over the analysed steps), because that
is what a user notices; data frames and JSON keep the sums.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from counterpoint.errors import printable

UNKNOWN = "–"
QUIET = "bright_black"  # style of explanations
CAUSES = {
    "host_stall": "host stall",
    "slow_kernels": "slower kernels",
    "slow_kernel": "one slower kernel",
    "more_work": "more work",
    "late_input": "late input",
    "unknown": "unknown cause",
}
KERNEL_CAUSES = {
    "tail_effect": "tail effect",
    "sm_contention": "SM contention",
    "bandwidth": "bandwidth or power",
    "none": "none",
}
IDLE_CAUSES = {
    "operation": "long host operation",
    "launch": "slow launches (host-bound)",
    "allocator": "allocator",
    "garbage_collection": "garbage collection",
    "late_input": "late input",
    "synchronise": "synchronisation",
    "copy": "blocking copy",
    "start_up": "start-up, compilation, capture",
    "profiler": "profiler",
    "queued": "queued, but held up",
    "between_kernels": "between queued kernels",
    "no_launch_recorded": "launch not recorded",
    "unrecorded": "host, not recorded",
    "nothing_recorded": "before or after all events",
    "earlier_work": "behind work not recorded",
    "page_migration": "unified memory, page by page",
    "other_gpu": "another GPU of the process works",
}


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
    """Format the ends of an interval as milliseconds without the unit; nothing where there is none."""
    if low_us is None or high_us is None:
        return ""
    digits = 1 if low_us < 1e5 else 0
    return f"{milliseconds(low_us, digits)} to {milliseconds(high_us, digits)}"


def duration(us: float) -> str:
    """Format µs as milliseconds, and less than a tenth of one as µs, with the unit."""
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
    """Format `1.5` as `1.50×`."""
    return UNKNOWN if ratio is None or not math.isfinite(ratio) else f"{ratio:.2f}×"


def bandwidth(gb_per_s: float | None) -> str:
    """Format GB/s without the unit."""
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


def text(value: object, style: str = "", limit: int = 1200) -> Text:
    """Return text for a terminal, never read as markup, with control characters escaped, cut at `limit`."""
    return Text(printable(str(value), limit), style=style)


def heading(console: Console, title: str, unit: str = "") -> None:
    """Print an empty line and a title, the unit of what follows in grey."""
    console.print()
    console.print(Text.assemble(text(title, "bold underline", 120), text(f"  {unit}" if unit else "", QUIET)))


def new_table(columns: Iterable[str], *, left: Container[str], padding: int = 1) -> Table:
    """Return a table without lines; columns that are not named in `left` hold numbers and align right."""
    made = Table(box=None, padding=(0, padding, 0, 0), pad_edge=False, header_style=QUIET, show_edge=False)
    for name in columns:
        justify: Literal["left", "right"] = "left" if name in left else "right"
        made.add_column(Text(name), justify=justify, overflow="fold", no_wrap=name == "order")
    return made


def print_table(
    console: Console,
    columns: Iterable[str],
    rows: Iterable[Iterable[object]],
    *,
    left: Container[str],
    padding: int = 1,
) -> None:
    """Print rows of texts that are never read as markup; see `new_table`."""
    made = new_table(columns, left=left, padding=padding)
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else text(cell) for cell in row))
    console.print(made)
