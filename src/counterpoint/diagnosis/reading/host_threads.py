"""Find the host's activity in gaps between GPU operations: each thread's innermost range and the one around it.

`host_categories.py` says which cause of idle time a range's name stands for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from counterpoint.diagnosis.reading.host_categories import (
    ALLOCATOR,
    COPY,
    GARBAGE_COLLECTION,
    OPERATION,
    PROFILER,
    UNRECORDED,
    says,
)
from counterpoint.diagnosis.reading.intervals import Intervals
from counterpoint.trace.timeline import F64, I32, I64, ROUNDED_US, U8, Bools, HostKind, HostOps, Timeline

SHORT_US = 100.0  # a shorter gap gets a single cause, by its midpoint
BLOCKING_COPY_US = 100.0  # cudaMemcpyAsync returns sooner unless the memory is pageable
_TOUCHING = 4  # most nested ranges that may begin where one range ends
_DEEPEST = 512  # levels of nesting; deeper ranges count as part of the range around them
_THREADS = 64  # threads that are analysed: those that launch most, then those with most ranges
_FRAME = re.compile(r"^(ProfilerStep|PyTorch Profiler|torch/profiler|profiler)")
_WAITING = re.compile(r"^<built-in .*(acquire|poll|select|wait|sleep|recv|read)\b|^(threading|queue|selectors)\.py\(")
LIBRARY = re.compile(r"^<|^nn\.Module|(^|/)torch/|^(threading|queue|selectors|contextlib|functools)\.py\(")


@dataclass(slots=True)
class GapPieces:
    """Holds pieces of gaps, each with a cause and the row of the host range at that time (-1: none)."""

    gap: I64
    start: F64
    end: F64
    category: U8
    row: I64

    @classmethod
    def joined(cls, parts: list[GapPieces]) -> GapPieces:
        """Concatenate the tables `parts` into one."""
        return cls(*(np.concatenate([getattr(p, name) for p in parts]) for name in cls.__dataclass_fields__))


@dataclass(frozen=True, slots=True)
class _Layer:
    """Holds disjoint spans of one thread (or of calls that block all threads), each with its innermost host range."""

    start: F64
    end: F64
    row: I32 | I64

    @classmethod
    def flat(cls, rows: I64, start: F64, end: F64, parent: I64) -> _Layer:
        """Return the spans in which each host range of `rows` (by start) is innermost; `parent`: enclosing range."""
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
        """Split the time windows of gaps into pieces inside this layer's spans, with the spans' rows, and the rest."""
        low = np.searchsorted(self.end, start, side="right")
        count = np.maximum(np.searchsorted(self.start, end, side="left") - low, 0)
        first = np.cumsum(count) - count
        windows = np.arange(len(gap))
        window = np.repeat(windows, count)
        at = np.arange(len(window))
        span = at + np.repeat(low - first, count)
        begins, ends = np.maximum(self.start[span], start[window]), np.minimum(self.end[span], end[window])
        opens, closes = (np.empty(len(gap) + len(at)) for _ in range(2))  # outside of a window's spans
        opens[first + windows], closes[first + count + windows] = start, end
        opens[at + window + 1], closes[at + window] = ends, begins
        left = closes > opens
        return (
            (gap[window], begins, ends, self.row[span]),
            (gap[np.repeat(windows, count + 1)[left]], opens[left], closes[left]),
        )


@dataclass(frozen=True, slots=True)
class HostThreads:
    """Holds the host's activity during gaps: a layer for each thread, and one for calls that block all threads.

    `category` and `inside` have one entry per row of HostOps. A range inside an allocator, a data loader or the like
    has the category of the allocator or loader.
    """

    host: HostOps
    category: U8
    inside: I64  # row; -1: none
    shared: _Layer  # allocator, garbage collection and profiler, which block every thread
    layers: dict[int, _Layer]  # by thread; under ~thread the same without ranges in which a thread only waits
    order: tuple[int, ...]  # threads, those that launch most first
    first: float  # start of the first recorded event of host or GPU, ...
    last: float  # ... and end of the last one; steps and ranges around everything do not count

    @classmethod
    def of(cls, timeline: Timeline, own: U8, idle: Intervals) -> HostThreads:
        """Return the host ranges that overlap the intervals `idle`, by thread; `own` is the category of each name."""
        host, gpu = timeline.host, timeline.gpu
        frames = np.array([says(n, _FRAME) for n in timeline.names], bool)
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
        waiting = np.array([says(n, _WAITING) for n in timeline.names], bool)
        layers = {}
        for thread in ranked.tolist():
            on = rows[(host.thread[rows] == thread) & (parent[rows] > -2)]
            layers[thread] = _Layer.flat(on, host.start[on], end[on], parent)
        blocks = np.isin(category, (ALLOCATOR, GARBAGE_COLLECTION, PROFILER))
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

    def explain(self, thread: int, gap: I64, start: F64, end: F64) -> GapPieces:
        """Return the host's activity in [start, end) of each gap; for a short gap, the activity at the midpoint."""
        short = end - start <= SHORT_US
        some = ~short & (end > start)
        at_once = self._seen_at_once(self._layers(thread), gap[short], start[short], end[short])
        return GapPieces.joined([at_once, self.seen(thread, gap[some], start[some], end[some])])

    def seen(self, thread: int, gap: I64, start: F64, end: F64) -> GapPieces:
        """Return the host's activity at every moment in [start, end) of each gap."""
        parts = []
        left = (gap, start, end)
        for layer in self._layers(thread):
            if not len(left[0]):
                break
            (of, begins, ends, row), left = layer.over(*left)
            parts.append(GapPieces(of, begins, ends, self.category[row], row))
        none = np.full(len(left[0]), UNRECORDED, np.uint8)
        return GapPieces.joined([*parts, GapPieces(*left, none, np.full(len(none), -1))])

    def _layers(self, thread: int) -> list[_Layer]:
        """Return the layers by precedence: calls that block all threads, then `thread`, then the other threads."""
        others = [~t for t in self.order if t != thread]
        return [self.shared, *(self.layers[t] for t in [thread, *others] if t in self.layers)]

    def _seen_at_once(self, layers: list[_Layer], gap: I64, start: F64, end: F64) -> GapPieces:
        row = np.full(len(gap), -1)
        left = np.arange(len(gap))
        for layer in layers:
            row[left] = layer.at((start[left] + end[left]) / 2)
            left = left[row[left] < 0]
        category = np.where(row >= 0, np.append(self.category, UNRECORDED)[row], UNRECORDED).astype(np.uint8)
        real = end > start
        return GapPieces(gap[real], start[real], end[real], category[real], row[real])


