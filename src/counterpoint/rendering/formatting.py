"""Format numbers, causes and parts of an account, the same in the terminal and in HTML.

Scaling happens here and nowhere else. Totals are shown **per step** (the mean over the analysed steps), because that
is what a user notices; data frames and JSON keep the sums.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from counterpoint.errors import printable
from counterpoint.records import causes
from counterpoint.records.diagnosis import (
    Account,
    Collective,
    CollectiveKind,
    Diagnosis,
    IdleCause,
    KernelComparison,
    RankAccount,
    Replay,
)

UNKNOWN = "–"
QUIET = "bright_black"  # style of explanations
CAUSES = {cause.name: cause.short for cause in causes.STRAGGLER_CAUSES.values()}
KERNEL_CAUSES = {cause.name: cause.short for cause in causes.KERNEL_CAUSES.values()}
IDLE_CAUSES = {cause.name: cause.short for cause in causes.IDLE_CAUSES.values()}
MAX_IDLE_CAUSES = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class AccountPart:
    """Describes one part of a rank's time; the parts of a rank add up to its duration."""

    key: str
    name: str
    glyph: str  # what a bar of it is made of where there is no colour
    colour: str  # of rich


PARTS = (
    AccountPart(key="compute", name="compute alone", glyph="█", colour="blue"),
    AccountPart(key="overlapped", name="compute + communication", glyph="▓", colour="cyan"),
    AccountPart(key="transfer", name="exposed transfer", glyph="▒", colour="yellow"),
    AccountPart(key="wait", name="exposed wait", glyph="░", colour="red"),
    AccountPart(key="memcpy", name="copies", glyph="=", colour="magenta"),
    AccountPart(key="idle", name="idle", glyph="·", colour="bright_black"),
)


def steps_in(diagnosis: Diagnosis) -> int:
    """Return the number of analysed steps, at least 1: it divides sums into means per step."""
    return max(1, len(diagnosis.steps))


def budget(account: Account) -> dict[str, float]:
    """Return the µs of each of `PARTS`. They add up to the account's duration: what no other part takes is copies."""
    wait = min(account.exposed_wait_us or 0.0, account.exposed_comm_us)
    copies = account.duration_us - account.compute_us - account.exposed_comm_us - account.idle_us
    return {
        "compute": account.compute_us - account.overlapped_us,
        "overlapped": account.overlapped_us,
        "transfer": account.exposed_comm_us - wait,
        "wait": wait,
        "memcpy": max(0.0, copies),
        "idle": account.idle_us,
    }


def worst_ranks(accounts: Sequence[RankAccount], limit: int, late: Container[int] = ()) -> list[RankAccount]:
    """Return all accounts in order of rank or, if there are more than `limit`, the late and those of least compute."""
    if len(accounts) <= limit:
        return list(accounts)
    worst = sorted(
        accounts,
        key=lambda a: (a.rank not in late, a.compute_us / a.duration_us if a.duration_us else 0.0, a.rank),
    )[:limit]
    return sorted(worst, key=lambda a: a.rank)


def idle_sentence(diagnosis: Diagnosis) -> str:
    """Say how long the GPUs idle in a step, how much of that is explained, and what the trace lacks."""
    idle = diagnosis.idle
    if idle is None:
        return "Idle: unknown"
    text = f"Idle {milliseconds(idle.idle_us)} ms {'a step' if diagnosis.has_steps else 'in the recording'}, of which "
    text += f"{milliseconds(idle.explained_us)} explained"
    rest = idle.idle_us - idle.explained_us
    return f"{text}; the trace does not hold why for the other {milliseconds(rest)}" if rest >= 5.0 else text


def idle_causes(diagnosis: Diagnosis) -> list[IdleCause]:
    """Return the causes of idle time that are worth a line: none that would read 0.00 ms."""
    causes = diagnosis.idle.causes if diagnosis.idle else ()
    return [c for c in causes if c.us >= 5.0][:MAX_IDLE_CAUSES]


