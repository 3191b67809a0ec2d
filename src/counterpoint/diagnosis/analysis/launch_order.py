"""Find collectives that were ready to run, but had to wait since an earlier kernel held every SM.

A collective that starts as a big kernel ends may simply depend on it. It does not if it began before the end of the
kernel, as the last blocks left; if it was launched before that kernel; if no stream wait was issued between the two
launches; if a later kernel of the same stream was already queued (a wait is for all that is queued); if the trace names
what it waited for and that had ended; or if the same collective began during the same kernel on another rank or at
another time. Without such proof nothing is reported.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from counterpoint.diagnosis.analysis.kernels import sm_limits
from counterpoint.diagnosis.reading.intervals import unique_rows
from counterpoint.diagnosis.reading.traced_job import TracedJob
from counterpoint.machine.occupancy import blocks_per_sm
from counterpoint.trace.timeline import I32, I64, Bools, GpuOps, Kind, device_of, previous_on_stream

_CLOSE_US = 25.0  # a kernel of another stream starts this soon after SMs become free
_SHORTEST_US = 30.0
_PAIRS = 1 << 20  # pairs of a collective and a kernel that are examined in one batch
_EARLY = 0.25  # last part of a kernel, in which its blocks leave SMs free and other kernels can start


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocked:
    """Records that a collective (`row` of rank `column`) waited `lost_us` for kernel `by` (GpuOps row) to leave SMs."""

    column: int
    row: int
    op: int  # first GPU operation of the collective
    by: int
    lost_us: float
    proof: str


def find_blocked(job: TracedJob) -> tuple[Blocked, ...]:
    """Return every collective that waited for SMs on any rank, with proof that it did not depend on the kernel."""
    suspects: list[Blocked] = []
    free: set[tuple[str, str]] = set()  # (collective operation, kernel name) seen running at the same time
    for column in range(len(job.digests)):
        found, beside = _of_rank(job, column)
        suspects += found
        free |= beside
    proven = []
    for s in suspects:
        d = job.digests[s.column]
        if s.proof:
            proven.append(s)
        elif (d.comm.op[s.row], d.names[d.gpu.name[s.by]]) in free:
            proven.append(replace(s, proof="the same collective starts beside the same kernel elsewhere"))
    return tuple(proven)


def _of_rank(job: TracedJob, column: int) -> tuple[list[Blocked], set[tuple[str, str]]]:
    d = job.digests[column]
    gpu, comm, limits = d.gpu, d.comm, sm_limits(d.device)
    if limits is None:
        return [], set()
    compute = np.flatnonzero((gpu.kind == Kind.COMPUTE) & (gpu.end - gpu.start >= _SHORTEST_US))
    holds = compute[_holds_every_sm(job, column, compute)]
    found: list[Blocked] = []
    beside: set[tuple[str, str]] = set()
    if not len(holds):
        return found, beside
    previous = previous_on_stream(gpu.stream)
    begin = gpu.start[holds]
    longest = float((gpu.end[holds] - begin).max())
    ops = _lead(gpu, previous, comm.first)
    lows = np.searchsorted(begin, gpu.start[ops] - longest - _CLOSE_US)
    highs = np.searchsorted(begin, comm.end)
    # peer copies need no SM, but a local copy right before them on their stream may
    needs_sms = ((comm.ctas > 0) | (ops != comm.first)) & np.isfinite(gpu.launch_start[ops])
    rows = np.flatnonzero(needs_sms & (lows < highs))
    for part in np.split(rows, np.flatnonzero(np.diff(np.cumsum((highs - lows)[rows]) // _PAIRS)) + 1):
        reach = (highs - lows)[part]
        row = np.repeat(part, reach)  # pairs of a collective and a kernel that holds every SM
        other = holds[np.arange(len(row)) + np.repeat(lows[part] - (np.cumsum(reach) - reach), reach)]
        apart = gpu.stream[other] != gpu.stream[ops[row]]
        apart &= device_of(gpu.stream[other]) == device_of(gpu.stream[ops[row]])
        row, other = row[apart], other[apart]
        start, end = gpu.start[ops[row]], gpu.end[other]
        late = end - _EARLY * (end - gpu.start[other])  # from here on SMs become free
        free = (gpu.launch_start[other] < gpu.launch_start[ops[row]]) & (late > start + _CLOSE_US)
        pairs = zip(row[free].tolist(), gpu.name[other[free]].tolist(), strict=True)
        beside |= {(comm.op[r], d.names[name]) for r, name in set(pairs)}
        near = np.flatnonzero((late <= start) & (end >= start - _CLOSE_US) & (gpu.start[other] < start))
        near = near[np.lexsort((-end[near], row[near]))]
        near = near[np.flatnonzero(np.diff(row[near], prepend=-1))]  # for each collective, the kernel that ended last
        op, by = ops[row[near]], other[near]
        free_at = np.where(previous[op] >= 0, gpu.end[previous[op]], -np.inf)
        lost = np.minimum(start[near] - np.maximum(gpu.launch_end[op], free_at), start[near] - gpu.start[by])
        found += [
            Blocked(column=column, row=r, op=o, by=k, lost_us=us, proof=_proof(job, column, o, k))
            for r, o, k, us in zip(row[near].tolist(), op.tolist(), by.tolist(), lost.tolist(), strict=True)
            if us >= _SHORTEST_US
        ]
    return found, beside


def _lead(gpu: GpuOps, previous: I64, ops: I32) -> I64:
    """Return the operation with which each collective begins: a local copy (needs SMs) right before it, or itself."""
    before = np.maximum(previous[ops], 0)
    near = gpu.start[ops] - gpu.end[before] < 2 * _CLOSE_US
    return np.where((previous[ops] >= 0) & (gpu.kind[before] == Kind.MEMCPY) & near, before, ops).astype(np.int64)


def _holds_every_sm(job: TracedJob, column: int, rows: I64) -> Bools:
    """Return whether each kernel's grid has at least as many blocks as the GPU can run at once."""
    gpu, limits = job.digests[column].gpu, sm_limits(job.digests[column].device)
    assert limits is not None
    facts = np.column_stack([gpu.grid[rows], gpu.block[rows], gpu.regs[rows], gpu.smem[rows]])
    kinds, which = unique_rows(facts)
    held = [
        math.prod(k[:3])
        >= limits.num_sms * blocks_per_sm(threads=math.prod(k[3:6]), regs_per_thread=k[6], smem_bytes=k[7], sm=limits)
        for k in kinds.tolist()
    ]
    return np.array(held, bool)[which]


