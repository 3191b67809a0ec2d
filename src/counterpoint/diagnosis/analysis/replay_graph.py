"""Build the graph that a replay simulates: nodes are GPU operations and host calls, edges are their dependencies.

A node is a GPU operation, or the return of a host call that waited for the GPU. Each node begins some time after the
last of at most four other nodes has ended:

    begin = max(end[host] + after_host, end[stream], end[event], end[seen]) + lag          end = begin + duration

- `host`: the last waiting host call before the launch. Between its calls the host works as long as it did: `after_host`
  is that time, plus, for an operation, the shortest time from launch to begin that the rank shows.
- `stream`: the operation before it on its stream; for a host call, the operation that it waited for.
- `event`: the operation it waited for on another stream, as the trace states it, else as cudaStreamWaitEvent calls
  suggest.
- `seen`: where it began later than all of that allows, the operation of another stream that ended as it began. Either
  it waited for that operation in a way that the trace does not show, or that operation is a kernel that took every SM.
- `lag`: the rest of the measured begin: gaps of a few µs, and delays that the trace does not explain.

A collective connects ranks: its kernels begin by these rules, and each ends its own `transfer` after the last one
began. Node 0 marks the start of the simulation: it ends at 0, and an edge that does not exist points to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from counterpoint.diagnosis.reading.traced_job import TracedJob
from counterpoint.trace.timeline import F64, I64, ROUNDED_US, U8, Bools, Kind, device_of, previous_on_stream

_EDGE_US = 20.0  # an operation that waited for another stream's operation begins this soon after its end
_LATE_US = 8.0  # beginning later than launch, stream and event explain by this: waited for something else, ...
_MORE_US = 1.0  # ... that must have ended at least this much after these
_TAIL = 0.15  # last part of a kernel, in which its blocks leave SMs free
_RETURN_US = 100.0  # a host call that waited returns within this time after the awaited operation ends
_BLOCKED_CALL_US = 100.0  # a launch call that takes longer waited for room in the launch queue
_APART_US = 1.0  # longest pause between consecutive steps of one replay
SOON_US = 20.0  # an operation that waits for nothing begins within this time
LOOK_BACK = 16  # number of ends that are examined for each begin


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayGraph:
    """Holds a replay's nodes in topological order, as columns of equal length with times in µs; edge 0: none."""

    column: I64  # of TracedJob
    row: I64  # of GpuOps; -1: a host call
    kind: U8  # Kind of the operation
    begin: F64  # measured; a simulation uses only columns that are derived from it
    end: F64
    order: F64  # when the host launched the operation, or when the host call returned; NaN: unknown
    host_gap: F64  # host time since the previous launch or return
    after_host: F64  # host time since the end of `host`: the sum of `host_gap`, for operations plus launch latency
    host: I64
    stream: I64
    event: I64
    seen: I64
    lag: F64
    duration: F64
    transfer: F64  # of a node that leaves a collective: own end - last arrival
    collective: I64  # row of Joined; -1: none
    arrives: Bools  # whether its begin is the rank's arrival at the collective
    leaves: Bools  # whether its end is the end of the collective on this rank
    # An island is a set of ranks that collectives join; ranks of other islands do not wait for them:
    island: I64 = field(default_factory=lambda: np.zeros(1, np.int64))  # island of each rank
    head_us: F64 = field(default_factory=lambda: np.zeros(1))  # from node 0 to the beginning of the replayed steps
    window_us: F64 = field(default_factory=lambda: np.zeros(1))  # from their earliest begin to their latest end
    own: F64 = field(default_factory=lambda: np.ones(1))  # weight of each island in a mean over ranks
    steps: int = 0

    def mean_us(self, last_us: F64) -> float:
        """Return the mean µs of a step over ranks, given the end of each island's last node in µs after node 0."""
        return float(((last_us - self.head_us) * self.own).sum()) / self.steps


