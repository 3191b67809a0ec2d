"""Who makes the others wait, and why.

A late arrival is accounted for exactly. Since the moment P at which the ranks were last together (the end of an earlier
collective), rank r and a typical rank o spent

    start_r - start_o = (compute_r - compute_o) + (copies) + (other communication) + (idle_r - idle_o)

up to their own arrivals; the largest term is where the cause is looked for: in the host, where r's GPU idled; in the
kernels, where it computed for longer. A delay inherited through another group's collective is not r's.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from counterpoint.diagnose.accounts import Activity, Waits
from counterpoint.diagnose.gaps import Gap
from counterpoint.diagnose.job import Job
from counterpoint.diagnose.kernel_diff import KernelDiff, compare_kernels
from counterpoint.records import Cause, Straggler
from counterpoint.trace.timeline import F64, I64

__all__ = ["Delays", "find_delays", "find_stragglers"]

_WORTH = 0.015  # of the time of all steps: less is noise between healthy GPUs (0.3 to 1.3 % measured on 8 x H200)
_WORTH_ONCE = 0.035  # of one step
_WORTH_UNEXPLAINED = 0.05  # where no cause can be shown
_OUTSTANDING = 3.0  # times the delay of the median rank
_EXPLAINED = 48  # late arrivals of one rank that are looked into
_STRUCTURAL = ("send_recv", "recv", "send")  # a pipeline waits by design


@dataclass(frozen=True, kw_only=True, slots=True)
class Delays:
    """Late arrivals: for collective j the last rank's, as the others felt it (exposed waiting, median over them)."""

    collective: I64
    column: I64
    felt_us: F64
    late_us: F64  # start of the last - start of the median rank


