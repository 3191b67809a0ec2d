"""Assign a cause to all time in which a rank's GPU ran nothing, from what the host did meanwhile.

A gap ends when a GPU operation starts. Until that operation is launched the GPU waits for the host: the cause is the
innermost host range of the launching thread at each moment, or, where that thread has none, of another thread. After
the launch it waits for something else (`queued`). Everything is computed for all gaps at once; see `Gaps`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from counterpoint.diagnosis import host_names
from counterpoint.diagnosis.intervals import Intervals
from counterpoint.diagnosis.steps import StepWindows
from counterpoint.trace.timeline import (
    F64,
    I32,
    I64,
    MIGRATION,
    ROUNDED_US,
    U8,
    Bools,
    GpuOps,
    HostKind,
    HostOps,
    Kind,
    Timeline,
    previous_on_stream,
)

CATEGORIES = (
    "operation",  # the host spent long in one operation or Python function
    "launch",  # host-bound: the host launches more slowly than the GPU runs, without a single long pause
    "allocator",
    "garbage_collection",
    "late_input",
    "synchronise",  # the host had waited for the GPU, so nothing was queued
    "copy",  # a copy blocked the host
    "start_up",  # CUDA was starting, kernels were loaded or compiled, or a graph was captured
    "profiler",  # the profiler's own work
    "queued",  # the next operation was launched in time, but waited for an event, another stream or another rank
    "between_kernels",  # the next operation was launched in time: the few µs from one kernel to the next
    "no_launch_recorded",  # the trace does not say when the next operation was launched, nor what the host did
    "unrecorded",  # the host launched nothing, and no range of any thread says what it did
    "nothing_recorded",  # before the first event of the trace or after its last
    "earlier_work",  # the first operation of its stream, launched long ago, waits: for work that was not recorded
    "page_migration",  # between migrations of unified memory: no call launches them, the host touches pages
    "other_gpu",  # another GPU of the same process works: no gap of all its GPUs
)
_NUMBER = {name: number for number, name in enumerate(CATEGORIES)}
OPERATION, LAUNCH = _NUMBER["operation"], _NUMBER["launch"]
QUEUED, BETWEEN = _NUMBER["queued"], _NUMBER["between_kernels"]
SYNCHRONISE, COPY, START_UP = _NUMBER["synchronise"], _NUMBER["copy"], _NUMBER["start_up"]
ALLOCATOR, NO_LAUNCH, UNRECORDED = _NUMBER["allocator"], _NUMBER["no_launch_recorded"], _NUMBER["unrecorded"]
NOTHING, EARLIER_WORK = _NUMBER["nothing_recorded"], _NUMBER["earlier_work"]
PAGES = _NUMBER["page_migration"]
NOT_RECORDED = ("unrecorded", "no_launch_recorded", "nothing_recorded")  # the trace does not hold the cause

STALL_US = 500.0  # a host that launches nothing for longer stalls; for a shorter time, it is slow
_HIDDEN_US = 2000.0  # queued launches would have hidden a shorter pause, had the host not waited for the GPU
_LOADING_US = 500_000.0  # only calls that start CUDA or load a library of kernels take longer
_SOON_US = 20.0  # an operation that waits for nothing begins this soon after its launch
_EARLIER_US = 1000.0  # the GPU runs nothing for longer, though an operation is queued, only if work is not recorded
_SHORT_US = 100.0  # a shorter gap gets one cause, that of its middle
_BLOCKING_COPY_US = 100.0  # cudaMemcpyAsync returns sooner unless the memory is pageable
_TOUCHING = 4  # ranges that may begin where one ends, each around the next
_DEEPEST = 512  # levels of nesting; deeper ranges count as part of the range around them
_THREADS = 64  # threads that are analysed: those that launch most, then those with most ranges
_PATTERNS = (
    ("allocator", (host_names.ALLOCATION,)),
    ("garbage_collection", (host_names.GARBAGE_COLLECTION,)),
    ("start_up", (host_names.START_UP, host_names.CAPTURE, host_names.COMPILATION)),
    ("profiler", (host_names.PROFILER,)),
    ("late_input", (host_names.INPUT,)),
    ("synchronise", (host_names.SYNCHRONISATION,)),
    ("copy", (host_names.COPY,)),
)
_FRAME = re.compile(r"^(ProfilerStep|PyTorch Profiler|torch/profiler|profiler)")
_WAITING = re.compile(r"^<built-in .*(acquire|poll|select|wait|sleep|recv|read)\b|^(threading|queue|selectors)\.py\(")
_LIBRARY = re.compile(r"^<|^nn\.Module|(^|/)torch/|^(threading|queue|selectors|contextlib|functools)\.py\(")


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedShares:
    """Holds the share that each name has in the idle time of each cause, in the rank's steps; columns of one length."""

    category: U8
    name: I32
    share: F64

    @classmethod
    def of(cls, category: U8, name: I64, time: F64, whole: F64) -> NamedShares:
        """Sum `time` by category and name (-1: none), as shares in `whole`, the time of each category."""
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
    """Holds when a rank's host launched nothing for `STALL_US` or longer, and did not wait for its GPU; columns.

    A pause has one row for each host range that is innermost in part of it. Where the GPU had finished everything
    before the host went on, an unrecorded pause may have been a wait for it: only the time after that counts.
    """

    number: I32  # of the pause
    start: F64
    end: F64
    time: F64  # of that, µs in which the GPU neither computed nor copied
    category: U8  # into CATEGORIES
    operation: I32  # the host range; -1: not recorded


