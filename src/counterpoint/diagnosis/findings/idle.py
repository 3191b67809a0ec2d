"""Find why GPUs idle: the time per cause, host operations meanwhile, and the resulting waits of other ranks."""

from __future__ import annotations

from collections.abc import Iterator

from counterpoint.diagnosis.analysis.analysis import Analysis
from counterpoint.diagnosis.analysis.idle import LONG_US, STALLS, HostPauses, long_pauses, share_out, summarise_idle
from counterpoint.diagnosis.findings.advice import advise_idle, short_name
from counterpoint.diagnosis.reading.traced_job import TracedJob
from counterpoint.records.causes import IDLE_CAUSES
from counterpoint.records.diagnosis import Finding, HostTime, Idle, IdleCause, ranks_in_words

_LEAST_SHARE = 0.03  # of a step: a cause that costs less is no finding ...
_LEAST_IDLE_SHARE = 0.1  # ... unless GPUs idle for this share of the step, and no single cause reaches the first share
_NAMED_SHARE = 0.01  # of a cause: evidence leaves out names with less time
_PLACE_SHARE = 0.1  # of a cause: evidence leaves out phases and modules with less time
_ON_HOSTS = (  # words of titles -> words for a job without GPUs
    ("The GPUs run out of work", "Compute pauses"),
    ("The GPUs wait for launches: host-bound", "Compute pauses between many small operations"),
    ("The GPUs wait", "Compute waits"),
    ("The GPUs idle", "Compute pauses"),
    ("queued kernels", "operations"),
    (", neither of host nor GPU", ""),
)
_NAMES_ARE = {  # causes whose names in the evidence are not host operations during the gap
    "queued": "what then ran",
    "between_kernels": "what then ran",
    "earlier_work": "what then ran",
    "synchronise": "in or after",
}


def find_idle(a: Analysis) -> Iterator[Finding]:
    """Yield findings on causes of idle time, on ranks that are not late; costs are µs per step.

    Where hosts of different ranks stall one after the other, each stall makes the other ranks wait in collectives. The
    replay without stalls saves more than the replay without late ranks; if the difference is more than the ranks' own
    idle time, the rest is split among the pauses.
    """
    job, step = a.job, a.step_us
    late = {rank for s in a.told_late for rank in s.ranks}
    columns = [c for c, r in enumerate(job.ranks) if r not in late] or list(range(len(job.ranks)))
    summary = summarise_idle(job, a.rank_idle, columns)
    if job.digests[0].device.from_host and summary.idle_us < _LEAST_IDLE_SHARE * step:
        return
    own = {c.category: c.us for c in summary.causes}
    whole = a.saved_us.get("no stall on any rank", 0.0)
    by_late = a.late_us if late else 0.0
    left = whole - by_late - sum(own.get(name, 0.0) for name in STALLS)
    together = bool(((job.joined.row >= 0).sum(axis=1) > 1).any())  # else no rank waits for another
    held = share_out(job, columns, own, left) if left > 0 and together else {}
    causes = [c for c in summary.causes if c.category != "other_gpu"]  # `find_turns` tells of it
    causes += [
        IdleCause(category=name, us=0.0, count=0.0, longest_us=0.0, operations=(), functions=())
        for name in held
        if name not in own
    ]
    cost = {c.category: c.us + (held[c.category].shared_us if c.category in held else 0.0) for c in causes}
    causes.sort(key=lambda c: -cost[c.category])
    found = [c for c in causes if cost[c.category] >= _LEAST_SHARE * step]
    if not found and sum(c.us for c in causes) >= _LEAST_IDLE_SHARE * step:
        found = causes[:1]
    stall = next((c for c in found if c.category in STALLS), None)
    for cause in found:
        pauses = held.get(cause.category)
        named = pauses.operations if pauses else cause.operations  # of the pauses, if ranks delay each other
        only = pauses is not None and len(pauses.columns) == 1
        yield Finding.of(
            IDLE_CAUSES[cause.category].kind,
            cost[cause.category],
            step,
            title=_title(job, cause, named, pauses),
            evidence=_evidence(job, columns, cause, summary, step, pauses)
            + (_stalls_of_all(job, whole if held else 0.0) if cause is stall and len(job.ranks) > 1 else ""),
            advice=advise_idle(job, columns, cause, named),
            rank=job.ranks[pauses.columns[0]] if pauses and only else None,
        )


