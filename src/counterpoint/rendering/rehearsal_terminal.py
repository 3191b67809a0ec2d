"""Print a rehearsal on a terminal: verdict, differences between ranks, replaced operations, and traffic."""

from __future__ import annotations

from rich.console import Console

from counterpoint.records.diagnosis import ranks_in_words
from counterpoint.records.rehearsal import Rehearsal
from counterpoint.rendering import print_table as terminal


def render_rehearsal(found: Rehearsal, console: Console) -> None:
    """Print a rehearsal, the verdict first; reports are printed as wide as their tables are."""

    def line(text: str, style: str = "") -> None:
        terminal.line(console, text, style)

    line(found.verdict, "bold")
    if missing := found.missing_ranks:
        line(f"Nothing is known of {ranks_in_words(missing)}: the script ended itself there before its last line.")
        if len(missing) == found.world_size:
            return
    where = f"{len(found.gpus)} × {found.gpus[0]}" if found.gpus else "CPUs"
    hosts = f" counted as {found.hosts} hosts" if found.hosts > 1 else ""
    peak = f", at most {found.peak_bytes / 2**30:.1f} GiB reserved by torch on a rank" if found.peak_bytes else ""
    line(f"{found.world_size} ranks{hosts} on {where}, {found.steps} optimizer steps{peak}", terminal.QUIET)
    line(f"Different between {'other ' if missing else ''}ranks: " + ("; ".join(found.differences) or "nothing."))
    for report in found.reports:
        line("")
        line(f"{report.name} on {ranks_in_words(report.ranks)}:", "bold")
        for row in report.text.splitlines() or ["no report"]:
            line(row)
    if not found.reports:
        line("counterpoint replaced nothing: no call of counterpoint.overlap, no group of its backend, no dispatcher.")
