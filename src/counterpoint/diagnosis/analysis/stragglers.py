"""Find ranks that make the other ranks wait, and why.

A rank makes others wait if they have exposed waiting in collectives that it entered last. The cause shows in how the
time of this late rank r in those steps differs from that of the typical other rank o:

    wait_o - wait_r = (compute_r - compute_o) + (copies_r - copies_o) + (idle_r - idle_o)

The largest term tells where the cause lies: idle time in its host, compute time in its kernels. Whole steps are
compared, not single collectives: one stall in the forward pass leaves a rank behind in every collective of the backward
pass. A rank that itself waits longer, in another group, only passes on the delay of a rank in that group.

Ranks that are late together (those of a slow host, say) come last by turns, and none of them alone costs anything: they
count as one straggler, which is compared with the ranks that wait for them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from counterpoint.diagnosis.analysis.accounts import Activity, Waits
from counterpoint.diagnosis.analysis.idle import time_in
from counterpoint.diagnosis.analysis.parallel_groups import parallels
from counterpoint.diagnosis.reading.host_threads import CATEGORIES
from counterpoint.diagnosis.reading.intervals import Intervals
from counterpoint.diagnosis.reading.modules import PHASES, Places, in_words, module_of
from counterpoint.diagnosis.reading.traced_job import TracedJob
from counterpoint.records.diagnosis import Straggler, StragglerCause
from counterpoint.trace.classify import is_matmul
from counterpoint.trace.timeline import F64, I64, Kind

_LEAST_SHARE = 0.015  # of all steps: a smaller delay is no finding; on healthy GPUs it is 0.3 to 1.3 % (8 x H200)
_JITTER_US = 100.0  # a healthy rank is late by less, on average over the collectives that it enters last
_LEAST_SHARE_IN_JITTER = 0.03
_LEAST_SHARE_OF_ONE_STEP = 0.035  # of a single step: a delay of this share is enough
_LEAST_SHARE_UNEXPLAINED = 0.05  # of the time of all steps, where no cause is found
_OUTSTANDING_FACTOR = 3.0  # times the delay of the median rank ...
_OUTSTANDING_SHARE = 0.1  # ... or, where all ranks are late at times, this much of all steps more than the median rank
_SHARE_OF_WORST_STEP = 0.25  # steps with at least this share of the worst step's delay are analysed
_EXPLAINED_SHARE = 0.3  # of the delay: a difference of less is not its cause
_ONE_KERNEL_SHARE = 0.8  # of the longer compute of a rank is in kernels of one name, while the others, ...
_OTHER_KERNELS_SHARE = 0.2  # ... of at least this share of its compute, ...
_AS_FAST_SHARE = 0.1  # ... are slower by no more than this share of the slowness of that one
_AS_LATE_SHARE = 0.25  # of the first rank's wait: a rank that comes so shortly before the last is as late, ...
_TOGETHER_SHARE = 0.75  # ... if it does so in collectives with this share of all waiting
_SAME_CAUSE_SHARE = 0.5  # of the latest rank's excess time: a rank with less of it has another cause
_STRUCTURAL = ("send_recv", "recv", "send")  # pipeline stages wait for one another by design


_Signatures = dict[tuple[str, tuple[int, ...], str], F64]  # durations by name, grid and block, and shapes


@dataclass(frozen=True, kw_only=True, slots=True)
class Delays:
    """Holds, for each collective, the column of its last rank and the median exposed wait of the others (µs)."""

    collective: I64
    column: I64
    felt_us: F64


def find_delays(job: TracedJob, w: Waits) -> Delays:
    """Return the delays of the steps' collectives that have more than one rank, except sends and receives."""
    rows, columns, felt = [], [], []
    for j in np.flatnonzero(w.step >= 0).tolist():
        there = np.flatnonzero(np.isfinite(w.arrival[j]))
        if len(there) < 2 or job.joined.op[j] in _STRUCTURAL:
            continue
        last = int(w.last_column[j])
        others = there[there != last]
        rows.append(j)
        columns.append(last)
        felt.append(float(np.median(w.exposed_wait[j, others])))
    return Delays(collective=np.array(rows, np.int64), column=np.array(columns, np.int64), felt_us=np.array(felt))


