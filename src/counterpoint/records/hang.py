"""Define the record that `diagnose` prints for NCCL flight-recorder dumps: which ranks are missing in a hang.

`Hang` is the contract `counterpoint.hang/1`: keys may be added, never renamed. What is not known is `null`.
"""

from __future__ import annotations

from typing import Literal

from counterpoint.records import Record

SCHEMA = "counterpoint.hang/1"

CallState = Literal["scheduled", "started", "completed"]


class CollectiveCall(Record, frozen=True, kw_only=True):
    """Describes one call of a collective, as ranks recorded it: its number, operation, sizes and dtypes."""

    seq: int
    operation: str
    input_sizes: tuple[tuple[int, ...], ...]
    output_sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    frame: str | None  # the line of Python that called it


class RankState(Record, frozen=True, kw_only=True):
    """Holds the sequence numbers of the last collectives of a rank in one group; null: no number is known."""

    rank: int
    scheduled: int | None
    started: int | None
    completed: int | None
    last_operation: str | None
    last_state: CallState | None
    last_frame: str | None


class Mismatch(Record, frozen=True, kw_only=True):
    """Names ranks whose call at one sequence number differs from the call of most ranks."""

    seq: int
    what: Literal["operation", "size", "dtype"]
    ranks: tuple[int, ...]
    theirs: CollectiveCall
    others: CollectiveCall


class GroupState(Record, frozen=True, kw_only=True):
    """Describes one process group: how far each rank came, and in which collective the group is stuck."""

    name: str
    description: str
    ranks: tuple[int, ...]
    unrecorded: tuple[int, ...]  # ranks of the group without a dump
    stuck: CollectiveCall | None  # the first collective that not all recorded ranks have completed
    waiting: tuple[int, ...]  # ranks that have entered it and not completed it
    missing: tuple[int, ...]  # ranks that have not entered it
    states: tuple[RankState, ...]
    mismatches: tuple[Mismatch, ...]


class Hang(Record, frozen=True, kw_only=True):
    """Holds the whole answer on a hang; the group that explains the hang comes first."""

    schema: str = SCHEMA
    files: tuple[str, ...]
    version: str | None
    ranks: tuple[int, ...]
    missing_dumps: tuple[int, ...]  # ranks of some group without a dump
    verdict: str
    groups: tuple[GroupState, ...]
    notes: tuple[str, ...]