def build_graph(job: TracedJob, limit: int) -> ReplayGraph | None:
    """Return the graph of the middle steps: one step, or more with together at most `limit` GPU operations.

    Return None if no operation runs in these steps, or they take no time.
    """
    first, last = _steps(job, limit)
    begin, finish = job.step_start[first], job.step_end[last]
    parts = [_nothing()] + [_rank(job, c, begin[c], finish[c]) for c in range(len(job.digests))]
    graph = _stacked(parts)
    if not (graph.row >= 0).any() or (finish - begin).sum() <= 0:
        return None
    zero = float(graph.begin[1:].min())
    graph.begin[1:] -= zero
    graph.end[1:] -= zero
    graph = _with_collectives(graph, job)
    island = job.islands
    members = [island == number for number in range(int(island.max()) + 1)]
    window = np.array([finish[own].max() - begin[own].min() for own in members])
    taken = np.array([(finish - begin)[own].mean() * own.mean() for own in members])
    return replace(
        _with_lags(_sorted(graph)),
        island=island,
        head_us=np.array([begin[own].min() for own in members]) - zero,
        window_us=window,
        own=taken / np.maximum(window, 1e-9),
        steps=last - first + 1,
    )


def by_host(graph: ReplayGraph) -> list[I64]:
    """Return each rank's nodes in host order: operations by their launch, host calls by their return."""
    nodes = np.flatnonzero(np.isfinite(graph.order))
    nodes = nodes[np.argsort(graph.order[nodes], kind="stable")]
    nodes = nodes[np.argsort(graph.column[nodes], kind="stable")]
    return np.split(nodes, np.searchsorted(graph.column[nodes], np.arange(1, int(graph.column.max()) + 1)))


def since_host(graph: ReplayGraph, hosts: Sequence[I64], gap: F64) -> F64:
    """Return, per node, the sum of `gap` in host order, from just after the node's `host` up to the node itself."""
    total = np.zeros(len(graph.row))
    for nodes in hosts:
        total[nodes] = np.cumsum(gap[nodes])
    return np.where(np.isfinite(graph.order), total - total[graph.host], 0.0)


def of_operations(graph: ReplayGraph, values: Sequence[Any], absent: Any) -> Any:
    """Return, per node, its operation's element of `values` (an array per rank); `absent` for a host call."""
    first = np.cumsum([0] + [len(v) for v in values])
    found = np.full(len(graph.row), absent)
    ops = graph.row >= 0
    found[ops] = np.concatenate(values)[first[graph.column[ops]] + graph.row[ops]]
    return found


def with_durations(graph: ReplayGraph, durations_us: Sequence[F64]) -> ReplayGraph:
    """Return the graph with other durations of operations, per rank and operation; NaN: as measured."""
    other = of_operations(graph, durations_us, np.nan)
    return replace(graph, duration=np.where(np.isfinite(other), other, graph.duration))


def not_held(graph: ReplayGraph, held: Bools) -> ReplayGraph:
    """Return the graph in which the nodes `held` do not wait for a kernel that holds every SM."""
    lag = np.where(held, np.minimum(graph.lag, SOON_US), graph.lag)
    return replace(graph, seen=np.where(held, 0, graph.seen), lag=lag)


def _steps(job: TracedJob, limit: int) -> tuple[int, int]:
    """Return first and last step to replay: the middle step and its neighbours, up to `limit` GPU operations.

    The steps are consecutive; of several runs of consecutive steps, the run with the most operations is taken.
    """
    size = np.zeros(len(job.step_names), np.int64)
    for c, at in enumerate(job.op_start):
        size += np.searchsorted(at, job.step_end[:, c]) - np.searchsorted(at, job.step_start[:, c])
    parted = np.flatnonzero((job.step_start[1:] - job.step_end[:-1]).max(axis=1) > _APART_US) + 1
    edges = [0, *parted.tolist(), len(size)]
    run = int(np.add.reduceat(size, edges[:-1]).argmax())
    low, high = edges[run], edges[run + 1]
    first = last = (low + high) // 2 if size[(low + high) // 2] else low + int(size[low:high].argmax())
    growing = True
    while growing:
        growing = False
        if last + 1 < high and size[first : last + 2].sum() <= limit:
            last, growing = last + 1, True
        if first > low and size[first - 1 : last + 1].sum() <= limit:
            first, growing = first - 1, True
    return first, last


