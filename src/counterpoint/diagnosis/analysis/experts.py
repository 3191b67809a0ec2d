"""Find waiting that unequal load of MoE experts causes.

Tokens are dispatched to the ranks of their experts, computed, and combined. The rank whose experts got most
tokens comes last to the combine, and the others wait. A dispatch and its combine are recognised by kernel names (DeepEP
and the like), or by sizes: a rank sends back as many bytes as it received, and gets back as many as it sent. Where
sizes are equal or not stated, kernels of experts (grouped GEMMs) between two all-to-alls identify the pair less surely.
So do kernels of experts between peer copies, and between an all-gather of all tokens and the reduce-scatter of their
sums; such pairs are sure if the group is named after experts. A rank's peer copies start when the rank is ready;
compute streams of the other ranks then wait for the copies of the last rank.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

import msgspec
import numpy as np

from counterpoint.diagnosis.analysis.accounts import Activity, Waits, stated
from counterpoint.diagnosis.analysis.parallel_groups import parallels
from counterpoint.diagnosis.reading.traced_job import TracedJob
from counterpoint.records.diagnosis import Straggler
from counterpoint.trace.classify import expert_leg
from counterpoint.trace.timeline import F64, I64, Bools, Kind

_LEAST_SHARE = 0.03  # of a step: an imbalance that costs less is no finding
_UNEVEN_FACTOR = 1.05  # largest share / mean share: below this there is no imbalance
_SAME_SHARE = 0.02  # shares that differ by less are the same
_EXPERT_KERNEL = re.compile(r"moe|experts?_|group(ed)?_?(gemm|mm|matmul|problem)|m_grouped|gmm", re.IGNORECASE)
_EXPERT_SHARE = 0.5  # of the compute between two all-to-alls: if more is in expert kernels, experts run there
_DELAY_SHARE = 0.5  # of a late rank's delay: if its experts cause at least this share, they are the cause
_GATHERED = "gathered"
_KINDS = {  # of collectives that carry tokens to experts or back, by operation; a pair is of one kind
    "all_to_all": "all_to_all", "all_gather": _GATHERED, "reduce_scatter": _GATHERED, "peer_copy": "peer_copy",
}  # fmt: skip
EXPERTS = "experts"  # the detail of a rank that is late because of them
_EMBEDDINGS = re.compile(r"split_embedding|fbgemm", re.IGNORECASE)  # tables are exchanged like experts' tokens
_ELSEWHERE_SHARE = 0.5  # of a rank's slowness with experts that it has elsewhere, too: then the rank is slow, ...
_JITTER_SHARE = 0.02  # ... if that is more than jitter


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertWaits:
    """Holds µs of compute between dispatch and combine, and of waiting in the combine: [pairs, ranks]; NaN: absent."""

    combine: I64  # row of Joined
    last: I64  # column of the rank that came last to the combine
    sure: Bools  # known by names or sizes, not only by the kernels between two collectives
    compute: F64
    received: F64  # bytes that the dispatch brought; NaN: not stated
    waited: F64  # exposed wait in the combine for the rank whose experts took longest

    def caused_by(self, column: int) -> float:
        """Return the µs of waiting for one rank's experts: the mean over the waiting ranks, summed over combines."""
        others = np.delete(self.waited[self.last == column], column, axis=1)
        count = np.maximum(np.isfinite(others).sum(axis=1), 1)
        return float((np.nansum(others, axis=1) / count).sum())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Legs:
    """Holds pairs of collectives (rows of Joined) that may be a dispatch and its combine."""

    before: I64
    after: I64
    told: Bools  # names or sizes identify the pair; other pairs need mostly expert compute between
    sure: Bools  # as `ExpertWaits.sure`
    copied: Bools  # by copy engines


def expert_waits(job: TracedJob, w: Waits, busy: list[Activity]) -> ExpertWaits:
    """Return the µs that each rank computed between each dispatch and its combine, and then waited for slower ranks."""
    legs = _legs(job, w)
    came = np.where(legs.copied[:, None], job.joined.start[legs.after], w.arrival[legs.after])
    kept = np.flatnonzero(legs.told | _expert_compute(job, came, busy, legs.before))
    before, after, came = legs.before[kept], legs.after[kept], came[kept]
    ended, until, last = job.joined.end[before], np.nanmax(came, axis=1), np.nanargmax(came, axis=1)
    compute, waited = np.full(ended.shape, np.nan), w.exposed_wait[after]
    for column, rank in enumerate(busy):
        there = np.isfinite(ended[:, column]) & np.isfinite(came[:, column])
        low = ended[there, column]
        compute[there, column] = rank.compute.within(low, np.maximum(low, came[there, column]))
        there &= legs.copied[kept]
        low = came[there, column]
        waited[there, column] = until[there] - low - rank.compute.within(low, until[there])
    longer = compute[np.arange(len(after)), last][:, None] - compute
    return ExpertWaits(
        combine=after,
        last=last,
        sure=legs.sure[kept],
        compute=compute,
        received=_stated(job, "received")[before],
        waited=np.minimum(waited, np.maximum(longer, 0.0)),
    )


