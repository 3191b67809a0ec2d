"""Report how long the GPUs of a job idle, why, and what to change; every µs of idle time in the steps has a cause.

The causes of each rank's gaps are found when the rank is read (gaps.py); here the gaps are cut to the steps of the job
and summed. Times are per step and means over ranks, unless stated otherwise.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from counterpoint.diagnosis.findings.advice import advise_idle
from counterpoint.diagnosis.reading.gap_categories import CATEGORIES, NOT_RECORDED
from counterpoint.diagnosis.reading.gaps import STALL_US
from counterpoint.diagnosis.reading.intervals import Intervals
from counterpoint.diagnosis.reading.modules import PHASES, module_of
from counterpoint.diagnosis.reading.traced_job import TracedJob
from counterpoint.records.diagnosis import Finding, HostTime, Idle, IdleCause, RankAccount, ranks_in_words, severity_of
from counterpoint.trace.timeline import F64, I64, Kind

_STALLS = ("operation", "unrecorded", "allocator", "garbage_collection", "late_input", "start_up", "profiler")
_WORTH = 0.03  # of a step: a cause that costs less is no finding ...
_MUCH = 0.1  # ... unless the GPUs idle for this share of the step and no single cause reaches _WORTH
_LONG_US = 5000.0  # evidence counts a pause of a host from this on
_NAMED = 5
_NAMED_WORTH = 0.01  # of a cause: evidence leaves out names with less
_ALIKE = 0.5  # of what the host that pauses most pauses: such hosts are named, ...
_NEARLY = 0.9  # ... if they are not all, and have this share of what all pause
_PART = 0.1  # of a cause: phases and modules with less are not told in words
IDLE_TITLES = {
    "operation": "The GPUs run dry while the host is in long operations",
    "launch": "The GPUs wait for launches: host-bound",
    "allocator": "The GPUs wait for the allocator",
    "garbage_collection": "The GPUs wait for garbage collection",
    "late_input": "The GPUs wait for input",
    "synchronise": "The GPUs run dry at synchronisations",
    "copy": "The GPUs run dry while a copy blocks the host",
    "start_up": "The GPUs wait for start-up: CUDA, kernels and graphs are loaded, compiled or captured",
    "profiler": "The GPUs wait for the profiler",
    "queued": "Work that was launched in time starts late",
    "between_kernels": "Short pauses between queued kernels add up",
    "no_launch_recorded": "The GPUs idle, and the trace does not hold the launches that would say why",
    "unrecorded": "The GPUs run dry while the host does something that was not recorded",
    "nothing_recorded": "Nothing was recorded, neither of host nor GPU, before the first event or after the last",
    "page_migration": "The GPUs idle while the host touches unified memory, which moves page by page",
    "earlier_work": "The first operations wait for work launched before the recording, which it does not hold",
}
_KIND = {
    "launch": "host_bound", "late_input": "late_input", "queued": "queued", "between_kernels": "queued",
    "start_up": "start_up", "no_launch_recorded": "not_recorded", "nothing_recorded": "not_recorded",
    "earlier_work": "not_recorded",
}  # fmt: skip
_NAMED_IS = {  # what the names in the evidence are
    "queued": "what then ran", "between_kernels": "what then ran", "earlier_work": "what then ran",
    "synchronise": "in or after",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class RankIdle:
    """Holds the gaps of one rank inside the steps: rows of `Gaps`, and the µs of each that lie in the steps."""

    row: I64
    us: F64
    missing_us: float  # idle time in steps that lies before or after what the rank's trace recorded
    other_gpu_us: float = 0.0  # idle time of the mean GPU while another GPU of the process works


def idle_of_ranks(job: TracedJob, per_rank: tuple[RankAccount, ...]) -> tuple[RankIdle, ...]:
    """Return the gaps of every rank inside the steps; their sum is `idle_us` of the rank's account."""
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
    """Return how many µs of each row of a rank's `Gaps` lie in these steps."""
    gaps = job.digests[column].gaps
    start, end = job.on_job_clock(column, gaps.start), job.on_job_clock(column, gaps.end)
    inside = Intervals.union(job.step_start[steps, column], job.step_end[steps, column]).within(start, end)
    return np.asarray(gaps.time * np.minimum(inside / np.maximum(end - start, 1e-9), 1.0))


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
            operations=_most(operations[i], scale),
            functions=_most(functions[i], scale),
            phases=_most({p: us for p, us in zip(PHASES, phases[i].tolist(), strict=True) if p and us > 0}, scale),
            modules=_most(modules[i], scale),
        )
        for i in np.argsort(-us, kind="stable").tolist()
        if us[i] > 0
    ]
    launches, interval, kernel = np.mean([_launching(job, c) for c in columns], axis=0).tolist()
    return Idle(
        idle_us=sum(c.us for c in causes),
        explained_us=sum(c.us for c in causes if c.category not in NOT_RECORDED),
        causes=tuple(causes),
        launches=launches if np.isfinite(launches) else None,
        launch_interval_us=interval if np.isfinite(interval) else None,
        kernel_us=kernel if np.isfinite(kernel) else None,
    )