def _felt_per_step(job: TracedJob, w: Waits, delays: Delays, column: int) -> F64:
    """Return the µs of delay that one rank caused in each step."""
    own = delays.column == column
    step = w.step[delays.collective[own]]
    return np.bincount(step, weights=delays.felt_us[own], minlength=len(job.step_names)).astype(np.float64)


def _stood_still_per_step(
    job: TracedJob, busy: list[Activity], w: Waits, delays: Delays, column: int, late: I64
) -> F64:
    """Return a late rank's µs of delay in each step, at most the longest time for which a rank not `late` stood still.

    The bound is needed since a rank may come last in a chain of collectives of different groups, in which different
    ranks wait.
    """
    own = delays.collective[delays.column == column]
    most = np.zeros(len(job.step_names))
    for c, rank in enumerate(busy):
        rows = own[np.isfinite(w.arrival[own, c])] if c not in late else own[:0]
        for step in np.unique(w.step[rows]).tolist():
            most[step] = max(most[step], _stood_still(w, rank, c, rows[w.step[rows] == step]))
    return np.minimum(_felt_per_step(job, w, delays, column), most)


def _stood_still(w: Waits, busy: Activity, column: int, rows: I64) -> float:
    """Return the µs that a rank waits in these collectives while it computes nothing; each µs counts once."""
    came = w.arrival[rows, column]
    waited = Intervals.union(came, came + w.wait[rows, column])
    return float((waited.end - waited.start - busy.compute.within(waited.start, waited.end)).sum())


def find_stragglers(job: TracedJob, busy: list[Activity], w: Waits, delays: Delays) -> tuple[Straggler, ...]:
    """Return the ranks whose delays stand out, worst first; none on a healthy job."""
    if len(job.ranks) < 2 or not len(delays.column):
        return ()
    together = _late_together(job, w, delays)
    if len(together) > 1:
        found = _find(job, busy, w, _as_one(w, delays, together), together)
        if any(s.with_ranks for s in found):
            return found
    return _find(job, busy, w, delays, together[:0])


def _late_together(job: TracedJob, w: Waits, delays: Delays) -> I64:
    """Return the columns of ranks that mostly arrive as late as the last rank, starting with the rank of most delay."""
    came = w.arrival[delays.collective]
    there = np.isfinite(came)
    longest = np.nan_to_num(np.nanmax(w.exposed_wait[delays.collective], axis=1))
    as_late = there & (np.nanmax(came, axis=1)[:, None] - came <= _AS_LATE_SHARE * longest[:, None])
    waited = (there * longest[:, None]).sum(axis=0)
    share = np.divide((as_late * longest[:, None]).sum(axis=0), waited, out=np.zeros(len(waited)), where=waited > 0)
    found = np.flatnonzero(share >= _TOGETHER_SHARE)
    if 2 * len(found) > len(job.ranks):
        return found[:0]
    felt = np.bincount(delays.column, weights=delays.felt_us, minlength=len(job.ranks))
    return found[np.argsort(-felt[found], kind="stable")].astype(np.int64)


def _as_one(w: Waits, delays: Delays, late: I64) -> Delays:
    """Return the delays with all `late` ranks merged into the first one, so that only other ranks' waits count."""
    own = np.flatnonzero(np.isin(delays.column, late))
    others = np.delete(w.exposed_wait[delays.collective[own]], late, axis=1)
    alone = np.isfinite(others).any(axis=1)
    column, felt = delays.column.copy(), delays.felt_us.copy()
    column[own], felt[own] = late[0], 0.0
    felt[own[alone]] = np.nanmedian(others[alone], axis=1)
    return Delays(collective=delays.collective, column=column, felt_us=felt)


def _find(job: TracedJob, busy: list[Activity], w: Waits, delays: Delays, together: I64) -> tuple[Straggler, ...]:
    ranks = len(job.ranks)
    total: F64 = np.bincount(delays.column, weights=delays.felt_us, minlength=ranks).astype(np.float64)
    last = np.bincount(delays.column, minlength=ranks)  # number of collectives that each rank entered last
    found = []
    for column in np.argsort(-total).tolist():
        late = together if column in together[:1] else np.array([column])
        if not _stands_out(job, delays, late, total, _felt_per_step(job, w, delays, column)):
            continue
        per_step = _stood_still_per_step(job, busy, w, delays, column, late)
        total[column] = per_step.sum()
        if not _stands_out(job, delays, late, total, per_step):
            continue
        straggler = _explain(job, busy, w, delays, late, per_step, int(last[column]))
        if straggler is not None:
            found.append(straggler)
    return tuple(sorted(found, key=lambda s: -s.delay_us))


