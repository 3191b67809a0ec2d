"""Compare compute kernels alone and beside communication, and find collectives that waited for a kernel to leave SMs.

A kernel is slower beside communication for one of three causes. Tail effect: communication CTAs take SMs, and a grid of
few waves needs one more. SM contention: the kernel has fewer SMs but no extra wave, and slows in proportion. Bandwidth
(and power): the kernel is slower though the communication takes no SMs, or the kernel is memory-bound.

A collective that starts as a big kernel ends may simply depend on it. It does not if it began before the end of the
kernel, as the last blocks left; if it was launched before that kernel; if no stream wait was issued between the two
launches; if a later kernel of the same stream was already queued (a wait is for all that is queued); if the trace names
what it waited for and that had ended; or if the same collective began during the same kernel on another rank or at
another time. Without such proof nothing is reported.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

import numpy as np

from counterpoint.diagnosis.analysis.accounts import Activity
from counterpoint.diagnosis.reading.intervals import unique_rows
from counterpoint.diagnosis.reading.traced_job import TracedJob
from counterpoint.machine.gpus import find_gpu
from counterpoint.machine.occupancy import SmLimits, blocks_per_sm, most_ctas_without_extra_wave, waves
from counterpoint.records.diagnosis import KernelCause, KernelComparison
from counterpoint.trace.timeline import F64, I32, I64, Bools, Device, GpuOps, Kind, device_of, previous_on_stream

_ALONE, _OVERLAPPED = 0.02, 0.5  # alone / beside communication: kernels with at most / at least this share of overlap
_SLOWER = 1.05
_UNKNOWN_SM = SmLimits(num_sms=0, regs=65536, smem=98304, threads=2048)  # the smallest limits since V100
_OTHER_SIZE = 1.3  # from this ratio on, adjacent sorted times belong to different problem sizes
_FEW_WAVES = 8  # with more waves, an extra wave costs no more than the proportional loss of SMs
_BESIDES = 1.25  # what clocks, power and caches may add to an extra wave, or to fewer SMs
_SHOWN = 200
_MEMORY_BOUND = re.compile(
    r"elementwise|reduce_kernel|layer_?norm|rms_?norm|softmax|CatArray|index|scatter|gather|embedding|multi_tensor|"
    r"copy|triton_(poi|red|per)|fused_(poi|red|per)|transpose|dropout|cast|fill|nll_loss|adam|unrolled|"
    r"chunk_cat|split_with_sizes|bn_|batch_norm|pool|GammaBeta|n[ch]\w*ToN[ch]|im2col|col2im",
    re.IGNORECASE,
)


_Fact = tuple[str, tuple[int, ...], str, int, int]  # name, grid + block, shapes, registers, shared memory
_CLOSE_US = 25.0  # a kernel of another stream starts this soon after SMs become free
_SHORTEST_US = 30.0
_PAIRS = 1 << 20  # pairs of a collective and a kernel that are examined in one batch
_EARLY = 0.25  # last part of a kernel, in which its blocks leave SMs free and other kernels can start


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelSet:
    """Holds kinds of kernels compared alone and beside communication, and GPU operations' µs without contention."""

    kernels: tuple[KernelComparison, ...]  # highest cost first
    alone_us: tuple[F64, ...]  # per rank and GPU operation; NaN: same as measured