def _expert_compute(job: TracedJob, came: F64, busy: list[Activity], before: I64) -> Bools:
    """Return, for each pair of collectives, whether most compute between them is in kernels named after experts."""
    if not len(before):
        return np.zeros(0, bool)
    of_experts, computed = np.zeros(len(before)), np.zeros(len(before))
    for column, d in enumerate(job.digests):
        named = np.array([bool(_EXPERT_KERNEL.search(name)) for name in d.names], bool)[d.gpu.name]
        low, high = job.joined.end[before, column], came[:, column]
        there = np.flatnonzero(np.isfinite(low) & np.isfinite(high))
        low, high = low[there], np.maximum(low[there], high[there])
        of_experts[there] += job.runs(column, named & (d.gpu.kind == Kind.COMPUTE)).within(low, high)
        computed[there] += busy[column].compute.within(low, high)
    return np.asarray((of_experts > _EXPERT_SHARE * computed) & (computed > 0))


def blame_experts(
    job: TracedJob, busy: list[Activity], found: ExpertWaits, stragglers: tuple[Straggler, ...]
) -> tuple[Straggler, ...]:
    """Return the stragglers, with the experts as cause of each rank that computes longer because of its experts."""
    out = []
    for s in stragglers:
        column = job.ranks.index(s.rank)
        theirs = s.cause in ("slow_kernels", "slow_kernel", "more_work", "unknown")
        theirs &= found.caused_by(column) >= _DELAY_SHARE * s.delay_us
        if theirs and not _slow_elsewhere(job, busy, found, column):
            out.append(
                msgspec.structs.replace(s, cause="more_work", detail=EXPERTS, evidence=_load(job, found, column))
            )
        else:
            out.append(s)
    return tuple(out)


def _load(job: TracedJob, found: ExpertWaits, column: int) -> str:
    """Return text on the time and received bytes of one rank's experts, relative to the mean of all ranks."""
    total = np.nansum(found.compute, axis=0) / job.num_steps
    mean = max(float(total[np.isfinite(found.compute).any(axis=0)].mean()), 1e-9)
    received, share = np.nansum(found.received, axis=0), ""
    if received[column] > 0:
        share = f", and they received {received[column] / received[received > 0].mean():.1f} x the mean bytes"
    return (
        f"rank {job.ranks[column]}'s experts took {total[column] / mean:.1f} x the mean between dispatch and combine "
        f"({total[column] / 1e3:.2f} against {mean / 1e3:.2f} ms {'a step' if job.has_steps else 'in all'}){share}"
        + "; no sizes tell that they get more tokens, only kernels of experts between two collectives"
        * _unsure(found)
    )


def _unsure(found: ExpertWaits) -> bool:
    return bool(np.nansum(found.waited[~found.sure]) > 0.5 * np.nansum(found.waited))


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertImbalance:
    """Says how many µs a step loses because ranks wait for the rank whose experts have the most work."""

    cost_us: float
    evened_us: float  # µs by which experts of equal load would shorten the step
    column: int  # of the rank whose experts take longest
    load: str  # load of that rank, in words
    longest: float  # time of the busiest rank over the mean of its group, the median of all exchanges
    exchanges: int
    worst: int  # row of Joined: the combine with the longest wait
    sure: bool


def expert_imbalance(
    job: TracedJob, busy: list[Activity], found: ExpertWaits, step_us: float
) -> ExpertImbalance | None:
    """Return the cost of unequal load of experts, except on ranks slow elsewhere too; None if the cost is small."""
    slow = [c for c in range(len(job.ranks)) if _slow_elsewhere(job, busy, found, c)]
    counted = ~np.isin(found.last, slow)
    waited = found.waited[counted]
    took = np.isfinite(waited).sum(axis=1)
    waiting = took / np.maximum(took - 1, 1)  # the busiest rank does not wait
    cost = float((np.nansum(waited, axis=1) * waiting).sum()) / len(job.ranks) / job.num_steps
    if cost < _LEAST_SHARE * step_us:
        return None
    most = int(np.nansum(found.compute, axis=0).argmax())
    each = np.nanmax(found.compute, axis=1) / np.maximum(np.nanmean(found.compute, axis=1), 1e-9)
    return ExpertImbalance(
        cost_us=cost,
        evened_us=float(np.nansum(waited)) / len(job.ranks) / job.num_steps,
        column=most,
        load=_load(job, found, most),
        longest=float(np.median(each)),
        exchanges=len(found.combine),
        worst=int(found.combine[np.nanargmax(np.nanmax(found.waited, axis=1))]),
        sure=not _unsure(found),
    )


