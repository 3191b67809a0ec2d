"""Find steps from repeating GPU operations, on a rank whose trace has no step ranges.

Layers repeat, too. Repeats are steps if no other operations (an embedding, a head) come before the first and after the
last repeat, no CUDA graph launches several repeats at once, and the repeats are most of the work. Where the host waits
for the GPU only after many short repeats, these are layers; steps then reach from one wait to the next, if alike.
"""

from __future__ import annotations

import re

import numpy as np

from counterpoint.trace.timeline import F64, I64, HostKind, Timeline

_LONGEST_PATTERN = 1 << 18
_MANY = 8  # repeats: more of them may be layers of one step
_MOST = 0.6  # of the GPU's time: repeats with less are layers of a step
_LAYER = 64  # operations: a repeat of more may be a step even if the host waits only after several repeats
_EVEN = 0.05  # largest relative difference in operations between host waits that separate steps
_OPTIMIZER = re.compile(r"multi_tensor_apply|adam|sgd|lamb(?!da)|adagrad|shampoo|optimizer", re.IGNORECASE)
_WAITS = ("Synchronize", "cudaMemcpy", "hipMemcpy", "cuMemcpyDtoH_v2")


def repeated_steps(timeline: Timeline) -> tuple[F64, F64] | None:
    """Return begin and end of each step, from the order of operations on the busiest stream; None: no steps.

    Only one stream is used because the order between streams differs from step to step.
    """
    gpu = timeline.gpu
    streams, count = np.unique(gpu.stream, return_counts=True)
    rows = np.flatnonzero(gpu.stream == streams[np.argmax(count)])
    if (period := _period(timeline, rows)) is None:
        return None
    first, length = period
    edges = np.arange(first, len(rows) + 1, length)
    waits = _waits(timeline, rows)
    usual = float(np.median(np.diff(waits)))
    if length <= _LAYER and len(waits) > 2 and usual >= 2 * length and not _optimizes(timeline, rows):
        if np.abs(np.diff(waits) - usual).max() > _EVEN * usual:
            return None
        edges = waits
    elif _are_layers(timeline, rows, edges):
        return None
    end = np.maximum.accumulate(gpu.end[rows])[edges[1:] - 1]
    begin = gpu.start[rows[edges[:-1]]]
    pause = float(np.median(np.maximum(begin[1:] - end[:-1], 0.0))) if len(end) > 1 else 0.0
    start = np.append(_earliest(timeline, float(begin[0]) if edges[0] else float(gpu.start.min()), pause), end[:-1])
    if edges[-1] == len(rows):
        end[-1] = gpu.end.max()
    return start, end


def _earliest(timeline: Timeline, first: float, pause: float) -> float:
    """Return the start (µs) of the step whose first operation begins at `first`, at most `pause` µs earlier."""
    gpu, host = timeline.gpu, timeline.host
    recorded = min(first, float(host.start.min())) if len(host) else first
    return float(min(first, max(first - pause, recorded, gpu.end[gpu.start < first].max(initial=-np.inf))))


def _waits(timeline: Timeline, rows: I64) -> I64:
    """Return the indices that split `rows` at the host's waits for the GPU, with 0 and `len(rows)`."""
    passed = np.searchsorted(_host_waits(timeline), timeline.gpu.launch_start[rows])
    return np.concatenate(([0], np.flatnonzero(np.diff(passed) > 0) + 1, [len(rows)])).astype(np.int64)


def _optimizes(timeline: Timeline, rows: I64) -> bool:
    """Return whether any of the operations `rows` is a kernel of an optimizer."""
    return any(_OPTIMIZER.search(timeline.names[kind]) for kind in np.unique(timeline.gpu.name[rows]).tolist())


