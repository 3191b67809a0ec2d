"""Sum up the idle time of a job's GPUs by cause; every idle µs in the steps has one cause.

The causes of each rank's gaps are found when the rank is read (gaps.py); here the gaps are cut to the steps of the job
and summed. Times are per step and means over ranks, unless stated otherwise.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from counterpoint.diagnosis.reading.gaps import STALL_US, Gaps, Pauses
from counterpoint.diagnosis.reading.host_categories import CATEGORIES
from counterpoint.diagnosis.reading.intervals import Intervals
from counterpoint.diagnosis.reading.modules import PHASES, module_of
from counterpoint.diagnosis.reading.traced_job import TracedJob
from counterpoint.records.causes import IDLE_CAUSES
from counterpoint.records.diagnosis import HostTime, Idle, IdleCause, RankAccount
from counterpoint.trace.timeline import F64, I64, Kind

STALLS = tuple(cause.name for cause in IDLE_CAUSES.values() if cause.stalls_host)
LONG_US = 5000.0  # a host's pause counts as long from this duration on
_NAMED = 5  # most host operations and functions listed for a cause
_SHARE_OF_LONGEST = 0.5  # of the longest pausing time of a host: hosts with at least this share are named, ...
_SHARE_OF_ALL = 0.9  # ... unless all do, or they have less than this share of all hosts' pausing time


@dataclass(frozen=True, kw_only=True, slots=True)
class RankIdle:
    """Holds the gaps of one rank inside the steps: rows of `Gaps`, and how many µs of each lie in the steps."""

    row: I64
    us: F64
    missing_us: float  # idle time in steps that lies before or after what the rank's trace recorded
    other_gpu_us: float = 0.0  # idle time of the mean GPU while another GPU of the process works


def idle_of_ranks(job: TracedJob, per_rank: tuple[RankAccount, ...]) -> tuple[RankIdle, ...]:
    """Return the gaps of every rank inside the steps; a rank's gaps add up to `idle_us` of its account."""
    found = []
    for column, account in enumerate(per_rank):
        us, idle_us = time_in(job, column, np.arange(len(job.step_names))), account.idle_us - account.other_gpu_us
        whole = float(us.sum())
        if whole > idle_us:
            us *= idle_us / whole
        row, missing = np.flatnonzero(us > 0), max(idle_us - whole, 0.0)
        found.append(RankIdle(row=row, us=us[row], missing_us=missing, other_gpu_us=account.other_gpu_us))
    return tuple(found)


def time_in(job: TracedJob, column: int, steps: I64) -> F64:
    """Return how many µs of each row of a rank's `Gaps` lie in the given steps."""
    within = Intervals.union(job.step_start[steps, column], job.step_end[steps, column])
    return _share_inside(job, column, job.digests[column].gaps, within)


def _share_inside(job: TracedJob, column: int, table: Gaps | Pauses, within: Intervals) -> F64:
    """Return how many µs of each of a rank's gaps or pauses lie in the given intervals."""
    start, end = job.on_job_clock(column, table.start), job.on_job_clock(column, table.end)
    inside = within.within(start, end)
    return np.asarray(table.time * np.minimum(inside / np.maximum(end - start, 1e-9), 1.0))