def waits(collective: Collective) -> tuple[float | None, float | None]:
    """Return mean and longest wait of the ranks in a collective; None where no other rank is joined."""
    known = [us for us in collective.wait_us.values() if us is not None]
    return (sum(known) / len(known), max(known)) if known else (None, None)


def replayed_waits(replay: Replay) -> str | None:
    """Say which waits a replay keeps as they were measured; None if it explains all."""
    kept = []
    if replay.collective_waits in ("as_measured", "partly_joined"):
        some = "some " if replay.collective_waits == "partly_joined" else ""
        kept.append(f"in {some}collectives, for other ranks have no trace")
    if replay.waits == "as_measured":
        kept.append("of operations that begin later than the trace explains")
    return f"Waits kept as measured: {'; '.join(kept)}." if kept else None


def replayed_steps(diagnosis: Diagnosis) -> str:
    """Say of how many steps the replay is; nothing where it is of all."""
    replayed, every = diagnosis.replay.steps if diagnosis.replay else None, len(diagnosis.steps)
    return f", mean of {replayed} of {every} steps" if replayed and replayed < every else ""


def group_of(kind: CollectiveKind) -> str:
    """Return the parallel group of a kind of collectives, else what the program or the trace calls it, and its size."""
    name = kind.parallel or kind.group_name or kind.group
    return f"{name} ×{kind.ranks}" if kind.ranks else name


def first_sentence(advice: str) -> str:
    """Return advice up to the end of its first sentence."""
    return re.split(r"(?<=[a-z0-9)])\. (?=[A-Z])", advice, maxsplit=1)[0]


def by_exposed(collectives: Sequence[Collective], limit: int) -> list[Collective]:
    """Return the `limit` collectives with the longest exposed time, worst first."""
    return sorted(collectives, key=lambda c: (-c.exposed_us, c.start_us))[:limit]


def milliseconds(us: float | None, digits: int = 2) -> str:
    """Format µs as milliseconds without the unit, grouped by thousands: `1234.5` as `1.23`."""
    return UNKNOWN if us is None or not math.isfinite(us) else f"{us / 1e3:,.{digits}f}"


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


def change(fraction: float | None) -> str:
    """Format `0.123` as `+12.3%`."""
    return percent(fraction, digits=1, sign=True)


def count(number: int | None) -> str:
    """Format `12345` as `12,345`."""
    return UNKNOWN if number is None else f"{number:,}"


def decimal(value: float | None) -> str:
    """Format `1234.56` as `1,234.6`."""
    return UNKNOWN if value is None or not math.isfinite(value) else f"{value:,.1f}"


def ratio(value: float | None) -> str:
    """Format `0.876` as `0.88`."""
    return UNKNOWN if value is None or not math.isfinite(value) else f"{value:z.2f}"


def factor(ratio: float | None) -> str:
    """Format `1.5` as `1.50×`."""
    return UNKNOWN if ratio is None or not math.isfinite(ratio) else f"{ratio:.2f}×"


def speed_up(before_us: float, after_us: float) -> str:
    """Format `before / after` as a factor."""
    return factor(before_us / after_us if after_us > 0 else None)


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


def waves(kernel: KernelComparison) -> str:
    """Format waves of thread blocks alone and during communication as `2 → 3`."""
    if kernel.waves_alone is None or kernel.waves_overlapped is None:
        return UNKNOWN
    return f"{kernel.waves_alone} → {kernel.waves_overlapped}"


def notes(diagnosis: Diagnosis) -> list[str]:
    """Return the diagnosis's notes, and what its fields say about clocks."""
    said = list(diagnosis.notes)
    offsets = {rank: us for rank, us in diagnosis.clock_offsets_us.items() if us}
    if offsets:
        worst = max(offsets, key=lambda rank: abs(offsets[rank]))
        within = diagnosis.clock_uncertainty_us.get(worst)
        plus_minus = "" if within is None else f" ± {within:.1f}"
        said.append(f"Clocks were aligned; the largest offset is rank {worst}'s: {offsets[worst]:,.1f}{plus_minus} µs.")
    return said


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
