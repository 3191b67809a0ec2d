"""Print a hang on a terminal: first the missing ranks, then how far each rank came in the stuck groups."""

from __future__ import annotations

from rich.console import Console

from counterpoint.records.hang import GroupState, Hang
from counterpoint.rendering import formatting as say
from counterpoint.rendering.table import Column, Table
from counterpoint.rendering.terminal import line, print_tables

MAX_GROUPS = 4
MAX_RANKS = 32


def render_hang(hang: Hang, console: Console) -> None:
    """Print the verdict, the stuck groups and the notes."""
    line(console, hang.verdict, "bold")
    stuck = [group for group in hang.groups if group.stuck is not None]
    notes = [f"and {len(stuck) - MAX_GROUPS} more groups that wait"] if len(stuck) > MAX_GROUPS else []
    notes += hang.notes
    if hang.missing_dumps:
        shown = ", ".join(map(str, hang.missing_dumps[:MAX_RANKS])) + " …" * (len(hang.missing_dumps) > MAX_RANKS)
        notes.append(f"No dump of rank {shown}.")
    print_tables([*map(_group, stuck[:MAX_GROUPS]), Table(title="Notes", notes=notes)], console)


def _group(group: GroupState) -> Table:
    assert group.stuck is not None
    missing, waiting = set(group.missing), set(group.waiting)

    def place(rank: int) -> str:
        return "not entered" if rank in missing else "waits" if rank in waiting else "done"

    return Table(
        title=f"Group {group.name}" + (f" ({group.description})" if group.description else ""),
        unit=f"{len(group.ranks)} ranks; stuck in {group.stuck.operation} #{group.stuck.seq}",
        columns=(
            Column("rank", say.count, lambda state: state.rank),
            Column("here", of=lambda state: place(state.rank)),
            Column("scheduled", say.count, lambda state: state.scheduled),
            Column("started", say.count, lambda state: state.started),
            Column("completed", say.count, lambda state: state.completed),
            Column("last call", of=lambda state: state.last_operation, limit=40),
            Column("called in", of=lambda state: state.last_frame, limit=60),
        ),
        rows=sorted(group.states, key=lambda state: state.rank not in missing),
        most=MAX_RANKS,
    )
