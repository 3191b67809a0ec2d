"""Tables of benchmarks, on the terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

__all__ = ["markdown", "print_table"]


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str | None = None, width: int = 150
) -> None:
    """On the terminal."""
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*row)
    Console(width=width).print(table)


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a page."""
    return [f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows)]
