"""Hold the comparison of two runs.

Times are µs a step, means over ranks. `Comparison` is the contract `counterpoint.comparison/1`
(docs/reference/diagnosis.md): keys may be added, never renamed. A value that is not known is `null`, never 0.
"""

from __future__ import annotations

from counterpoint.records import Record

COMPARISON_SCHEMA = "counterpoint.comparison/1"


class Change(Record, frozen=True, kw_only=True):
    """Holds one time (µs) of the earlier run and of this run; None: the run does not have it, which counts as 0."""

    name: str
    before_us: float | None
    now_us: float | None
    change_us: float


class FindingChange(Change, frozen=True, kw_only=True):
    """Holds the cost of one finding in the earlier run and in this run; None: not found. `name` is its title."""

    kind: str
    rank: int | None


class KernelChange(Change, frozen=True, kw_only=True):
    """Holds the mean µs of a kernel in both runs, over kinds that both have; `change_us` is the change per step."""

    slowdown: float


class Comparison(Record, frozen=True, kw_only=True):
    """Compares a run with an earlier run; every list has the largest growth first.

    `parts` add up to `step`: compute, exposed communication, copies, idle.
    """

    schema: str = COMPARISON_SCHEMA
    verdict: str
    before: tuple[str, ...]  # files of the earlier run
    now: tuple[str, ...]
    notes: tuple[str, ...]  # why the two runs may not be comparable
    step: Change
    hidden_before: float | None
    hidden_now: float | None
    parts: tuple[Change, ...]
    findings: tuple[FindingChange, ...]
    idle: tuple[Change, ...]  # by cause
    exposed: tuple[Change, ...]  # by operation
    late: tuple[Change, ...]  # by rank: how long the others stood still for it
    kernels: tuple[KernelChange, ...]  # that became slower by name
