"""Align the cells of a report's rows."""

from __future__ import annotations

from collections.abc import Sequence


def aligned_rows(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line for each row, with the columns below one another."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
