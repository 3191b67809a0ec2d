"""Simulate the steps unchanged and with single changes, such as free communication, to see what each saves.

Every step time comes out of a simulation of `ReplayGraph`; nothing is subtracted from the measured step. These keep
their measured values: durations of operations, host time between calls, and small unexplained gaps. These are
computed: when everything begins, and how long ranks wait for one another, in collectives and for the GPU. A wait that
the graph does not explain is left out, so that the error of the unchanged replay says how much of the step the graph
explains; only where that is too little (a trace without launches, say) such waits stay as measured.

- no straggler: operations and host work of a straggler take as long as on a typical rank.
- no contention: a compute kernel that ran during communication takes as long as alone.
- communication twice as fast, free: the transfer of every collective is halved, or nothing. Where other ranks have no
  trace, transfer cannot be told from waiting: all of the collective is scaled except its suspected waiting. Not tried
  where the trace has no launches and the graph does not explain it: what waits for communication is then unknown.
- no suspected waiting for ranks not recorded: collectives take no longer than such usually do (`unrecorded.py`).
- launch order fixed: a collective that found every SM taken by a persistent kernel does not wait for that kernel. The
  kernel is not slowed in turn.
- independent streams: operations that began late since all streams share one queue begin when they are ready.
- hosts free: a host takes no time between its calls, but still waits for the GPU where it did. An operation that
  was not seen to wait for another stream still follows the last operation that had ended when it began.
- no stall on any rank: every long host time without a launch takes as long as the median one below `STALL_US`; calls
  of copies, which return when the host has copied, do not count as stalls.
- no copies: copies between host and GPU, and the calls that start them, take no time.
- no FSDP2 copies: copies between parameters and the buffers of FSDP2's collectives take no time.
- element-wise chains fused, products in TF32 and other changes of compute (`compute_losses.py`): shorter kernels.
- zero-SM collectives: copy engines move what NCCL's kernels move (`zero_sm.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace as changed

import numpy as np

from counterpoint.diagnosis.analysis.replay_graph import (
    LOOK_BACK,
    SOON_US,
    ReplayGraph,
    build_graph,
    by_host,
    not_held,
    of_operations,
    since_host,
    with_durations,
)
from counterpoint.diagnosis.analysis.simulation import simulate, simulate_all
from counterpoint.diagnosis.analysis.zero_sm import fsdp2_copies, without_fsdp2_copies, zero_sm
from counterpoint.diagnosis.reading.gaps import STALL_US
from counterpoint.diagnosis.reading.traced_job import TracedJob, TracedStack
from counterpoint.records.diagnosis import Replay, WhatIfStep
from counterpoint.trace.timeline import F64, I64, ROUNDED_US, Bools, Kind

_LIMIT = 60_000  # most GPU operations: a few seconds of eight ranks, replayed in half a second
_LEAST_COPY_SHARE = 0.01  # of the replayed time: where copies take less, no replay leaves them out
NO_SUSPECTED_WAITING = "no suspected waiting for ranks not recorded"
LAUNCH_ORDER = "launch order fixed"
INDEPENDENT_STREAMS = "independent streams"
NO_FSDP2_COPIES = "no FSDP2 copies"
ZERO_SM = "zero-SM collectives"
_EXPLAINED_ERROR = 0.01  # largest error of a graph that counts as explaining a trace


def replay(
    job: TracedJob,
    *,
    typical: Mapping[int, int] | None = None,
    alone_us: Sequence[F64] | None = None,
    held: Mapping[str, Sequence[Bools]] | None = None,
    suspected_us: Sequence[F64] | None = None,
    stack: TracedStack | None = None,
    hosts_known: bool = True,
    collective_waits: str | None = None,
    compute_us: Mapping[str, Sequence[F64]] | None = None,
    limit: int = _LIMIT,
) -> Replay | None:
    """Replay consecutive whole steps around the middle of the trace, unchanged and with each change.

    Args:
        job: ranks on one clock.
        typical: column of a straggler -> column of the rank whose operations and host work stand in for its own.
        alone_us: per column and GPU operation, how long it would run without contention; NaN: as measured.
        held: by the name of the what-if without it, per column and GPU operation, whether something held it up:
            a persistent kernel (`LAUNCH_ORDER`) or a queue that all streams share (`INDEPENDENT_STREAMS`).
        suspected_us: per column and GPU operation, how long it seems to have waited for a rank that has no trace.
        stack: hardware and software that the trace shows; None: zero-SM collectives are not tried.
        hosts_known: whether host activity was recorded; if not, hosts that are free or do not stall are not tried.
        collective_waits: the result's `collective_waits`: joined, partly_joined or as_measured.
        compute_us: by name of a change, per column and GPU operation, how long it would then run; NaN: as measured.
        limit: most GPU operations of the replayed steps over all ranks; at least one step is replayed.

    Returns:
        Mean step time as measured, as replayed, and after each change; None if no GPU operation ran.
    """
    graph = build_graph(job, limit)
    if graph is None:
        return None
    measured = graph.mean_us(graph.head_us + graph.window_us)
    strict = _explained_only(graph)
    ends = simulate(strict)
    explained = abs(_step_us(strict, ends) / measured - 1.0) <= _EXPLAINED_ERROR
    graph, ends = (strict, ends) if explained else (graph, simulate(graph))
    hosts = by_host(graph)
    what_if: dict[str, ReplayGraph] = {}
    if typical:
        what_if["no straggler"] = _no_straggler(graph, typical, hosts)
    if alone_us is not None:
        what_if["no contention"] = with_durations(graph, alone_us)
    late: F64 = np.zeros(len(graph.row))
    if suspected_us is not None:
        late = np.minimum(of_operations(graph, suspected_us, 0.0), graph.duration)
    if late.any():
        what_if[NO_SUSPECTED_WAITING] = changed(
            graph, duration=graph.duration - late, transfer=graph.transfer - np.minimum(late, graph.transfer)
        )
    launched = bool((np.isfinite(graph.order) & (graph.row >= 0)).any())
    if (graph.kind == Kind.COMM).any() and (explained or launched):
        what_if["communication twice as fast"] = _communication(graph, 0.5, late)
        what_if["communication free"] = _communication(graph, 0.0, late)
    held = held or {}
    what_if |= {name: not_held(graph, of_operations(graph, rows, False)) for name, rows in held.items()}
    if hosts_known and launched:
        what_if |= _of_hosts(graph, job, ends, hosts)
    if graph.duration[graph.kind == Kind.MEMCPY].sum() >= _LEAST_COPY_SHARE * graph.window_us.max():
        what_if["no copies"] = _no_copies(graph, job, hosts)
    what_if |= {name: with_durations(graph, durations) for name, durations in (compute_us or {}).items()}
    what_if |= _without_sms(graph, job, stack, alone_us, held.get(LAUNCH_ORDER), hosts)
    steps_us = [_step_us(g, e) for g, e in zip(what_if.values(), simulate_all(list(what_if.values())), strict=True)]
    replayed = _step_us(graph, ends)
    return Replay(
        measured_us=measured,
        replayed_us=replayed,
        error=replayed / measured - 1.0 if measured > 0 else 0.0,
        what_if=tuple(WhatIfStep(name=name, step_us=us) for name, us in zip(what_if, steps_us, strict=True)),
        steps=graph.steps,
        waits="explained" if explained else "as_measured",
        collective_waits=collective_waits,
    )


def _without_sms(
    graph: ReplayGraph,
    job: TracedJob,
    stack: TracedStack | None,
    alone_us: Sequence[F64] | None,
    blocked: Sequence[Bools] | None,
    hosts: Sequence[I64],
) -> dict[str, ReplayGraph]:
    """Return, by name, the graphs with collectives on copy engines and without FSDP2's copies, where these apply."""
    found: dict[str, ReplayGraph] = {}
    if stack is None or not stack.nvidia_nccl:
        return found
    copies = None
    if stack.fsdp2:
        by_rank = [fsdp2_copies(d) for d in job.digests]
        copies = of_operations(graph, by_rank, False)
        if any(rows.any() for rows in by_rank):
            found[NO_FSDP2_COPIES] = without_fsdp2_copies(graph, copies, hosts)
    moved = zero_sm(graph, job, hosts, copies=copies, alone_us=alone_us, blocked=blocked)
    return found if moved is None else found | {ZERO_SM: moved}