@dataclass(frozen=True, kw_only=True, slots=True)
class Gaps:
    """Holds all times [start, end) in which no GPU operation runs, and their causes; columns of one length.

    A gap has one row per cause: `time` is the part of the gap with that cause, longest first. Gaps are cut where steps
    begin and end. Names are indices into the rank's names, -1: not known. A row names only what took most of its time;
    `operations` and `functions` are tables of their own, of every moment in the steps.
    """

    start: F64
    end: F64
    time: F64
    category: U8  # into CATEGORIES
    operation: I32  # host range that took most of `time`; for queued and between_kernels: the next GPU operation
    inside: I32  # the Python function or range around that host range
    host_us: F64  # for how long no thread launched anything, until the gap's next launch
    operations: NamedShares  # innermost host ranges; of causes after a launch: the next GPU operation
    functions: NamedShares  # the Python functions, or ranges, around those
    pauses: Pauses  # of the host, also where the GPU does not idle, but waits for another rank

    def __len__(self) -> int:
        return len(self.start)

    @property
    def whole(self) -> Bools:
        """Return a mask of the first row of each gap, which has its main cause."""
        return np.concatenate(([True], self.start[1:] > self.start[:-1])) if len(self) else np.zeros(0, bool)


def find_gaps(timeline: Timeline, steps: StepWindows) -> Gaps:
    """Return every gap of a rank with its causes, from the first recorded event to the last."""
    start, end, op = _idle(timeline, steps)
    own = np.array([_category(n) for n in timeline.names], np.uint8)
    waits = _Launches.of(timeline, _blocking(timeline.host, own), start, end, op)
    paused = _paused(timeline, steps)
    threads = _Threads.of(timeline, own, Intervals.union(start, waits.held) | Intervals.union(*paused[:2]))
    parts = [_queued(timeline.gpu, waits, start, end)]
    known = np.where(np.isin(waits.thread, threads.order), waits.thread, -1)
    for thread in np.unique(known).tolist():
        gap = np.flatnonzero(known == thread).astype(np.int64)
        parts.append(threads.explain(thread, gap, start[gap], waits.held[gap]))
    pieces = _Pieces.joined(parts)
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
    at = np.searchsorted(end, edges, side="right")  # the gap that each edge cuts, if that gap begins before it
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
    """Holds, for each gap, when and on which thread the operation that ends it was launched."""

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