def _title(job: TracedJob, cause: IdleCause, named: tuple[HostTime, ...], held: HostPauses | None) -> str:
    title, us = IDLE_CAUSES[cause.category].title, held.us if held else cause.us
    if cause.category == "operation" and named and named[0].us >= 0.5 * us:
        title = f"The GPUs run out of work while the host is in {short_name(named[0].name)}"
    if job.digests[0].device.from_host:
        for of_gpus, of_hosts in _ON_HOSTS:
            title = title.replace(of_gpus, of_hosts)
    return f"{title}, on {_whose(job, held)}" if held and held.columns else title


def _whose(job: TracedJob, held: HostPauses) -> str:
    return ranks_in_words(tuple(job.ranks[c] for c in held.columns))


def _evidence(
    job: TracedJob, columns: list[int], cause: IdleCause, idle: Idle, step: float, held: HostPauses | None
) -> str:
    if held and cause.us < _NAMED_SHARE * held.shared_us:
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
        [n for n in names if n.us >= _NAMED_SHARE * cause.us] for names in (cause.operations, cause.functions)
    )
    if operations:
        where = _NAMES_ARE.get(cause.category, "host time in these gaps")
        text += f"; {where}: " + ", ".join(f"{short_name(o.name)} {_ms(o.us)} ms" for o in operations)
    if functions and cause.category in ("launch", "operation", "synchronise", "allocator", "copy"):
        text += "; in " + ", ".join(f"{short_name(f.name)} {_ms(f.us)} ms" for f in functions[:3])
    for what, known in (("in ", cause.phases), ("in module ", cause.modules[:3])):
        if part := [p for p in known if p.us >= _PLACE_SHARE * cause.us]:
            text += "; " + what + ", ".join(f"{short_name(p.name)} {_ms(p.us)} ms" for p in part)
    return f"{text}; {_pausing(job, columns, held)}" if held else text


def _pausing(job: TracedJob, columns: list[int], held: HostPauses) -> str:
    """Return text on how long hosts pause, and in which operations, while GPUs idle or wait for another rank."""
    ranks = len(held.columns or columns)
    whose = f"the host{'s' * (ranks > 1)} of {_whose(job, held)}" if held.columns else "hosts"
    verb = "pauses" if whose.startswith("the host ") else "pause"
    mean = f" (mean of {ranks} ranks)" if ranks > 1 else ""
    named = [f"{short_name(o.name)} {_ms(o.us / ranks)} ms" for o in held.operations
             if o.us >= _NAMED_SHARE * held.us]  # fmt: skip
    where = f", in {', '.join(named)}" if named else ""
    return f"{whose} {verb} for {_ms(held.us / ranks)} ms {job.each} for this{mean}{where}"


def _pace(job: TracedJob, idle: Idle) -> str:
    """Return text on the interval between launches and the mean time of a kernel; empty if these are not known."""
    if not (idle.launches and idle.launch_interval_us and idle.kernel_us):
        return ""
    each = "" if not job.has_steps else " a step"
    text = f": {idle.launches:,.0f} launches{each}, one every {idle.launch_interval_us:.1f} µs"
    if idle.launch_interval_us > idle.kernel_us:
        return f"{text}, while a kernel takes {idle.kernel_us:.1f} µs on average"
    return (
        f"{text} on average, no slower than kernels run ({idle.kernel_us:.1f} µs), but in bursts, with no work between"
    )


def _gaps(job: TracedJob, cause: IdleCause) -> str:
    """Return the number of gaps as text: per step, or over all steps if a step has less than one."""
    steps = len(job.step_names)
    count, within = (cause.count, "") if cause.count >= 1 else (cause.count * steps, f" in {steps} steps")
    number = max(round(count), 1)
    return f"{number:,} gap{'s' * (number != 1)}{within}"


def _stalls_of_all(job: TracedJob, saved_us: float) -> str:
    """Return text on the joint cost of all ranks' stalls, if known, and on how often each host pauses."""
    text = ""
    if saved_us > 0 and not job.islands.any():
        text = f"; the others wait meanwhile: without any rank's stalls a step would be {_ms(saved_us)} ms shorter"
    pauses = [long_pauses(job, c) for c in range(len(job.ranks))]
    count = [len(p) for p in pauses]
    if not min(count):
        return text
    steps = job.num_steps
    least, most = (f(float(p.sum()) for p in pauses) / steps for f in (min, max))
    times = f"{min(count)}" if min(count) == max(count) else f"{min(count)} to {max(count)}"
    return (
        f"{text}; every host pauses {times} times in {steps} step{'s' * (steps != 1)} for over {LONG_US / 1e3:.0f} ms,"
        f" {_ms(least)} to {_ms(most)} ms a step in all"
    )


def _ms(us: float) -> str:
    return f"{us / 1e3:.2f}" if us >= 100.0 else f"{us / 1e3:.3f}"
