"""Find collectives that were ready to run, but found every SM taken by a kernel that had started before.

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

from counterpoint.diagnosis.intervals import unique_rows
from counterpoint.diagnosis.job import TracedJob
from counterpoint.diagnosis.kernels import sm_limits
from counterpoint.machine.occupancy import blocks_per_sm
from counterpoint.trace.timeline import I32, I64, Bools, GpuOps, Kind, device_of, previous_on_stream

_CLOSE_US = 25.0  # a kernel of another stream starts this soon after SMs become free
_SHORTEST_US = 30.0
_EARLY = 0.25  # last part of a kernel, in which its blocks leave SMs free and other kernels can start


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocked:
    """Records that row `row` of `column`'s collectives waited `lost_us` for kernel `by` (GpuOps row) to leave SMs."""

    column: int
    row: int
    op: int  # its first GPU operation
    by: int
    lost_us: float
    proof: str


def find_blocked(job: TracedJob) -> tuple[Blocked, ...]:
    """Return every collective that waited for SMs, on any rank, with the proof that it did not depend on the kernel."""
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
    for row in np.flatnonzero(needs_sms & (lows < highs)).tolist():
        op = int(ops[row])
        start, launched = float(gpu.start[op]), float(gpu.launch_start[op])
        others = holds[lows[row] : highs[row]]
        others = others[gpu.stream[others] != gpu.stream[op]]
        others = others[device_of(gpu.stream[others]) == device_of(gpu.stream[op])]
        late = gpu.end[others] - _EARLY * (gpu.end[others] - gpu.start[others])  # from here on SMs become free
        for kernel in others[(gpu.launch_start[others] < launched) & (late > start + _CLOSE_US)].tolist():
            beside.add((comm.op[row], d.names[gpu.name[kernel]]))
        near = others[(late <= start) & (gpu.end[others] >= start - _CLOSE_US) & (gpu.start[others] < start)]
        if not len(near):
            continue
        by = int(near[np.argmax(gpu.end[near])])
        ready = max(float(gpu.launch_end[op]), float(gpu.end[previous[op]]) if previous[op] >= 0 else -np.inf)
        lost = min(start - ready, start - float(gpu.start[by]))
        if lost >= _SHORTEST_US:
            found.append(Blocked(column=column, row=row, op=op, by=by, lost_us=lost, proof=_proof(job, column, op, by)))
    return found, beside


def _lead(gpu: GpuOps, previous: I64, ops: I32) -> I64:
    """Return the first operation of each collective: the local copy right before it, which needs SMs, or itself."""
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
    """Return the reason why operation `op` cannot have depended on kernel `by`; empty if it may have."""
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