@dataclass(slots=True)
class _Pieces:
    """Holds parts of gaps, each with its cause and the row of the host range at that time (-1: none)."""

    gap: I64
    start: F64
    end: F64
    category: U8
    row: I64

    @classmethod
    def joined(cls, parts: list[_Pieces]) -> _Pieces:
        return cls(*(np.concatenate([getattr(p, name) for p in parts]) for name in cls.__dataclass_fields__))


def _queued(gpu: GpuOps, waits: _Launches, start: F64, end: F64) -> _Pieces:
    """Return the parts of gaps after the next operation was launched, with their causes.

    If nothing ran since that launch for long, and it is the first operation of its stream, the stream was busy with
    work that was launched before the recording began.
    """
    gap = np.flatnonzero(waits.held < end)
    us, op = end[gap] - waits.held[gap], waits.op[gap]
    category = np.where(us <= _SOON_US, BETWEEN, QUEUED).astype(np.uint8)
    earlier = (us >= _EARLIER_US) & (previous_on_stream(gpu.stream) < 0)[op] & (start[gap] < gpu.launch_end[op])
    category[earlier] = EARLIER_WORK
    return _Pieces(gap, waits.held[gap], end[gap], category, np.full(len(gap), -1))


@dataclass(frozen=True, slots=True)
class _Layer:
    """Holds disjoint spans of one thread (or of calls that block all threads), each with its innermost host range."""

    start: F64
    end: F64
    row: I32 | I64

    @classmethod
    def flat(cls, rows: I64, start: F64, end: F64, parent: I64) -> _Layer:
        """Return the spans in which each of `rows`, sorted by start, is innermost; `parent` is the range around it."""
        edge = np.concatenate((end[::-1], start))  # at equal times: ends before starts, inner ends before outer ends
        label = np.concatenate((parent[rows][::-1], rows)).astype(np.int32)
        order = np.argsort(edge, kind="stable")
        edge = edge[order]
        label = label[order]
        del order
        keep = (edge[1:] > edge[:-1]) & (label[:-1] >= 0)
        return cls(edge[:-1][keep], edge[1:][keep], label[:-1][keep])

    def at(self, when: F64) -> I64:
        """Return the row of the host range at each time in `when`; -1: none."""
        span = np.searchsorted(self.start, when, side="right") - 1
        return np.where((span >= 0) & (when < np.append(self.end, 0.0)[span]), np.append(self.row, -1)[span], -1)

    def over(self, gap: I64, start: F64, end: F64) -> tuple[tuple[I64, F64, F64, I64], tuple[I64, F64, F64]]:
        """Split time windows: return the parts inside spans, with rows, and the parts outside."""
        low = np.searchsorted(self.end, start, side="right")
        count = np.maximum(np.searchsorted(self.start, end, side="left") - low, 0)
        first = np.cumsum(count) - count
        windows = np.arange(len(gap))
        window = np.repeat(windows, count)
        at = np.arange(len(window))
        span = at + np.repeat(low - first, count)
        begins, ends = np.maximum(self.start[span], start[window]), np.minimum(self.end[span], end[window])
        opens, closes = (np.empty(len(gap) + len(at)) for _ in range(2))  # before, between and after a window's spans
        opens[first + windows], closes[first + count + windows] = start, end
        opens[at + window + 1], closes[at + window] = ends, begins
        left = closes > opens
        return (
            (gap[window], begins, ends, self.row[span]),
            (gap[np.repeat(windows, count + 1)[left]], opens[left], closes[left]),
        )