def _stands_out(job: TracedJob, delays: Delays, late: I64, total: F64, per_step: F64) -> bool:
    column = int(late[0])
    duration = (job.step_end - job.step_start).mean(axis=1)
    share = _LEAST_SHARE if total[column] > _JITTER_US * (delays.column == column).sum() else _LEAST_SHARE_IN_JITTER
    enough = bool((per_step > _LEAST_SHARE_OF_ONE_STEP * duration).any()) or total[column] > share * duration.sum()
    typical = float(np.median(np.delete(total, late)))
    outstanding = total[column] > min(_OUTSTANDING_FACTOR * typical, typical + _OUTSTANDING_SHARE * duration.sum())
    return bool(enough and outstanding)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Excess:
    """Holds by how many µs, per activity, a late rank exceeds the median of the others in the steps that it delayed."""

    compute: float
    memcpy: float
    comm: float
    idle: float


def _explain(
    job: TracedJob, busy: list[Activity], w: Waits, delays: Delays, late: I64, per_step: F64, times_last: int
) -> Straggler | None:
    column = int(late[0])
    own = np.flatnonzero((delays.column == column) & (delays.felt_us > 0))
    felt = float(per_step.sum())
    steps = np.flatnonzero(per_step >= _SHARE_OF_WORST_STEP * per_step.max())
    spent = _spent_by_all(job, busy, w, steps)
    excess = _excess(spent, column, late)
    shown = float(per_step[steps].sum())
    worst = int(delays.collective[own[np.argmax(delays.felt_us[own])]])
    start, end = float(np.nanmin(job.joined.start[worst])), float(w.last_start[worst])
    if (
        excess.comm > _EXPLAINED_SHARE * shown
        or _waited_elsewhere(job, busy, w, delays.collective[own], column, steps) > 0.5 * shown
    ):
        return None  # the rank itself waits for other ranks, which are the cause
    if excess.idle >= max(excess.compute, excess.memcpy, _EXPLAINED_SHARE * shown):
        found = _host_cause(job, column, steps)
        if found.gap is not None:
            start, end = job.on_job_clock(column, np.array(found.gap)).tolist()
    elif excess.memcpy >= max(excess.compute, _EXPLAINED_SHARE * shown):
        found = _copy_cause(excess.memcpy, shown)
    else:
        found = _compute_cause(job, column, late, steps, excess.compute, shown)
    duration = float((job.step_end - job.step_start).mean(axis=1).sum())
    if found.cause == "unknown" and felt < _LEAST_SHARE_UNEXPLAINED * duration:
        return None
    comm, row = job.digests[column].comm, int(job.joined.row[worst, column])
    serves, place = parallels(job)[worst], in_words(comm.phase[row], comm.module[row])
    where = f" ({serves}){place}" if serves else place
    longest = f"; they waited longest in {comm.op[row]} #{job.joined.index[worst]}{where}" if where else ""
    return Straggler(
        rank=job.ranks[column],
        with_ranks=tuple(sorted(job.ranks[c] for c in late[1:].tolist() if _alike(_excess(spent, c, late), excess))),
        delay_us=felt,
        times_last=times_last,
        cause=found.cause,
        evidence=found.evidence + longest,
        detail=found.detail,
        start_us=start,
        end_us=end,
        phase=found.phase,
        module=found.module,
    )


def _waited_elsewhere(job: TracedJob, busy: list[Activity], w: Waits, felt_in: I64, column: int, steps: I64) -> float:
    """Return the µs that a rank itself waited in these steps, in collectives of other groups than it delayed."""
    there = np.isfinite(job.joined.start)

    def same_ranks(j: int, k: int) -> bool:  # or fewer ranks, if a trace lacks one of the group's collectives
        smaller = job.joined.group[j] == job.joined.group[k] and not (there[j] & ~there[k]).any()
        return smaller or bool((there[j] == there[k]).all())

    own = np.unique(there[felt_in], axis=0, return_index=True)[1]
    rows = np.flatnonzero(np.isin(w.step, steps) & there[:, column] & (w.exposed_wait[:, column] > 0))
    elsewhere = [j for j in rows.tolist() if not any(same_ranks(j, int(felt_in[k])) for k in own)]
    return _stood_still(w, busy[column], column, np.array(elsewhere, np.int64))


