"""How numbers and causes are said, and how an account is cut into parts: the same in the terminal and in HTML.

Scaling happens here and nowhere else. Totals are said **per step** (the mean over the analysed steps), because that is
the unit in which a user feels them; frames and JSON keep the sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from counterpoint.records import Account, Collective, Diagnosis, Kernel, RankAccount

__all__ = [
    "CAUSES", "KERNEL_CAUSES", "PARTS", "Part", "bandwidth", "budget", "by_exposed", "factor", "milliseconds", "notes",
    "percent", "ratio", "size", "speed_up", "steps_in", "waves", "worst_ranks",
]  # fmt: skip

UNKNOWN = "–"
CAUSES = {
    "host_stall": "host stall",
    "slow_kernels": "slower kernels",
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One part of a rank's time; the parts of a rank add up to its duration."""

    key: str
    name: str
    glyph: str  # what a bar of it is made of where there is no colour
    colour: str  # of rich


PARTS = (
    Part(key="compute", name="compute alone", glyph="█", colour="blue"),
    Part(key="overlapped", name="compute + communication", glyph="▓", colour="cyan"),
    Part(key="transfer", name="exposed transfer", glyph="▒", colour="yellow"),
    Part(key="wait", name="exposed wait", glyph="░", colour="red"),
    Part(key="memcpy", name="copies", glyph="=", colour="magenta"),
    Part(key="idle", name="idle", glyph="·", colour="bright_black"),
)


def steps_in(diagnosis: Diagnosis) -> int:
    """Number of analysed steps, at least 1: the divisor that turns sums into means per step."""
    return max(1, len(diagnosis.steps))


def budget(account: Account) -> dict[str, float]:
    """µs of each of `PARTS`; they add up to the account's duration.

    What neither computes, communicates nor idles is copies.
    """
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


def worst_ranks(accounts: Sequence[RankAccount], limit: int) -> list[RankAccount]:
    """All accounts in order of rank, or, if there are more than `limit`, those with the least time in compute."""
    if len(accounts) <= limit:
        return list(accounts)
    worst = sorted(accounts, key=lambda a: (a.compute_us / a.duration_us if a.duration_us else 0.0, a.rank))[:limit]
    return sorted(worst, key=lambda a: a.rank)


def by_exposed(collectives: Sequence[Collective], limit: int) -> list[Collective]:
    """The `limit` collectives with the longest exposed time, worst first."""
    return sorted(collectives, key=lambda c: (-c.exposed_us, c.start_us))[:limit]


def milliseconds(us: float | None, digits: int = 2) -> str:
    """`1234.5` -> `1.23`, without the unit, grouped by thousands."""
    return UNKNOWN if us is None or not math.isfinite(us) else f"{us / 1e3:,.{digits}f}"


def percent(fraction: float | None, *, digits: int = 0, sign: bool = False) -> str:
    """`0.123` -> `12%`."""
    if fraction is None or not math.isfinite(fraction):
        return UNKNOWN
    return f"{fraction * 100:{'+' if sign else ''}z.{digits}f}%"


def ratio(value: float | None) -> str:
    """`0.876` -> `0.88`."""
    return UNKNOWN if value is None or not math.isfinite(value) else f"{value:z.2f}"


def factor(ratio: float | None) -> str:
    """`1.5` -> `1.50×`."""
    return UNKNOWN if ratio is None or not math.isfinite(ratio) else f"{ratio:.2f}×"


def speed_up(before_us: float, after_us: float) -> str:
    """`before / after` as a factor."""
    return factor(before_us / after_us if after_us > 0 else None)


def bandwidth(gb_per_s: float | None) -> str:
    """GB/s without the unit."""
    return UNKNOWN if gb_per_s is None or not math.isfinite(gb_per_s) else f"{gb_per_s:,.{0 if gb_per_s >= 10 else 1}f}"


def size(count: int | None) -> str:
    """`1048576` -> `1.0 MiB`."""
    if count is None:
        return UNKNOWN
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def waves(kernel: Kernel) -> str:
    """`2 → 3`: waves of thread blocks alone and beside communication."""
    if kernel.waves_alone is None or kernel.waves_overlapped is None:
        return UNKNOWN
    return f"{kernel.waves_alone} → {kernel.waves_overlapped}"


def notes(diagnosis: Diagnosis) -> list[str]:
    """The diagnosis's notes, and what its fields say about missing ranks and clocks."""
    said = list(diagnosis.notes)
    if diagnosis.missing_ranks:
        ranks = ", ".join(map(str, diagnosis.missing_ranks[:32])) + (" …" if len(diagnosis.missing_ranks) > 32 else "")
        said.append(f"No trace of rank {ranks}: seen only through the ranks that waited.")
    offsets = {rank: us for rank, us in diagnosis.clock_offsets_us.items() if us}
    if offsets:
        worst = max(offsets, key=lambda rank: abs(offsets[rank]))
        within = diagnosis.clock_uncertainty_us.get(worst)
        plus_minus = "" if within is None else f" ± {within:.1f}"
        said.append(f"Clocks were aligned; the largest offset is rank {worst}'s: {offsets[worst]:,.1f}{plus_minus} µs.")
    return said