def summarise_idle(job: TracedJob, idle: tuple[RankIdle, ...], columns: list[int] | None = None) -> Idle:
    """Return the idle time of a step and its causes, largest first, as means over the ranks in `columns`."""
    columns = list(range(len(job.ranks))) if columns is None else columns
    scale = 1.0 / (len(columns) * job.num_steps)
    us, count, longest = np.zeros(len(CATEGORIES)), np.zeros(len(CATEGORIES)), np.zeros(len(CATEGORIES))
    operations: list[dict[str, float]] = [defaultdict(float) for _ in CATEGORIES]
    functions: list[dict[str, float]] = [defaultdict(float) for _ in CATEGORIES]
    phases = np.zeros((len(CATEGORIES), len(PHASES)))
    modules: list[dict[str, float]] = [defaultdict(float) for _ in CATEGORIES]
    for c in columns:
        gaps, names, part = job.digests[c].gaps, job.digests[c].names, idle[c]
        category = gaps.category[part.row]
        us[CATEGORIES.index("unrecorded")] += part.missing_us
        us[CATEGORIES.index("other_gpu")] += part.other_gpu_us
        count += np.bincount(category, minlength=len(CATEGORIES))
        np.maximum.at(longest, category, part.us)
        own = np.bincount(category, weights=part.us, minlength=len(CATEGORIES))
        us += own
        for named, into in ((gaps.operations, operations), (gaps.functions, functions)):
            time = own[named.category] * named.share
            for where, name, t in zip(named.category.tolist(), named.name.tolist(), time.tolist(), strict=True):
                if t > 0 and (into is operations or ".py(" in names[name]):
                    into[where][names[name]] += t
        places = job.digests[c].gap_places
        np.add.at(phases, (category, places.phase[part.row]), part.us)
        keys, at = np.unique(category.astype(np.int64) * (len(names) + 1) + places.module[part.row] + 1,
                             return_inverse=True)  # fmt: skip
        for k, t in zip(keys.tolist(), np.bincount(at, weights=part.us).tolist(), strict=True):
            where, name = divmod(k, len(names) + 1)
            if name:
                modules[where][module_of(names[name - 1]) or names[name - 1]] += t
    causes = [
        IdleCause(
            category=CATEGORIES[i],
            us=float(us[i]) * scale,
            count=float(count[i]) * scale,
            longest_us=float(longest[i]),
            operations=most_time(operations[i], scale),
            functions=most_time(functions[i], scale),
            phases=most_time({p: us for p, us in zip(PHASES, phases[i].tolist(), strict=True) if p and us > 0}, scale),
            modules=most_time(modules[i], scale),
        )
        for i in np.argsort(-us, kind="stable").tolist()
        if us[i] > 0
    ]
    launches, interval, kernel = np.mean([_launching(job, c) for c in columns], axis=0).tolist()
    return Idle(
        idle_us=sum(c.us for c in causes),
        explained_us=sum(c.us for c in causes if IDLE_CAUSES[c.category].recorded),
        causes=tuple(causes),
        launches=launches if np.isfinite(launches) else None,
        launch_interval_us=interval if np.isfinite(interval) else None,
        kernel_us=kernel if np.isfinite(kernel) else None,
    )


def hosts_known(idle: Idle) -> bool:
    """Return whether the trace shows what the hosts did in at least half of the idle time."""
    unknown = sum(c.us for c in idle.causes if c.category in ("nothing_recorded", "no_launch_recorded"))
    return unknown <= 0.5 * idle.idle_us


def most_time(times: dict[str, float], scale: float) -> tuple[HostTime, ...]:
    """Return the names with the most µs, longest first; their times are multiplied by `scale`."""
    best = sorted(times.items(), key=lambda item: -item[1])[:_NAMED]
    return tuple(HostTime(name=name, us=us * scale) for name, us in best)


def _launching(job: TracedJob, column: int) -> tuple[float, float, float]:
    """Return launches per step, mean µs between launches (without stalls) and mean µs of a kernel; NaN: unknown."""
    gpu, at = job.digests[column].gpu, job.launch[column]
    start = np.unique(at[(at >= job.step_start[0, column]) & (at < job.step_end[-1, column])])  # each call once
    if not len(start):
        return np.nan, np.nan, np.nan
    between = np.diff(start)
    between = between[between < STALL_US]
    kernels = job.in_steps(column, np.arange(len(job.step_names))) & (gpu.kind == Kind.COMPUTE)
    mean = float((gpu.end - gpu.start)[kernels].mean()) if kernels.any() else np.nan
    return len(start) / job.num_steps, float(between.mean()) if len(between) else np.nan, mean