def _excess(spent: F64, column: int, late: I64) -> _Excess:
    """Return, per activity, a rank's µs minus the median µs of the ranks that are not late."""
    compute, memcpy, comm, idle = (spent[column] - np.median(np.delete(spent, late, axis=0), axis=0)).tolist()
    return _Excess(compute=compute, memcpy=memcpy, comm=comm, idle=idle)


def _alike(one: _Excess, latest: _Excess) -> bool:
    """Return whether a late rank has at least half the latest rank's excess in the activity where that is largest."""
    kind = max(("idle", "compute", "memcpy"), key=lambda name: float(getattr(latest, name)))
    return bool(getattr(one, kind) >= _SAME_CAUSE_SHARE * getattr(latest, kind))


def _spent_by_all(job: TracedJob, busy: list[Activity], w: Waits, steps: I64) -> F64:
    """Return what `_spent` returns for every rank in these steps: [R, 4] in µs."""
    waited = [Intervals.union(came, came + wait) for came, wait in zip(w.arrival.T, w.wait.T, strict=True)]
    start, end = job.step_start[steps], job.step_end[steps]
    return np.array([_spent(b, waited[c], start[:, c], end[:, c]) for c, b in enumerate(busy)])


def _spent(busy: Activity, waited: Intervals, start: F64, end: F64) -> tuple[float, float, float, float]:
    """Return the µs of compute, exposed copies, exposed communication and waits, and idle time in the windows."""
    compute = float(busy.compute.within(start, end).sum())
    copying = float((busy.compute | busy.memcpy).within(start, end).sum())
    working = float((busy.any | waited).within(start, end).sum())
    return compute, copying - compute, working - copying, float((end - start).sum()) - working


@dataclass(frozen=True, kw_only=True, slots=True)
class _Why:
    """Holds why a rank is late, where in the program, and the longest gap of its GPU if its GPU idles."""

    cause: StragglerCause
    evidence: str
    detail: str | None = None
    phase: str | None = None
    module: str | None = None
    gap: tuple[float, float] | None = None


def _host_cause(job: TracedJob, column: int, steps: I64) -> _Why:
    """Return the cause of lateness, judged by what the host did while the rank's GPU idled in these steps."""
    gaps, names = job.digests[column].gaps, job.digests[column].names
    us = time_in(job, column, steps)
    rows = np.flatnonzero(us > 0)
    if not len(rows):
        return _Why(cause="host_stall", evidence="its GPU had nothing to do; no single gap is long enough to say why")
    keys, which = np.unique(np.stack([gaps.category[rows], gaps.operation[rows]]), axis=1, return_inverse=True)
    idle = np.bincount(which.ravel(), weights=us[rows])
    most = int(idle.argmax())
    own = rows[which.ravel() == most]
    gap = int(own[us[own].argmax()])
    category, operation = CATEGORIES[keys[0, most]], names[keys[1, most]] if keys[1, most] >= 0 else None
    host_ms, gap_ms = float(gaps.host_us[gap]) / 1e3, float(us[gap]) / 1e3
    phase, module = _place(job.digests[column].gap_places, gap, names)
    where = f" (inside {names[gaps.inside[gap]]})" if gaps.inside[gap] >= 0 else ""
    where += in_words(phase, module)
    dry = f"its GPU ran dry for {idle[most] / 1e3:.2f} ms in all, {gap_ms:.2f} ms at once"
    cause: StragglerCause = "host_stall"
    detail = operation
    if category == "late_input":
        cause = "late_input"
        evidence = f"{dry}, while its host waited {host_ms:.2f} ms for input in {operation}{where}"
    elif category == "launch":
        detail = "launch"
        evidence = f"{dry}: its host launches more slowly than the GPU works (host-bound){in_words(phase, module)}"
    elif category == "queued":
        cause, detail = "unknown", None
        evidence = f"{dry}, with work queued that waited for something else: an event, a stream, another rank"
    elif category == "nothing_recorded":
        cause, detail = "unknown", category
        evidence = f"{dry}, before the first event of its trace or after the last"
    elif operation is None:
        detail = None
        evidence = (
            f"{dry}; its host launched nothing for {host_ms:.2f} ms and no operation was recorded{where}: Python code, "
            "garbage collection or the system"
        )
    elif category in ("allocator", "garbage_collection", "start_up", "profiler", "copy"):
        detail = category
        evidence = f"{dry}, while its host sat {host_ms:.2f} ms in {category.replace('_', ' ')} ({operation}){where}"
    else:
        evidence = f"{dry}, while its host sat {host_ms:.2f} ms in {operation}{where}"
    at = (float(gaps.start[gap]), float(gaps.end[gap]))
    return _Why(cause=cause, detail=detail, evidence=evidence, phase=phase, module=module, gap=at)


