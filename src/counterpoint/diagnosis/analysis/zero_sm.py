"""Change a replay as if copy engines did NCCL's transfers, to see what `counterpoint.overlap(model)` would save.

- A collective takes as long as its program takes on the clock of `collectives/program`, at the rates measured on this
  kind of GPU, and no kernel that holds every SM delays it.
- A compute kernel that ran beside NCCL takes as long as it did alone; where it was not seen alone, it gets back the
  speed that NCCL takes on average. Beside copies it then loses what copies take (`Disturbance.compute_kept`).
- FSDP2's copies between parameters and buffers take no time: every byte goes straight to its place. Gradients that
  FSDP2 reduces in float32 are sent as they are computed, in bfloat16.
- The sum of a reduction keeps compute from the SMs for `_SUMS` times as long as its bytes take through device memory.
- Hosts take as long as measured, less the time to launch FSDP2's copies.

Collectives of other sizes and kinds stay as they are: those that NCCL moves faster, and those of more than one host.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from counterpoint.collectives.program.clock import simulate as play
from counterpoint.collectives.program.operations import even_call, plan_all
from counterpoint.collectives.program.tuning import best_tuning
from counterpoint.diagnosis.analysis.replay_graph import (
    ReplayGraph,
    not_held,
    of_operations,
    since_host,
    with_durations,
)
from counterpoint.diagnosis.analysis.simulation import simulate
from counterpoint.diagnosis.reading.digest import RankDigest
from counterpoint.diagnosis.reading.intervals import Intervals
from counterpoint.diagnosis.reading.traced_job import TracedJob
from counterpoint.machine.profile import Profile, own_profile_of_traces, shipped_profile
from counterpoint.pair.together import REDUCTIONS, disturbance
from counterpoint.trace.timeline import F64, I64, Bools, Kind

_COPY = re.compile(  # FSDP2's copies in and out of the buffers of its collectives, without casts of dtypes
    r"split_with_sizes_copy|chunk_cat|multi_tensor_apply.*\bCopy<(?P<type>[\w:]+), (?P=type)>"
)
_FSDP2 = ("all_gather", "reduce_scatter")
_ON_ONE_HOST = 8  # GPUs: a larger group counts as spread over several hosts
_ROUNDS = 3  # rounds of a replay, each of which updates which operations overlap
_SUMS = 2.0  # time of gradient sums on busy SMs / (their bytes / `memory_gb_per_s`), on 2 x H200


def zero_sm(
    graph: ReplayGraph,
    job: TracedJob,
    hosts: Sequence[I64],
    *,
    copies: Bools | None = None,
    alone_us: Sequence[F64] | None = None,
    blocked: Sequence[Bools] | None = None,
) -> ReplayGraph | None:
    """Return the graph with collectives moved from NCCL kernels to copy engines, which take no SM.

    None if there is no collective that copy engines would move, or the copy engines of this GPU model are unknown.

    Args:
        graph: the replayed steps.
        job: ranks on one clock.
        hosts: each rank's nodes in host order.
        copies: per node, whether it is a copy of FSDP2 (`fsdp2_copies`); None: the collectives are not FSDP2's.
        alone_us: per column and GPU operation, how long it would run without contention; NaN: as measured.
        blocked: per column and GPU operation, whether it is communication held back by a persistent kernel.
    """
    gpu = job.digests[0].device.name
    profile = own_profile_of_traces(gpu) or shipped_profile(gpu)
    if not profile.is_of_this_chip:
        return None
    transfer, sums = _transfers(graph, job, profile, fsdp2=copies is not None)
    moved = np.isfinite(transfer)
    if not moved.any():
        return None
    changed = replace(graph, duration=_without_nccl(graph, moved, profile))
    if alone_us is not None:
        changed = with_durations(changed, alone_us)
    if blocked is not None:
        changed = not_held(changed, of_operations(graph, blocked, False) & moved)
    changed = replace(
        changed,
        duration=np.where(moved, transfer, changed.duration),
        transfer=np.where(moved, transfer, graph.transfer),
    )
    if copies is not None:
        changed = without_fsdp2_copies(changed, copies, hosts)
    duration = changed.duration
    lost = 1.0 - disturbance("zero_sm", profile).compute_kept + sums / transfer
    for _ in range(_ROUNDS):
        changed = replace(changed, duration=_beside(changed, simulate(changed), duration, lost))
    return changed


def fsdp2_copies(digest: RankDigest) -> Bools:
    """Return a mask of GPU operations that are FSDP2's copies between parameters and buffers of collectives."""
    copies = np.array([bool(_COPY.search(name)) for name in digest.names], bool)
    return copies[digest.gpu.name] & (digest.gpu.kind != Kind.COMM) if len(copies) else np.zeros(0, bool)


