"""List findings: problems that a person can act on, ranked by their cost in step time.

Costs come from the replay (the step without that problem), shared out among causes by what each kernel lost. What to
change is in advice.py.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from counterpoint.diagnosis.analysis.accounts import Activity, Waits
from counterpoint.diagnosis.analysis.experts import (
    EXPERTS,
    ExpertWaits,
    find_expert_imbalance,
    find_pipeline_bubbles,
)
from counterpoint.diagnosis.analysis.idle import RankIdle, find_idle, short_name
from counterpoint.diagnosis.analysis.launch_order import Blocked
from counterpoint.diagnosis.analysis.replay import NO_FSDP2_COPIES, NO_SUSPECTED_WAITING
from counterpoint.diagnosis.analysis.unrecorded import Unrecorded
from counterpoint.diagnosis.analysis.vendor import TracedStack
from counterpoint.diagnosis.analysis.zero_sm import fsdp2_copies
from counterpoint.diagnosis.findings.advice import (
    advise_exposed,
    advise_kernel,
    advise_launch_order,
    advise_straggler,
    no_sm_collectives,
)
from counterpoint.diagnosis.findings.copies import find_copies, saves_otherwise
from counterpoint.diagnosis.findings.gpus import find_turns
from counterpoint.diagnosis.findings.slow_links import find_slow_links
from counterpoint.diagnosis.reading.traced_job import TracedJob
from counterpoint.records.diagnosis import (
    Account,
    Collective,
    CollectiveKind,
    Finding,
    GpuAccount,
    KernelComparison,
    RankAccount,
    Replay,
    Straggler,
    ranks_in_words,
    severity_of,
)
from counterpoint.trace.timeline import Bools

_WORTH = 0.01  # of a step: cheaper findings are left out
_EXPOSED_WORTH = 0.05
_HEALTHY_TOO = {  # healthy jobs have them: the verdict names another cause, ...
    "exposed_comm": "exposed communication, a symptom,",
    "fsdp2_copies": "copying between FSDP2's buffers, which healthy jobs do too,",
}
_SYMPTOM = 0.2  # ... unless it costs less than this share of the dearest finding
_UNEVEN = 1.25  # times the median: where the mean of the steps is longer, the verdict tells both
_LEAST_US = 5.0  # a smaller cost would print as 0.00 ms
_KERNELS_NAMED = 3
_SUSPECTED_WORTH = 0.02  # of a step: healthy ranks wait for each other too
_UNTOLD = 0.1  # of exposed communication that lacks ranks: what is known says little then
_HARDLY = 0.01  # of the time: compute that takes less was not recorded
_RECORD_COMPUTE = (
    "record compute as well, and all ranks: hardly an operation that could run beside the communication is in the "
    "traces, so that it is not known whether it is exposed"
)
_RECORD_ALL = (
    "record all ranks in the same steps and diagnose them together: only that tells waiting for a late rank, which has "
    "its cause there, from moving bytes. What helps in both cases is compute to run beside it: begin it earlier"
)
_CAUSE_TITLE = {
    "host_stall": "its host stalls",
    "slow_kernels": "its kernels are slow",
    "slow_kernel": "one of its kernels takes longer",
    "more_work": "it has more work",
    "late_input": "its input is late",
    "unknown": "cause not found",
}
_OF_SEVERAL = (("its host stalls", "their hosts stall"), ("its host launches", "their hosts launch"), ("its", "their"),
               ("it has", "they have"))  # fmt: skip
_KERNEL_TITLE = {
    "tail_effect": "Tail effect: {kernels} in need of an extra wave beside communication",
    "sm_contention": "{kernels} slowed by the SMs that communication takes",
    "bandwidth": "{kernels} slowed by the bandwidth or power that communication takes",
}


def find_findings(
    job: TracedJob,
    account: Account,
    w: Waits,
    busy: list[Activity],
    idle: tuple[RankIdle, ...],
    stragglers: tuple[Straggler, ...],
    experts: ExpertWaits,
    kernels: tuple[KernelComparison, ...],
    blocked: tuple[Blocked, ...],
    unrecorded: Unrecorded,
    collectives: tuple[Collective, ...],
    kinds: tuple[CollectiveKind, ...],
    replay: Replay | None,
    stack: TracedStack,
    per_rank: tuple[RankAccount, ...],
    per_gpu: tuple[GpuAccount, ...],
) -> tuple[Finding, ...]:
    """Return the findings, dearest first; `cost_us` is time per step.

    Args:
        job: ranks on one clock.
        account: means over ranks.
        w: waits in collectives.
        busy: per rank, when its GPU computed, communicated and copied.
        idle: per rank, the gaps of its GPU and their causes.
        stragglers: ranks that make the others wait.
        experts: what ranks computed between dispatch and combine, and waited for one another.
        kernels: those slowed by communication.
        blocked: collectives that found no SM.
        unrecorded: collectives that lack ranks, and what they seem to have waited for these.
        collectives: every one, in the order of `job.joined`.
        kinds: their table.
        replay: what the step would be without each trouble, if it could be replayed.
        stack: whose GPUs and collectives the trace shows.
        per_rank: one account per rank.
        per_gpu: one account per GPU, of processes with several.
    """
    step = account.duration_us / job.num_steps
    if not job.gpu_recorded or step <= 0:
        return ()
    saved = {w.name: max(replay.replayed_us - w.step_us, 0.0) for w in replay.what_if} if replay else {}
    no_sm = no_sm_collectives(job, stack, replay)
    imbalance = find_expert_imbalance(job, w, busy, experts, step)
    if imbalance:  # tells it of all ranks
        stragglers = tuple(s for s in stragglers if s.detail != EXPERTS)
    found = [
        *_stragglers(job, stragglers, saved, step, stack),
        *_slow_kernels(job, kernels, saved, step, stack, no_sm),
        *_launch_order(job, blocked, saved, step, stack, no_sm),
        *_fsdp2_copies(job, saved, step, no_sm),
        *find_idle(job, idle, {rank for s in stragglers for rank in s.ranks}, saved, step),
        *find_copies(job, busy, saved, step),
        *find_turns(job, per_rank, per_gpu),
        *_suspected_waits(job, unrecorded, w, collectives, saved, step),
        *find_pipeline_bubbles(job, w, busy, collectives, step),
        *imbalance,
        *find_slow_links(job, w, collectives, saved, step, stack),
        *_exposed(job, account, w, unrecorded, kinds, saved, step, stack, no_sm),
    ]
    return tuple(sorted((f for f in found if f.cost_us >= _LEAST_US), key=lambda f: -f.cost_us))


def _stragglers(
    job: TracedJob, stragglers: tuple[Straggler, ...], saved: dict[str, float], step: float, stack: TracedStack
) -> list[Finding]:
    whole = sum(s.delay_us for s in stragglers)
    launched = all(np.isfinite(at).any() for at in job.launch)  # else the replay cannot change host times
    steps = job.num_steps
    out = []
    for s in stragglers:
        cost = s.delay_us / steps
        if "no straggler" in saved and whole > 0 and launched:
            cost = saved["no straggler"] * s.delay_us / whole
        out.append(
            Finding(
                kind="straggler",
                cost_us=cost,
                severity=severity_of(cost, step),
                title=_straggler_title(s),
                evidence=f"the others stood still for {s.delay_us / steps / 1e3:.2f} ms {job.each}; "
                f"{'one of them' if s.with_ranks else 'it'} arrived last {_count(s.times_last, 'time')}{_in_all(job)}; "
                + (f"of rank {s.rank}: " if s.with_ranks else "")
                + s.evidence,
                advice=advise_straggler(s, stack),
                rank=s.rank,
                start_us=s.start_us,
                end_us=s.end_us,
            )
        )
    return out


def _straggler_title(s: Straggler) -> str:
    cause = "its host launches slowly" if s.detail == "launch" else _CAUSE_TITLE[s.cause]
    if not s.with_ranks:
        return f"Rank {s.rank} makes the others wait: {cause}"
    for one, several in _OF_SEVERAL:
        cause = cause.replace(one, several)
    return f"{ranks_in_words(s.ranks).capitalize()} make the others wait: {cause}"


def _slow_kernels(
    job: TracedJob,
    kernels: tuple[KernelComparison, ...],
    saved: dict[str, float],
    step: float,
    stack: TracedStack,
    no_sm: str,
) -> list[Finding]:
    whole = sum(k.cost_us for k in kernels)
    out = []
    for cause in ("tail_effect", "sm_contention", "bandwidth"):
        group = [k for k in kernels if k.cause == cause]
        lost = sum(k.cost_us for k in group)
        cost = lost / job.num_steps
        if "no contention" in saved and whole > 0:
            cost = min(cost, saved["no contention"] * lost / whole)
        if not group or cost < _WORTH * step:
            continue
        worst = group[0]
        parts = [f"{short_name(k.name, 60)} {_times(k)}" for k in group[:_KERNELS_NAMED]]
        waves = (
            f"; {worst.grid[0] * worst.grid[1] * worst.grid[2]} blocks at {worst.blocks_per_sm} a SM take "
            f"{_count(worst.waves_alone or 0, 'wave')} alone, {worst.waves_overlapped} beside {worst.comm_ctas} "
            "communication CTAs"
            if cause == "tail_effect"
            else ""
        )
        out.append(
            Finding(
                kind=cause,
                cost_us=cost,
                severity=severity_of(cost, step),
                title=_KERNEL_TITLE[cause].format(kernels=_count(len(group), "kind") + " of kernels"),
                evidence=f"{lost / job.num_steps / 1e3:.2f} ms of kernel time {job.each}: "
                + "; ".join(parts) + waves,
                advice=advise_kernel(worst, job.digests[0].device.num_sms, stack, no_sm),
            )
        )  # fmt: skip
    return out


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _times(k: KernelComparison) -> str:
    return (
        f"{k.alone_us:.0f} → {k.overlapped_us:.0f} µs ({k.slowdown:.2f} x, {_count(k.overlapped_count, 'time')} in all)"
    )


def _in_all(job: TracedJob) -> str:
    steps = len(job.step_names)
    return f" in {steps} steps" if steps > 1 else ""


def _launch_order(
    job: TracedJob,
    blocked: tuple[Blocked, ...],
    saved: dict[str, float],
    step: float,
    stack: TracedStack,
    no_sm: str,
) -> list[Finding]:
    if not blocked:
        return []
    lost = sum(b.lost_us for b in blocked) / len(job.ranks) / job.num_steps
    cost = saved.get("launch order fixed", lost)
    if min(lost, cost) < 0.5 * _WORTH * step:
        return []  # the collectives were held up, but no rank lost time by it
    worst = max(blocked, key=lambda b: b.lost_us)
    d = job.digests[worst.column]
    kernel, op = d.names[d.gpu.name[worst.by]], d.comm.op[worst.row]
    start = float(job.op_start[worst.column][worst.by])
    by_kernel: dict[str, int] = defaultdict(int)
    for b in blocked:
        by_kernel[job.digests[b.column].names[job.digests[b.column].gpu.name[b.by]]] += 1
    most = max(by_kernel, key=lambda name: by_kernel[name])
    return [
        Finding(
            kind="launch_order",
            cost_us=cost,
            severity=severity_of(cost, step),
            title=f"{_count(len(blocked), 'collective')} queued that could not start: a kernel held every SM",
            evidence=f"{lost / 1e3:.2f} ms {job.each_rank}, mostly behind {short_name(most, 60)} "
            f"({_count(by_kernel[most], 'time')} in all); "
            f"worst: {op} of rank {d.rank} waited {worst.lost_us / 1e3:.2f} ms for {short_name(kernel, 60)}; "
            f"{worst.proof}",
            advice=advise_launch_order(d.device.num_sms, int(d.comm.ctas[worst.row]), stack, no_sm),
            rank=d.rank,
            start_us=start,
            end_us=float(job.op_start[worst.column][worst.op]),
        )
    ]


def _fsdp2_copies(job: TracedJob, saved: dict[str, float], step: float, no_sm: str) -> list[Finding]:
    """Tell of the copies that FSDP2 makes between parameters and the buffers of its collectives."""
    cost = saved.get(NO_FSDP2_COPIES, 0.0)
    if cost < _WORTH * step:
        return []
    by_name: dict[str, float] = defaultdict(float)
    for c, d in enumerate(job.digests):
        rows = np.flatnonzero(fsdp2_copies(d) & job.in_steps(c, np.arange(len(job.step_names))))
        for name in np.unique(d.gpu.name[rows]).tolist():
            own = rows[d.gpu.name[rows] == name]
            by_name[d.names[name]] += float((d.gpu.end[own] - d.gpu.start[own]).sum()) / len(job.ranks) / job.num_steps
    worst = sorted(by_name.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{short_name(name, 60)} {us / 1e3:.2f} ms" for name, us in worst)
    return [
        Finding(
            kind="fsdp2_copies",
            cost_us=cost,
            severity=severity_of(cost, step),
            title="Copies between parameters and the buffers of FSDP2's collectives",
            evidence=f"{sum(by_name.values()) / 1e3:.2f} ms of kernels {job.each_rank}; without them a replay is "
            f"{cost / 1e3:.2f} ms shorter: {parts}",
            advice=f"use {no_sm}: every byte goes straight to its place",
        )
    ]


def _suspected_waits(
    job: TracedJob,
    unrecorded: Unrecorded,
    w: Waits,
    collectives: tuple[Collective, ...],
    saved: dict[str, float],
    step: float,
) -> list[Finding]:
    """Tell of collectives that take far longer than usual where ranks have no trace: these are late."""
    steps = job.num_steps
    rows = np.flatnonzero((w.step >= 0) & (unrecorded.excess_us > 0))
    exposed = float(np.nansum(unrecorded.exposed_us[rows])) / len(job.ranks) / steps
    cost = saved.get(NO_SUSPECTED_WAITING, exposed)  # more than what is exposed, where collectives queue up behind it
    if not len(rows) or cost < _SUSPECTED_WORTH * step:
        return []
    by_op: dict[str, list[float]] = defaultdict(list)
    for j in rows.tolist():
        by_op[job.joined.op[j]].append(float(unrecorded.excess_us[j]) / steps)
    parts = ", ".join(
        f"{op} {sum(us) / 1e3:.2f} ms in {_count(len(us), 'call')}"
        for op, us in sorted(by_op.items(), key=lambda i: -sum(i[1]))[:4]
    )
    worst = int(rows[np.argmax(np.nanmean(unrecorded.exposed_us[rows], axis=1))])
    one, took = collectives[worst], float(np.nanmin(w.transfer[worst]))
    rank = "that was not recorded" if job.missing or len(job.ranks) == 1 else "whose part in them was not recorded"
    return [
        Finding(
            kind="suspected_wait",
            cost_us=cost,
            severity=severity_of(cost, step),
            title=f"At least {cost / 1e3:.2f} ms of communication {job.each} is waiting for a rank {rank}",
            evidence=f"beyond what the same operation usually takes in this recording, {job.each}: {parts}; worst: "
            f"{one.op} #{one.index} of group {one.group}{_in_words(one.parallel, one.phase, one.module)} took "
            f"{took / 1e3:.2f} ms, where {unrecorded.usual_us[worst] / 1e3:.2f} ms is usual",
            advice="record all ranks in the same steps and diagnose them together, which names the late one and why; "
            "until then look for it in the logs of the other ranks (input, checkpoints, evaluation, a slow GPU)",
            start_us=float(np.nanmin(job.joined.start[worst])),
            end_us=float(np.nanmax(job.joined.end[worst])),
        )
    ]


def _exposed(
    job: TracedJob,
    account: Account,
    w: Waits,
    unrecorded: Unrecorded,
    kinds: tuple[CollectiveKind, ...],
    saved: dict[str, float],
    step: float,
    stack: TracedStack,
    no_sm: str,
) -> list[Finding]:
    share = account.exposed_comm_us / account.duration_us if account.duration_us > 0 else 0.0
    if share < _EXPOSED_WORTH:
        return []
    by_op, by_name = defaultdict[str, float](float), defaultdict[str, float](float)
    for kind in kinds:
        by_op[kind.op] += kind.exposed_us
        by_name[f"{kind.op}{_in_words(kind.parallel, kind.phase)}"] += kind.exposed_us
    worst = sorted(((name, us) for name, us in by_name.items() if us >= _LEAST_US), key=lambda i: -i[1])
    parts = ", ".join(f"{name} {us / 1e3:.2f} ms" for name, us in worst[:4])
    inside = w.step >= 0
    exposed = np.nansum(w.exposed, axis=1)[inside]
    untold = float(exposed[~w.complete[inside]].sum()) > _UNTOLD * float(exposed.sum())
    by_copies = by_op.get("peer_copy", 0.0) > sum(by_op.values()) / 2
    stages = any(k.op == "send_recv" and k.parallel == "pp" and k.exposed_us >= _EXPOSED_WORTH * step for k in kinds)
    cost = saved.get("communication free", account.exposed_comm_us / job.num_steps)
    return [
        Finding(
            kind="exposed_comm",
            cost_us=cost,
            severity=severity_of(cost, step),
            title=f"{share:.0%} of the {job.whole} ({account.exposed_comm_us / job.num_steps / 1e3:.2f} ms) is "
            "communication with no compute beside it",
            evidence=f"exposed {job.each_rank}: {parts or 'unknown operations'}; "
            + _say_waiting(account, unrecorded, inside, len(job.step_names), untold=untold, stages=stages)
            + saves_otherwise(job, cost, account.exposed_comm_us / job.num_steps),
            advice=_RECORD_COMPUTE
            if account.compute_us < _HARDLY * account.duration_us
            else _RECORD_ALL
            if untold
            else advise_exposed(account, stack, no_sm, by_copies=by_copies),
        )
    ]


def _in_words(*names: str | None) -> str:
    """Return what is known of a collective's place, in parentheses: its parallel group, phase, module."""
    known = [name for name in names if name]
    return f" ({', '.join(known)})" if known else ""