@dataclass(frozen=True, slots=True)
class _Threads:
    """Holds what the host did during the gaps: one layer for each thread, and one for calls that block all threads.

    `category` and `inside` have one entry per row of HostOps. A range inside an allocator, a data loader or the like
    has the category of that.
    """

    host: HostOps
    category: U8
    inside: I64  # row; -1: none
    shared: _Layer  # allocator, garbage collection and profiler, which block every thread
    layers: dict[int, _Layer]  # by thread; under ~thread the same without ranges in which a thread only waits
    order: tuple[int, ...]  # threads, those that launch most first
    first: float  # when the first event was recorded, of the host or the GPU, and ...
    last: float  # ... when the last one ended; steps and ranges around everything do not count

    @classmethod
    def of(cls, timeline: Timeline, own: U8, idle: Intervals) -> _Threads:
        host, gpu = timeline.host, timeline.gpu
        frames = np.array([host_names.says(n, _FRAME) for n in timeline.names], bool)
        use = (host.end > host.start) & (host.kind != HostKind.SYNC)
        if len(host):
            use &= ~frames[host.name] & (idle.within(host.start, host.end) > 0)
        around = _around_everything(timeline, own, use)
        use &= ~around
        events = ~around & ~frames[host.name] if len(host) else use
        rows = np.flatnonzero(use)
        parent, category, inside, end = _nested(timeline, own, rows)
        threads, count = np.unique(host.thread[rows], return_counts=True)
        launches = np.bincount(gpu.launch_thread[gpu.launch_thread >= 0], minlength=int(threads.max(initial=0)) + 1)
        ranked = threads[np.lexsort((-count, -launches[threads]))][:_THREADS]
        waiting = np.array([host_names.says(n, _WAITING) for n in timeline.names], bool)
        layers = {}
        for thread in ranked.tolist():
            on = rows[(host.thread[rows] == thread) & (parent[rows] > -2)]
            layers[thread] = _Layer.flat(on, host.start[on], end[on], parent)
        blocks = np.isin(category, (ALLOCATOR, _NUMBER["garbage_collection"], _NUMBER["profiler"]))
        held = rows[blocks[rows] & np.isin(host.kind[rows], (HostKind.RUNTIME, HostKind.PYTHON))]
        held = held[host.start[held] >= np.concatenate(([-np.inf], np.maximum.accumulate(host.end[held])[:-1]))]
        shared = _Layer(host.start[held], host.end[held], held)
        idle_others = {
            t: layer if k.all() else _Layer(layer.start[k], layer.end[k], layer.row[k])
            for t, layer in layers.items()
            for k in [~waiting[host.name[layer.row]]]
        }
        layers |= {~t: layer for t, layer in idle_others.items()}
        first = min(host.start[events].min(initial=np.inf), gpu.start.min(initial=np.inf))
        last = max(host.end[events].max(initial=-np.inf), gpu.end.max(initial=-np.inf))
        return cls(host, category, inside, shared, layers, tuple(ranked.tolist()), float(first), float(last))

    def explain(self, thread: int, gap: I64, start: F64, end: F64) -> _Pieces:
        """Return what the host did in [start, end) of each gap; for short gaps only the middle is looked up."""
        short = end - start <= _SHORT_US
        some = ~short & (end > start)
        at_once = self._seen_at_once(self._layers(thread), gap[short], start[short], end[short])
        return _Pieces.joined([at_once, self.seen(thread, gap[some], start[some], end[some])])

    def seen(self, thread: int, gap: I64, start: F64, end: F64) -> _Pieces:
        """Return what the host did in [start, end) of each gap, every moment of it."""
        parts = []
        left = (gap, start, end)
        for layer in self._layers(thread):
            if not len(left[0]):
                break
            (of, begins, ends, row), left = layer.over(*left)
            parts.append(_Pieces(of, begins, ends, self.category[row], row))
        none = np.full(len(left[0]), UNRECORDED, np.uint8)
        return _Pieces.joined([*parts, _Pieces(*left, none, np.full(len(none), -1))])

    def _layers(self, thread: int) -> list[_Layer]:
        """Return where to look, in turn: calls that block all threads, `thread`, the other threads."""
        others = [~t for t in self.order if t != thread]
        return [self.shared, *(self.layers[t] for t in [thread, *others] if t in self.layers)]

    def _seen_at_once(self, layers: list[_Layer], gap: I64, start: F64, end: F64) -> _Pieces:
        row = np.full(len(gap), -1)
        left = np.arange(len(gap))
        for layer in layers:
            row[left] = layer.at((start[left] + end[left]) / 2)
            left = left[row[left] < 0]
        category = np.where(row >= 0, np.append(self.category, UNRECORDED)[row], UNRECORDED).astype(np.uint8)
        real = end > start
        return _Pieces(gap[real], start[real], end[real], category[real], row[real])