def sm_limits(device: Device) -> SmLimits | None:
    """Return the number and resource limits of a GPU's SMs, from the trace, else the datasheet; None: unknown GPU."""
    known = find_gpu(device.name)
    if known is None and not device.num_sms:
        return None
    sm = known.sm if known else _UNKNOWN_SM
    return replace(
        sm,
        num_sms=device.num_sms or sm.num_sms,
        regs=device.regs_per_sm or sm.regs,
        smem=device.smem_per_sm or sm.smem,
        threads=device.threads_per_sm or sm.threads,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _ComputeRows:
    """Holds the compute operations of all ranks in one table; `column` is the rank, `op` the row of its GpuOps."""

    column: I64
    op: I64
    duration: F64
    share: F64  # share of the duration while communication runs
    ctas: I64  # blocks of the largest communication kernel at its midpoint; 0: none or copies
    kind: I64  # index into `facts`
    facts: list[_Fact]


def compare_overlap(job: TracedJob, busy: list[Activity]) -> KernelSet:
    """Compare each kind of compute kernel (same name, grid, block and shapes) alone and beside communication."""
    rows = _collect(job, busy)
    alone_us = tuple(np.full(len(d.gpu), np.nan) for d in job.digests)
    limits = sm_limits(job.digests[0].device)
    kernels: list[KernelComparison] = []
    order = np.argsort(rows.kind, kind="stable")
    bounds = np.searchsorted(rows.kind[order], np.arange(len(rows.facts) + 1))
    for kind, fact in enumerate(rows.facts):
        sizes = _by_size(job, rows, order[bounds[kind] : bounds[kind + 1]], shaped=bool(fact[2]))
        kernels += [_compared(job, rows, members, fact, limits, alone_us) for members in sizes]
    kernels.sort(key=lambda k: -k.cost_us)
    return KernelSet(kernels=tuple(kernels[:_SHOWN]), alone_us=alone_us)


def _compared(
    job: TracedJob, rows: _ComputeRows, members: I64, fact: _Fact, limits: SmLimits | None, alone_us: tuple[F64, ...]
) -> KernelComparison:
    """Compare a kind of kernel alone and beside communication; write its µs without contention into `alone_us`."""
    share = rows.share[members]
    alone, beside = members[share <= _ALONE], members[share >= _OVERLAPPED]
    kernel = _kernel(fact, rows, alone, beside, limits, len(job.ranks))
    if kernel.alone_us is not None and kernel.slowdown is not None and kernel.slowdown > 1.0:
        touched = members[share > _ALONE]
        for column in np.unique(rows.column[touched]).tolist():
            mine = touched[rows.column[touched] == column]
            alone_us[column][rows.op[mine]] = np.minimum(rows.duration[mine], kernel.alone_us)
    return kernel


def _by_size(job: TracedJob, rows: _ComputeRows, members: I64, *, shaped: bool) -> list[I64]:
    """Return the operations of one kind, split by problem size where the trace does not state their shapes.

    Alone, a kernel takes about the same time for the same size. Where times alone form several classes, sizes are mixed
    (one GEMM kernel serves many layers): each class becomes a kind, and an operation beside communication joins the
    class of the operations at its place in the step, on other ranks and in other steps. If there are none, it is left
    out.
    """
    alone = members[rows.share[members] <= _ALONE]
    if shaped or len(alone) < 4:
        return [members]
    times = np.sort(rows.duration[alone])
    edges = np.flatnonzero(times[1:] > _OTHER_SIZE * times[:-1])
    if not len(edges):
        return [members]
    limits = np.sqrt(times[edges] * times[edges + 1])
    place = _place_in_step(job, rows, members)
    size = np.full(int(place.max()) + 1, np.nan)
    in_alone = np.isin(members, alone)
    for at in np.unique(place[in_alone]).tolist():
        size[at] = np.median(rows.duration[members[in_alone & (place == at)]])
    known = np.isfinite(size[place])
    which = np.searchsorted(limits, size[place])
    return [members[known & (which == number)] for number in range(len(limits) + 1)]


def _place_in_step(job: TracedJob, rows: _ComputeRows, members: I64) -> I64:
    """Return each operation's index among the operations of its kind in the same step of the same rank."""
    column, op = rows.column[members], rows.op[members]
    start = np.array([job.op_start[c][o] for c, o in zip(column.tolist(), op.tolist(), strict=True)])
    step = np.zeros(len(members), np.int64)
    for c in np.unique(column).tolist():
        own = column == c
        step[own] = np.searchsorted(job.step_start[:, c], start[own], side="right")
    order = np.lexsort((start, step, column))
    first = np.concatenate(([True], np.diff(column[order]).astype(bool) | np.diff(step[order]).astype(bool)))
    position = np.arange(len(order)) - np.maximum.accumulate(np.where(first, np.arange(len(order)), 0))
    place = np.empty(len(order), np.int64)
    place[order] = position
    return place


def _collect(job: TracedJob, busy: list[Activity]) -> _ComputeRows:
    column, op, duration, share, ctas, kinds = [], [], [], [], [], []
    table: dict[_Fact, int] = {}
    for c, d in enumerate(job.digests):
        gpu = d.gpu
        rows = np.flatnonzero(gpu.kind == Kind.COMPUTE)
        start, end = job.op_start[c][rows], job.op_end[c][rows]
        facts = np.column_stack([gpu.name[rows], gpu.shape[rows], gpu.regs[rows], gpu.smem[rows],
                                 gpu.grid[rows], gpu.block[rows]])  # fmt: skip
        unique, which = unique_rows(facts)
        number = []
        for n, shape, regs, smem, *dims in unique.tolist():
            fact = (d.names[n], tuple(dims), d.shapes[shape] if shape >= 0 else "", regs, smem)
            number.append(table.setdefault(fact, len(table)))
        column.append(np.full(len(rows), c))
        op.append(rows)
        duration.append(end - start)
        beside = np.zeros(len(rows))
        for own, on in busy[c].by_gpu(gpu.stream[rows]):
            beside[own] = on.comm.within(start[own], end[own])
        share.append(beside / np.maximum(end - start, 1e-9))
        ctas.append(_ctas_during(job, c, start, end))
        kinds.append(np.array(number, np.int64)[which])
    return _ComputeRows(
        column=np.concatenate(column),
        op=np.concatenate(op),
        duration=np.concatenate(duration),
        share=np.concatenate(share),
        ctas=np.concatenate(ctas),
        kind=np.concatenate(kinds),
        facts=list(table),
    )


def _ctas_during(job: TracedJob, column: int, start: F64, end: F64) -> I64:
    """Return the number of blocks of the largest communication kernel that runs at each window's midpoint; 0: none."""
    comm = job.digests[column].comm
    low, high = job.on_job_clock(column, comm.start), job.on_job_clock(column, comm.end)
    found = np.zeros(len(start), np.int64)
    middle = (start + end) / 2
    for stream in np.unique(comm.stream):
        own = np.flatnonzero(comm.stream == stream)
        at = np.searchsorted(low[own], middle, side="right") - 1
        inside = (at >= 0) & (middle < high[own[np.maximum(at, 0)]])
        found = np.maximum(found, np.where(inside, np.maximum(comm.ctas[own[np.maximum(at, 0)]], 0), 0))
    return found


def _kernel(
    fact: _Fact, rows: _ComputeRows, alone: I64, beside: I64, limits: SmLimits | None, ranks: int
) -> KernelComparison:
    name, dims, shapes, regs, smem = fact
    grid, block = dims[:3], dims[3:]
    a, b = rows.duration[alone], rows.duration[beside]
    slowdown = float(np.median(b) / np.median(a)) if len(a) and len(b) and np.median(a) > 0 else None
    blocks = int(np.prod(np.maximum(grid, 0), dtype=np.int64))
    ctas = int(np.median(rows.ctas[beside])) if len(beside) else 0
    fit = lost = before = after = None
    if limits is not None and blocks > 0:
        fit = blocks_per_sm(threads=int(np.prod(block)), regs_per_thread=regs, smem_bytes=smem, sm=limits)
        before = waves(blocks, num_sms=limits.num_sms, blocks_per_sm=fit)
        after = waves(blocks, num_sms=limits.num_sms - ctas, blocks_per_sm=fit)
        lost = most_ctas_without_extra_wave(blocks, num_sms=limits.num_sms, blocks_per_sm=fit)
    cause = _cause(name, slowdown, a, b, ctas, before, after)
    if slowdown and slowdown > _most_slowdown(cause, limits.num_sms if limits else 0, ctas, before, after):
        slowdown, cause = None, "none"  # the kernels have two sizes that the trace does not distinguish
    extra = float(np.maximum(b - np.median(a), 0.0).sum()) / ranks if cause != "none" else 0.0
    return KernelComparison(
        name=name,
        grid=(grid[0], grid[1], grid[2]),
        block=(block[0], block[1], block[2]),
        shapes=shapes or None,
        alone_count=len(a),
        overlapped_count=len(b),
        alone_us=_quantile(a, 50),
        alone_p10_us=_quantile(a, 10),
        alone_p90_us=_quantile(a, 90),
        overlapped_us=_quantile(b, 50),
        overlapped_p10_us=_quantile(b, 10),
        overlapped_p90_us=_quantile(b, 90),
        slowdown=slowdown,
        cost_us=extra,
        cause=cause,
        waves_alone=before,
        waves_overlapped=after,
        blocks_per_sm=fit,
        comm_ctas=ctas if len(beside) else None,
        comm_ctas_without_extra_wave=lost,
    )


def _most_slowdown(cause: KernelCause, sms: int, ctas: int, before: int | None, after: int | None) -> float:
    """Return the largest slowdown that a cause can explain; if the number of SMs is unknown, half count as taken."""
    more_waves = after / before if before and after else 1.0
    fewer_sms = sms / (sms - ctas) if sms > ctas else 2.0
    most = {"tail_effect": more_waves, "sm_contention": max(fewer_sms, more_waves)}
    return _BESIDES * most.get(cause, np.inf)


def _quantile(values: F64, q: float) -> float | None:
    return float(np.percentile(values, q)) if len(values) else None


def _cause(
    name: str, slowdown: float | None, alone: F64, beside: F64, ctas: int, before: int | None, after: int | None
) -> KernelCause:
    """Return why communication slows a kernel; "none" if by under 5 %, or by less than the spread of times alone."""
    if slowdown is None or slowdown < _SLOWER or np.median(beside) <= np.percentile(alone, 75):
        return "none"
    if ctas == 0 or _MEMORY_BOUND.search(name):
        return "bandwidth"
    if before is not None and after is not None and before <= _FEW_WAVES and after > before:
        return "tail_effect"
    return "sm_contention"


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
    """Return every collective that waited for a kernel to leave SMs, with proof that no dependency made it wait."""
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
    """Return each collective's first GPU operation, or the local copy right before it on the same stream."""
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
