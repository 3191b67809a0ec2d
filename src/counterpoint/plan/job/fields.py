"""Define which values a job's fields may have, and explain in plain words a value that msgspec refuses.

Bounds are annotations of the fields. `parse_record` makes a record of a table of a file; what it says of a field that
is wrong is the field, what came, and what is allowed:

    cluster.levels[1].latency_us = nan: give a number from 0 to 1,000,000
    parallel.dpp is not known: give pp, dp, or another of tp, sequence, ...
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, inspect

from counterpoint.errors import Misconfigured, NoSuchValue, printable
from counterpoint.records import Record

Precision = Literal["bf16", "fp16", "fp8", "fp32"]
Count = Annotated[int, Meta(ge=1, le=1 << 24)]
Degree = Annotated[int, Meta(ge=1, le=1 << 20)]
Width = Annotated[int, Meta(ge=1, le=1 << 20)]
Layers = Annotated[int, Meta(ge=1, le=10_000)]
Rate = Annotated[float, Meta(ge=1e-3, le=1e9)]
Micros = Annotated[float, Meta(ge=0, le=1e6)]
Factor = Annotated[float, Meta(ge=1, le=1000)]
Part = Annotated[float, Meta(gt=0, le=1)]
Share = Annotated[float, Meta(ge=0, le=1)]
Name = Annotated[str, Meta(min_length=1, max_length=80)]
Text = Annotated[str, Meta(max_length=1000)]

MAX_TEXT = 1000  # characters of a flag's value
STEP = re.compile(r"\.\w+|\[\d+\]")  # of a path of msgspec, such as $.levels[1].name

R = TypeVar("R", bound=Record)
Table = Mapping[str, Any]
type_info = cache(inspect.type_info)  # takes a millisecond each time


class JobRecord(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Is the base class of the records into which the tables of a job's file are read."""


def parse_record(where: str, table: object, kind: type[R]) -> R:
    """Return a table as a record of type `kind`; raise Misconfigured, with the field's name, if a field is wrong."""
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, Misconfigured):  # of a record whose fields do not go together
            raise error.__cause__ from None
        raise _in_our_words(where, table, type_info(kind), str(error).partition("`$")[2]) from None


def read_value(text: str) -> Any:
    """Return a flag's text parsed as a TOML value; a text that is no TOML value stays a string."""
    try:
        tables = tomllib.loads(f"value = {text}") if len(text) <= MAX_TEXT else {}
    except (ValueError, RecursionError):
        return text
    return tables["value"] if len(tables) == 1 else text


def no_such_name(name: str, allowed: Iterable[str], *, where: str = "") -> NoSuchValue:
    """Return the error for an unknown `name`, with the most similar of the allowed names."""
    names = list(allowed)
    field = printable(f"{where}.{name}" if where else str(name), 120)
    near = get_close_matches(str(name)[:80], names, n=2)
    others = ", ".join(each for each in names if each not in near)
    first = f"{', '.join(near)}, or another of" if near else "one of"
    return NoSuchValue(f"{field} is not known: give {first} {others}")


def check_known(where: str, table: Table, allowed: tuple[str, ...]) -> None:
    """Raise Misconfigured at the first key of `table` that is not allowed."""
    for key in table:
        if key not in allowed:
            raise no_such_name(key, allowed, where=where)


def shown(value: object) -> str:
    """Return a value in TOML's notation, in a few printable characters, however large or deep it is."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "a table" if value else "an empty table"
    if isinstance(value, list | tuple):
        return "an array" if value else "an empty array"
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    return printable(f'"{value}"' if isinstance(value, str) else str(value), 80)


def _in_our_words(where: str, value: Any, kind: inspect.Type, path: str) -> Misconfigured:
    """Return msgspec's error at a path in a table as Misconfigured, with the field's name and the allowed values."""
    for step in STEP.findall(path):
        value = value[int(step[1:-1]) if step[0] == "[" else step[1:]]
        kind, where = _inside(kind, step), where + step
    if isinstance(kind, inspect.DictType) and isinstance(value, Mapping) and "..." in path:
        # msgspec does not say which of these the value should have been
        where, kind = f"{where}.{'.'.join(map(str, value))}", kind.value_type
        value = next(iter(value.values())) if len(value) == 1 else value
    record = next((each for each in _members(kind) if isinstance(each, inspect.StructType)), None)
    if record is None or not isinstance(value, Mapping):
        return NoSuchValue(f"{printable(where, 120)} = {shown(value)}: give {_allowed(kind)}")
    fields = {field.encode_name: field for field in record.fields}
    for key in value:
        if key not in fields:
            return no_such_name(key, fields, where=where)
    missing = next(name for name, field in fields.items() if field.required and name not in value)
    return Misconfigured(f"{where}.{missing} is missing: give {_allowed(fields[missing].type)}")


def _members(kind: inspect.Type) -> tuple[inspect.Type, ...]:
    """Return the types that a union allows, without null; for any other type, the type itself."""
    kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    return tuple(each for each in kinds if not isinstance(each, inspect.NoneType))


def _inside(kind: inspect.Type, step: str) -> inspect.Type:
    """Return the type that one step of a path leads to: a record's field (`.name`) or an array's element (`[0]`)."""
    for each in _members(kind):
        if isinstance(each, inspect.StructType):
            return next(field.type for field in each.fields if field.encode_name == step[1:])
        if isinstance(each, inspect.VarTupleType):
            return each.item_type
    raise TypeError(f"{kind}: nothing is at {step}")


def _allowed(kind: inspect.Type) -> str:
    """Return in words which values a type allows, for error messages."""
    match kind:
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType() | inspect.FloatType():
            number = "a whole number" if isinstance(kind, inspect.IntType) else "a number"
            least = f"above {_plain(kind.gt)}, at most" if kind.ge is None else f"from {_plain(kind.ge)} to"
            return f"{number} {least} {_plain(kind.le)}"
        case inspect.StrType():
            return (
                f"a string of {kind.min_length or 0} to {kind.max_length} characters" if kind.max_length else "a string"
            )
        case inspect.LiteralType():
            return f"one of {', '.join(map(str, kind.values))}"
        case inspect.UnionType():
            return " or ".join(map(_allowed, _members(kind)))
        case inspect.DictType():
            return f"a table of {_allowed(kind.key_type)} = {_allowed(kind.value_type)}"
        case inspect.VarTupleType():
            return f"an array of {_allowed(kind.item_type)}"
        case inspect.StructType():
            return f"a table of {', '.join(field.encode_name for field in kind.fields)}"
    return "another value"


def _plain(bound: float | None) -> str:
    """Return a bound of a range in plain digits: "any" for None, whole numbers in full (1,000,000, not 1e+06)."""
    return "any" if bound is None else f"{int(bound):,}" if bound == int(bound) else f"{bound:g}"