def find_delays(job: Job, w: Waits) -> Delays:
    """Every collective that more than one rank took part in."""
    rows, columns, felt, late = [], [], [], []
    for j in np.flatnonzero(w.step >= 0).tolist():
        start = job.joined.start[j]
        there = np.flatnonzero(np.isfinite(start))
        if len(there) < 2 or job.joined.op[j] in _STRUCTURAL:
            continue
        last = int(w.last_column[j])
        others = there[there != last]
        rows.append(j)
        columns.append(last)
        felt.append(float(np.median(w.exposed_wait[j, others])))
        late.append(float(start[last] - np.sort(start[there])[(len(there) - 1) // 2]))
    return Delays(collective=np.array(rows, np.int64), column=np.array(columns, np.int64),
                  felt_us=np.array(felt), late_us=np.array(late))  # fmt: skip


def find_stragglers(job: Job, busy: list[Activity], w: Waits, delays: Delays) -> tuple[Straggler, ...]:
    """Ranks whose delays stand out, worst first; empty on a healthy job."""
    ranks = len(job.ranks)
    if ranks < 2 or not len(delays.column):
        return ()
    total: F64 = np.bincount(delays.column, weights=delays.felt_us, minlength=ranks).astype(np.float64)
    last = np.bincount(delays.column, minlength=ranks)  # times last
    found = []
    for column in np.argsort(-total).tolist():
        if not _stands_out(job, w, delays, column, total):
            continue
        straggler = _explain(job, busy, w, delays, column, float(total[column]), int(last[column]))
        if straggler is not None:
            found.append(straggler)
    return tuple(sorted(found, key=lambda s: -s.delay_us))


def _stands_out(job: Job, w: Waits, delays: Delays, column: int, total: F64) -> bool:
    duration = (job.step_end - job.step_start).mean(axis=1)
    own = delays.column == column
    per_step = np.bincount(w.step[delays.collective[own]], weights=delays.felt_us[own], minlength=len(duration))
    enough = bool((per_step > _WORTH_ONCE * duration).any()) or total[column] > _WORTH * duration.sum()
    others = np.delete(total, column)
    return bool(enough and total[column] > _OUTSTANDING * float(np.median(others)))


@dataclass(frozen=True, slots=True)
class _Term:
    """How one late arrival is made up (µs), and over which window of the late rank."""

    weight: float
    start: float
    end: float
    compute: float
    memcpy: float
    comm: float
    idle: float
    peer: int


def _explain(
    job: Job, busy: list[Activity], w: Waits, delays: Delays, column: int, felt: float, times_last: int
) -> Straggler | None:
    own = np.flatnonzero((delays.column == column) & (delays.felt_us > 0))
    own = own[np.argsort(-delays.felt_us[own], kind="stable")][:_EXPLAINED]
    terms = [_term(job, busy, w, int(delays.collective[i]), column, float(delays.felt_us[i])) for i in own.tolist()]
    weight = np.array([t.weight for t in terms])
    share = {name: _amount(terms, name) for name in ("compute", "memcpy", "comm", "idle")}
    if share["comm"] > 0.6 * sum(share.values()):
        return None  # it waits in another group itself: the cause is found there
    main = max(share, key=lambda name: share[name] if name != "comm" else -1.0)
    worst = terms[int(weight.argmax())]
    if main == "idle":
        cause, detail, evidence = _host_cause(job, column, terms)
    elif main == "memcpy":
        cause, detail, evidence = _copy_cause(share["memcpy"], felt)
    else:
        cause, detail, evidence = _compute_cause(compare_kernels(job, column), share["compute"])
    if cause == "unknown" and felt < _WORTH_UNEXPLAINED * float((job.step_end - job.step_start).mean(axis=1).sum()):
        return None
    return Straggler(
        rank=job.ranks[column],
        delay_us=felt,
        times_last=times_last,
        cause=cause,
        evidence=evidence,
        detail=detail,
        start_us=worst.start,
        end_us=worst.end,
    )


def _amount(terms: list[_Term], name: str) -> float:
    """Lateness that a kind of activity explains, weighted by what the others felt of it."""
    amount = 0.0
    for term in terms:
        parts = {n: max(getattr(term, n), 0.0) for n in ("compute", "memcpy", "comm", "idle")}
        whole = sum(parts.values())
        amount += term.weight * parts[name] / whole if whole > 0 else 0.0
    return amount


def _term(job: Job, busy: list[Activity], w: Waits, j: int, column: int, felt: float) -> _Term:
    start = job.joined.start[j]
    there = np.flatnonzero(np.isfinite(start))
    others = there[there != column]
    peer = int(others[np.argsort(start[others], kind="stable")[(len(others) - 1) // 2]])
    since = _together_before(job, w, j, there, 0.25 * float(start[column] - start[peer]))
    mine = _spent(busy[column], since, float(start[column]))
    theirs = _spent(busy[peer], since, float(start[peer]))
    compute, memcpy, comm, idle = (a - b for a, b in zip(mine, theirs, strict=True))
    return _Term(weight=felt, start=since, end=float(start[column]), compute=compute, memcpy=memcpy, comm=comm,
                 idle=idle, peer=peer)  # fmt: skip


def _together_before(job: Job, w: Waits, j: int, members: I64, slack: float) -> float:
    """When the members of collective j last ended one together before any of them started this one.

    One that some awaited while they computed does not count: they are still ahead of its last rank by that much.
    """
    first = float(np.nanmin(job.joined.start[j]))
    before = job.joined.end[:j, :][:, members]
    ahead = (w.wait - w.exposed_wait)[:j, :][:, members]
    whole = np.isfinite(before).all(axis=1)
    whole[whole] = ahead[whole].max(axis=1) <= slack
    ends = before[whole].max(axis=1) if whole.any() else np.empty(0)
    ends = ends[ends <= first]
    floor = float(job.step_start.min())
    return float(ends.max()) if len(ends) else min(floor, first)


def _spent(busy: Activity, start: float, end: float) -> tuple[float, float, float, float]:
    """(compute, copies beside no compute, other communication beside neither, idle) in a window."""
    compute = busy.compute.clip(start, end)
    memcpy = busy.memcpy.clip(start, end) - compute
    comm = busy.comm.clip(start, end) - compute - memcpy
    parts = compute.measure, memcpy.measure, comm.measure
    return (*parts, max(end - start, 0.0) - sum(parts))


def _host_cause(job: Job, column: int, terms: list[_Term]) -> tuple[Cause, str | None, str]:
    """What the host sat in while the GPU had nothing to do."""
    blamed: dict[tuple[str, str | None], float] = defaultdict(float)
    longest: dict[tuple[str, str | None], Gap] = {}
    gaps = job.digests[column].gaps
    low = job.on_job_clock(column, np.array([g.start for g in gaps]))
    high = job.on_job_clock(column, np.array([g.end for g in gaps]))
    seen: set[int] = set()
    for term in terms:
        for i in np.flatnonzero((high > term.start) & (low < term.end + 1.0)).tolist():
            key = (gaps[i].category, gaps[i].operation)
            if i not in seen:
                blamed[key] += float(high[i] - low[i])
                seen.add(i)
            if key not in longest or gaps[i].end - gaps[i].start > longest[key].end - longest[key].start:
                longest[key] = gaps[i]
    if not blamed:
        return "host_stall", None, "its GPU had nothing to do; no single gap is long enough to say why"
    (category, operation), idle = max(blamed.items(), key=lambda item: item[1])
    gap = longest[category, operation]
    host_ms, gap_ms = (gap.host_end - gap.host_start) / 1e3, (gap.end - gap.start) / 1e3
    where = f" (inside {gap.inside})" if gap.inside else ""
    dry = f"its GPU ran dry for {idle / 1e3:.2f} ms in all, {gap_ms:.2f} ms at once"
    if category == "late_input":
        return "late_input", operation, f"{dry}, while its host waited {host_ms:.2f} ms for input in {operation}{where}"
    if category == "launch":
        return "host_stall", "launch", f"{dry}: its host launches more slowly than the GPU works (host-bound)"
    if category == "unrecorded":
        evidence = f"{dry}; its host launched nothing for {host_ms:.2f} ms and no operation was recorded{where}: "
        return "host_stall", None, evidence + "Python code, garbage collection or the system"
    named = {"allocator": f"the allocator ({operation})", "garbage_collection": f"garbage collection ({operation})"}
    what = named.get(category, operation)
    detail = category if category in named else operation
    return "host_stall", detail, f"{dry}, while its host sat {host_ms:.2f} ms in {what}{where}"


def _copy_cause(copies_us: float, felt: float) -> tuple[Cause, str | None, str]:
    evidence = f"copies that ran beside no compute explain {copies_us / 1e3:.2f} of its {felt / 1e3:.2f} ms"
    return "late_input", "memcpy", evidence


def _compute_cause(diff: KernelDiff, compute_us: float) -> tuple[Cause, str | None, str]:
    """Same kernels for longer, or more of them."""
    late = f"it computed {compute_us / 1e3:.2f} ms longer before arriving"
    if diff.other_share >= 0.1 and diff.extra_us > 0:
        return (
            "more_work",
            diff.example,
            (
                f"{late}: {diff.other_share:.0%} of its kernels differ in grid or shapes from rank {diff.peer}'s, "
                f"{diff.extra_us / 1e3:+.2f} ms of kernels a step (such as {diff.example})"
            ),
        )
    if diff.ratio > 1.02:
        return (
            "slow_kernels",
            diff.example,
            (
                f"{late}: the same kernels take {diff.ratio:.2f} x as long as on rank {diff.peer} "
                f"({diff.matched} of {diff.count} kernels compared, worst {diff.example})"
            ),
        )
    if diff.extra_us > 0.5 * compute_us:
        return "more_work", diff.example, f"{late}: {diff.extra_us / 1e3:.2f} ms of kernels that rank {diff.peer} lacks"
    return "unknown", None, f"{late}, but its kernels are as many and as fast as those of rank {diff.peer}"
