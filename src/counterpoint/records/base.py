"""Define what every record is."""

from __future__ import annotations

import msgspec


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Is immutable, compared by value, read and written by `msgspec.json`; subclasses must repeat `kw_only`."""