def _place(places: Places, row: int, names: tuple[str, ...]) -> tuple[str | None, str | None]:
    module = int(places.module[row])
    return PHASES[places.phase[row]], module_of(names[module]) if module >= 0 else None


def _copy_cause(copies_us: float, felt: float) -> _Why:
    evidence = f"copies that ran beside no compute explain {copies_us / 1e3:.2f} of its {felt / 1e3:.2f} ms"
    return _Why(cause="late_input", detail="memcpy", evidence=evidence)


def _compute_cause(job: TracedJob, column: int, late: I64, steps: I64, compute_us: float, felt: float) -> _Why:
    """Return the cause of lateness: different, slower or more kernels, or unknown if these do not explain the delay.

    The kernels of a rank in some steps are compared, by name, grid, block and input shapes, with those of the peer that
    has the median kernel time. Times of kernels that both ran are compared mean by mean, weighted by the rank's counts.
    """
    mine = _signatures(job, column, steps)
    others_of = {c: _signatures(job, c, steps) for c in range(len(job.ranks)) if c not in late}
    by_time = sorted(others_of, key=lambda c: sum(float(v.sum()) for v in others_of[c].values()))
    peer_column = by_time[(len(by_time) - 1) // 2]
    peer, theirs = job.ranks[peer_column], others_of[peer_column]
    both = mine.keys() & theirs.keys()
    matched, count = sum(min(len(mine[s]), len(theirs[s])) for s in both), sum(map(len, mine.values()))
    expected = sum(float(np.mean(theirs[s])) * len(mine[s]) for s in both)
    measured = sum(float(np.mean(mine[s])) * len(mine[s]) for s in both)
    ratio, other_share = measured / expected if expected > 0 else 1.0, 1 - matched / count if count else 0.0
    others = {s: v for s, v in mine.items() if s not in theirs}
    lacking = {s: v for s, v in theirs.items() if s not in mine}
    extra_us = sum(float(v.sum()) for v in others.values()) - sum(float(v.sum()) for v in lacking.values())
    extra_us += sum(
        float(mine[s].sum()) * (1 - len(theirs[s]) / len(mine[s])) for s in both if len(mine[s]) > len(theirs[s])
    )
    example = None
    if others:
        example = max(others, key=lambda s: float(others[s].sum()))[0][:120]
    elif both:
        longer = {s: (float(np.mean(mine[s])) - float(np.mean(theirs[s]))) * len(mine[s]) for s in both}
        example = max(both, key=lambda s: longer[s])[0][:120]
    places = zip(*(_by_place(job, c, steps) for c in (column, peer_column)), strict=True)
    phase, module = (_mostly(*of_both) for of_both in places)
    where = in_words(phase, module).replace(", in", ", mostly in", 1)
    text = f"it computes {compute_us / 1e3:.2f} ms longer than the typical rank{where}"
    enough = _EXPLAINED_SHARE * felt
    slower = ratio > 1.02 and measured - expected > enough
    slowest, slowest_ratio, other_ratio = _slowest(mine, theirs)
    cause: StragglerCause = "unknown"
    if other_share >= 0.1 and extra_us > enough:
        cause = "more_work"
        text += (
            f": {other_share:.0%} of its kernels differ in grid or shapes from rank {peer}'s, "
            f"{extra_us / 1e3:+.2f} ms of kernels (such as {example})"
        )
    elif slower and slowest:
        cause, example = "slow_kernel", slowest
        text += (
            f": {slowest} takes {slowest_ratio:.2f} x as long as on rank {peer}, in equal grids "
            f"and shapes, and all its other kernels {other_ratio:.2f} x: its work differs, not the GPU"
        )
    elif slower:
        cause = "slow_kernels"
        text += (
            f": the same kernels take {ratio:.2f} x as long as on rank {peer} "
            f"({matched} of {count} kernels compared, worst {example})"
        )
    elif extra_us > max(enough, 0.5 * compute_us):
        cause = "more_work"
        text += f": {extra_us / 1e3:.2f} ms of kernels that rank {peer} lacks"
    else:
        example = None
        text += f", but its kernels are as many and as fast as those of rank {peer}"
    return _Why(cause=cause, detail=example, evidence=text, phase=phase, module=module)


def _slowest(mine: _Signatures, theirs: _Signatures) -> tuple[str | None, float, float]:
    """Return the one kernel name that explains the slowness (or None), and the slowdowns of it and of all others.

    A slow GPU is slow in several kernels. If power limits the GPU, these may be its matrix products only; so a product
    is named only if there are other products and all other kernels are nearly as fast as on the peer.
    """
    measured, expected = defaultdict[str, float](float), defaultdict[str, float](float)
    for s in mine.keys() & theirs.keys():
        measured[s[0]] += float(mine[s].sum())
        expected[s[0]] += float(np.mean(theirs[s])) * len(mine[s])
    if not expected:
        return None, 1.0, 1.0
    name = max(measured, key=lambda n: measured[n] - expected[n])
    longer = sum(measured.values()) - sum(expected.values())
    rest = sum(expected.values()) - expected[name]
    if rest < _OTHER_KERNELS_SHARE * sum(expected.values()) or expected[name] <= 0:
        return None, 1.0, 1.0
    ratio, other = measured[name] / expected[name], (sum(measured.values()) - measured[name]) / rest
    alone = measured[name] - expected[name] >= _ONE_KERNEL_SHARE * longer > 0 and other - 1 <= _AS_FAST_SHARE * (
        ratio - 1
    )
    products = [n for n in expected if n != name and is_matmul(n)]
    if not alone or (is_matmul(name) and not products):
        return None, ratio, other
    return name, ratio, other


def _by_place(job: TracedJob, column: int, steps: I64) -> tuple[dict[str | None, float], dict[str | None, float]]:
    """Return the compute µs of a rank in some steps, by phase and by module; the key None means unknown."""
    d = job.digests[column]
    rows = np.flatnonzero((d.gpu.kind == Kind.COMPUTE) & job.in_steps(column, steps))
    us, places = (d.gpu.end - d.gpu.start)[rows], d.op_places
    by_phase = np.bincount(places.phase[rows], us, len(PHASES))
    used, which = np.unique(places.module[rows], return_inverse=True)
    by_module: dict[str | None, float] = defaultdict(float)  # ranges of several names may name one module
    for i, t in zip(used.tolist(), np.bincount(which.ravel(), us, len(used)).tolist(), strict=True):
        by_module[module_of(d.names[i]) if i >= 0 else None] += t
    return dict(zip(PHASES, by_phase.tolist(), strict=True)), by_module


def _mostly(mine: dict[str | None, float], theirs: dict[str | None, float]) -> str | None:
    """Return the phase or module with at least half of the time by which `mine` exceeds `theirs`, else None."""
    longer = {place: us - theirs.get(place, 0.0) for place, us in mine.items()}
    whole = sum(mine.values()) - sum(theirs.values())
    most = max(longer, key=lambda place: longer[place], default=None)
    return most if most is not None and longer[most] >= 0.5 * whole > 0 else None


def _signatures(job: TracedJob, column: int, steps: I64) -> _Signatures:
    """Return the µs of the compute kernels of some steps, by name, grid + block, and shapes."""
    d, gpu = job.digests[column], job.digests[column].gpu
    rows = np.flatnonzero((gpu.kind == Kind.COMPUTE) & job.in_steps(column, steps))
    if not len(rows):
        return {}
    facts = np.column_stack([gpu.name[rows], gpu.shape[rows], gpu.grid[rows], gpu.block[rows]])
    kinds, which = np.unique(facts, axis=0, return_inverse=True)
    order = np.argsort(which.ravel(), kind="stable")
    parts = np.split((gpu.end - gpu.start)[rows][order], np.cumsum(np.bincount(which.ravel()))[:-1])
    return {
        (d.names[k[0]], tuple(k[2:]), d.shapes[k[1]] if k[1] >= 0 else ""): part
        for k, part in zip(kinds.tolist(), parts, strict=True)
    }
