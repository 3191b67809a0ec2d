"""Print a comparison of two runs on a terminal: tables of what changed a step, and at its end the verdict."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from counterpoint.records.comparison import Change, Comparison, KernelChange
from counterpoint.rendering import formatting as say

MAX_ROWS = 8
MAX_NAME = 44  # fits beside the figures in 80 columns


def render_comparison(compared: Comparison, console: Console) -> None:
    """Print what grew and what shrank, in ms a step; its last line is the verdict."""
    idle = [(say.IDLE_CAUSES.get(c.name, c.name), c) for c in compared.idle]
    _table(console, "Where the time goes", "", [("step", compared.step), *((c.name, c) for c in compared.parts)])
    hidden = f"hidden: {say.percent(compared.hidden_before)} before, {say.percent(compared.hidden_now)} now"
    console.print(say.text(hidden, say.QUIET))
    _table(console, "Findings", "cost of step time", [(c.name, c) for c in compared.findings])
    _table(console, "Idle", "by cause", idle)
    _table(console, "Exposed communication", "by operation", [(c.name, c) for c in compared.exposed])
    _table(console, "Ranks that make others wait", "", [(c.name, c) for c in compared.late])
    _table(console, "Kernels that became slower", "", [(c.name, c) for c in compared.kernels])
    if compared.notes:
        say.heading(console, "Notes")
    for note in compared.notes:
        console.print(Text.assemble("· ", say.text(note)))
    console.print()
    console.print(say.text(compared.verdict, "bold"), soft_wrap=True)


def _table(console: Console, title: str, unit: str, rows: Sequence[tuple[str, Change]]) -> None:
    """Print the largest changes, growth first."""
    if not rows:
        return
    say.heading(console, title, ", ".join(filter(None, ("ms a step", unit))))
    kept = sorted(rows, key=lambda row: -abs(row[1].change_us))[:MAX_ROWS]
    lines = [
        [
            say.text(name, limit=MAX_NAME), say.milliseconds(c.before_us), say.milliseconds(c.now_us),
            f"{c.change_us / 1e3:+,.2f}", *([say.factor(c.slowdown)] if isinstance(c, KernelChange) else []),
        ]
        for name, c in rows
        if any(c is k for _, k in kept)
    ]  # fmt: skip
    slower = ("slower",) if isinstance(rows[0][1], KernelChange) else ()
    say.print_table(console, ("", "before", "now", "change", *slower), lines, left=("",))
    if len(rows) > len(lines):
        console.print(f"   and {len(rows) - len(lines)} more")