def _say_waiting(
    account: Account, unrecorded: Unrecorded, inside: Bools, steps: int, *, untold: bool, stages: bool
) -> str:
    """Say how much of the time in collectives is waiting; that it is unknown where ranks have no trace."""
    known = None
    if account.wait_us is not None and account.transfer_us is not None:
        known = account.wait_us / max(account.wait_us + account.transfer_us, 1e-9)
    if not untold and known is not None:
        return f"{known:.0%} of the time in collectives is waiting for the last rank"
    said = "how much of it is waiting is unknown, for not all ranks were recorded"
    if stages:
        said += " (nor how much of the pipeline's sends and receives is bubbles: that takes the neighbouring stages)"
    if known is not None:
        said += f" (for each other, those that were wait {known:.0%} of their time in collectives)"
    suspected = float(np.nansum(unrecorded.exposed_us[inside])) / unrecorded.exposed_us.shape[1] / max(steps, 1)
    if suspected >= _EXPOSED_WORTH * account.exposed_comm_us / max(steps, 1):
        said += f"; at least {suspected / 1e3:.2f} ms of it by what such collectives usually take"
    return said


def verdict(job: TracedJob, account: Account, findings: tuple[Finding, ...], replay: Replay | None) -> str:
    """Return a summary: how long a step takes, how much communication is hidden, and what costs most."""
    steps = job.num_steps
    step = account.duration_us / steps
    what = "A step" if job.has_steps else "The recording (no steps were found in it)"
    takes = f"{step / 1e3:.1f} ms" if step >= 100.0 else f"{step:.3g} µs"
    if not job.gpu_recorded:
        return (
            f"{what} takes {takes} on the host. GPU activity was not recorded, so nothing can be said of what "
            "the GPUs did: record with ProfilerActivity.CUDA beside ProfilerActivity.CPU."
        )
    takes += _usually(job, step / 1e3)
    if account.hidden is None:
        head = f"{what} takes {takes}; no communication was seen."
    else:
        exposed = account.exposed_comm_us / account.duration_us if account.duration_us else 0.0
        head = (
            f"{what} takes {takes}; {account.hidden:.0%} of the communication is hidden, {exposed:.0%} of the "
            f"{job.whole} waits for it."
        )
        cost = max((f.cost_us for f in findings if f.kind == "exposed_comm"), default=0.0)
        if exposed >= _EXPOSED_WORTH and replay and cost < _WORTH * step:
            head += (
                " Without communication it would take as long, by the replay: it waits for something else meanwhile."
            )
    if not findings:
        return f"{head} Nothing stands out."
    causes = [f for f in findings if f.kind not in _HEALTHY_TOO and f.cost_us >= _SYMPTOM * findings[0].cost_us]
    worst = causes[0] if causes else findings[0]
    said = f" ({_cost(worst)} {job.each})"
    if worst.kind in ("exposed_comm", "copies"):  # the title says how long it takes; what it costs is another figure
        said = f"; at most {_cost(worst)} {'of it ' if worst.kind == 'exposed_comm' else ''}can be saved"
    if worst is not findings[0]:
        said += f"; {_HEALTHY_TOO[findings[0].kind]} costs {_cost(findings[0])}"
    return f"{head} Dearest cause: {worst.title[0].lower() + worst.title[1:]}{said}."


def _cost(finding: Finding) -> str:
    return f"{finding.cost_us / 1e3:.{1 if finding.cost_us >= 1000 else 2}f} ms"


def _usually(job: TracedJob, mean_ms: float) -> str:
    """Return words on the usual step, where few long ones make the mean longer than that."""
    each = (job.step_end - job.step_start).mean(axis=1) / 1e3
    usual, longest = float(np.median(each)), int(each.argmax())
    if mean_ms <= _UNEVEN * usual:
        return ""
    return f" on average, usually {usual:.1f} (longest: {job.step_names[longest][:60]}, {each[longest]:.1f} ms)"