def _step_us(graph: ReplayGraph, ends: F64) -> float:
    last = np.zeros(len(graph.own))
    np.maximum.at(last, graph.island[graph.column[1:]], ends[1:])
    return graph.mean_us(np.where(last > 0, last, graph.head_us + graph.window_us))  # 0: no operation of the island ran


def _explained_only(graph: ReplayGraph) -> ReplayGraph:
    """Return the graph with each operation's wait that no edge explains cut to `SOON_US`."""
    follows = (graph.row >= 0) & ((graph.host > 0) | (graph.stream > 0))
    return changed(graph, lag=np.where(follows, np.minimum(graph.lag, SOON_US), graph.lag))


def _communication(graph: ReplayGraph, factor: float, waiting: F64) -> ReplayGraph:
    scale = np.where(graph.kind == Kind.COMM, factor, 1.0)
    in_transfer = np.minimum(waiting, graph.transfer)
    return changed(
        graph,
        duration=(graph.duration - waiting) * scale + waiting,
        transfer=(graph.transfer - in_transfer) * scale + in_transfer,
    )


def _of_hosts(graph: ReplayGraph, job: TracedJob, ends: F64, hosts: Sequence[I64]) -> dict[str, ReplayGraph]:
    """Return, by name, the graphs without host time and without host stalls."""
    found = {"hosts free (CUDA graphs)": _hosts_free(graph, ends, hosts)}
    stalling = graph.host_gap - _in_copies(graph, job, hosts)
    if (stalling >= STALL_US).any():
        found["no stall on any rank"] = _no_stall(graph, stalling, hosts)
    return found


