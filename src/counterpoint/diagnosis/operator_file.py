"""Write operators and their kernels as one table, in CSV or Parquet."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from counterpoint.diagnosis.frames import OPERATOR_COLUMNS, operator_rows, operators_frame, require_polars
from counterpoint.errors import Misconfigured
from counterpoint.records.operators import OperatorTime

_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet would run text that begins with one of these


def check_name(path: Path | None) -> None:
    """Check, before any work is done, that a file of operators can be written under this name.

    Raises:
        Misconfigured: the name ends neither in .csv nor in .parquet.
        Unsupported: it ends in .parquet, and polars is not installed.
    """
    if path is not None and path.suffix not in (".csv", ".parquet"):
        raise Misconfigured(f"--save-operators {path}: give a name that ends in .csv or .parquet")
    if path is not None and path.suffix == ".parquet":
        require_polars("Parquet needs")


def operators_file(operators: Sequence[OperatorTime], suffix: str) -> bytes:
    """Return the table of operators and kernels as the content of a `.csv` or `.parquet` file; times are µs."""
    if suffix == ".parquet":
        content = io.BytesIO()
        operators_frame(operators).write_parquet(content)
        return content.getvalue()
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(OPERATOR_COLUMNS)
    writer.writerows(map(_safe, row) for row in operator_rows(operators))
    return text.getvalue().encode("utf-8", "replace")


def _safe(value: object) -> object:
    """Return a value for CSV; a text that a spreadsheet would run gets an apostrophe before it."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value
