"""Put the recordings of one job beside one another: the trend, and how the worst differs from the best."""

from __future__ import annotations

from collections.abc import Sequence

from counterpoint.diagnosis.comparison import compare, step_us
from counterpoint.records.comparison import Trend, TrendRow
from counterpoint.records.diagnosis import Diagnosis


def trend_row(name: str, d: Diagnosis) -> TrendRow:
    """Return the row of one recording."""
    steps = max(len(d.steps), 1)
    worst = max(d.stragglers, key=lambda s: s.delay_us, default=None)
    return TrendRow(
        name=name,
        steps=len(d.steps),
        step_us=step_us(d),
        hidden=d.totals.hidden,
        exposed_us=d.totals.exposed_comm_us / steps,
        idle_us=d.totals.idle_us / steps,
        worst_rank=worst.rank if worst else None,
        late_us=worst.delay_us / steps if worst else None,
        verdict=d.verdict,
    )


def failed_row(name: str, error: str) -> TrendRow:
    """Return the row of a recording that could not be diagnosed."""
    return TrendRow(
        name=name, steps=None, step_us=None, hidden=None, exposed_us=None, idle_us=None, worst_rank=None,
        late_us=None, verdict=None, error=error,
    )  # fmt: skip


def make_trend(rows: Sequence[TrendRow], best: tuple[str, Diagnosis], worst: tuple[str, Diagnosis]) -> Trend:
    """Return the trend of recordings, of which `best` and `worst` have the shortest and the longest step."""
    read = [row for row in rows if row.error is None]
    if len(read) < 2:
        only = read[0]
        return Trend(
            verdict=f"One recording was found that can be diagnosed. {only.verdict}",
            recordings=tuple(rows), worst=None, best=None, difference=None,
        )  # fmt: skip
    difference = compare(worst[1], best[1])
    low, high = step_us(best[1]) / 1e3, step_us(worst[1]) / 1e3
    cause = difference.verdict.partition(" What ")[2]
    return Trend(
        verdict=f"{len(read)} recordings; a step takes {low:.1f} to {high:.1f} ms; worst: {worst[0]}, best: {best[0]}."
        + (f" From best to worst, what {cause}" if cause else ""),
        recordings=tuple(rows),
        worst=worst[0],
        best=best[0],
        difference=difference,
    )