def _hosts_free(graph: ReplayGraph, ends: F64, hosts: Sequence[I64]) -> ReplayGraph:
    """Return the graph without host time; new edges keep the measured order, and delay no operation.

    `ends`: end of every node in the unchanged replay, µs.
    """
    event, lag = graph.event.copy(), graph.lag.copy()
    begins = ends[graph.host] + graph.after_host
    for edge in (graph.stream, graph.event, graph.seen):
        begins = np.maximum(begins, ends[edge])
    begins += graph.lag
    for ops in _operations(graph):
        free = ops[(graph.event[ops] == 0) & (graph.seen[ops] == 0)]
        before = _ended_before(graph, ops, free)
        pause = begins[free] - ends[before]
        before, free, pause = (x[(before > 0) & (pause >= -ROUNDED_US)] for x in (before, free, pause))
        event[free], lag[free] = before, np.minimum(lag[free], pause)
    worked = np.maximum(since_host(graph, hosts, graph.host_gap), 0.0)  # negative where calls of two threads overlap
    return changed(graph, after_host=graph.after_host - worked, event=event, lag=lag)


def _operations(graph: ReplayGraph) -> list[I64]:
    """Return, per rank, the nodes that are GPU operations."""
    ops = np.flatnonzero(graph.row >= 0)
    ops = ops[np.argsort(graph.column[ops], kind="stable")]
    return np.split(ops, np.searchsorted(graph.column[ops], np.arange(1, int(graph.column.max()) + 1)))


def _ended_before(graph: ReplayGraph, ops: I64, nodes: I64) -> I64:
    """Return, per node, the operation of `ops`, launched earlier, that ended last before the node began; 0: none."""
    by_end = ops[np.argsort(graph.end[ops], kind="stable")]
    last = np.searchsorted(graph.end[by_end], graph.begin[nodes] + ROUNDED_US, side="right") - 1
    near = last[:, None] - np.arange(LOOK_BACK)
    candidate = by_end[np.maximum(near, 0)]
    joins = graph.leaves[candidate]  # the end of a collective depends on the last rank, which may come later
    fits = (near >= 0) & (graph.order[candidate] < graph.order[nodes][:, None]) & (candidate < nodes[:, None]) & ~joins
    return np.where(fits.any(axis=1), candidate[np.arange(len(nodes)), fits.argmax(axis=1)], 0)


