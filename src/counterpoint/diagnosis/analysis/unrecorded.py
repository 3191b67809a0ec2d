"""Estimate how long collectives waited for ranks without a trace, by usual times of equal collectives.

Where every rank of a group is read, the last arrival tells waiting from moving bytes. With one rank's trace, or without
that of the late rank, both look alike. What can be said is a lower bound: among collectives of one operation, group and
size, those that take far longer than usual do so because a rank is late, for bytes and links are the same. Where the
trace holds no sizes, calls of one kernel with one grid are compared, by a factor that sizes do not explain.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from counterpoint.diagnosis.analysis.accounts import Activity, Waits, most_stated
from counterpoint.diagnosis.reading.intervals import Intervals
from counterpoint.diagnosis.reading.traced_job import TracedJob
from counterpoint.trace.timeline import F64, I64, Bools, Intern, Kind

_LEAST_CALLS = 3  # least number of collectives of one size that tell the usual time
_LEAST_CALLS_OF_ANY_SIZE = 8  # least number of calls of one kernel and grid, where no size is stated
_LEAST_CALLS_OF_ANOTHER_SIZE = 2  # least number of collectives of another size
_QUANTILE = 0.25  # low, since many collectives may contain a wait
_SUSPECT_FACTOR = 2.0  # contention does not explain more than this many times the usual time, ...
_SUSPECT_FACTOR_OF_ANY_SIZE = 8.0  # nor do sizes for which NCCL takes one kernel with one grid
_SUSPECT_US = 50.0  # ... and jitter does not explain more than this
_SHARED_SHARE = 0.5  # of a transfer beside which other collectives run
_EVEN = ("all_reduce", "all_gather", "reduce_scatter")  # ranks move equally many bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Unrecorded:
    """Holds each joined collective's suspected waiting for ranks without a trace, in µs [J]; `exposed_us`: [J, R]."""

    usual_us: F64  # longest usual time of such a collective if no rank is late; NaN: unknown
    excess_us: F64  # part of its transfer that is suspected to be waiting
    exposed_us: F64  # exposed part of `excess_us`; NaN: the rank took no part

    def by_operation(self, job: TracedJob) -> list[F64]:
        """Return the µs of suspected waiting of every GPU operation, one array per rank."""
        found = []
        for column, d in enumerate(job.digests):
            excess = np.zeros(len(d.gpu))
            rows = np.flatnonzero(job.joined.row[:, column] >= 0)
            excess[d.comm.first[job.joined.row[rows, column]]] = self.excess_us[rows]
            found.append(excess)
        return found


def find_unrecorded(job: TracedJob, busy: list[Activity], w: Waits) -> Unrecorded:
    """Return which collectives lack traces of some ranks, and the suspected µs of waiting for these ranks in each."""
    there = job.joined.row >= 0
    incomplete = ~w.complete
    transfer = np.where(there, w.transfer, np.inf).min(axis=1, initial=np.inf)
    beside = np.zeros(there.shape)
    for column in range(len(busy)):
        rows = np.flatnonzero(there[:, column] & incomplete)
        start, end = w.last_start[rows], job.joined.end[rows, column]
        beside[rows, column] = _several(job, column).within(start, np.maximum(start, end))
    shared = beside.max(axis=1, initial=0.0)  # concurrent collectives share the links: these tell no usual time
    own = np.where(shared > _SHARED_SHARE * transfer, np.nan, np.maximum(transfer - shared, 0.0))
    usual, limit = _usual(job, own, incomplete)
    copies = most_stated(job, "ctas") == 0  # copies wait before they begin
    late = incomplete & ~copies & (own > limit)
    excess = np.where(late, own - np.where(np.isfinite(usual), np.maximum(usual, 0.0), 0.0), 0.0)
    exposed = np.where(there, 0.0, np.nan)
    for column, rank in enumerate(busy):
        rows = np.flatnonzero(there[:, column] & late)
        start = w.last_start[rows]
        exposed[rows, column] = excess[rows] - rank.compute.within(start, start + excess[rows])
    return Unrecorded(usual_us=np.where(copies, np.nan, usual), excess_us=excess, exposed_us=exposed)