def _nothing() -> ReplayGraph:
    """Return a graph that has only node 0, the origin."""
    none, zero, no = np.full(1, -1, np.int64), np.zeros(1), np.zeros(1, bool)
    edge = np.zeros(1, np.int64)
    return ReplayGraph(column=none, row=none, kind=np.zeros(1, np.uint8), begin=zero, end=zero, order=zero * np.nan,
                 host_gap=zero, after_host=zero, host=edge, stream=edge, event=edge, seen=edge, lag=zero,
                 duration=zero, transfer=zero, collective=none, arrives=no, leaves=no)  # fmt: skip


def _rank(job: TracedJob, c: int, begin: float, finish: float) -> ReplayGraph:
    """Return the nodes of one rank: operations, then host calls; edges are indices into these nodes; -1: none."""
    gpu = job.digests[c].gpu
    row = np.flatnonzero((job.op_start[c] >= begin) & (job.op_start[c] < finish)).astype(np.int64)
    start, end, launch = job.op_start[c][row], job.op_end[c][row], job.launch[c][row]
    enter, leave, awaited = _host_calls(job, c, row, begin, finish)
    host, host_gap, after_host = _host_chain(launch, enter, leave)
    known = np.isfinite(launch)
    latency = float((start - launch)[known].min()) if known.any() else 0.0
    after_host[: len(row)][known] += latency
    previous = previous_on_stream(gpu.stream[row])
    stated = _stated(job, c, row)
    calls = job.on_job_clock(c, job.digests[c].waits.wait_call)
    event = np.where(stated >= 0, stated, _asked(launch, start, end, gpu.stream[row], calls))
    base = np.fmax(launch + latency, np.fmax(_ends(end, previous), _ends(end, event)))
    seen = _seen(start, end, launch, gpu.stream[row], gpu.kind[row], base)
    none = np.full(len(leave), -1, np.int64)
    nodes = len(row) + len(leave)
    return ReplayGraph(
        column=np.full(nodes, c, np.int64),
        row=np.concatenate((row, none)),
        kind=np.concatenate((gpu.kind[row], np.full(len(leave), 255, np.uint8))),
        begin=np.concatenate((start, leave)),
        end=np.concatenate((end, leave)),
        order=np.concatenate((launch, leave)),
        host_gap=host_gap,
        after_host=after_host,
        host=host,
        stream=np.concatenate((previous, awaited)),
        event=np.concatenate((event, none)),
        seen=np.concatenate((seen, none)),
        lag=np.zeros(nodes),
        duration=np.concatenate((end - start, np.zeros(len(leave)))),
        transfer=np.zeros(nodes),
        collective=np.full(nodes, -1, np.int64),
        arrives=np.zeros(nodes, bool),
        leaves=np.zeros(nodes, bool),
    )


def _ends(end: F64, edge: I64) -> F64:
    return np.where(edge >= 0, end[edge], np.nan) if len(end) else np.empty(0)


def _host_calls(job: TracedJob, c: int, row: I64, begin: float, finish: float) -> tuple[F64, F64, I64]:
    """Return entry µs, return µs and awaited operation (-1: none) of a rank's blocking host calls, by time of return.

    The first entry marks the begin of the host's work; the last entry marks its end if the host ends after the GPU.
    Between them are calls that waited for all operations launched before, or for one of these. Other calls count as
    host work.
    """
    gpu, waits, launch, end = job.digests[c].gpu, job.digests[c].waits, job.launch[c][row], job.op_end[c][row]
    call = gpu.launch_end[row] - gpu.launch_start[row]
    full = call > _BLOCKED_CALL_US
    enter = np.concatenate((job.on_job_clock(c, waits.start), launch[full]))
    leave = np.concatenate((job.on_job_clock(c, waits.end), launch[full] + call[full]))
    start = np.fmin(begin, np.nanmin(launch)) if np.isfinite(launch).any() else begin
    inside = (enter >= start) & (leave <= finish + ROUNDED_US)
    enter, leave = enter[inside], np.minimum(leave[inside], finish)
    order = np.argsort(leave, kind="stable")
    enter, leave = enter[order], leave[order]
    awaited = _awaited(enter, leave, launch, end)
    enter, leave, awaited = enter[awaited >= 0], leave[awaited >= 0], awaited[awaited >= 0]
    if finish <= end.max(initial=-np.inf) + 1.0:
        tail: tuple[list[float], list[float], list[int]] = ([], [], [])
    elif np.isfinite(launch).any() or not len(end):
        tail = ([finish], [finish], [-1])
    else:  # without recorded launches, the host ends with the GPU
        tail = ([start], [finish], [int(end.argmax())])
    return (np.concatenate(([start], enter, tail[0])), np.concatenate(([start], leave, tail[1])),
            np.concatenate(([-1], awaited, tail[2])).astype(np.int64))  # fmt: skip


