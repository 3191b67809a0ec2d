"""Say which values the fields of a job may have, and hold every record of a job to that, however it is made.

Bounds are annotations of the fields. `parse_record` makes a record of a table of a file; `CheckedRecord` checks numbers
again when a record is changed (`msgspec.structs.replace`). Both say the field, what came, and what is allowed:

    cluster.levels[1].latency_us = nan: give a number from 0 to 1,000,000
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar

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
Name = Annotated[str, Meta(min_length=1, max_length=80)]
Text = Annotated[str, Meta(max_length=1000)]

MAX_TEXT = 1000  # characters of a flag's value

R = TypeVar("R", bound=Record)
Table = Mapping[str, Any]
Number = inspect.IntType | inspect.FloatType
type_info = cache(inspect.type_info)  # takes a millisecond each time


class CheckedRecord(Record, frozen=True, kw_only=True):
    """Refuses numbers that are outside of the bounds of their fields."""

    table: ClassVar[str]  # of a job's file, for messages

    def __post_init__(self) -> None:
        for name, kind, low, high in _bounds(type(self)):
            value = getattr(self, name)
            if isinstance(value, int | float) and not (low <= value <= high and value != kind.gt):
                raise _refused(f"{self.table}.{name}", value, kind)


def parse_record(where: str, table: object, kind: type[R]) -> R:
    """Return a table as a record of that kind, or raise Misconfigured with the field that is wrong."""
    _check(where, table, type_info(kind))
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        cause = error.__cause__
        if isinstance(cause, Misconfigured):
            raise cause from None
        raise Misconfigured(f"{where}: {printable(str(error))}") from None


def read_value(text: str) -> Any:
    """Return the value of a flag as TOML has it; anything that is no value of TOML is a string."""
    try:
        tables = tomllib.loads(f"value = {text}") if len(text) <= MAX_TEXT else {}
    except (ValueError, RecursionError):
        return text
    return tables["value"] if len(tables) == 1 else text


def check_known(where: str, table: Table, allowed: tuple[str, ...]) -> None:
    """Raise Misconfigured at the first key of `table` that is not allowed."""
    for key in table:
        if key not in allowed:
            field = printable(f"{where}.{key}" if where else key, 120)
            raise NoSuchValue(f"{field} is not known: allowed are {', '.join(allowed)}")


def check_table(where: str, value: object) -> Table:
    """Return `value` if it is a table, else raise Misconfigured."""
    if not isinstance(value, Mapping):
        raise Misconfigured(f"{where} = {shown(value)}: give a table [{where}]")
    return value


def parse_name(where: str, value: object) -> str:
    """Return `value` if it is a string, else raise Misconfigured."""
    if not isinstance(value, str):
        raise Misconfigured(f"{where} = {shown(value)}: give a name")
    return value


def shown(value: object) -> str:
    """Return a value as TOML has it, in a few printable characters, however large or deep it is."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "a table" if value else "an empty table"
    if isinstance(value, list | tuple):
        return "an array" if value else "an empty array"
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    return printable(f'"{value}"' if isinstance(value, str) else str(value), 80)


@cache
def _bounds(kind: type[Record]) -> tuple[tuple[str, Number, float, float], ...]:
    """Return name, type, least and largest value of each number among the fields of a record."""
    found: list[tuple[str, Number, float, float]] = []
    for field in type_info(kind).fields:  # type: ignore[attr-defined]
        for each in field.type.types if isinstance(field.type, inspect.UnionType) else (field.type,):
            if isinstance(each, Number):
                least = each.gt if each.ge is None else each.ge
                found.append((field.name, each, _limit(each, least), _limit(each, each.le)))
    return tuple(found)


def _limit(kind: Number, bound: float | None) -> float:
    """Return a bound that the type has; every number of a job has a least and a largest value."""
    if bound is None:
        raise TypeError(f"{kind}: a number of a job's record needs Meta with ge or gt, and le")
    return bound


def _check(where: str, value: object, kind: inspect.Type) -> None:
    """Raise Misconfigured, with the path of the field, unless a value of a file is of that type."""
    match kind:
        case inspect.StructType() if isinstance(value, Mapping):
            _check_fields(where, value, kind)
        case inspect.UnionType():
            _check_union(where, value, kind)
        case inspect.VarTupleType() | inspect.ListType() if isinstance(value, list | tuple):
            for index, each in enumerate(value):
                _check(f"{where}[{index}]", each, kind.item_type)
        case inspect.DictType() if isinstance(value, Mapping) and len(value) >= (kind.min_length or 0):
            for key, each in value.items():
                _check(f"{where}: a key", key, kind.key_type)
                _check(f"{where}.{key}", each, kind.value_type)
        case _ if not _is_of(value, kind):
            raise _refused(where, value, kind)


def _check_fields(where: str, table: Table, kind: inspect.StructType) -> None:
    check_known(where, table, tuple(field.encode_name for field in kind.fields))
    for field in kind.fields:
        if field.encode_name in table:
            _check(f"{where}.{field.encode_name}", table[field.encode_name], field.type)
        elif field.required:
            raise Misconfigured(f"{where}.{field.encode_name} is missing: give {_allowed(field.type)}")


def _check_union(where: str, value: object, kind: inspect.UnionType) -> None:
    """Check a value against the member for its own type; of one other than null, that one says what is wrong."""
    members = [each for each in kind.types if not isinstance(each, inspect.NoneType)]
    if value is None and len(members) < len(kind.types):
        return
    if len(members) == 1:
        _check(where, value, members[0])
        return
    for each in members:
        try:
            _check(where, value, each)
        except Misconfigured:
            continue
        return
    raise _refused(where, value, kind)


def _is_of(value: object, kind: inspect.Type) -> bool:
    """Return whether a value is of a type that has no fields."""
    match kind:
        case inspect.AnyType():
            return True
        case inspect.BoolType():
            return isinstance(value, bool)
        case inspect.IntType() | inspect.FloatType():
            numbers = int if isinstance(kind, inspect.IntType) else int | float
            return isinstance(value, numbers) and not isinstance(value, bool) and _is_within(value, kind)
        case inspect.StrType():
            return isinstance(value, str) and (kind.min_length or 0) <= len(value) <= (kind.max_length or 1 << 20)
        case inspect.LiteralType():
            return any(type(value) is type(each) and value == each for each in kind.values)
    return False


def _is_within(value: float, kind: Number) -> bool:
    """Return whether a number is within bounds; nan is not."""
    least = kind.gt if kind.ge is None else kind.ge
    return (least is None or value >= least) and value != kind.gt and (kind.le is None or value <= kind.le)


def _refused(where: str, value: object, kind: inspect.Type) -> NoSuchValue:
    return NoSuchValue(f"{printable(where, 120)} = {shown(value)}: give {_allowed(kind)}")


def _allowed(kind: inspect.Type) -> str:
    """Return the values of a type in words."""
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
            return " or ".join(_allowed(each) for each in kind.types if not isinstance(each, inspect.NoneType))
        case inspect.DictType():
            return f"a table of {_allowed(kind.key_type)} = {_allowed(kind.value_type)}"
        case inspect.VarTupleType() | inspect.ListType():
            return f"an array of {_allowed(kind.item_type)}"
        case inspect.StructType():
            return f"a table of {', '.join(field.encode_name for field in kind.fields)}"
    return "another value"


def _plain(bound: float | None) -> str:
    """Return a bound without an exponent."""
    return "any" if bound is None else f"{int(bound):,}" if bound == int(bound) else f"{bound:g}"
