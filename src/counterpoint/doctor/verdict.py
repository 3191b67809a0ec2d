"""Make the records of checks: the one place where texts from outside become safe to print."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from counterpoint.errors import printable
from counterpoint.records.machine import Check

Value = int | float | str | None
_LIMIT = 600


def fine(name: str, seen: str, means: str = "", **values: Value) -> Check:
    """Return a check that found nothing in the way of overlap."""
    return _check(name, "ok", seen, means, "", values)


def warning(name: str, seen: str, *, means: str, fix: str, **values: Value) -> Check:
    """Return a check that found a fault which may reduce overlap, or may hide another fault."""
    return _check(name, "warning", seen, means, fix, values)


def problem(name: str, seen: str, *, means: str, fix: str, **values: Value) -> Check:
    """Return a check that found a fault which reduces or prevents overlap."""
    return _check(name, "problem", seen, means, fix, values)


def not_seen(name: str, why: str) -> Check:
    """Return a check that could not be made, with the reason."""
    return _check(name, "not_seen", why, "", "", {})


def and_so_on(items: Iterable[str], most: int = 8) -> str:
    """Join at most `most` of the items, and say how many more there are."""
    every = list(items)
    return "; ".join(every[:most]) + (f"; and {len(every) - most} more" if len(every) > most else "")


Status = Literal["ok", "warning", "problem", "not_seen"]


def _check(name: str, status: Status, seen: str, means: str, fix: str, values: Mapping[str, Value]) -> Check:
    safe = {key: printable(value, _LIMIT) if isinstance(value, str) else value for key, value in values.items()}
    return Check(
        name=printable(name, 80),
        status=status,
        seen=printable(seen, _LIMIT),
        means=printable(means, _LIMIT),
        fix=printable(fix, _LIMIT),
        values=safe,
    )