def _proof(job: TracedJob, column: int, op: int, by: int) -> str:
    """Return the reason why operation `op` cannot have depended on kernel `by`; empty if it may have depended on it."""
    d = job.digests[column]
    gpu = d.gpu
    launched, kernel_launched = float(gpu.launch_start[op]), float(gpu.launch_start[by])
    if gpu.start[op] < gpu.end[by] - 3.0:
        return "it began as that kernel's last blocks left, so it does not depend on it"
    if not np.isfinite(kernel_launched):
        return ""
    if launched < kernel_launched:
        return "it was launched before that kernel"
    wait = d.waits
    if not len(wait.wait_call) and not len(wait.stream_wait_at):
        return ""  # the trace records no host calls by which to tell
    between = (wait.wait_call > kernel_launched) & (wait.wait_call < launched)
    if len(wait.wait_call) and not between.any():
        return "no stream wait was issued between the launch of that kernel and its own"
    stated = (wait.stream_wait_at > kernel_launched) & (wait.stream_wait_at < launched)
    mine = wait.stream_wait_for[stated & (wait.stream_wait_stream == gpu.stream[op])]
    if len(mine) and (gpu.end[mine] < gpu.start[op] - _CLOSE_US).all():
        return "what its stream waited for was over"
    later = (gpu.stream == gpu.stream[by]) & (gpu.launch_start > kernel_launched) & (gpu.launch_start < launched)
    if (later & (gpu.start >= gpu.start[op])).any():
        return "a later kernel of that stream was queued before it and had not begun"
    return ""
