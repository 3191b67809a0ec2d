"""Find late ranks, kernels that communication slows, collectives that a kernel holds up, and FSDP2's copies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from counterpoint.diagnosis.analysis.analysis import Analysis
from counterpoint.diagnosis.analysis.replay import INDEPENDENT_STREAMS, LAUNCH_ORDER, NO_FSDP2_COPIES
from counterpoint.diagnosis.analysis.zero_sm import fsdp2_copies
from counterpoint.diagnosis.findings.advice import (
    advise_kernel,
    advise_launch_order,
    advise_straggler,
    no_sm_collectives,
    short_name,
)
from counterpoint.records.causes import KERNEL_CAUSES, STRAGGLER_CAUSES
from counterpoint.records.diagnosis import Finding, KernelComparison, Straggler, counted, ranks_in_words

LEAST_SHARE = 0.01  # of a step: a finding that costs less is left out
_KERNELS_NAMED = 3
_LONGEST_NAME = 60
_OF_SEVERAL = (
    ("its host stalls", "their hosts stall"),
    ("its host launches", "their hosts launch"),
    ("its", "their"),
    ("it has", "they have"),
)


def find_late_ranks(a: Analysis) -> Iterator[Finding]:
    """Yield a finding for each rank, or set of ranks, that makes the other ranks wait."""
    job, late = a.job, a.told_late
    whole = sum(s.delay_us for s in late)
    launched = all(np.isfinite(at).any() for at in job.launch)  # else the replay cannot change host times
    steps = f" in {len(job.step_names)} steps" if len(job.step_names) > 1 else ""
    for s in late:
        cost = s.delay_us / job.num_steps
        if "no straggler" in a.saved_us and whole > 0 and launched:
            cost = a.late_us * s.delay_us / whole
        yield Finding.of(
            "straggler",
            cost,
            a.step_us,
            title=_late_title(s),
            evidence=f"the others stood still for {s.delay_us / job.num_steps / 1e3:.2f} ms {job.each}; "
            f"{'one of them' if s.with_ranks else 'it'} arrived last {counted(s.times_last, 'time')}{steps}; "
            + (f"of rank {s.rank}: " if s.with_ranks else "")
            + s.evidence,
            advice=advise_straggler(s, a.stack),
            rank=s.rank,
            start_us=s.start_us,
            end_us=s.end_us,
        )


def _late_title(s: Straggler) -> str:
    cause = "its host launches slowly" if s.detail == "launch" else STRAGGLER_CAUSES[s.cause].title
    if not s.with_ranks:
        return f"Rank {s.rank} makes the others wait: {cause}"
    for one, several in _OF_SEVERAL:
        cause = cause.replace(one, several)
    return f"{ranks_in_words(s.ranks).capitalize()} make the others wait: {cause}"


def find_slow_kernels(a: Analysis) -> Iterator[Finding]:
    """Yield a finding for each cause by which communication slows kernels: tail effect, SM contention, bandwidth."""
    job, kernels = a.job, a.kernels.kernels
    whole = sum(k.cost_us for k in kernels)
    for cause in ("tail_effect", "sm_contention", "bandwidth"):
        group = [k for k in kernels if k.cause == cause]
        lost = sum(k.cost_us for k in group)
        cost = lost / job.num_steps
        if "no contention" in a.saved_us and whole > 0:
            cost = min(cost, a.saved_us["no contention"] * lost / whole)
        if not group or cost < LEAST_SHARE * a.step_us:
            continue
        worst = group[0]
        parts = [f"{short_name(k.name, _LONGEST_NAME)} {_times(k)}" for k in group[:_KERNELS_NAMED]]
        waves = (
            f"; {worst.grid[0] * worst.grid[1] * worst.grid[2]} blocks at {worst.blocks_per_sm} a SM take "
            f"{counted(worst.waves_alone or 0, 'wave')} alone, {worst.waves_overlapped} beside {worst.comm_ctas} "
            "communication CTAs"
            if cause == "tail_effect"
            else ""
        )
        yield Finding.of(
            cause,
            cost,
            a.step_us,
            title=KERNEL_CAUSES[cause].title.format(kernels=counted(len(group), "kernel")),
            evidence=f"{lost / job.num_steps / 1e3:.2f} ms of kernel time {job.each}: " + "; ".join(parts) + waves,
            advice=advise_kernel(worst, job.digests[0].device.num_sms, a.stack, no_sm_collectives(a)),
        )


def _times(k: KernelComparison) -> str:
    times = counted(k.overlapped_count, "time")
    return f"{k.alone_us:.0f} → {k.overlapped_us:.0f} µs ({k.slowdown:.2f} x, {times} in all)"


def find_launch_order(a: Analysis) -> Iterator[Finding]:
    """Yield a finding if ranks lose time because collectives waited for a kernel that held every SM."""
    job, blocked = a.job, a.blocked
    if not blocked:
        return
    lost = sum(b.lost_us for b in blocked) / len(job.ranks) / job.num_steps
    cost = a.saved_us.get(LAUNCH_ORDER, lost)
    if min(lost, cost) < 0.5 * LEAST_SHARE * a.step_us:
        return  # the collectives were held up, but no rank lost time by it
    worst = max(blocked, key=lambda b: b.lost_us)
    d = job.digests[worst.column]
    kernel, op = d.names[d.gpu.name[worst.by]], d.comm.op[worst.row]
    by_kernel: dict[str, int] = defaultdict(int)
    for b in blocked:
        by_kernel[job.digests[b.column].names[job.digests[b.column].gpu.name[b.by]]] += 1
    most = max(by_kernel, key=lambda name: by_kernel[name])
    yield Finding.of(
        "launch_order",
        cost,
        a.step_us,
        title=f"{counted(len(blocked), 'collective')} queued that could not start: a kernel held every SM",
        evidence=f"{lost / 1e3:.2f} ms {job.each_rank}, mostly behind {short_name(most, _LONGEST_NAME)} "
        f"({counted(by_kernel[most], 'time')} in all); "
        f"worst: {op} of rank {d.rank} waited {worst.lost_us / 1e3:.2f} ms for {short_name(kernel, _LONGEST_NAME)}; "
        f"{worst.proof}",
        advice=advise_launch_order(d.device.num_sms, int(d.comm.ctas[worst.row]), a.stack, no_sm_collectives(a)),
        rank=d.rank,
        start_us=float(job.op_start[worst.column][worst.by]),
        end_us=float(job.op_start[worst.column][worst.op]),
    )


def find_stream_order(a: Analysis) -> Iterator[Finding]:
    """Yield a finding if all streams share one queue, so that work begins in the order of its launches."""
    job, found = a.job, a.stream_order
    if found is None:
        return
    lost = sum(float(us.sum()) for us in found) / len(job.ranks) / job.num_steps
    cost = min(a.saved_us.get(INDEPENDENT_STREAMS, lost), lost)
    if cost < LEAST_SHARE * a.step_us:
        return
    c = int(np.argmax([us.max(initial=0.0) for us in found]))
    d, row, count = job.digests[c], int(found[c].argmax()), sum(int((us > 0).sum()) for us in found)
    yield Finding.of(
        "stream_order",
        cost,
        a.step_us,
        title="All streams share one queue: work begins in the order of its launches",
        evidence=f"{counted(count, 'time')} an operation that was ready began just when the one launched before "
        "it on another stream had begun, never before it; worst: "
        f"{short_name(d.names[d.gpu.name[row]], _LONGEST_NAME)} of rank {d.rank} waited "
        f"{found[c][row] / 1e3:.2f} ms",
        advice="unset CUDA_DEVICE_MAX_CONNECTIONS, or set it to 8 or more before CUDA starts. Megatron-LM and Ray set "
        "it to 1 for tensor parallelism; collectives that take no SM need neither value",
        rank=d.rank,
        start_us=float(job.op_start[c][row]) - float(found[c][row]),
        end_us=float(job.op_start[c][row]),
    )


def find_fsdp2_copies(a: Analysis) -> Iterator[Finding]:
    """Yield a finding if FSDP2's copies between parameters and buffers of collectives cost time."""
    job, cost = a.job, a.saved_us.get(NO_FSDP2_COPIES, 0.0)
    if cost < LEAST_SHARE * a.step_us:
        return
    by_name: dict[str, float] = defaultdict(float)
    for c, d in enumerate(job.digests):
        rows = np.flatnonzero(fsdp2_copies(d) & job.in_steps(c, np.arange(len(job.step_names))))
        for name in np.unique(d.gpu.name[rows]).tolist():
            own = rows[d.gpu.name[rows] == name]
            by_name[d.names[name]] += float((d.gpu.end[own] - d.gpu.start[own]).sum()) / len(job.ranks) / job.num_steps
    worst = sorted(by_name.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{short_name(name, _LONGEST_NAME)} {us / 1e3:.2f} ms" for name, us in worst)
    yield Finding.of(
        "fsdp2_copies",
        cost,
        a.step_us,
        title="Copies between parameters and the buffers of FSDP2's collectives",
        evidence=f"{sum(by_name.values()) / 1e3:.2f} ms of kernels {job.each_rank}; without them a replay is "
        f"{cost / 1e3:.2f} ms shorter: {parts}",
        advice=f"use {no_sm_collectives(a)}: every byte goes straight to its place",
    )
