"""Print texts and tables on a terminal: never read as markup; readable at 80 columns, without colour, and piped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from counterpoint.errors import printable
from counterpoint.rendering.table import LengthBar, Table, TableRow

QUIET = "bright_black"  # style of explanations
TONES = {"": "", "quiet": QUIET, "marked": "red", "strong": "bold"}
LOOKS = {  # glyph, so that a bar reads without colour, and colour
    "compute": ("█", "blue"),
    "overlapped": ("▓", "cyan"),
    "transfer": ("▒", "yellow"),
    "wait": ("░", "red"),
    "memcpy": ("=", "magenta"),
    "idle": ("·", QUIET),
    "sigma": ("░", QUIET),
}
BAR_WIDTH = 24
LEAST = 12  # least width in characters of a column of texts, where the terminal is too narrow
BETWEEN = 1  # spaces between columns


def text(value: object, style: str = "", limit: int = 1200) -> Text:
    """Return `value` as text that is never read as markup, with control characters escaped, cut at `limit`."""
    return Text(printable(str(value), limit), style=style)


def line(console: Console, value: object, style: str = "", limit: int = 1200) -> None:
    """Print a line that only the terminal itself may wrap: piped, it stays one line."""
    console.print(text(value, style, limit), soft_wrap=True)


def heading(console: Console, title: str, unit: str = "") -> None:
    """Print an empty line and a title, with the unit in grey."""
    console.print()
    console.print(Text.assemble(text(title, "bold underline", 240), text(f"  {unit}" if unit else "", QUIET)))


def notes(console: Console, title: str, found: Sequence[str]) -> None:
    """Print a title and a line for each note; without notes, nothing."""
    if found:
        print_table(Table(title=title, notes=found), console)


def below(console: Console, value: str, style: str = "", most: int | None = None) -> None:
    """Print text wrapped and indented by three, without spaces at line ends, in at most `most` lines."""
    width = max(20, console.width - 3)
    lines = list(text(value, style).wrap(console, width))
    for number, each in enumerate(lines[:most], start=1):
        each.rstrip()
        if number == most and len(lines) > number:
            if each.cell_len > width - 2:
                each.truncate(max(each.plain.rfind(" ", 0, width - 1), 0) or width - 2)
                each.rstrip()
            each.append(" …")
        console.print(Text("   ").append_text(each), soft_wrap=True)


def print_tables(tables: Iterable[Table], console: Console) -> None:
    """Print tables; a table without rows and notes is left out, with its title."""
    for table in tables:
        if table.rows or table.notes:
            print_table(table, console)


def print_table(table: Table, console: Console) -> None:
    """Print a table below its title, then the number of rows left out, the legend and the notes.

    In a table wider than the terminal, texts wrap; then optional columns are left out, and a line names these columns.
    If the rest is still too wide, lines are longer than the terminal.
    """
    heading(console, table.title, table.unit)
    rows = table.filled()[: table.most]
    texts = table.lines()[: table.most]
    shown, widths = _fitting(table, texts, console.width)
    grid = Grid(box=None, padding=(0, BETWEEN, 0, 0), pad_edge=False, header_style=QUIET, show_edge=False)
    for place in shown:
        column = table.columns[place]
        is_text = column.format is None
        grid.add_column(
            Text(column.head),
            justify="left" if is_text else "right",
            overflow="fold",
            no_wrap=not is_text,
            width=widths[place],
        )
    for row, cells in zip(rows, texts, strict=True):
        grid.add_row(*(_bar(row, place) or Text(cells[place]) for place in shown), style=TONES[row.tone])
    if rows:
        grid.width = sum(widths[place] + BETWEEN for place in shown) - BETWEEN
        console.print(grid, crop=False)
    if len(rows) < len(table.rows):
        line(console, f"   and {len(table.rows) - len(rows):,} more", QUIET)
    if left_out := [
        column.name for place, column in enumerate(table.columns) if place not in shown and not column.page_only
    ]:
        line(console, f"   a wider terminal shows {', '.join(left_out)}".replace("\n", " "), QUIET)
    if table.legend:
        keys = (Text.assemble(LOOKS[look], " ", name) for look, name in table.legend)
        console.print(Text("  ").join(keys))
    for note in table.notes:
        console.print(text(f"· {note}"))


def _fitting(table: Table, texts: Sequence[Sequence[str]], most: int) -> tuple[list[int], list[int]]:
    """Return the indices of the columns that fit in `most` characters, and the width of every column."""
    widths = [
        BAR_WIDTH if column.is_bar else max(map(cell_len, "\n".join((column.head, *cells)).split("\n")))
        for column, *cells in zip(table.columns, *texts, strict=True)
    ]
    wraps = [place for place, column in enumerate(table.columns) if column.format is None and not column.is_bar]
    shown = [place for place, column in enumerate(table.columns) if not column.page_only]

    def least() -> int:
        return sum(min(widths[place], LEAST) if place in wraps else widths[place] for place in shown) + len(shown)

    while least() > most + 1 and (optional := [place for place in shown if table.columns[place].optional]):
        shown.remove(optional[-1])
    while sum(widths[place] for place in shown) + len(shown) > most + 1:
        widest = max((place for place in shown if place in wraps), key=widths.__getitem__, default=None)
        if widest is None or widths[widest] <= LEAST:
            break
        widths[widest] -= 1
    return shown, widths


def _bar(row: TableRow, place: int) -> Text | None:
    """Return a cell's bar as text, with one glyph per look; None if the cell is no bar."""
    cell = row.cells[place] if place < len(row.cells) else None
    if not isinstance(cell, LengthBar):
        return None
    drawn, bar, reached = 0, Text(), 0.0
    for part in cell.parts:
        reached += part.share
        end = round(BAR_WIDTH * reached)
        glyph, colour = LOOKS.get(part.look.split()[-1], ("█", ""))
        bar.append(glyph * (end - drawn), colour)
        drawn = max(drawn, end)
    return bar
