"""Define the records of `counterpoint doctor`: its checks of a machine. Their schema is `counterpoint.doctor/1`."""

from __future__ import annotations

from typing import Literal

import msgspec

from counterpoint.records import Record

CHECKUP_SCHEMA = "counterpoint.doctor/1"


class Check(Record, frozen=True, kw_only=True):
    """Holds the result of one check of the machine."""

    name: str  # "peer_access"
    status: Literal["ok", "warning", "problem", "not_seen"]
    seen: str
    means: str = ""  # what the result means for overlap
    fix: str = ""  # what to do, with the command or variable
    values: dict[str, int | float | str | None] = msgspec.field(default_factory=dict)


class Checkup(Record, frozen=True, kw_only=True):
    """Holds all checks of one machine."""

    schema: str = CHECKUP_SCHEMA
    host: str
    gpus: tuple[str, ...]
    driver: str | None
    checks: tuple[Check, ...]