def hosts_known(idle: Idle) -> bool:
    """Return whether the trace holds what the hosts did, for half of the idle time at least."""
    unknown = sum(c.us for c in idle.causes if c.category in ("nothing_recorded", "no_launch_recorded"))
    return unknown <= 0.5 * idle.idle_us


def _most(times: dict[str, float], scale: float) -> tuple[HostTime, ...]:
    best = sorted(times.items(), key=lambda item: -item[1])[:_NAMED]
    return tuple(HostTime(name=name, us=us * scale) for name, us in best)


def _launches(job: TracedJob, column: int) -> tuple[F64, F64]:
    """Return when each launching host call of a rank in the steps began and ended, each call once."""
    gpu, at = job.digests[column].gpu, job.launch[column]
    rows = np.flatnonzero((at >= job.step_start[0, column]) & (at < job.step_end[-1, column]))
    at, first = np.unique(at[rows], return_index=True)
    return at, at + (gpu.launch_end - gpu.launch_start)[rows[first]]


def _launching(job: TracedJob, column: int) -> tuple[float, float, float]:
    """Return launches per step, mean µs between launches (without stalls) and mean µs of a kernel; NaN: unknown."""
    gpu, (start, _) = job.digests[column].gpu, _launches(job, column)
    if not len(start):
        return np.nan, np.nan, np.nan
    between = np.diff(start)
    between = between[between < STALL_US]
    kernels = job.in_steps(column, np.arange(len(job.step_names))) & (gpu.kind == Kind.COMPUTE)
    mean = float((gpu.end - gpu.start)[kernels].mean()) if kernels.any() else np.nan
    return len(start) / job.num_steps, float(between.mean()) if len(between) else np.nan, mean


def _long_pauses(job: TracedJob, column: int) -> F64:
    """Return the µs of every pause of a rank's host that takes more than `_LONG_US` of the steps."""
    us = np.bincount(job.digests[column].gaps.pauses.number, _time_paused(job, column))
    return np.asarray(us[us >= _LONG_US])


@dataclass(frozen=True, kw_only=True, slots=True)
class _Held:
    """Says how long hosts pause in a step for one cause, while their GPUs idle or wait for another rank (µs).

    `shared_us` is what the step loses by that beyond the idle time of the mean GPU.
    """

    us: float  # sum over ranks
    shared_us: float
    columns: tuple[int, ...]  # of the ranks whose hosts pause, if not of all
    operations: tuple[HostTime, ...]


def _time_paused(job: TracedJob, column: int) -> F64:
    """Return how many µs of each row of a rank's `Pauses` lie in the steps."""
    pauses = job.digests[column].gaps.pauses
    start, end = job.on_job_clock(column, pauses.start), job.on_job_clock(column, pauses.end)
    inside = job.steps_of(column).within(start, end)
    return np.asarray(pauses.time * np.minimum(inside / np.maximum(end - start, 1e-9), 1.0))


def _some_host_pauses(job: TracedJob, columns: list[int], category: int) -> float:
    """Return for how many µs of a step at least one of these ranks' hosts pauses for one cause."""
    found = Intervals.union(np.empty(0), np.empty(0))
    for c in columns:
        pauses = job.digests[c].gaps.pauses
        rows = pauses.category == category
        at = job.on_job_clock(c, pauses.start[rows]), job.on_job_clock(c, pauses.end[rows])
        found |= Intervals.union(*at) & job.steps_of(c)
    return float((found.end - found.start).sum()) / job.num_steps


