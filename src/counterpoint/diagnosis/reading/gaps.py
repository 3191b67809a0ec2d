"""Assign causes to all time in which a rank's GPU ran nothing, by the host's activity in that time.

A gap ends when a GPU operation starts. Until that operation is launched the GPU waits for the host: the cause is the
innermost host range of the launching thread at each moment, or, where that thread has none, of another thread. After
the launch the operation waits for something else (`queued`). Everything is computed for all gaps at once; see `Gaps`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from counterpoint.diagnosis.reading.host_categories import (
    ALLOCATOR,
    BETWEEN,
    CATEGORIES,
    COPY,
    EARLIER_WORK,
    LAUNCH,
    NO_LAUNCH,
    NOTHING,
    OPERATION,
    PAGES,
    QUEUED,
    START_UP,
    SYNCHRONISE,
    UNRECORDED,
    category_of,
)
from counterpoint.diagnosis.reading.host_threads import BLOCKING_COPY_US, SHORT_US, GapPieces, HostThreads
from counterpoint.diagnosis.reading.intervals import Intervals
from counterpoint.diagnosis.reading.steps import StepWindows
from counterpoint.trace.timeline import (
    F64,
    I32,
    I64,
    MIGRATION,
    U8,
    Bools,
    GpuOps,
    HostKind,
    HostOps,
    Kind,
    Timeline,
    previous_on_stream,
)

STALL_US = 500.0  # a host that launches nothing for this long stalls; one with shorter pauses is slow
_HIDDEN_US = 2000.0  # queued launches would hide a shorter pause if the host had not waited for the GPU
_LOADING_US = 500_000.0  # only calls that start CUDA or load a kernel library take longer
_SOON_US = 20.0  # an operation that waits for nothing begins this soon after its launch
_EARLIER_US = 1000.0  # a queued operation waits longer on an idle GPU only for work that was not recorded


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedShares:
    """Holds the share of each named host range or operation in each cause's idle time in the rank's steps."""

    category: U8
    name: I32
    share: F64

    @classmethod
    def of(cls, category: U8, name: I64, time: F64, whole: F64) -> NamedShares:
        """Return the sums of `time` by category and name, each as a share of the category's µs in `whole`."""
        causes, named, shares = [np.empty(0, np.uint8)], [np.empty(0, np.int32)], [np.empty(0)]
        for each in np.flatnonzero(whole > 0).tolist():
            rows = (category == each) & (name >= 0)
            total = np.bincount(name[rows], weights=time[rows])
            named.append(np.flatnonzero(total > 0).astype(np.int32))
            causes.append(np.full(len(named[-1]), each, np.uint8))
            shares.append(np.minimum(total[named[-1]] / whole[each], 1.0))
        return cls(category=np.concatenate(causes), name=np.concatenate(named), share=np.concatenate(shares))


@dataclass(frozen=True, kw_only=True, slots=True)
class Pauses:
    """Holds pauses in which a rank's host launched nothing for at least `STALL_US`, and did not wait for its GPU.

    A pause has one row for each host range that is innermost in part of it. Where the GPU had finished all
    work before the host went on, an unrecorded pause may have been a wait for the GPU, so only the time after the GPU
    finished counts.
    """

    number: I32  # of the pause
    start: F64
    end: F64
    time: F64  # µs of the pause in which the GPU neither computed nor copied
    category: U8  # into CATEGORIES
    operation: I32  # the host range; -1: not recorded


@dataclass(frozen=True, kw_only=True, slots=True)
class Gaps:
    """Holds all times [start, end) in which no GPU operation runs, and their causes; columns have one length.

    A gap has one row per cause: `time` is the part of the gap with that cause, longest first. Gaps are cut where steps
    begin and end. Names are indices into the rank's names, -1: not known. A row names only what took most of its time;
    `operations` and `functions` are separate tables, which cover every moment in the steps.
    """

    start: F64
    end: F64
    time: F64
    category: U8  # into CATEGORIES
    operation: I32  # host range that took most of `time`; for queued and between_kernels: the next GPU operation
    inside: I32  # the Python function or range around that host range
    host_us: F64  # µs for which no thread had launched anything before the gap's next launch
    operations: NamedShares  # names of innermost host ranges; of causes after a launch: of the next GPU operation
    functions: NamedShares  # names of the Python functions, or ranges, around those
    pauses: Pauses  # pauses of the host, also where the GPU does not idle but waits for another rank

    def __len__(self) -> int:
        return len(self.start)

    @property
    def whole(self) -> Bools:
        """Return a mask of rows that are the first, with the main cause, of their gap."""
        return np.concatenate(([True], self.start[1:] > self.start[:-1])) if len(self) else np.zeros(0, bool)


