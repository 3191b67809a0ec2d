"""Define the base class of all records."""

from __future__ import annotations

import msgspec


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Represents immutable data, compared by value, read and written by `msgspec.json`; subclasses repeat `kw_only`."""