def _awaited(enter: F64, leave: F64, launch: F64, end: F64) -> I64:
    """Return, per blocking host call, the GPU operation that the host awaited; -1: none."""
    launched = np.flatnonzero(np.isfinite(launch))
    launched = launched[np.argsort(launch[launched], kind="stable")]
    found = np.full(len(enter), -1, np.int64)
    if not len(launched) or not len(enter):
        return found
    latest = np.maximum.accumulate(end[launched])
    reached = np.searchsorted(latest, latest)  # position of the operation with the latest end so far
    at = np.searchsorted(launch[launched], enter, side="right") - 1
    last = np.where(at >= 0, latest[at], np.inf)
    all_done = (last <= enter) | ((last <= leave) & (leave - last <= _RETURN_US))
    found[all_done] = launched[reached[at[all_done]]]
    by_end = launched[np.argsort(end[launched], kind="stable")]
    near = np.searchsorted(end[by_end], leave, side="right")[:, None] - 1 - np.arange(LOOK_BACK)
    candidate = by_end[np.maximum(near, 0)]
    fits = (near >= 0) & (launch[candidate] <= enter[:, None])
    fits &= (end[candidate] > enter[:, None]) & (leave[:, None] - end[candidate] <= _RETURN_US)
    some = ~all_done & fits.any(axis=1)
    found[some] = candidate[some, fits[some].argmax(axis=1)]
    return found


def _host_chain(launch: F64, enter: F64, leave: F64) -> tuple[I64, F64, F64]:
    """Return columns `host`, `host_gap` and `after_host` of operations and host calls, from their order on the host."""
    n = len(launch)
    met, left = np.concatenate((launch, enter)), np.concatenate((launch, leave))
    order = np.argsort(left, kind="stable")
    order = order[np.isfinite(left[order])]
    gap, after, host = np.zeros(len(met)), np.zeros(len(met)), np.full(len(met), -1, np.int64)
    gap[order[1:]] = met[order[1:]] - left[order[:-1]]
    calls = np.where(order >= n, np.arange(len(order)), -1)
    last = np.concatenate(([-1], np.maximum.accumulate(calls)[:-1]))
    host[order] = np.where(last >= 0, order[last], -1)
    after[order] = np.where(last >= 0, met[order] - left[order[last]], 0.0)
    return host, gap, after


def _stated(job: TracedJob, c: int, row: I64) -> I64:
    """Return, per operation, the awaited operation that ended last, by recorded stream waits; -1: none."""
    gpu, waits = job.digests[c].gpu, job.digests[c].waits
    stated = np.full(len(row), -1, np.int64)
    known = np.flatnonzero(waits.stream_wait_for >= 0)
    for stream in np.unique(waits.stream_wait_stream[known]).tolist():
        own = np.flatnonzero((gpu.stream[row] == stream) & np.isfinite(gpu.launch_start[row]))
        own = own[np.argsort(gpu.launch_start[row[own]], kind="stable")]
        asked = known[waits.stream_wait_stream[known] == stream]
        at = np.searchsorted(gpu.launch_start[row[own]], waits.stream_wait_at[asked])
        source = np.searchsorted(row, waits.stream_wait_for[asked])
        held = (at < len(own)) & (source < len(row))
        held[held] = row[source[held]] == waits.stream_wait_for[asked[held]]
        for target, s in zip(own[at[held]].tolist(), source[held].tolist(), strict=True):
            before = int(stated[target])
            if before < 0 or gpu.end[row[s]] > gpu.end[row[before]]:
                stated[target] = s
    return stated