def without_fsdp2_copies(graph: ReplayGraph, copies: Bools, hosts: Sequence[I64]) -> ReplayGraph:
    """Return the graph in which the nodes `copies`, and their launches, take no time."""
    launching = since_host(graph, hosts, np.where(copies, graph.host_gap, 0.0))
    return replace(
        graph,
        duration=np.where(copies, 0.0, graph.duration),
        lag=np.where(copies, 0.0, graph.lag),
        after_host=graph.after_host - launching,
    )


def _transfers(graph: ReplayGraph, job: TracedJob, profile: Profile, *, fsdp2: bool) -> tuple[F64, F64]:
    """Return, per node, its collective's µs on copy engines (NaN: NCCL keeps it), and its µs of reduction kernels."""
    found, sums = np.full(len(graph.row), np.nan), np.zeros(len(graph.row))
    known: dict[tuple[str, int, int], float] = {}
    for c, digest in enumerate(job.digests):
        comm = digest.comm
        own = np.flatnonzero((graph.column == c) & (graph.row >= 0) & (graph.kind == Kind.COMM))
        at = np.searchsorted(comm.first, graph.row[own], side="right") - 1
        gathered = {size for op, size in zip(comm.op, comm.bytes.tolist(), strict=True) if op == "all_gather"}
        for node, i in zip(own[at >= 0].tolist(), at[at >= 0].tolist(), strict=True):
            op, stated, ranks = comm.op[i], int(comm.bytes[i]), int(comm.size[i])
            movable = stated > 0 and 2 <= ranks <= _ON_ONE_HOST and op in profile.nccl.crossover_bytes
            if comm.ctas[i] == 0 or not movable:
                continue
            widened = fsdp2 and op == "reduce_scatter" and stated not in gathered and stated // 2 in gathered
            size = stated // 2 if widened else stated
            if op not in _FSDP2 if fsdp2 else size < profile.nccl.crossover_bytes[op]:
                continue
            key = op, size, ranks
            if key not in known:
                known[key] = _alone_us(*key, profile)
            found[node] = known[key]
            if op in REDUCTIONS:
                sums[node] = _SUMS * (size + stated / ranks) / profile.sums.memory_gb_per_s / 1e3
    return found, sums


def _alone_us(op: str, size: int, ranks: int, profile: Profile) -> float:
    call = even_call(op, ranks, size)
    return play(plan_all(call, best_tuning(call, profile.rates)), profile.rates).us


def _without_nccl(graph: ReplayGraph, moved: Bools, profile: Profile) -> F64:
    """Return node durations (µs) less the slowdown of compute by NCCL kernels that copy engines replace."""
    duration, lost = graph.duration.copy(), 1.0 - disturbance("nccl", profile).compute_kept
    for c in np.unique(graph.column[1:]).tolist():
        compute = np.flatnonzero((graph.column == c) & (graph.kind == Kind.COMPUTE))
        nccl = np.flatnonzero((graph.column == c) & moved)
        beside = Intervals.union(graph.begin[nccl], graph.end[nccl])
        duration[compute] -= lost * beside.within(graph.begin[compute], graph.end[compute])
    return duration


def _beside(graph: ReplayGraph, ends: F64, duration: F64, lost: F64) -> F64:
    """Return node durations (µs) with compute slowed by copies that overlap it in a simulation with these `ends`.

    `lost`: share of its speed that compute loses beside each node; NaN: the node stays with NCCL or is no collective.
    """
    out = graph.duration.copy()
    for c in np.unique(graph.column[1:]).tolist():
        compute = np.flatnonzero((graph.column == c) & (graph.kind == Kind.COMPUTE))
        begin = ends[compute] - graph.duration[compute]
        out[compute] = duration[compute]
        for loss in np.unique(lost[(graph.column == c) & np.isfinite(lost)]):
            copying = np.flatnonzero((graph.column == c) & (lost == loss))
            during = Intervals.union(ends[copying] - graph.transfer[copying], ends[copying])
            out[compute] += loss * during.within(begin, ends[compute])
    return out