def find_gaps(timeline: Timeline, steps: StepWindows) -> Gaps:
    """Return every gap of a rank, from the first recorded event to the last, with the gap's causes."""
    start, end, op = _idle(timeline, steps)
    own = np.array([category_of(n) for n in timeline.names], np.uint8)
    waits = _Launches.of(timeline, _blocking(timeline.host, own), start, end, op)
    paused = _paused(timeline, steps)
    threads = HostThreads.of(timeline, own, Intervals.union(start, waits.held) | Intervals.union(*paused[:2]))
    parts = [_queued(timeline.gpu, waits, start, end)]
    known = np.where(np.isin(waits.thread, threads.order), waits.thread, -1)
    for thread in np.unique(known).tolist():
        gap = np.flatnonzero(known == thread).astype(np.int64)
        parts.append(threads.explain(thread, gap, start[gap], waits.held[gap]))
    pieces = GapPieces.joined(parts)
    _judge(timeline, threads, waits, pieces, start, end)
    host_us = np.minimum(waits.since_launch + waits.call_us, waits.held - start)
    named = _named(timeline, threads, known, pieces, op, Intervals.union(steps.start, steps.end))
    return _table(timeline, threads, pieces, start, end, op, host_us, *named, _pauses(timeline, threads, *paused))


def _idle(timeline: Timeline, steps: StepWindows) -> tuple[F64, F64, I64]:
    """Return start, end and next GPU operation of each gap, cut at step edges; operation -1: the trace ends."""
    gpu, host = timeline.gpu, timeline.host
    low = min(float(t.start[0]) for t in (gpu, host) if len(t))
    high = max(float(t.end.max()) for t in (gpu, host) if len(t))
    low, high = min(low, float(steps.start.min())), max(high, float(steps.end.max()))
    start = np.concatenate(([low], np.maximum.accumulate(gpu.end)))
    end = np.concatenate((gpu.start, [high]))
    op = np.concatenate((np.arange(len(gpu)), [-1]))
    real = end > start
    start, end, op = start[real], end[real], op[real]
    edges = np.unique(np.concatenate((steps.start, steps.end)))
    at = np.searchsorted(end, edges, side="right")  # the gap that each edge cuts, if the gap begins before the edge
    at = np.minimum(at, len(start) - 1)
    cuts = (start[at] < edges) & (edges < end[at]) if len(start) else np.zeros(len(edges), bool)
    begins = np.concatenate((start, edges[cuts]))
    order = np.argsort(begins, kind="stable")
    of = np.concatenate((np.arange(len(start)), at[cuts]))[order]
    begins = begins[order]
    last = np.concatenate((of[1:] != of[:-1], [True])) if len(of) else np.zeros(0, bool)
    ends = np.where(last, end[of], np.concatenate((begins[1:], [0.0])))
    return begins, ends, op[of]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Launches:
    """Holds when, and on which thread, the operation that ends each gap was launched."""

    known: Bools  # whether the launch is recorded
    launched: F64  # when it was launched; if not known, the end of the gap
    call_us: F64  # duration of the launching call
    held: F64  # end of the part that the host caused; the rest of the gap is `queued`
    thread: I32
    op: I64  # row of GpuOps; -1: the trace ends
    since_launch: F64  # time from the previous launch, or from the return of a later blocking call, to this launch
    blocking: I64  # rows of HostOps: calls that wait for the GPU

    @classmethod
    def of(cls, timeline: Timeline, blocking: I64, start: F64, end: F64, op: I64) -> _Launches:
        gpu, host = timeline.gpu, timeline.host
        launches, returns = (np.append(column, np.nan)[op] for column in (gpu.launch_start, gpu.launch_end))
        begins = np.append(gpu.start, np.inf)[op]
        known = np.isfinite(launches) | (op < 0)  # at the end of the trace: surely not yet
        waited = known & (begins - returns > _SOON_US)
        held = np.where(waited, np.clip(returns, start, end), end)
        busiest = gpu.launch_thread[gpu.launch_thread >= 0]
        main = np.bincount(busiest).argmax() if len(busiest) else -1
        thread = np.append(gpu.launch_thread, -1)[op]
        launched = np.where(np.isfinite(launches), launches, end)
        recorded = np.flatnonzero(np.isfinite(gpu.launch_start))
        recorded = recorded[np.argsort(gpu.launch_start[recorded], kind="stable")]
        reach = np.concatenate(([-np.inf], np.maximum.accumulate(gpu.launch_end[recorded])))
        before = reach[np.searchsorted(gpu.launch_start[recorded], launched, side="left")]
        returned = np.concatenate(([-np.inf], np.sort(host.end[blocking])))
        before = np.maximum(before, returned[np.searchsorted(returned, launched + 1.0, side="right") - 1])
        return cls(
            known=known,
            launched=launched,
            call_us=np.nan_to_num(returns - launches),
            held=held,
            thread=np.where(thread >= 0, thread, main).astype(np.int32),
            op=op,
            since_launch=np.maximum(launched - np.maximum(before, start.min(initial=0.0)), 0.0),
            blocking=blocking,
        )


