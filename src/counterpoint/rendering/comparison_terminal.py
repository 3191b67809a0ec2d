"""Print a comparison of two runs on a terminal: tables of the changes in a step, and at the end the verdict."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace
from rich.console import Console

from counterpoint.records.diagnosis import Change, Comparison, KernelChange
from counterpoint.rendering import formatting as say
from counterpoint.rendering.operator_tables import operator_changes_table
from counterpoint.rendering.print_table import line, print_tables
from counterpoint.rendering.table import Column, Table

MAX_ROWS = 8
MAX_NAME = 44  # fits beside the figures in 80 columns


def render_comparison(compared: Comparison, console: Console, *, operators: int = 0) -> None:
    """Print what changed between two runs, in ms per step, with at most `operators` operators, and last the verdict."""
    hidden = f"hidden: {say.percent(compared.hidden_before)} before, {say.percent(compared.hidden_now)} now"
    idle = [replace(change, name=say.IDLE_CAUSES.get(change.name, change.name)) for change in compared.idle]
    parts = [replace(compared.step, name="step"), *compared.parts]
    tables = (
        _changes("Where the time goes", "", parts, [hidden]),
        _changes("Findings", "cost of step time", compared.findings),
        _changes("Idle", "by cause", idle),
        _changes("Exposed communication", "by operation", compared.exposed),
        _changes("Ranks that make others wait", "", compared.late),
        _changes("Kernels that became slower", "", compared.kernels),
        *([operator_changes_table(compared.operators, operators)] if operators else []),
        Table(title="Notes", notes=compared.notes),
    )
    print_tables(tables, console)
    console.print()
    line(console, compared.verdict, "bold")


def _changes(title: str, unit: str, rows: Sequence[Change], notes: Sequence[str] = ()) -> Table:
    """Return a table of the largest changes, in their given order; without changes the table has no rows."""
    largest = sorted(rows, key=lambda it: -abs(it.change_us))[:MAX_ROWS]
    shown = [it for it in rows if any(it is each for each in largest)]
    more = [f"and {len(rows) - len(shown)} more"] * (len(rows) > len(shown))
    columns = [
        Column("", of=lambda it: it.name, limit=MAX_NAME),
        Column("before", say.milliseconds, lambda it: it.before_us),
        Column("now", say.milliseconds, lambda it: it.now_us),
        Column("change", lambda us: f"{us / 1e3:+,.2f}", lambda it: it.change_us),
    ]
    if any(isinstance(it, KernelChange) for it in rows):
        columns.append(Column("slower", say.factor, lambda it: it.slowdown))
    unit = ", ".join(filter(None, ("ms a step", unit)))
    return Table(title=title, unit=unit, columns=columns, rows=shown, notes=[*more, *notes])