def _share_out(job: TracedJob, columns: list[int], own: dict[str, float], left_us: float) -> dict[str, _Held]:
    """Return what all ranks' stalls cost beyond own idle time, shared by how long the hosts pause for each cause.

    No cause costs more in all than the time in which some host pauses for it.
    """
    time = {c: _time_paused(job, c) / job.num_steps for c in columns}
    by_rank = np.array([np.bincount(job.digests[c].gaps.pauses.category, time[c], len(CATEGORIES)) for c in columns])
    beyond, most_us, cost = np.zeros(len(CATEGORIES)), np.zeros(len(CATEGORIES)), np.zeros(len(CATEGORIES))
    for each in map(CATEGORIES.index, _STALLS):
        idle_us = own.get(CATEGORIES[each], 0.0)
        beyond[each] = max(float(by_rank[:, each].sum()) - idle_us, 0.0)
        most_us[each] = min(beyond[each], max(_some_host_pauses(job, columns, each) - idle_us, 0.0))
    for _ in _STALLS:  # what one cause cannot have cost goes to the others
        weight = np.where(cost < most_us, beyond, 0.0)
        cost = np.minimum(cost + max(left_us - cost.sum(), 0.0) * weight / max(float(weight.sum()), 1e-9), most_us)
    found = {}
    for each in np.flatnonzero(cost > 0).tolist():
        most = np.flatnonzero(by_rank[:, each] >= _ALIKE * by_rank[:, each].max())
        names: dict[str, float] = defaultdict(float)
        for c in columns:
            pauses, digest = job.digests[c].gaps.pauses, job.digests[c]
            rows = np.flatnonzero((pauses.category == each) & (pauses.operation >= 0))
            total = np.bincount(pauses.operation[rows], time[c][rows])
            for name in np.flatnonzero(total > 0).tolist():
                names[digest.names[name]] += float(total[name])
        told = len(most) < len(columns) and by_rank[most, each].sum() >= _NEARLY * by_rank[:, each].sum()
        found[CATEGORIES[each]] = _Held(
            us=float(by_rank[:, each].sum()),
            shared_us=float(cost[each]),
            columns=tuple(columns[i] for i in most.tolist()) if told else (),
            operations=_most(names, 1.0),
        )
    return found


def find_idle(
    job: TracedJob, idle: tuple[RankIdle, ...], late: set[int], saved: dict[str, float], step: float
) -> list[Finding]:
    """Return findings on why GPUs idle, over the ranks that are not in `late`; costs are time per step.

    Where ranks stall in turn, each stall makes the other ranks wait in collectives. What the replay without stalls
    saves beyond that without late ranks, if it is more than the ranks' own idle time, is shared out among the pauses.
    """
    columns = [c for c, r in enumerate(job.ranks) if r not in late] or list(range(len(job.ranks)))
    summary = summarise_idle(job, idle, columns)
    own = {c.category: c.us for c in summary.causes}
    whole = saved.get("no stall on any rank", 0.0)
    left = whole - (saved.get("no straggler", 0.0) if late else 0.0) - sum(own.get(name, 0.0) for name in _STALLS)
    together = bool(((job.joined.row >= 0).sum(axis=1) > 1).any())  # else no rank waits for another
    held = _share_out(job, columns, own, left) if left > 0 and together else {}
    causes = [c for c in summary.causes if c.category != "other_gpu"]  # `find_turns` tells of it
    causes += [IdleCause(category=name, us=0.0, count=0.0, longest_us=0.0, operations=(), functions=())
               for name in held if name not in own]  # fmt: skip
    cost = {c.category: c.us + (held[c.category].shared_us if c.category in held else 0.0) for c in causes}
    causes.sort(key=lambda c: -cost[c.category])
    worth = [c for c in causes if cost[c.category] >= _WORTH * step]
    if job.digests[0].device.from_host and summary.idle_us < _MUCH * step:
        return []
    if not worth and sum(c.us for c in causes) >= _MUCH * step:
        worth = causes[:1]
    stall = next((c for c in worth if c.category in _STALLS), None)
    return [
        Finding(
            kind=_KIND.get(cause.category, "host_stall"),
            cost_us=cost[cause.category],
            severity=severity_of(cost[cause.category], step),
            title=_title(job, cause, held.get(cause.category)),
            evidence=_evidence(job, columns, cause, summary, step, held.get(cause.category))
            + (_stalls_of_all(job, whole if held else 0.0) if cause is stall and len(job.ranks) > 1 else ""),
            advice=advise_idle(job, columns, cause, _named(cause, held.get(cause.category))),
            rank=_only_rank(job, held.get(cause.category)),
        )
        for cause in worth
    ]


def _only_rank(job: TracedJob, held: _Held | None) -> int | None:
    return job.ranks[held.columns[0]] if held is not None and len(held.columns) == 1 else None


def _named(cause: IdleCause, held: _Held | None) -> tuple[HostTime, ...]:
    """Return the operations that a cause is told by: those of the pauses, if ranks hold each other up."""
    return held.operations if held else cause.operations


def _title(job: TracedJob, cause: IdleCause, held: _Held | None) -> str:
    title = IDLE_TITLES[cause.category]
    named, us = _named(cause, held), held.us if held else cause.us
    if cause.category == "operation" and named and named[0].us >= 0.5 * us:
        title = f"The GPUs run dry while the host is in {short_name(named[0].name)}"
    if job.digests[0].device.from_host:
        title = title.replace("The GPUs run dry", "No operation runs").replace("The GPUs", "The ranks")
    return f"{title}, on {_whose(job, held)}" if held and held.columns else title


def _whose(job: TracedJob, held: _Held) -> str:
    return ranks_in_words(tuple(job.ranks[c] for c in held.columns))


