"""What a person can act on, ranked by what it costs in step time.

Costs come from the replay (the step without that trouble), shared out among causes by what each kernel lost. Advice
names a knob and its value, and only knobs that were seen to take effect (docs/diagnose.md, "Knobs that do nothing").
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from counterpoint.diagnose import advice
from counterpoint.diagnose.accounts import Waits
from counterpoint.diagnose.job import Job
from counterpoint.diagnose.launch_order import Blocked
from counterpoint.records import Account, Finding, Kernel, Replay, Severity, Straggler

__all__ = ["find_findings", "verdict"]

_WORTH = 0.01  # of a step: cheaper findings are left out
_EXPOSED_WORTH = 0.05
_KERNELS_NAMED = 3


def find_findings(
    job: Job,
    account: Account,
    w: Waits,
    stragglers: tuple[Straggler, ...],
    kernels: tuple[Kernel, ...],
    blocked: tuple[Blocked, ...],
    replay: Replay | None,
) -> tuple[Finding, ...]:
    """Findings, dearest first; `cost_us` is time per step."""
    step = account.duration_us / max(len(job.step_names), 1)
    saved = {w.name: max(replay.replayed_us - w.step_us, 0.0) for w in replay.what_if} if replay else {}
    found = [
        *_stragglers(job, stragglers, saved, step),
        *_slow_kernels(job, kernels, saved, step),
        *_launch_order(job, blocked, saved, step),
        *(_idle(job, account, stragglers, step) if job.digests[0].device.name != "cpu" else ()),
        *_exposed(job, account, w, saved, step),
    ]
    return tuple(sorted(found, key=lambda f: -f.cost_us))


def _severity(cost_us: float, step_us: float) -> Severity:
    share = cost_us / step_us if step_us > 0 else 0.0
    return "high" if share >= 0.1 else "medium" if share >= 0.03 else "low"


def _stragglers(job: Job, stragglers: tuple[Straggler, ...], saved: dict[str, float], step: float) -> list[Finding]:
    whole = sum(s.delay_us for s in stragglers)
    launched = all(np.isfinite(at).any() for at in job.launch)  # else the replay cannot move a host
    out = []
    for s in stragglers:
        cost = s.delay_us / max(len(job.step_names), 1)
        if "no straggler" in saved and whole > 0 and launched:
            cost = saved["no straggler"] * s.delay_us / whole
        out.append(
            Finding(
                kind="straggler",
                cost_us=cost,
                severity=_severity(cost, step),
                title=f"Rank {s.rank} makes the others wait: {advice.CAUSE_TITLE[s.cause]}",
                evidence=f"the others stood still for {s.delay_us / 1e3:.2f} ms; it arrived last {s.times_last} times; "
                f"{s.evidence}",
                advice=advice.straggler(s),
                rank=s.rank,
                start_us=s.start_us,
                end_us=s.end_us,
            )
        )
    return out


def _slow_kernels(job: Job, kernels: tuple[Kernel, ...], saved: dict[str, float], step: float) -> list[Finding]:
    whole = sum(k.cost_us for k in kernels)
    out = []
    for cause in ("tail_effect", "sm_contention", "bandwidth"):
        group = [k for k in kernels if k.cause == cause]
        lost = sum(k.cost_us for k in group)
        cost = lost / max(len(job.step_names), 1)
        if "no contention" in saved and whole > 0:
            cost = min(cost, saved["no contention"] * lost / whole)
        if not group or cost < _WORTH * step:
            continue
        worst = group[0]
        parts = [f"{_short(k.name)} {_times(k)}" for k in group[:_KERNELS_NAMED]]
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
                severity=_severity(cost, step),
                title=advice.KERNEL_TITLE[cause].format(kernels=_count(len(group), "kind") + " of kernels"),
                evidence=f"{lost / max(len(job.step_names), 1) / 1e3:.2f} ms of kernel time a step: "
                + "; ".join(parts) + waves,
                advice=advice.kernel(worst, job.digests[0].device.num_sms),
            )
        )  # fmt: skip
    return out


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _times(k: Kernel) -> str:
    return f"{k.alone_us:.0f} → {k.overlapped_us:.0f} µs ({k.slowdown:.2f} x, {k.overlapped_count} times)"


def _short(name: str) -> str:
    return name if len(name) <= 60 else name[:57] + "…"


def _launch_order(job: Job, blocked: tuple[Blocked, ...], saved: dict[str, float], step: float) -> list[Finding]:
    if not blocked:
        return []
    lost = sum(b.lost_us for b in blocked) / len(job.ranks) / max(len(job.step_names), 1)
    cost = saved.get("launch order fixed", lost)
    if min(lost, cost) < 0.5 * _WORTH * step:
        return []  # held up, but nobody waited for it
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
            severity=_severity(cost, step),
            title=f"{_count(len(blocked), 'collective')} queued that could not start: a kernel held every SM",
            evidence=f"{lost / 1e3:.2f} ms a step and rank, mostly behind {_short(most)} ({by_kernel[most]} times); "
            f"worst: {op} of rank {d.rank} waited {worst.lost_us / 1e3:.2f} ms for {_short(kernel)}; {worst.proof}",
            advice=advice.launch_order(d.device.num_sms, int(d.comm.ctas[worst.row])),
            rank=d.rank,
            start_us=start,
            end_us=float(job.op_start[worst.column][worst.op]),
        )
    ]


def _idle(job: Job, account: Account, stragglers: tuple[Straggler, ...], step: float) -> list[Finding]:
    """Gaps that every rank has: the host is too slow for all of them."""
    steps = max(len(job.step_names), 1)
    late = {s.rank for s in stragglers}
    columns = [c for c, r in enumerate(job.ranks) if r not in late] or list(range(len(job.ranks)))
    lost: dict[str, list[float]] = defaultdict(lambda: [0.0] * len(columns))
    example: dict[str, str] = {}
    longest: dict[str, float] = {}
    for i, c in enumerate(columns):
        low, high = job.step_start[0, c], job.step_end[-1, c]
        gaps = job.digests[c].gaps
        at = job.on_job_clock(c, np.array([g.start for g in gaps]))
        for g, start in zip(gaps, at.tolist(), strict=True):
            if low <= start < high:
                lost[g.category][i] += g.end - g.start
                if g.end - g.start > longest.get(g.category, 0.0):
                    longest[g.category], example[g.category] = g.end - g.start, g.operation or g.inside or ""
    out = []
    for category, per_rank in lost.items():
        cost = float(np.median(per_rank)) / steps
        if cost < 3 * _WORTH * step:
            continue
        seen = f", the longest ({longest[category] / 1e3:.2f} ms) in {example[category]}" if example[category] else ""
        out.append(
            Finding(
                kind="host_bound" if category == "launch" else category if category == "late_input" else "host_stall",
                cost_us=cost,
                severity=_severity(cost, step),
                title=advice.IDLE_TITLE[category],
                evidence=f"the GPU of a typical rank idles {cost / 1e3:.2f} ms a step for this{seen}",
                advice=advice.IDLE[category],
            )
        )
    return out


def _exposed(job: Job, account: Account, w: Waits, saved: dict[str, float], step: float) -> list[Finding]:
    share = account.exposed_comm_us / account.duration_us if account.duration_us > 0 else 0.0
    if share < _EXPOSED_WORTH:
        return []
    by_op: dict[str, float] = defaultdict(float)
    for j in np.flatnonzero(w.step >= 0).tolist():
        by_op[job.joined.op[j]] += float(np.nanmean(w.exposed[j])) / max(len(job.step_names), 1)
    parts = ", ".join(f"{op} {us / 1e3:.2f} ms" for op, us in sorted(by_op.items(), key=lambda i: -i[1])[:4])
    waiting = account.wait_us / max(account.wait_us + account.transfer_us, 1e-9)
    cost = saved.get("communication free", account.exposed_comm_us / max(len(job.step_names), 1))
    return [
        Finding(
            kind="exposed_comm",
            cost_us=cost,
            severity=_severity(cost, step),
            title=f"{share:.0%} of the step is communication with no compute beside it",
            evidence=f"exposed a step and rank: {parts}; {waiting:.0%} of the time in collectives is waiting for the "
            "last rank",
            advice=advice.exposed(account, by_copies=by_op["peer_copy"] > sum(by_op.values()) / 2),
        )
    ]


def verdict(job: Job, account: Account, findings: tuple[Finding, ...], replay: Replay | None) -> str:
    """One sentence: the step, how much is hidden, and the dearest finding."""
    steps = max(len(job.step_names), 1)
    step = account.duration_us / steps / 1e3
    if account.hidden is None:
        head = f"A step takes {step:.1f} ms; no communication was seen."
    else:
        exposed = account.exposed_comm_us / account.duration_us if account.duration_us else 0.0
        head = (
            f"A step takes {step:.1f} ms; {account.hidden:.0%} of the communication is hidden, {exposed:.0%} of the "
            "step waits for it."
        )
    if not findings:
        return f"{head} Nothing stands out."
    worst = next((f for f in findings if f.kind != "exposed_comm"), findings[0])  # a cause says more than the symptom
    return f"{head} Dearest cause: {worst.title[0].lower() + worst.title[1:]} ({worst.cost_us / 1e3:.1f} ms a step)."
