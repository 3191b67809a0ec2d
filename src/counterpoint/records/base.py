"""What every record is."""

from __future__ import annotations

import msgspec

__all__ = ["Record"]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Base: immutable, compared by value, `msgspec.json` reads and writes it. (msgspec does not inherit `kw_only`.)"""