def _queued(gpu: GpuOps, waits: _Launches, start: F64, end: F64) -> GapPieces:
    """Return the part of each gap between the launch and the start of the operation that ends the gap, with a cause.

    If the next operation is the first of its stream and began long after its launch, the stream was busy with work that
    was launched before the recording began.
    """
    gap = np.flatnonzero(waits.held < end)
    us, op = end[gap] - waits.held[gap], waits.op[gap]
    category = np.where(us <= _SOON_US, BETWEEN, QUEUED).astype(np.uint8)
    earlier = (us >= _EARLIER_US) & (previous_on_stream(gpu.stream) < 0)[op] & (start[gap] < gpu.launch_end[op])
    category[earlier] = EARLIER_WORK
    return GapPieces(gap, waits.held[gap], end[gap], category, np.full(len(gap), -1))


def _blocking(host: HostOps, own: U8) -> I64:
    """Return the rows of calls that wait for the GPU: synchronisations and blocking copies."""
    if not len(host):
        return np.empty(0, np.int64)
    category = own[host.name]
    copies = (category == COPY) & (host.end - host.start >= BLOCKING_COPY_US)
    return np.flatnonzero((host.kind == HostKind.RUNTIME) & ((category == SYNCHRONISE) | copies)).astype(np.int64)


def _judge(timeline: Timeline, threads: HostThreads, waits: _Launches, pieces: GapPieces, start: F64, end: F64) -> None:
    """Refine the categories of `pieces` in place, to slow launches, stalls, start-up or synchronisation."""
    gpu, host, gap = timeline.gpu, timeline.host, pieces.gap
    launched = np.isfinite(gpu.launch_start)
    kernels = launched & (gpu.kind != Kind.MEMCPY)
    first = float(gpu.launch_start[kernels if kernels.any() else launched].min(initial=np.inf))
    row = np.maximum(pieces.row, 0)
    call = (pieces.row >= 0) & (host.kind[row] == HostKind.RUNTIME) if len(host) else np.zeros(len(gap), bool)
    long = call & (host.end[row] - host.start[row] >= STALL_US) if len(host) else call
    others = np.isin(pieces.category, (OPERATION, ALLOCATOR, COPY))
    loading = call & (host.end[row] - host.start[row] >= _LOADING_US) if len(host) else call
    pieces.category[others & ((long & (pieces.start < first)) | loading)] = START_UP
    fresh = np.zeros(len(gpu) + 1, bool)
    fresh[np.unique(gpu.name, return_index=True)[1]] = True
    loads = long & (pieces.category == OPERATION) & fresh[waits.op[gap]] & (waits.call_us[gap] >= STALL_US)
    pieces.category[loads] = START_UP
    told = waits.known | timeline.device.from_host
    since_launch = np.where(told, np.maximum(waits.since_launch, waits.call_us), 0.0)
    stalls = np.maximum(since_launch, waits.held - start) >= STALL_US
    generic = np.isin(pieces.category, (OPERATION, UNRECORDED))
    slow = generic & ~stalls[gap]
    if timeline.device.from_host:  # operations run on the host, so there are no launches
        pieces.category[slow] = OPERATION
    else:
        pieces.category[slow & (waits.known[gap] | (pieces.category == OPERATION))] = LAUNCH
        after, by = _after_waiting(timeline, waits, start)
        after &= end - start < _HIDDEN_US
        waited = np.isin(pieces.category, (LAUNCH, UNRECORDED)) & after[gap]
        pieces.category[waited], pieces.row[waited] = SYNCHRONISE, by[gap[waited]]
        blind = (pieces.category == UNRECORDED) & ~waits.known[gap]
        pieces.category[blind] = NO_LAUNCH
        moves = np.array([name.startswith(MIGRATION) for name in timeline.names] + [False], bool)
        pieces.category[blind & moves[np.append(gpu.name, -1)[waits.op[gap]]]] = PAGES
    outside = (pieces.end <= threads.first) | (pieces.start >= threads.last)
    pieces.category[outside & np.isin(pieces.category, (UNRECORDED, NO_LAUNCH))] = NOTHING
    captured = _captures(timeline).covers((pieces.start + pieces.end) / 2)
    pieces.category[captured & np.isin(pieces.category, (OPERATION, UNRECORDED, LAUNCH))] = START_UP


