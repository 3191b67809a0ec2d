"""Print a rehearsal on a terminal: the verdict, what differed between ranks, what was replaced and moved."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from counterpoint.records.rehearsal import Rehearsal
from counterpoint.rendering import formatting as say


def render_rehearsal(found: Rehearsal, console: Console) -> None:
    """Print a rehearsal, its verdict first. Reports are as wide as their tables."""

    def line(text: str, style: str = "") -> None:
        console.print(say.text(text, style), soft_wrap=True)

    line(found.verdict, "bold")
    where = f"{len(found.gpus)} × {found.gpus[0]}" if found.gpus else "CPUs"
    hosts = f" counted as {found.hosts} hosts" if found.hosts > 1 else ""
    peak = f", at most {found.peak_bytes / 2**30:.1f} GiB reserved by torch on a rank" if found.peak_bytes else ""
    line(f"{found.world_size} ranks{hosts} on {where}, {found.steps} optimizer steps{peak}", say.QUIET)
    if found.missing_ranks:
        line(f"No report of rank {_numbers(found.missing_ranks)}: the script ended itself before its last line.")
    line("Different between ranks: " + ("; ".join(found.differences) or "nothing."))
    for report in found.reports:
        line("")
        line(f"{report.name} on rank{'s' * (len(report.ranks) > 1)} {_numbers(report.ranks)}:", "bold")
        for row in report.text.splitlines():
            line(row)
    if not found.reports:
        line("counterpoint replaced nothing: the script makes no call of it, and all communication was torch's own.")


def _numbers(ranks: Sequence[int]) -> str:
    """Return ranks in words: 0 to 7, or 0, 2, 3."""
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]} to {ranks[-1]}"
    return ", ".join(map(str, ranks))