def _slow_elsewhere(job: TracedJob, busy: list[Activity], found: ExpertWaits, column: int) -> bool:
    """Return whether a rank also computes longer than others outside its experts (at least half as much longer)."""
    if len(busy) < 2 or not len(found.combine):
        return False
    within = np.nansum(found.compute, axis=0)
    whole = [float(rank.compute.within(job.step_start[:, c], job.step_end[:, c]).sum()) for c, rank in enumerate(busy)]
    outside = np.array(whole) - within
    with_experts, elsewhere = (
        float(us[column] / max(np.median(np.delete(us, column)), 1e-9)) - 1.0 for us in (within, outside)
    )
    return elsewhere >= max(_JITTER_SHARE, _ELSEWHERE_SHARE * with_experts)


def _legs(job: TracedJob, w: Waits) -> _Legs:
    """Return the pairs of collectives in the steps that are, or may be, a dispatch and its combine."""
    groups: dict[tuple[str, str, bytes], list[int]] = defaultdict(list)
    there, serves = job.joined.row >= 0, parallels(job)
    for j in np.flatnonzero((w.step >= 0) & (there.sum(axis=1) >= 2)).tolist():
        kind = _KINDS.get(job.joined.op[j])
        if kind == "all_to_all" or (kind and "ep" in (serves[j] or "ep").split("+")):
            groups[kind, job.joined.group[j], there[j].tobytes()].append(j)
    op = job.joined.op
    pairs = [(j, k) for rows in groups.values() for j, k in pairwise(rows) if op[k] != "all_gather"]
    before, after = np.array(pairs, np.int64).reshape(-1, 2).T
    leg = _by_name(job)
    sent, received = _stated(job, "sent"), _stated(job, "received")
    by_size = _uneven(received[before]) & _same_shares(received[before], sent[after])
    by_size &= _same_shares(sent[before], received[after])
    unnamed = (leg[before] == "") & (leg[after] == "")
    if any(_EMBEDDINGS.search(name) for name in job.digests[0].names):
        unnamed[:] = False
    by_name = (leg[before] == "dispatch") & (leg[after] == "combine")
    sent_apart = np.array([op[j] == "all_to_all" for j in before.tolist()], bool)
    told = by_name | (by_size & sent_apart)
    named = ~sent_apart & np.array([serves[j] is not None for j in after.tolist()], bool)
    may = np.flatnonzero(by_name | unnamed)
    return _Legs(
        before=before[may],
        after=after[may],
        told=told[may],
        sure=(told | named)[may],
        copied=np.array([op[j] == "peer_copy" for j in after[may].tolist()], bool),
    )


def _by_name(job: TracedJob) -> np.ndarray[tuple[int], np.dtype[np.str_]]:
    """Return `dispatch` or `combine` for each joined collective, by its kernel's name; "" if the name says neither."""
    leg = np.full(len(job.joined), "", "U8")
    for column, d in enumerate(job.digests):
        names = np.array([expert_leg(name) or "" for name in d.names], "U8")
        took = np.flatnonzero(job.joined.row[:, column] >= 0)
        leg[took] = names[d.gpu.name[d.comm.first[job.joined.row[took, column]]]]
    return leg


def _stated(job: TracedJob, column: str) -> F64:
    """Return a column of bytes of `CommRows` for every joined collective and rank; NaN: not stated or absent."""
    found = stated(job, column)
    return np.where(found >= 0, found, np.nan)


def _uneven(shares: F64) -> Bools:
    mean = np.nansum(shares, axis=1) / np.maximum(np.isfinite(shares).sum(axis=1), 1)
    return np.asarray(np.nan_to_num(shares).max(axis=1, initial=0.0) > _UNEVEN_FACTOR * mean)


def _same_shares(one: F64, other: F64) -> Bools:
    """Return whether each rank's share of the bytes is equal in both collectives; False if only one states bytes."""
    both = np.isfinite(one) == np.isfinite(other)
    a, b = (v / np.maximum(np.nansum(v, axis=1), 1e-9)[:, None] for v in (one, other))
    alike = ~(np.abs(a - b) > _SAME_SHARE * np.maximum(a, b))
    return np.asarray((both & alike).all(axis=1) & np.isfinite(one).any(axis=1))