def _after_waiting(timeline: Timeline, waits: _Launches, start: F64) -> tuple[Bools, I64]:
    """Return whether the host was waiting for the GPU as each gap began, and the row of that blocking call."""
    host, rows = timeline.host, waits.blocking
    if not len(rows):
        return np.zeros(len(start), bool), np.full(len(start), -1)
    at = np.searchsorted(host.start[rows], start + 1.0, side="right") - 1
    row = rows[np.maximum(at, 0)]
    found = (at >= 0) & (host.end[row] >= start - 5.0) & (host.end[row] <= waits.launched + 1.0)
    return found, row


def _captures(timeline: Timeline) -> Intervals:
    """Return the intervals of CUDA graph capture, in which launches run nothing on the GPU."""
    host, names = timeline.host, timeline.names
    if not len(host):
        return Intervals(np.empty(0), np.empty(0))
    begins, ends = (
        np.flatnonzero(np.array([n.endswith(what) for n in names], bool)[host.name] & (host.kind == HostKind.RUNTIME))
        for what in ("StreamBeginCapture", "StreamEndCapture")
    )
    after = np.searchsorted(host.start[ends], host.start[begins])
    begins, after = begins[after < len(ends)], after[after < len(ends)]
    return Intervals.union(host.start[begins], host.end[ends[after]])


def _named(
    timeline: Timeline, threads: HostThreads, thread: I64, pieces: GapPieces, op: I64, steps: Intervals
) -> tuple[NamedShares, NamedShares]:
    """Return idle time in the steps per host range or GPU operation, and per Python function around them.

    Each range gets the time in which it was innermost, also in short gaps, which have one cause. A gap caused by
    a wait of the host is entirely named after the call that waited.
    """
    time: F64 = steps.within(pieces.start, pieces.end)
    whole = np.asarray(np.bincount(pieces.category, weights=time, minlength=len(CATEGORIES)), np.float64)
    launched = np.isin(pieces.category, (QUEUED, BETWEEN, EARLIER_WORK))
    short = (pieces.end - pieces.start <= SHORT_US) & ~launched & (pieces.category != SYNCHRONISE) & (time > 0)
    gpu_name = np.append(timeline.gpu.name, -1)[op[pieces.gap]]
    parts: list[tuple[U8, I64, I32, F64]] = [
        (pieces.category[~short], pieces.row[~short], gpu_name[~short], time[~short])
    ]
    for each in np.unique(thread[pieces.gap[short]]).tolist():
        window = np.flatnonzero(short & (thread[pieces.gap] == each))
        part = threads.seen(each, window, pieces.start[window], pieces.end[window])
        parts.append((pieces.category[part.gap], part.row, gpu_name[part.gap], part.end - part.start))
    category, row = np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])
    gpu_name, us = np.concatenate([p[2] for p in parts]), np.concatenate([p[3] for p in parts])
    names = np.append(timeline.host.name, -1)
    operation = np.where(np.isin(category, (QUEUED, BETWEEN, EARLIER_WORK)), gpu_name, names[row])
    function = names[np.append(threads.inside, -1)[row]]
    return NamedShares.of(category, operation, us, whole), NamedShares.of(category, function, us, whole)