def _evidence(job: TracedJob, columns: list[int], cause: IdleCause, idle: Idle, step: float, held: _Held | None) -> str:
    if held and cause.us < _NAMED_WORTH * held.shared_us:
        return _pausing(job, columns, held)
    mean = f"mean of {len(columns)} ranks, " if len(columns) > 1 else ""
    share = f"{cause.us / step:.0%} of it" if step > 0 else "all of it"
    what = "nothing runs for" if job.digests[0].device.from_host else "the GPU idles"
    text = f"{what} {_ms(cause.us)} ms {job.each} for this ({mean}{share}, {_gaps(job, cause)})"
    if cause.category == "launch":
        text += _pace(job, idle)
    else:
        text += f"; the longest single gap is {_ms(cause.longest_us)} ms"
    operations, functions = (
        [n for n in names if n.us >= _NAMED_WORTH * cause.us] for names in (cause.operations, cause.functions)
    )
    if operations:
        where = _NAMED_IS.get(cause.category, "host time in these gaps")
        text += f"; {where}: " + ", ".join(f"{short_name(o.name)} {_ms(o.us)} ms" for o in operations)
    if functions and cause.category in ("launch", "operation", "synchronise", "allocator", "copy"):
        text += "; in " + ", ".join(f"{short_name(f.name)} {_ms(f.us)} ms" for f in functions[:3])
    for what, known in (("in ", cause.phases), ("in module ", cause.modules[:3])):
        if part := [p for p in known if p.us >= _PART * cause.us]:
            text += "; " + what + ", ".join(f"{short_name(p.name)} {_ms(p.us)} ms" for p in part)
    return f"{text}; {_pausing(job, columns, held)}" if held else text


def _pausing(job: TracedJob, columns: list[int], held: _Held) -> str:
    """Say for how long hosts pause for one cause, and in what, while their GPUs idle or wait for another rank."""
    ranks = len(held.columns or columns)
    whose = f"the host{'s' * (ranks > 1)} of {_whose(job, held)}" if held.columns else "hosts"
    verb = "pauses" if whose.startswith("the host ") else "pause"
    mean = f" (mean of {ranks} ranks)" if ranks > 1 else ""
    named = [f"{short_name(o.name)} {_ms(o.us / ranks)} ms" for o in held.operations
             if o.us >= _NAMED_WORTH * held.us]  # fmt: skip
    where = f", in {', '.join(named)}" if named else ""
    return f"{whose} {verb} for {_ms(held.us / ranks)} ms {job.each} for this{mean}{where}"


def _pace(job: TracedJob, idle: Idle) -> str:
    """Say how often the host launches, beside how long kernels take; empty if that is not known."""
    if not (idle.launches and idle.launch_interval_us and idle.kernel_us):
        return ""
    each = "" if not job.has_steps else " a step"
    text = f": {idle.launches:,.0f} launches{each}, one every {idle.launch_interval_us:.1f} µs"
    if idle.launch_interval_us > idle.kernel_us:
        return f"{text}, while a kernel takes {idle.kernel_us:.1f} µs on average"
    return (
        f"{text} on average, no slower than kernels run ({idle.kernel_us:.1f} µs), but in bursts: it runs dry between"
    )


def _gaps(job: TracedJob, cause: IdleCause) -> str:
    """Return text with the number of gaps per step, or in all steps if there is less than one per step."""
    steps = len(job.step_names)
    count, within = (cause.count, "") if cause.count >= 1 else (cause.count * steps, f" in {steps} steps")
    number = max(round(count), 1)
    return f"{number:,} gap{'s' * (number != 1)}{within}"


def _stalls_of_all(job: TracedJob, saved_us: float) -> str:
    """Return text on what the stalls of all ranks cost together, if that is known, and how often every host pauses."""
    text = ""
    if saved_us > 0 and not job.islands.any():
        text = f"; the others wait meanwhile: without any rank's stalls a step would be {_ms(saved_us)} ms shorter"
    pauses = [_long_pauses(job, c) for c in range(len(job.ranks))]
    count = [len(p) for p in pauses]
    if not min(count):
        return text
    steps = job.num_steps
    least, most = (f(float(p.sum()) for p in pauses) / steps for f in (min, max))
    times = f"{min(count)}" if min(count) == max(count) else f"{min(count)} to {max(count)}"
    return (
        f"{text}; every host pauses {times} times in {steps} step{'s' * (steps != 1)} for over {_LONG_US / 1e3:.0f} ms,"
        f" {_ms(least)} to {_ms(most)} ms a step in all"
    )


def _ms(us: float) -> str:
    return f"{us / 1e3:.2f}" if us >= 100.0 else f"{us / 1e3:.3f}"


def short_name(name: str, most: int = 80) -> str:
    """Return a name of at most `most` letters; what is cut off shows as …."""
    return name if len(name) <= most else name[: most - 3] + "…"
