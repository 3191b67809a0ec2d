"""Find the ranks that make other ranks wait, and why they are late.

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

from dataclasses import dataclass

import numpy as np

from counterpoint.diagnosis.analysis.accounts import Activity, Waits
from counterpoint.diagnosis.analysis.parallel_groups import parallels
from counterpoint.diagnosis.analysis.straggler_causes import EXPLAINED_SHARE, compute_cause, copy_cause, host_cause
from counterpoint.diagnosis.reading.intervals import Intervals
from counterpoint.diagnosis.reading.modules import in_words
from counterpoint.diagnosis.reading.traced_job import TracedJob
from counterpoint.records.diagnosis import Straggler
from counterpoint.trace.timeline import F64, I64

_LEAST_SHARE = 0.015  # of all steps: a smaller delay is no finding; on healthy GPUs it is 0.3 to 1.3 % (8 x H200)
_JITTER_US = 100.0  # a healthy rank is late by less, on average over the collectives that it enters last
_LEAST_SHARE_IN_JITTER = 0.03
_LEAST_SHARE_OF_ONE_STEP = 0.035  # of a single step: a delay of this share is enough
_LEAST_SHARE_UNEXPLAINED = 0.05  # of the time of all steps, where no cause is found
_OUTSTANDING_FACTOR = 3.0  # times the delay of the median rank ...
_OUTSTANDING_SHARE = 0.1  # ... or, where all ranks are late at times, this much of all steps more than the median rank
_SHARE_OF_WORST_STEP = 0.25  # steps with at least this share of the worst step's delay are analysed
_AS_LATE_SHARE = 0.25  # of the first rank's wait: a rank that comes so shortly before the last is as late, ...
_TOGETHER_SHARE = 0.75  # ... if it does so in collectives with this share of all waiting
_SAME_CAUSE_SHARE = 0.5  # of the latest rank's excess time: a rank with less of it has another cause
_STRUCTURAL = ("send_recv", "recv", "send")  # pipeline stages wait for one another by design


@dataclass(frozen=True, kw_only=True, slots=True)
class Delays:
    """Holds, per collective, the column of the rank that came last and the other ranks' median exposed wait in µs."""

    collective: I64
    column: I64
    felt_us: F64


def find_delays(job: TracedJob, w: Waits) -> Delays:
    """Return the delays in collectives of more than one rank inside the steps, except sends and receives."""
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
    """Return a late rank's delay in each step in µs, but no more than the longest time for which another rank waited.

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
    """Return for how many µs a rank waits in the collectives `rows` and computes nothing; overlaps count once."""
    came = w.arrival[rows, column]
    waited = Intervals.union(came, came + w.wait[rows, column])
    return float((waited.end - waited.start - busy.compute.within(waited.start, waited.end)).sum())


def find_stragglers(job: TracedJob, busy: list[Activity], w: Waits, delays: Delays) -> tuple[Straggler, ...]:
    """Return the ranks that delay others far more than is usual, worst first; none on a healthy job."""
    if len(job.ranks) < 2 or not len(delays.column):
        return ()
    together = _late_together(job, w, delays)
    if len(together) > 1:
        found = _find(job, busy, w, _as_one(w, delays, together), together)
        if any(s.with_ranks for s in found):
            return found
    return _find(job, busy, w, delays, together[:0])


def _late_together(job: TracedJob, w: Waits, delays: Delays) -> I64:
    """Return the columns of ranks that mostly arrive about as late as the last one, by falling delay."""
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
    """Return the delays with all `late` ranks treated as one, the first: only the waits of other ranks count."""
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
    """Holds a late rank's µs per activity minus the median of the other ranks, in the steps that the rank delayed."""

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
        excess.comm > EXPLAINED_SHARE * shown
        or _waited_elsewhere(job, busy, w, delays.collective[own], column, steps) > 0.5 * shown
    ):
        return None  # the rank itself waits for other ranks, which are the cause
    if excess.idle >= max(excess.compute, excess.memcpy, EXPLAINED_SHARE * shown):
        found = host_cause(job, column, late, steps)
        if found.gap is not None:
            start, end = job.on_job_clock(column, np.array(found.gap)).tolist()
    elif excess.memcpy >= max(excess.compute, EXPLAINED_SHARE * shown):
        found = copy_cause(excess.memcpy, shown)
    else:
        found = compute_cause(job, column, late, steps, excess.compute, shown)
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
    """Return the µs that a rank itself waited in these steps in collectives of groups that it did not delay."""
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
    """Return whether excess `one` is at least half of excess `latest` in the activity where `latest` is largest."""
    kind = max(("idle", "compute", "memcpy"), key=lambda name: float(getattr(latest, name)))
    return bool(getattr(one, kind) >= _SAME_CAUSE_SHARE * getattr(latest, kind))


def _spent_by_all(job: TracedJob, busy: list[Activity], w: Waits, steps: I64) -> F64:
    """Return every rank's µs per activity (as of `_spent`) in these steps: [R, 4]."""
    waited = [Intervals.union(came, came + wait) for came, wait in zip(w.arrival.T, w.wait.T, strict=True)]
    start, end = job.step_start[steps], job.step_end[steps]
    return np.array([_spent(b, waited[c], start[:, c], end[:, c]) for c, b in enumerate(busy)])


def _spent(busy: Activity, waited: Intervals, start: F64, end: F64) -> tuple[float, float, float, float]:
    """Return a rank's µs of compute, exposed copies, exposed communication or waits, and idle time in the windows."""
    compute = float(busy.compute.within(start, end).sum())
    copying = float((busy.compute | busy.memcpy).within(start, end).sum())
    working = float((busy.any | waited).within(start, end).sum())
    return compute, copying - compute, working - copying, float((end - start).sum()) - working