def _table(
    timeline: Timeline, threads: HostThreads, pieces: GapPieces, start: F64, end: F64, op: I64, host_us: F64,
    operations: NamedShares, functions: NamedShares, pauses: Pauses,
) -> Gaps:  # fmt: skip
    """Return one row per gap and cause: the sum of their pieces, named after the host range with the most time."""
    name = np.where(pieces.row >= 0, np.append(timeline.host.name, -1)[pieces.row], -1)
    key = pieces.gap * len(CATEGORIES) + pieces.category
    order = np.lexsort((name, key))
    key, name, row = key[order], name[order], pieces.row[order]
    time = (pieces.end - pieces.start)[order]
    firsts = np.flatnonzero(np.concatenate(([True], (key[1:] != key[:-1]) | (name[1:] != name[:-1])))[: len(key)])
    if not len(firsts):
        none, no = np.empty(0), np.empty(0, np.int32)
        return Gaps(start=none, end=none, time=none, category=np.empty(0, np.uint8), operation=no, inside=no,
                    host_us=none, operations=operations, functions=functions, pauses=pauses)  # fmt: skip
    key, row, part = key[firsts], row[firsts], np.add.reduceat(time, firsts)
    best = np.lexsort((part, row >= 0, key))  # pieces with a host range win over those without
    causes = np.flatnonzero(np.concatenate((key[1:] != key[:-1], [True])))
    whole = np.add.reduceat(part, np.concatenate(([0], causes[:-1] + 1)))
    row = row[best[causes]]
    gap, category = key[causes] // len(CATEGORIES), (key[causes] % len(CATEGORIES)).astype(np.uint8)
    around = np.where(row >= 0, np.append(threads.inside, -1)[row], -1)
    names = np.append(timeline.host.name, -1).astype(np.int32)
    order = np.lexsort((-whole, gap))
    operation, in_time = names[row], np.isin(category, (QUEUED, BETWEEN, EARLIER_WORK))
    operation[in_time] = np.append(timeline.gpu.name, -1)[op[gap[in_time]]]
    return Gaps(
        start=start[gap[order]], end=end[gap[order]], time=whole[order], category=category[order],
        operation=operation[order], inside=names[around[order]], host_us=host_us[gap[order]],
        operations=operations, functions=functions, pauses=pauses,
    )  # fmt: skip


def _paused(timeline: Timeline, steps: StepWindows) -> tuple[F64, F64, I32, F64]:
    """Return start, end and thread of each long pause in launches, and when the GPU had finished earlier work."""
    gpu = timeline.gpu
    rows = np.flatnonzero(np.isfinite(gpu.launch_start))
    rows = rows[np.argsort(gpu.launch_start[rows], kind="stable")]
    if not len(rows) or timeline.device.from_host:
        return np.empty(0), np.empty(0), np.empty(0, np.int32), np.empty(0)
    low, high = float(steps.start.min()), float(steps.end.max())
    start = np.maximum(np.concatenate(([low], np.maximum.accumulate(gpu.launch_end[rows]))), low)
    end = np.minimum(np.append(gpu.launch_start[rows], high), high)
    done = np.concatenate(([low], np.maximum.accumulate(gpu.end[rows])))
    thread = np.append(gpu.launch_thread[rows], gpu.launch_thread[rows[-1]])
    long = end - start >= STALL_US
    return start[long], end[long], thread[long], done[long]


def _pauses(timeline: Timeline, threads: HostThreads, start: F64, end: F64, thread: I32, done: F64) -> Pauses:
    gpu, names = timeline.gpu, np.append(timeline.host.name, -1)
    known = np.where(np.isin(thread, threads.order), thread, -1)
    none = np.empty(0, np.int64)
    parts = [GapPieces(none, np.empty(0), np.empty(0), np.empty(0, np.uint8), none)]
    for each in np.unique(known).tolist():
        own = np.flatnonzero(known == each)
        parts.append(threads.seen(each, own, start[own], end[own]))
    found = GapPieces.joined(parts)
    unsure = (found.category == UNRECORDED) & (done < end)[found.gap]
    begins = np.where(unsure, np.maximum(found.start, done[found.gap]), found.start)
    rows = np.flatnonzero((found.end > begins) & (found.category != SYNCHRONISE))
    works = Intervals.union(gpu.start[gpu.kind != Kind.COMM], gpu.end[gpu.kind != Kind.COMM])
    begins, ends = begins[rows], found.end[rows]
    return Pauses(
        number=found.gap[rows].astype(np.int32), start=begins, end=ends,
        time=ends - begins - works.within(begins, ends), category=found.category[rows],
        operation=names[found.row[rows]].astype(np.int32),
    )  # fmt: skip