def _around_everything(timeline: Timeline, own: U8, use: Bools) -> Bools:
    """Return a mask of annotations (such as an epoch) that span at least half of the recorded time and launches."""
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
        Parent row, category, row of the innermost Python function around (else the parent row), and end, for each row
        of HostOps. Parent -1: none; -2: nested too deeply. A range without a category of its own takes its parent's.
    """
    host = timeline.host
    library = np.array([says(n, LIBRARY) for n in timeline.names], bool)
    category, parent = np.zeros(len(host), np.uint8), np.full(len(host), -1)
    inside = np.full(len(host), -1)
    if not len(rows):
        return parent, category, inside, host.end
    category[rows] = own[host.name[rows]]
    quick = (category == COPY) & (host.end - host.start < BLOCKING_COPY_US)
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
    """Return the ends of a thread's ranges (sorted by start), cut so that ranges which touch do not overlap.

    A range is cut where a later range begins that overlaps it and ends after it. It is not cut if the later one ends
    after it only by rounding, since it may then enclose the later one.
    """
    found, last = end.copy(), np.searchsorted(start, end, side="left") - 1
    for before in range(_TOUCHING):
        other = np.maximum(last - before, 0)
        beyond = end[other] - end
        touches = (beyond > ROUNDED_US) | (beyond > 0) & (end - start[other] <= ROUNDED_US)
        cut = touches & (other > np.arange(len(start)))
        found[cut] = np.minimum(found, start[other])[cut]
    return found