def _asked(launch: F64, start: F64, end: F64, stream: I64, calls: F64) -> I64:
    """Return which operation each operation awaited, guessed from times of cudaStreamWaitEvent calls; -1: none.

    An operation launched after such a call waits for the last operation launched to some other stream before the call.
    That must have ended before it began, which leaves few streams; of those the last to end is taken.
    """
    asked = np.full(len(launch), -1, np.int64)
    known = np.flatnonzero(np.isfinite(launch))
    known = known[np.argsort(launch[known], kind="stable")]
    lanes = [known[stream[known] == s] for s in np.unique(stream[known])]
    for own in lanes if len(calls) else []:
        call = np.searchsorted(calls, launch[own]) - 1
        at = np.where(call >= 0, calls[call], -np.inf)
        target = np.flatnonzero(at > np.concatenate(([-np.inf], launch[own[:-1]])))
        for given in lanes if len(target) else []:
            last = np.searchsorted(launch[given], at[target]) - 1
            source, row = given[last], own[target]
            fits = (last >= 0) & (given is not own) & (end[source] <= start[row] + ROUNDED_US)
            fits &= ~(end[source] <= np.where(asked[row] >= 0, end[asked[row]], -np.inf))
            asked[row[fits]] = source[fits]
    return asked


def _seen(start: F64, end: F64, launch: F64, stream: I64, kind: U8, base: F64) -> I64:
    """Return the other stream's operation that ended just as each operation began, if after `base`; -1: none.

    Either it waited for the other operation, launched before it (an event can be awaited only once it is recorded), or
    the other one is a kernel that held every SM until its last blocks; it then begins a little before this kernel ends.
    Waits between compute and communication are likelier than within one of them, and waits of or for copies the least.
    """
    late = np.flatnonzero(~(start - base <= _LATE_US))
    by_end = np.argsort(end, kind="stable")
    near = np.searchsorted(end[by_end], start[late])[:, None] + np.arange(-LOOK_BACK, LOOK_BACK)
    candidate = by_end[np.clip(near, 0, len(end) - 1)]
    waited = (start[late][:, None] - end[candidate] >= -ROUNDED_US) & ~(launch[candidate] >= launch[late][:, None])
    tail = np.maximum(_EDGE_US, _TAIL * (end - start))[candidate]
    held = (kind[candidate] == Kind.COMPUTE) & (np.abs(start[late][:, None] - end[candidate]) <= tail)
    held &= device_of(stream[candidate]) == device_of(stream[late])[:, None]
    fits = (waited & (end[candidate] >= start[late][:, None] - _EDGE_US)) | held
    fits &= (near >= 0) & (near < len(end)) & (stream[candidate] != stream[late][:, None])
    fits &= (start[candidate] < start[late][:, None]) & ~(end[candidate] <= base[late][:, None] + _MORE_US)
    joins = (kind[candidate] == Kind.COMM) != (kind[late] == Kind.COMM)[:, None]
    copies = (kind[candidate] == Kind.MEMCPY) | (kind[late] == Kind.MEMCPY)[:, None]
    score = 1000.0 * (2.0 * joins - copies) - np.abs(start[late][:, None] - end[candidate])
    best = np.where(fits, score, -np.inf).argmax(axis=1)[:, None]
    seen = np.full(len(start), -1, np.int64)
    chosen = np.take_along_axis(candidate, best, 1)[:, 0]
    seen[late] = np.where(np.take_along_axis(fits, best, 1)[:, 0], chosen, -1)
    return seen


_EDGES = ("host", "stream", "event", "seen")
_COLUMNS = tuple(
    n for n in ReplayGraph.__dataclass_fields__ if n not in ("island", "head_us", "window_us", "own", "steps")
)