def _no_stall(graph: ReplayGraph, stalling: F64, hosts: Sequence[I64]) -> ReplayGraph:
    saved = np.zeros(len(graph.row))
    for own in hosts:
        gap = graph.host_gap[own]
        usual = gap[(gap > 0) & (gap < STALL_US)]
        pace = float(np.median(usual)) if len(usual) else 0.0
        saved[own] = np.where(stalling[own] >= STALL_US, pace - stalling[own], 0.0)
    return changed(graph, after_host=graph.after_host + since_host(graph, hosts, saved))


def _in_copies(graph: ReplayGraph, job: TracedJob, hosts: Sequence[I64]) -> F64:
    """Return the µs of each node's `host_gap` that the host spent in the copy call just before the node."""
    call = of_operations(graph, [d.gpu.launch_end - d.gpu.launch_start for d in job.digests], 0.0)
    calling = np.zeros(len(graph.row))
    for own in hosts:
        copying = np.where(graph.kind[own] == Kind.MEMCPY, call[own], 0.0)
        calling[own] = np.minimum(np.concatenate(([0.0], copying[:-1])), np.maximum(graph.host_gap[own], 0.0))
    return calling


def _no_copies(graph: ReplayGraph, job: TracedJob, hosts: Sequence[I64]) -> ReplayGraph:
    return changed(
        graph,
        after_host=graph.after_host - since_host(graph, hosts, _in_copies(graph, job, hosts)),
        duration=np.where(graph.kind == Kind.MEMCPY, 0.0, graph.duration),
    )


def _no_straggler(graph: ReplayGraph, typical: Mapping[int, int], hosts: Sequence[I64]) -> ReplayGraph:
    duration, after_host, lag = graph.duration.copy(), graph.after_host.copy(), graph.lag.copy()
    saved = np.zeros(len(graph.row))
    for late, stand_in in typical.items():
        own, theirs = hosts[late], hosts[stand_in]
        stretch, their_stretch = _stretch(graph, own), _stretch(graph, theirs)
        gap = _stand_in(graph.host_gap[own], stretch, graph.host_gap[theirs], their_stretch)
        saved[own] = gap - graph.host_gap[own]
        local, their_local = _is_local(graph, own), _is_local(graph, theirs)
        duration[own[local]] = _stand_in(
            duration[own[local]], stretch[local], graph.duration[theirs[their_local]], their_stretch[their_local]
        )
        lag[own] = _stand_in(lag[own], stretch, graph.lag[theirs], their_stretch)
    after_host += since_host(graph, hosts, saved)
    for late, stand_in in typical.items():
        own, theirs = hosts[late], hosts[stand_in]
        if (root := graph.row[own] < 0).any():
            after_host[own[root][0]] = graph.after_host[theirs[graph.row[theirs] < 0][0]]
    return changed(graph, duration=duration, after_host=after_host, lag=lag)


def _is_local(graph: ReplayGraph, nodes: I64) -> Bools:
    local: Bools = (graph.row[nodes] >= 0) & (graph.kind[nodes] != Kind.COMM)
    return local


def _stretch(graph: ReplayGraph, nodes: I64) -> I64:
    """Return each node's stretch: the number of communication operations up to it, equal on ranks of one program."""
    return np.cumsum((graph.row[nodes] >= 0) & (graph.kind[nodes] == Kind.COMM))


def _stand_in(own: F64, stretch: I64, theirs: F64, their_stretch: I64) -> F64:
    """Return the values `own`, replaced by `theirs` in stretches of nodes where the sum of `theirs` is smaller.

    If a stretch has equally many values in both, values are replaced one by one; else `own` is scaled to the sum of
    `theirs`.
    """
    count = int(max(stretch.max(initial=0), their_stretch.max(initial=0))) + 1
    size, their_size = np.bincount(stretch, minlength=count), np.bincount(their_stretch, minlength=count)
    total, their_total = (np.bincount(s, v, count) for s, v in ((stretch, own), (their_stretch, theirs)))
    ratio = np.divide(their_total, total, out=np.ones(count), where=(total > 0) & (their_size > 0))
    at = np.arange(len(own)) - (np.cumsum(size) - size)[stretch] + (np.cumsum(their_size) - their_size)[stretch]
    one_by_one = (size == their_size)[stretch]
    value = np.where(one_by_one, theirs[np.minimum(at, len(theirs) - 1)], own * ratio[stretch])
    return np.where((their_total < total)[stretch], value, own)
