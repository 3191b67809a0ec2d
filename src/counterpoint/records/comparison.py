"""Hold what two runs, or many recordings of one job, say beside one another.

Times are µs a step, means over ranks. `Comparison` is the contract `counterpoint.comparison/1`, `Trend`
`counterpoint.trend/1` (docs/reference/diagnosis.md): keys may be added, never renamed. A value
that is not known is `null`, never 0.
"""

from __future__ import annotations

from counterpoint.records import Record

COMPARISON_SCHEMA = "counterpoint.comparison/1"
TREND_SCHEMA = "counterpoint.trend/1"


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


class TrendRow(Record, frozen=True, kw_only=True):
    """Holds one recording of a job; `error` says why it could not be diagnosed, and all else is then null."""

    name: str
    steps: int | None
    step_us: float | None
    hidden: float | None
    exposed_us: float | None
    idle_us: float | None
    worst_rank: int | None  # for which the others stood still the longest; None: for none
    late_us: float | None  # how long they did
    verdict: str | None
    error: str | None = None


class Trend(Record, frozen=True, kw_only=True):
    """Holds the recordings of a job in order of time; `worst` beside `best`: the longest step and the shortest."""

    schema: str = TREND_SCHEMA
    verdict: str
    recordings: tuple[TrendRow, ...]
    worst: str | None  # None: fewer than two could be diagnosed
    best: str | None
    difference: Comparison | None  # of the worst from the best