def _stacked(parts: list[ReplayGraph]) -> ReplayGraph:
    """Concatenate the nodes of all ranks, and turn edges into indices into the concatenated nodes; 0: none."""
    offset = np.cumsum([0] + [len(p.row) for p in parts])
    columns: dict[str, Any] = {}
    for name in _COLUMNS:
        values = [getattr(p, name) for p in parts]
        if name in _EDGES:
            values = [np.where(v >= 0, v + o, 0) for v, o in zip(values, offset.tolist(), strict=False)]
        columns[name] = np.concatenate(values)
    return ReplayGraph(**columns)


def _with_collectives(graph: ReplayGraph, job: TracedJob) -> ReplayGraph:
    """Return the graph with `collective`, `arrives`, `leaves` and `transfer` set from the joined collectives.

    A rank that left before the last arrived (the root of a broadcast) did not wait: it keeps its own duration.
    """
    joined = job.joined
    if not len(joined):
        return graph
    for c, digest in enumerate(job.digests):
        nodes = np.flatnonzero((graph.column == c) & (graph.row >= 0))
        took = np.flatnonzero(joined.row[:, c] >= 0)
        ends = (digest.comm.first[joined.row[took, c]], digest.comm.last[joined.row[took, c]])
        first, last = (np.searchsorted(graph.row[nodes], e) for e in ends)
        held = (first < len(nodes)) & (last < len(nodes))
        held[held] = (graph.row[nodes[first[held]]] == ends[0][held]) & (graph.row[nodes[last[held]]] == ends[1][held])
        graph.arrives[nodes[first[held]]] = True
        graph.leaves[nodes[last[held]]] = True
        graph.collective[nodes[first[held]]] = graph.collective[nodes[last[held]]] = took[held]
    count = np.bincount(graph.collective[graph.arrives], minlength=len(joined))
    alone = (graph.collective >= 0) & (count[graph.collective] < 2)
    graph.arrives[alone] = graph.leaves[alone] = False
    graph.collective[alone] = -1
    arrival = np.full(len(joined), -np.inf)
    np.maximum.at(arrival, graph.collective[graph.arrives], graph.begin[graph.arrives])
    graph.transfer[graph.leaves] = (graph.end - arrival[graph.collective])[graph.leaves]
    graph.leaves[graph.leaves & (graph.transfer <= 0)] = False
    return graph


def _sorted(graph: ReplayGraph) -> ReplayGraph:
    """Sort nodes by measured begin; drop edges to nodes that come later, so that the graph has no cycle."""
    order = np.concatenate(([0], 1 + np.lexsort((graph.end[1:], graph.begin[1:]))))
    here = np.arange(len(order))
    place = np.empty_like(here)
    place[order] = here
    columns: dict[str, Any] = {n: getattr(graph, n)[order] for n in _COLUMNS}
    columns |= {n: place[columns[n]] for n in _EDGES}
    known = here.copy()  # node at which a node's end is known; in a collective: the node of the last rank to arrive
    joint, arrives, leaves = columns["collective"], columns["arrives"], columns["leaves"]
    last = np.zeros(int(joint.max()) + 1, np.int64)
    np.maximum.at(last, joint[arrives], here[arrives])
    known[leaves] = np.maximum(known[leaves], last[joint[leaves]])
    for name in ("host", "event", "seen"):
        columns[name] = np.where(known[columns[name]] < here, columns[name], 0)
    before = columns["stream"]
    while (ahead := (known[columns["stream"]] >= here) & (columns["stream"] > 0)).any():  # take the one before instead
        columns["stream"] = np.where(ahead, before[columns["stream"]], columns["stream"])
    return ReplayGraph(**columns)


def _with_lags(graph: ReplayGraph) -> ReplayGraph:
    """Set each node's `lag`: the µs by which it began later than its edges explain; 0 for a rank's first host node."""
    end = graph.end
    base = end[graph.host] + graph.after_host
    for edge in (graph.stream, graph.event):
        base = np.maximum(base, end[edge])
    base = np.where(graph.seen > 0, np.maximum(base, end[graph.seen]), base)
    comes_from = (graph.row < 0) & (graph.host == 0)
    after_host = np.where(comes_from, graph.begin, graph.after_host)
    return replace(graph, after_host=after_host, lag=np.where(comes_from, 0.0, graph.begin - base))