def _blocking(host: HostOps, own: U8) -> I64:
    """Return the rows of calls that wait for the GPU: synchronisations and blocking copies."""
    if not len(host):
        return np.empty(0, np.int64)
    category = own[host.name]
    copies = (category == COPY) & (host.end - host.start >= _BLOCKING_COPY_US)
    return np.flatnonzero((host.kind == HostKind.RUNTIME) & ((category == SYNCHRONISE) | copies)).astype(np.int64)


@lru_cache(maxsize=1 << 13)  # the ranks of a job share their names
def _category(name: str) -> int:
    return next((_NUMBER[c] for c, patterns in _PATTERNS if any(p.search(name) for p in patterns)), OPERATION)


def _around_everything(timeline: Timeline, own: U8, use: Bools) -> Bools:
    """Return a mask of annotations, such as an epoch, around at least half of the recorded time and of the launches."""
    gpu, host = timeline.gpu, timeline.host
    if not use.any():
        return np.zeros(len(host), bool)
    tables = [t for t in (gpu, host) if len(t)]
    length = max(float(t.end.max()) for t in tables) - min(float(t.start[0]) for t in tables)
    plain = (host.kind == HostKind.ANNOTATION) & (own[host.name] == OPERATION)
    rows = np.flatnonzero(plain & (host.end - host.start >= 0.5 * length))
    launched = np.sort(np.where(np.isfinite(gpu.launch_start), gpu.launch_start, gpu.start))
    inside = np.searchsorted(launched, host.end[rows]) - np.searchsorted(launched, host.start[rows])
    found = np.zeros(len(host), bool)
    found[rows] = inside >= 0.5 * len(launched)
    return found


def _nested(timeline: Timeline, own: U8, rows: I64) -> tuple[I64, U8, I64, F64]:
    """Find how `rows` of HostOps nest on their threads.

    Returns:
        Parent row, category, row of the innermost Python function around it (else of the parent), and end, by row of
        HostOps. Parent -1: none; -2: nested too deeply. A range without a category of its own takes its parent's.
    """
    host = timeline.host
    library = np.array([host_names.says(n, _LIBRARY) for n in timeline.names], bool)
    category, parent = np.zeros(len(host), np.uint8), np.full(len(host), -1)
    inside = np.full(len(host), -1)
    if not len(rows):
        return parent, category, inside, host.end
    category[rows] = own[host.name[rows]]
    quick = (category == COPY) & (host.end - host.start < _BLOCKING_COPY_US)
    category[quick] = OPERATION
    function = (host.kind == HostKind.PYTHON) & ~library[host.name]
    order = rows[np.argsort(host.thread[rows], kind="stable")]
    depth = np.empty(len(order), np.int64)
    edges = np.flatnonzero(np.concatenate(([True], np.diff(host.thread[order]) != 0, [True])))
    ends = host.end.copy()
    for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        own_rows = order[low:high]
        ends[own_rows] = _apart(host.start[own_rows], host.end[own_rows])
        depth[low:high] = np.arange(high - low) - np.searchsorted(
            np.sort(ends[own_rows]), host.start[own_rows], side="right"
        )
    end = ends.copy()
    parent[order[depth >= _DEEPEST]] = -2
    by_depth = np.argsort(depth, kind="stable")
    levels = np.searchsorted(depth[by_depth], np.arange(min(int(depth.max()) + 1, _DEEPEST) + 1))
    for level in range(1, len(levels) - 1):
        here, above = by_depth[levels[level] : levels[level + 1]], by_depth[levels[level - 1] : levels[level]]
        around = order[above[np.searchsorted(above, here) - 1]]
        row = order[here]
        while (past := (around >= 0) & (ends[np.maximum(around, 0)] + ROUNDED_US < ends[row])).any():  # not nested:
            np.minimum.at(end, around[past], host.start[row[past]])  # the earlier range is cut where the later begins
            around[past] = parent[around[past]]
        parent[row] = around
        row, around = row[around >= 0], around[around >= 0]
        end[row] = np.minimum(end[row], end[around])
        ends[row] = np.minimum(ends[row], ends[around])
        category[row] = np.where(category[row] == OPERATION, category[around], category[row])
        inside[row] = np.where(function[around] | (inside[around] < 0) | ~function[inside[around]], around,
                               inside[around])  # fmt: skip
    return parent, category, inside, end