def _several(job: TracedJob, column: int) -> Intervals:
    """Return the intervals in which at least two communication operations run at once on a rank."""
    rows = job.digests[column].gpu.kind == Kind.COMM
    start, end = np.sort(job.op_start[column][rows]), np.sort(job.op_end[column][rows])
    at = np.concatenate((start, end))
    order = np.lexsort((np.repeat([1, 0], len(start)), at))  # an end before a start at the same time
    depth = np.cumsum(np.where(order < len(start), 1, -1))
    at = at[order]
    busy = np.flatnonzero(depth[:-1] >= 2)
    return Intervals.union(at[busy], at[busy + 1])


def _usual(job: TracedJob, own: F64, judged: Bools) -> tuple[F64, F64]:
    """Return, per collective, the longest transfer µs that are usual, and the limit above which waiting is suspected.

    Returns:
        The longest time that counts as usual for the collective's kind, and the time beyond which waiting is suspected.
        Both follow from a low quantile over collectives of equal operation, group and size. Times of larger collectives
        of the group also limit smaller ones, and times of smaller ones limit larger ones in proportion to bytes:
        bandwidth grows with size.
    """
    count = len(job.joined)
    usual, limit = np.full(count, np.nan), np.full(count, np.inf)
    size = most_stated(job, "bytes")
    messages = np.array([op == "send_recv" for op in job.joined.op], bool)  # their sizes and waits differ by schedule
    rows = np.flatnonzero(judged & np.isfinite(own) & ((size >= 0) | ~messages))
    if not len(rows):
        return usual, limit
    keys, which = np.unique(_keys(job, rows, size), axis=0, return_inverse=True)
    which = which.ravel()
    order = np.lexsort((own[rows], which))
    number = np.bincount(which)
    first = np.cumsum(number) - number
    low = own[rows][order][first + (_QUANTILE * (number - 1)).astype(np.int64)]
    sized = keys[:, 2] >= 0
    measure = np.where(number >= np.where(sized, _LEAST_CALLS, _LEAST_CALLS_OF_ANY_SIZE), low, np.inf)
    even = np.isin(np.array([job.joined.op[j] for j in rows[order[first]].tolist()]), _EVEN)
    even &= sized & (number >= _LEAST_CALLS_OF_ANOTHER_SIZE)
    measure = np.minimum(measure, _from_other_sizes(keys, np.where(even, low, np.inf)))
    bound = np.where(sized, _SUSPECT_FACTOR, _SUSPECT_FACTOR_OF_ANY_SIZE) * measure + _SUSPECT_US
    ordinary = own[rows] <= bound[which]
    slowest = np.full(len(keys), -np.inf)
    np.maximum.at(slowest, which[ordinary], own[rows][ordinary])
    slowest = np.where(np.isfinite(slowest), slowest, bound)
    limit[rows] = bound[which]
    usual[rows] = np.where(np.isfinite(measure), slowest, np.nan)[which]
    return usual, limit


def _keys(job: TracedJob, rows: I64, size: I64) -> I64:
    """Return three integers per collective: an id of operation and group, an id of the recorded ranks, and bytes.

    Without bytes (-1) the first id is also that of the kernel and its grid.
    """
    table: Intern[tuple[object, ...]] = Intern()
    kernels = [_kernel(job, j) if size[j] < 0 else () for j in rows.tolist()]
    names = ((job.joined.op[j], job.joined.group[j], *k) for j, k in zip(rows.tolist(), kernels, strict=True))
    named = np.array([table[name] for name in names], np.int64)
    members = np.unique(job.joined.row[rows] >= 0, axis=0, return_inverse=True)[1].ravel()
    return np.stack([named, members.astype(np.int64), size[rows]], axis=1)


def _kernel(job: TracedJob, collective: int) -> tuple[object, ...]:
    """Return the name and the number of blocks of a collective's kernel, on the first rank that took part."""
    column = int((job.joined.row[collective] >= 0).argmax())
    d, row = job.digests[column], job.joined.row[collective, column]
    return d.names[d.gpu.name[d.comm.first[row]]], int(d.comm.ctas[row])


def _from_other_sizes(keys: I64, low: F64) -> F64:
    """Return the most µs that collectives of each key should take, by the same operation's times at other sizes."""
    measure = np.full(len(keys), np.inf)
    cuts = np.flatnonzero((keys[1:, :2] != keys[:-1, :2]).any(axis=1)) + 1
    for part in np.split(np.arange(len(keys)), cuts):
        size = np.maximum(keys[part, 2], 1).astype(np.float64)
        larger = np.minimum.accumulate(low[part][::-1])[::-1]
        smaller = np.minimum.accumulate(low[part] / size) * size
        measure[part] = np.minimum(larger, smaller)
    return measure
