"""Hold a table once, as values and columns with their formats; each medium renders it by one function.

The functions are `print_table.print_table`, `markdown` below, and the macro `table` of page/parts.html.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from counterpoint.errors import printable
from counterpoint.records.measurement import Environment
from counterpoint.rendering.figures import Figure

UNKNOWN = "–"
Tone = Literal["", "quiet", "marked", "strong"]


@dataclass(frozen=True, slots=True)
class Column:
    """Describes a column: its name, format and source of values.

    Args:
        name: text at the column's head; a terminal breaks it at a line break.
        format: makes a value text, which aligns right; None: the column holds texts, which align left and wrap.
        of: returns the value of a record, for tables whose rows are records.
        optional: a terminal that is too narrow leaves the column out, the last such column first.
        page_only: a terminal never shows it.
        limit: characters of a text.
        is_bar: whether it holds `LengthBar`s, which Markdown leaves out.
    """

    name: str
    format: Callable[[Any], str] | None = None
    of: Callable[[Any], object] | None = None
    optional: bool = False
    page_only: bool = False
    limit: int = 300
    is_bar: bool = False

    @property
    def head(self) -> str:
        """Return the name without control characters other than line breaks."""
        return "\n".join(printable(part, 60) for part in self.name.split("\n"))

    def text(self, value: object) -> str:
        """Return a value as text without control characters: a `str` unchanged, None as a dash, others formatted."""
        if isinstance(value, str) or self.format is None:
            return UNKNOWN if value is None else printable(str(value), self.limit)
        return self.format(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class BarPart:
    """Holds one part of a bar: its look and its share of the length."""

    look: str  # a class of page.css, and a glyph in print_table.py
    share: float  # of the longest bar beside it, 0 to 1
    says: str = ""  # under the pointer


@dataclass(frozen=True, slots=True)
class LengthBar:
    """Holds the parts of a bar that a cell draws."""

    parts: Sequence[BarPart]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """Holds a cell's value, with extras that only a page shows."""

    value: object
    note: str = ""  # small, below the value
    heat: float = 0.0  # 0 to 1: how dark the cell is


@dataclass(frozen=True, slots=True)
class TableRow:
    """Holds the cells of a row; if cells are fewer than columns, the last cell is a text that spans the rest."""

    cells: Sequence[object]
    tone: Tone = ""  # "marked": must not be believed; its first cell begins with "!"


def row(*cells: object, tone: Tone = "") -> TableRow:
    """Return a row with these cells."""
    return TableRow(cells, tone)


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Holds a table with its title and notes; without rows, it is a title with notes or a figure.

    `rows` are `TableRow`s, or records of which each column's `of` returns the value and `tone` the tone.
    """

    title: str
    unit: str = ""  # of its numbers, or what they are
    columns: Sequence[Column] = ()
    rows: Sequence[Any] = ()
    tone: Callable[[Any], Tone] = lambda record: ""
    notes: Sequence[str] = ()  # below it
    legend: Sequence[tuple[str, str]] = ()  # look and name of the parts of bars
    figure: Figure | None = None  # above it on a page
    most: int = 1000  # rows that a terminal shows
    folded: bool = False  # on a page the table is closed until it is clicked

    @property
    def head(self) -> int:
        """Return the index of the column that names the rows: the first named column of texts."""
        texts = (place for place, each in enumerate(self.columns) if each.name and not (each.format or each.is_bar))
        return next(texts, 0)

    def filled(self) -> list[TableRow]:
        """Return all rows as `TableRow`s; the columns make them from other objects in `rows`."""
        return [each if isinstance(each, TableRow) else self._row_of(each) for each in self.rows]

    def _row_of(self, record: object) -> TableRow:
        return TableRow([column.of(record) if column.of else None for column in self.columns], self.tone(record))

    def cells(self, shown: TableRow) -> list[tuple[Column, Cell, str]]:
        """Return a row's cells, each with its column and its text; a bar's text is empty."""
        found = []
        for place, (column, given) in enumerate(zip(self.columns, shown.cells, strict=False)):
            cell = given if isinstance(given, Cell) else Cell(value=given)
            spans = place + 1 == len(shown.cells) < len(self.columns)
            text = "" if isinstance(cell.value, LengthBar) else (Column("") if spans else column).text(cell.value)
            found.append((column, cell, f"! {text}" if shown.tone == "marked" and not place else text))
        return found

    def lines(self) -> list[list[str]]:
        """Return the texts of all rows, one per column; in a short row, empty texts come before the last."""
        found = [[text for *_, text in self.cells(each)] for each in self.filled()]
        return [[*texts[:-1], *[""] * (len(self.columns) - len(texts)), texts[-1]] for texts in found]


def machine_line(where: Environment) -> str:
    """Return GPUs and versions in one line: `8 × NVIDIA H200 · torch 2.11.0 · NCCL 2.28.9`."""
    nccl = [f"NCCL {where.nccl}"] if where.nccl else []
    return " · ".join([f"{where.world_size} × {where.gpu or where.device}", f"torch {where.torch}", *nccl])


def environment_table(title: str, where: Environment, unit: str = "", **more: str) -> Table:
    """Return a table of the known properties of the machine and the call, and of `more` by name."""
    versions = {"driver": where.driver, "torch": where.torch, "NCCL": where.nccl, "counterpoint": where.counterpoint}
    facts = {
        "device": f"{where.world_size} × {where.gpu or where.device}",
        "software": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        "commit": (where.commit or "")[:12],
        "command": " ".join(where.command),
        "date": where.date,
        **more,
        "variables": " ".join(f"{name}={value}" for name, value in sorted(where.variables.items())),
    }
    rows = [row(name, value) for name, value in facts.items() if value]
    return Table(title=title, unit=unit, columns=(Column(""), Column("", limit=600)), rows=rows)


def markdown(table: Table) -> str:
    """Return a Markdown section: the title, the table, and the notes as a list; all text stays plain text."""
    parts = [f"## {plain(table.title)}{f' ({plain(table.unit)})' if table.unit else ''}"]
    if table.rows:
        lines = [[plain(column.name.replace("\n", " ")) for column in table.columns]]
        lines += [["---" if column.format is None else "---:" for column in table.columns]]
        lines += [[plain(text) for text in line] for line in table.lines()]
        kept = [[text for text, column in zip(line, table.columns, strict=True) if not column.is_bar] for line in lines]
        parts.append("\n".join(f"| {' | '.join(line)} |" for line in kept))
    if table.notes:
        parts.append("\n".join(f"- {plain(note)}" for note in table.notes))
    return "\n\n".join(parts)


def plain(text: str) -> str:
    """Return a text with Markdown's characters escaped."""
    return "".join("\\" + character if character in "\\`*_<>[]|&#" else character for character in printable(text))