def _apart(start: F64, end: F64) -> F64:
    """Return the ends of ranges of one thread, sorted by start, so that ranges which touch do not overlap.

    A range that ends after another has begun, which goes on for longer, is cut where that begins. It is left as it is
    where it seems to go on by a rounding only: it may be around the other.
    """
    found, last = end.copy(), np.searchsorted(start, end, side="left") - 1
    for before in range(_TOUCHING):
        other = np.maximum(last - before, 0)
        beyond = end[other] - end
        touches = (beyond > ROUNDED_US) | (beyond > 0) & (end - start[other] <= ROUNDED_US)
        cut = touches & (other > np.arange(len(start)))
        found[cut] = np.minimum(found, start[other])[cut]
    return found


def _judge(timeline: Timeline, threads: _Threads, waits: _Launches, pieces: _Pieces, start: F64, end: F64) -> None:
    """Refine the categories of `pieces` in place: tell slow launches, stalls, start-up and synchronisation apart."""
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
    """Return when a CUDA graph is captured; launches during capture run nothing on the GPU."""
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
    timeline: Timeline, threads: _Threads, thread: I64, pieces: _Pieces, op: I64, steps: Intervals
) -> tuple[NamedShares, NamedShares]:
    """Return what the idle time in the steps is named after: host ranges or GPU operations, and Python functions.

    Each range gets the time in which it was innermost, also in short gaps, which have one cause. Where the cause is
    that the host had waited, all of the gap is named after that call.
    """
    time: F64 = steps.within(pieces.start, pieces.end)
    whole = np.asarray(np.bincount(pieces.category, weights=time, minlength=len(CATEGORIES)), np.float64)
    launched = np.isin(pieces.category, (QUEUED, BETWEEN, EARLIER_WORK))
    short = (pieces.end - pieces.start <= _SHORT_US) & ~launched & (pieces.category != SYNCHRONISE) & (time > 0)
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
    timeline: Timeline, threads: _Threads, pieces: _Pieces, start: F64, end: F64, op: I64, host_us: F64,
    operations: NamedShares, functions: NamedShares, pauses: Pauses,
) -> Gaps:  # fmt: skip
    """Sum the pieces of each gap and cause into one row, named after the host range with the most time."""
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
    """Return start, end and thread of each time without launches, and when the GPU was done with all before it."""
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


def _pauses(timeline: Timeline, threads: _Threads, start: F64, end: F64, thread: I32, done: F64) -> Pauses:
    gpu, names = timeline.gpu, np.append(timeline.host.name, -1)
    known = np.where(np.isin(thread, threads.order), thread, -1)
    none = np.empty(0, np.int64)
    parts = [_Pieces(none, np.empty(0), np.empty(0), np.empty(0, np.uint8), none)]
    for each in np.unique(known).tolist():
        own = np.flatnonzero(known == each)
        parts.append(threads.seen(each, own, start[own], end[own]))
    found = _Pieces.joined(parts)
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
