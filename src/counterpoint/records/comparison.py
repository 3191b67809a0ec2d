"""Hold the comparison of two runs.

Times are µs a step, means over ranks. `Comparison` is the contract `counterpoint.comparison/1`
(docs/reference/diagnosis.md): keys may be added, never renamed. A value that is not known is `null`, never 0.
"""

from __future__ import annotations

from counterpoint.records import Record

COMPARISON_SCHEMA = "counterpoint.comparison/1"


class Change(Record, frozen=True, kw_only=True):
    """Holds a time before and now; None: not there. `change_us` counts what is not there as nothing."""

    name: str
    before_us: float | None
    now_us: float | None
    change_us: float


class FindingChange(Change, frozen=True, kw_only=True):
    """Holds what a finding costs before and now; None: not found. `name` is its title."""

    kind: str
    rank: int | None


class KernelChange(Change, frozen=True, kw_only=True):
    """Holds the mean time of a kernel by name, over kinds that both runs have, and what its change costs a step."""

    slowdown: float


class Comparison(Record, frozen=True, kw_only=True):
    """Holds a run beside an earlier one; every list has the largest growth first.

    `parts` add up to `step`: compute, exposed communication, copies, idle.
    """

    schema: str = COMPARISON_SCHEMA
    verdict: str
    before: tuple[str, ...]  # files
    now: tuple[str, ...]
    notes: tuple[str, ...]  # why the two may not be comparable
    step: Change
    hidden_before: float | None
    hidden_now: float | None
    parts: tuple[Change, ...]
    findings: tuple[FindingChange, ...]
    idle: tuple[Change, ...]  # by cause
    exposed: tuple[Change, ...]  # by operation
    late: tuple[Change, ...]  # by rank: how long the others stood still for it
    kernels: tuple[KernelChange, ...]  # that became slower by name
