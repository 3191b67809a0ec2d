"""Turn a diagnosis into polars frames; columns have the types of the record fields, even in an empty frame."""

from __future__ import annotations

import types
import typing
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from counterpoint.errors import Unsupported
from counterpoint.records import Record
from counterpoint.records.diagnosis import (
    Collective,
    Diagnosis,
    Finding,
    KernelComparison,
    RankAccount,
    StepTime,
    Straggler,
    WhatIfStep,
)
from counterpoint.records.operators import OperatorTime

if TYPE_CHECKING:
    import polars as pl

_OF_OPERATOR = tuple(name for name in OperatorTime.__struct_fields__ if name != "kernels")
OPERATOR_COLUMNS = (*_OF_OPERATOR, "kernel", "kernel_count", "kernel_us")
_TEXTS = ("operator", "shapes", "dtypes", "phase", "module", "stack", "kernel")


def frames(diagnosis: Diagnosis) -> dict[str, pl.DataFrame]:
    """Return a diagnosis as polars frames by name, such as `steps`, `collectives` and `operators`.

    Columns are the fields of the records, times are µs. Fields that hold several values become nested columns:
    `wait_us` of a collective is `List[Struct{rank: Int64, us: Float64}]` in order of rank (explode, then unnest: one
    row per rank), `ranks` a `List[Int64]`, `grid` and `block` an `Array[Int64, 3]`. Null means not known.

    Raises:
        Unsupported: polars is not installed.
    """
    require_polars("frames need")
    what_if = diagnosis.replay.what_if if diagnosis.replay else ()
    tables: dict[str, tuple[type[Record], Sequence[Record]]] = {
        "steps": (StepTime, diagnosis.steps),
        "per_rank": (RankAccount, diagnosis.per_rank),
        "collectives": (Collective, diagnosis.collectives),
        "stragglers": (Straggler, diagnosis.stragglers),
        "kernels": (KernelComparison, diagnosis.kernels),
        "findings": (Finding, diagnosis.findings),
        "what_if": (WhatIfStep, what_if),
    }
    operators = operators_frame(diagnosis.operators)
    return {name: _frame(record, rows) for name, (record, rows) in tables.items()} | {"operators": operators}


def require_polars(what: str) -> None:
    """Raise Unsupported, in a sentence that begins with `what`, if polars is not installed."""
    if find_spec("polars") is None:
        raise Unsupported(f"{what} polars, which is not installed: pip install 'counterpoint[frames]'")


def operators_frame(operators: Sequence[OperatorTime]) -> pl.DataFrame:
    """Return operators and their kernels as one table, a polars frame; null: not known."""
    import polars as pl

    schema = {name: pl.String() if name in _TEXTS else pl.Float64() for name in OPERATOR_COLUMNS}
    return pl.DataFrame(operator_rows(operators), schema, orient="row")


def operator_rows(operators: Sequence[OperatorTime]) -> list[tuple[object, ...]]:
    """Return a row of `OPERATOR_COLUMNS` for each kernel of each operator, which repeats the operator's figures."""
    return [
        (*(getattr(row, name) for name in _OF_OPERATOR), *((one.name, one.count, one.us) if one else (None,) * 3))
        for row in operators
        for one in (row.kernels or (None,))
    ]


def _frame(record: type[Record], rows: Sequence[Record]) -> pl.DataFrame:
    import polars as pl

    hints = get_type_hints(record)
    columns = {
        field.name: pl.Series(field.name, [_cell(getattr(row, field.name)) for row in rows], _dtype(hints[field.name]))
        for field in sorted(msgspec.structs.fields(record), key=lambda field: field.name != "rank")
    }
    return pl.DataFrame(columns)


def _cell(value: Any) -> Any:
    if isinstance(value, dict):
        return [{"rank": int(rank), "us": us} for rank, us in sorted(value.items(), key=lambda item: int(item[0]))]
    return value


def _dtype(hint: Any) -> Any:
    """Return the polars type for the type hint of a record field, such as `float | None` or `tuple[int, ...]`."""
    import polars as pl

    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _dtype(next(arg for arg in args if arg is not type(None)))
    if origin is Literal:
        return pl.String()
    if origin is tuple:
        inner = _dtype(args[0])
        return pl.List(inner) if args[1:] == (...,) else pl.Array(inner, len(args))
    if origin is dict:
        return pl.List(pl.Struct({"rank": pl.Int64(), "us": _dtype(args[1])}))
    scalars: dict[typing.Any, Any] = {float: pl.Float64(), int: pl.Int64(), str: pl.String(), bool: pl.Boolean()}
    return scalars[hint]
