"""Print a hang on a terminal: who is missing, then how far each rank came in the groups that are stuck."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from counterpoint.records.hang import GroupState, Hang, RankState
from counterpoint.rendering import formatting as say

MAX_GROUPS = 4
MAX_RANKS = 32


def render_hang(hang: Hang, console: Console) -> None:
    """Print the verdict, the stuck groups and the notes."""
    console.print(say.text(hang.verdict, "bold"), soft_wrap=True)
    stuck = [group for group in hang.groups if group.stuck is not None]
    for group in stuck[:MAX_GROUPS]:
        _group(group, console)
    if len(stuck) > MAX_GROUPS:
        console.print(f"and {len(stuck) - MAX_GROUPS} more groups that wait")
    notes = list(hang.notes)
    if hang.missing_dumps:
        shown = ", ".join(map(str, hang.missing_dumps[:MAX_RANKS])) + " …" * (len(hang.missing_dumps) > MAX_RANKS)
        notes.append(f"No dump of rank {shown}.")
    if notes:
        say.heading(console, "Notes")
    for note in notes:
        console.print(Text.assemble("· ", say.text(note)))


def _group(group: GroupState, console: Console) -> None:
    assert group.stuck is not None
    name = f"Group {group.name}" + (f" ({group.description})" if group.description else "")
    say.heading(console, name, f"{len(group.ranks)} ranks; stuck in {group.stuck.operation} #{group.stuck.seq}")
    missing, waiting = set(group.missing), set(group.waiting)
    first = [s for s in group.states if s.rank in missing]
    shown = (first + [s for s in group.states if s.rank not in missing])[:MAX_RANKS]
    rows = ((str(s.rank), _place(s, missing, waiting), *_cells(s)) for s in shown)
    columns = ("rank", "here", "scheduled", "started", "completed", "last call", "called in")
    say.print_table(console, columns, rows, left=("here", "last call", "called in"))
    if len(shown) < len(group.states):
        console.print(f"   and {len(group.states) - len(shown)} more ranks")


def _place(state: RankState, missing: set[int], waiting: set[int]) -> str:
    return "not entered" if state.rank in missing else "waits" if state.rank in waiting else "done"


def _cells(state: RankState) -> Iterator[str | Text]:
    for seq in (state.scheduled, state.started, state.completed):
        yield say.UNKNOWN if seq is None else str(seq)
    yield say.text(state.last_operation or say.UNKNOWN, limit=40)
    yield say.text(state.last_frame or say.UNKNOWN, limit=60)