def long_pauses(job: TracedJob, column: int) -> F64:
    """Return the µs of each pause of a rank's host that lasts at least `LONG_US` within the steps."""
    us = np.bincount(job.digests[column].gaps.pauses.number, _time_paused(job, column))
    return np.asarray(us[us >= LONG_US])


@dataclass(frozen=True, kw_only=True, slots=True)
class HostPauses:
    """Holds the µs per step that hosts pause for one cause while their GPUs idle or wait for another rank.

    `shared_us` is what the step loses by these pauses beyond the idle time of the mean GPU.
    """

    us: float  # sum over ranks
    shared_us: float
    columns: tuple[int, ...]  # columns of the ranks whose hosts pause; empty: all ranks
    operations: tuple[HostTime, ...]


def _time_paused(job: TracedJob, column: int) -> F64:
    """Return how many µs of each row of a rank's `Pauses` lie in the steps."""
    return _share_inside(job, column, job.digests[column].gaps.pauses, job.steps_of(column))


def _some_host_pauses(job: TracedJob, columns: list[int], category: int) -> float:
    """Return the µs per step in which the host of at least one of these ranks pauses for one cause."""
    found = Intervals.union(np.empty(0), np.empty(0))
    for c in columns:
        pauses = job.digests[c].gaps.pauses
        rows = pauses.category == category
        at = job.on_job_clock(c, pauses.start[rows]), job.on_job_clock(c, pauses.end[rows])
        found |= Intervals.union(*at) & job.steps_of(c)
    return float((found.end - found.start).sum()) / job.num_steps


def share_out(job: TracedJob, columns: list[int], own: dict[str, float], left_us: float) -> dict[str, HostPauses]:
    """Return `left_us`, the cost of stalls beyond own idle time, split among causes by how long hosts pause for each.

    A cause's own idle time plus its share of `left_us` is at most the time in which some host pauses for the cause.
    """
    time = {c: _time_paused(job, c) / job.num_steps for c in columns}
    by_rank = np.array([np.bincount(job.digests[c].gaps.pauses.category, time[c], len(CATEGORIES)) for c in columns])
    beyond, most_us, cost = np.zeros(len(CATEGORIES)), np.zeros(len(CATEGORIES)), np.zeros(len(CATEGORIES))
    for each in map(CATEGORIES.index, STALLS):
        idle_us = own.get(CATEGORIES[each], 0.0)
        beyond[each] = max(float(by_rank[:, each].sum()) - idle_us, 0.0)
        most_us[each] = min(beyond[each], max(_some_host_pauses(job, columns, each) - idle_us, 0.0))
    for _ in STALLS:  # the excess over what a cause can cost goes to the other causes
        weight = np.where(cost < most_us, beyond, 0.0)
        cost = np.minimum(cost + max(left_us - cost.sum(), 0.0) * weight / max(float(weight.sum()), 1e-9), most_us)
    found = {}
    for each in np.flatnonzero(cost > 0).tolist():
        most = np.flatnonzero(by_rank[:, each] >= _SHARE_OF_LONGEST * by_rank[:, each].max())
        names: dict[str, float] = defaultdict(float)
        for c in columns:
            pauses, digest = job.digests[c].gaps.pauses, job.digests[c]
            rows = np.flatnonzero((pauses.category == each) & (pauses.operation >= 0))
            total = np.bincount(pauses.operation[rows], time[c][rows])
            for name in np.flatnonzero(total > 0).tolist():
                names[digest.names[name]] += float(total[name])
        told = len(most) < len(columns) and by_rank[most, each].sum() >= _SHARE_OF_ALL * by_rank[:, each].sum()
        found[CATEGORIES[each]] = HostPauses(
            us=float(by_rank[:, each].sum()),
            shared_us=float(cost[each]),
            columns=tuple(columns[i] for i in most.tolist()) if told else (),
            operations=most_time(names, 1.0),
        )
    return found
