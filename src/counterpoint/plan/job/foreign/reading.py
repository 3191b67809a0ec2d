"""Read the values of a foreign file one by one, and record which were read, assumed and left out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from counterpoint.errors import Misconfigured, printable
from counterpoint.records import Record

MAX_NAMED = 60  # names of values in one note
TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


class ForeignJob(Record, frozen=True, kw_only=True):
    """Holds the tables of a job that a foreign file gives, and notes on how it was read."""

    what: str  # the format, for people
    tables: dict[str, dict[str, Any]]  # as those of a job's file
    notes: tuple[str, ...]  # what was read, assumed and left out


class Reading:
    """Holds the values of a foreign file by name, and collects the notes on how they were read."""

    def __init__(self, what: str, values: Mapping[str, object]) -> None:
        self.what = what
        self.values = {name: value for name, value in values.items() if value is not None}
        self.read: dict[str, None] = {}  # names, in order
        self.said: list[str] = []

    def take(self, *names: str) -> object:
        """Return the value of the first of these names that the file has, and count it as read; None if it has none."""
        for name in names:
            if name in self.values:
                self.read[name] = None
                return self.values[name]
        return None

    def whole(self, *names: str, least: int = 1) -> int | None:
        """Return an integer, `least` or more, from the first of these names in the file; None if no name is in it."""
        value = self.take(*names)
        if isinstance(value, str) and value.strip().lstrip("+-").replace("_", "").isdecimal() and len(value) < 20:
            value = int(value)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.wrong(names, value, f"give a whole number, {least} or more")
        return value

    def needed(self, *names: str) -> int:
        """Return an integer above 0 from the first of these names in the file; raise Misconfigured if none is in it."""
        found = self.whole(*names)
        if found is None:
            raise Misconfigured(f"{self.what} without {names[0]}: add it")
        return found

    def truth(self, *names: str, default: bool = False) -> bool:
        """Return a boolean from the first of these names in the file; `default` if no name is in it."""
        value = self.take(*names)
        if value is None:
            return default
        found = TRUTH.get(str(value).strip().lower()) if isinstance(value, bool | int | str) else None
        if found is None:
            raise self.wrong(names, value, "give true or false")
        return found

    def word(self, *names: str, allowed: tuple[str, ...] = ()) -> str | None:
        """Return a text, one of `allowed` if given, from the first of these names in the file; None if it has none."""
        value = self.take(*names)
        if value is None:
            return None
        if not isinstance(value, str) or (allowed and value not in allowed):
            raise self.wrong(names, value, f"allowed are {', '.join(allowed)}" if allowed else "give a text")
        return value

    def number(self, *names: str) -> float:
        """Return a number from the first of these names in the file; 0 if no name is in it."""
        value = self.take(*names)
        try:
            found = float(str(value)) if value is not None and not isinstance(value, bool) else 0.0
        except ValueError:
            found = float("nan")
        if not 0 <= found < 1e9:
            raise self.wrong(names, value, "give a number from 0")
        return found

    def wrong(self, names: tuple[str, ...], value: object, advice: str) -> Misconfigured:
        """Return the error for a value that is not allowed under these names."""
        name = next((name for name in names if name in self.values), names[0])
        return Misconfigured(f"{printable(name, 80)} = {printable(repr(value), 80)} in {self.what}: {advice}")

    def say(self, text: str) -> None:
        """Add a note, for instance on an assumption."""
        self.said.append(text)

    def notes(self, neutral: re.Pattern[str]) -> tuple[str, ...]:
        """Return all notes: names read, assumptions, ignored names without effect (`neutral` matches), unknown names.

        Switches that are off are left out.
        """
        rest = [name for name in self.values if name not in self.read and str(self.values[name]).lower() != "false"]
        of_no_matter = [name for name in rest if neutral.fullmatch(name)]
        unknown = [name for name in rest if not neutral.fullmatch(name)]
        found = [f"read from {self.what}: {_listed(self.read)}", *self.said]
        if of_no_matter:
            found.append(f"left out, as it changes neither time nor memory: {_listed(of_no_matter)}")
        if unknown:
            found.append(f"not modelled, so not in the prediction: {_listed(unknown)}")
        return tuple(found)


def _listed(names: Mapping[str, None] | list[str]) -> str:
    shown = [printable(name, 60) for name in list(names)[:MAX_NAMED]]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")
