"""Define the record that the exporters of `watch` get for each recording.

`WatchedStep` is the contract `counterpoint.watch/1`: keys may be added, never renamed. Times are µs of a mean step; a
value that is not known is `null`, never 0.
"""

from __future__ import annotations

from counterpoint.records import Record
from counterpoint.records.diagnosis import Finding, StragglerCause

SCHEMA = "counterpoint.watch/1"


class WatchedStep(Record, frozen=True, kw_only=True):
    """Sums up the diagnosis of the steps that end with `step`; `line` is the line in the log."""

    schema: str = SCHEMA
    step: int
    unix_s: float
    line: str
    verdict: str
    ranks: tuple[int, ...]  # those that were read
    world_size: int
    step_us: float
    usual_us: float | None = None  # mean time of the unrecorded steps since the recording before
    hidden: float | None  # share of the communication that is hidden; null: no communication was seen
    exposed_comm_us: float
    idle_us: float
    late_rank: int | None  # the rank that makes the others wait longest
    late_us: float | None
    late_cause: StragglerCause | None
    late_detail: str | None
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