def _are_layers(timeline: Timeline, rows: I64, edges: I64) -> bool:
    """Return whether the repeated sequences between `edges` of `rows` are layers of one step, not steps."""
    gpu = timeline.gpu
    took = (gpu.end - gpu.start)[rows]
    if took[edges[0] : edges[-1]].sum() < _MOST * took.sum():
        return True
    launched = gpu.launch_start[rows[edges[:-1]]]
    if (launched[1:] == launched[:-1]).mean() >= 0.5:
        return True  # one call, such as cudaGraphLaunch, launched several repeats
    kinds = gpu.name[rows]
    repeated = kinds[edges[0] : edges[-1]]
    if _optimizes(timeline, rows[edges[0] : edges[-1]]):
        return False
    before, after = (bool(len(np.setdiff1d(part, repeated))) for part in (kinds[: edges[0]], kinds[edges[-1] :]))
    passed = np.searchsorted(_host_waits(timeline), launched)
    waited = (passed[1:] > passed[:-1]).mean() > 0.5  # steps usually end with a wait of the host
    return (before and after) or bool((before or after) and len(edges) > _MANY and not waited)


def _host_waits(timeline: Timeline) -> F64:
    """Return the µs at which the host began to wait for the GPU, ascending."""
    host = timeline.host
    waits = np.array([name.endswith(_WAITS[0]) or name in _WAITS for name in timeline.names], bool)
    at: F64 = host.start[(host.kind == HostKind.RUNTIME) & waits[host.name]]
    return at


def _period(timeline: Timeline, rows: I64) -> tuple[int, int] | None:
    """Return the index of the first step's first operation, and the number of operations per step; None: no period.

    Layers repeat, too, so a period counts only if one window of that length holds nearly all kinds of operations that
    recur, and nearly every operation equals the one a period later. Of the first operations that leave the most whole
    steps, the one with the longest pauses before it is chosen.
    """
    gpu = timeline.gpu
    kinds = np.stack([gpu.name[rows], gpu.grid[rows, 0]])
    tokens = np.unique(kinds, axis=1, return_inverse=True)[1].ravel().astype(np.int64)[:_LONGEST_PATTERN]
    if not 8 <= len(rows) <= _LONGEST_PATTERN * 8:
        return None
    occurrences = np.bincount(tokens).astype(np.int64)
    recurring = np.flatnonzero(occurrences >= 2).astype(np.int64)
    if not len(recurring):
        return None
    span = np.zeros(len(occurrences), np.int64)  # distance from first to last occurrence
    np.maximum.at(span, tokens, np.arange(len(tokens)))
    span -= np.unique(tokens, return_index=True)[1]
    best: tuple[float, int] | None = None
    for period in _candidates(tokens, recurring, occurrences):
        same = float((tokens[period:] == tokens[:-period]).mean())
        middle = (len(tokens) - period) // 2
        lasting = recurring[span[recurring] >= period]  # not those within one step only, as in a warm-up
        held = len(np.intersect1d(tokens[middle : middle + period], lasting)) / max(len(lasting), 1)
        if same >= 0.97 and held >= 0.9 and (best is None or same > best[0] + 0.005):
            best = (same, period)
    if best is None:
        return None
    period = best[1]
    pause = np.concatenate(([0.0], gpu.start[rows[1:]] - np.maximum.accumulate(gpu.end[rows])[:-1]))
    phases = [float(pause[phase::period].mean()) for phase in range(len(rows) % period + 1)]
    return int(np.argmax(phases)), period


def _candidates(tokens: I64, recurring: I64, occurrences: I64) -> list[int]:
    """Return the 32 most frequent distances between repeats of the rarest recurring operations, ascending."""
    distances: dict[int, int] = {}
    for token in recurring[np.argsort(occurrences[recurring], kind="stable")][:64].tolist():
        for gap in np.diff(np.flatnonzero(tokens == token)).tolist():
            if 4 <= gap <= len(tokens) // 2:
                distances[gap] = distances.get(gap, 0) + 1
    return sorted(sorted(distances, key=lambda d: -distances[d])[:32])
