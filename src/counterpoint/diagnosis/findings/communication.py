"""Find exposed communication, suspected waiting for ranks without a trace, and slow links."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from counterpoint.diagnosis.analysis.accounts import Waits
from counterpoint.diagnosis.analysis.analysis import Analysis
from counterpoint.diagnosis.analysis.replay import NO_SUSPECTED_WAITING
from counterpoint.diagnosis.analysis.unrecorded import Unrecorded
from counterpoint.diagnosis.findings.advice import (
    advise_exposed,
    in_parentheses,
    no_sm_collectives,
    saves_otherwise,
)
from counterpoint.records.diagnosis import Account, Collective, Finding, counted, ranks_in_words
from counterpoint.trace.timeline import F64, I64, Bools

LEAST_EXPOSED_SHARE = 0.05  # of a step
_LEAST_SAVED_SHARE = 0.001  # of a step: communication that costs less is not in the way
_LEAST_SUSPECTED_SHARE = 0.02  # of a step: healthy ranks wait for each other too
_LEAST_LINK_SHARE = 0.02  # of a step
_LEAST_NAMED_US = 5.0  # operations with less time would print as 0.00 ms
_LEAST_COMPUTE_SHARE = 0.01  # of the time: if compute takes less, compute was not recorded
_SLOW_FACTOR = 1.5  # a slow group takes this many times the median of other groups
_PACK_BYTES = 16  # NCCL moves packs of 16 bytes (pytorch#195450)
_LEAST_PAYLOAD = 1 << 20  # bytes of the array: in smaller calls latency hides the alignment
_SIMILAR = 4  # rates are compared where sizes differ by no more than this factor
_LEAST_GROUPS = 3  # least number of groups to compare: of two, either may be the unusual one
_LEAST_CALLS = 3  # least number of calls of each group
_JOINED_SURELY = ("seq", "comms_id")  # required for sends and receives, whose order differs between ranks
_LINK_TOOLS = {
    "nvidia": "nvidia-smi topo -m, nvidia-smi nvlink --status; ",
    "amd": "amd-smi topology, amd-smi xgmi; ",
}
_RECORD_COMPUTE = (
    "record compute as well, and all ranks: hardly an operation that could run beside the communication is in the "
    "traces, so that it is not known whether it is exposed"
)
_RECORD_ALL = (
    "record all ranks in the same steps and diagnose them together: only that tells waiting for a late rank, which has "
    "its cause there, from moving bytes. What helps in both cases is compute to run beside it: begin it earlier"
)


def find_exposed(a: Analysis) -> Iterator[Finding]:
    """Yield a finding if exposed communication, beside which no compute runs, takes a notable share of a step."""
    job, account, w, kinds = a.job, a.totals, a.waits, a.kinds
    share = account.exposed_comm_us / account.duration_us if account.duration_us > 0 else 0.0
    if share < LEAST_EXPOSED_SHARE:
        return
    by_op, by_name = defaultdict[str, float](float), defaultdict[str, float](float)
    for kind in kinds:
        by_op[kind.op] += kind.exposed_us
        by_name[f"{kind.op}{in_parentheses(kind.parallel, kind.phase)}"] += kind.exposed_us
    worst = sorted(((name, us) for name, us in by_name.items() if us >= _LEAST_NAMED_US), key=lambda i: -i[1])
    parts = ", ".join(f"{name} {us / 1e3:.2f} ms" for name, us in worst[:4])
    inside = w.step >= 0
    untold = a.waits_untold
    by_copies = by_op.get("peer_copy", 0.0) > sum(by_op.values()) / 2
    stages = any(
        k.op == "send_recv" and k.parallel == "pp" and k.exposed_us >= LEAST_EXPOSED_SHARE * a.step_us for k in kinds
    )
    cost = a.saved_us.get("communication free", account.exposed_comm_us / job.num_steps)
    if cost < _LEAST_SAVED_SHARE * a.step_us:
        return  # the verdict says that the step waits for something else meanwhile
    yield Finding.of(
        "exposed_comm",
        cost,
        a.step_us,
        title=f"{share:.0%} of the {job.whole} ({account.exposed_comm_us / job.num_steps / 1e3:.2f} ms) is "
        "communication with no compute beside it",
        evidence=f"exposed {job.each_rank}: {parts or 'unknown operations'}; "
        + _say_waiting(account, a.unrecorded, inside, len(job.step_names), untold=untold, stages=stages)
        + saves_otherwise(job, cost, account.exposed_comm_us / job.num_steps),
        advice=_RECORD_COMPUTE
        if account.compute_us < _LEAST_COMPUTE_SHARE * account.duration_us
        else _RECORD_ALL
        if untold
        else advise_exposed(account, a.stack, no_sm_collectives(a), late=bool(a.told_late), by_copies=by_copies),
    )


def _say_waiting(
    account: Account, unrecorded: Unrecorded, inside: Bools, steps: int, *, untold: bool, stages: bool
) -> str:
    """Return text on the share of waiting in the time in collectives, or on why the share is unknown."""
    known = None
    if account.wait_us is not None and account.transfer_us is not None:
        known = account.wait_us / max(account.wait_us + account.transfer_us, 1e-9)
    if not untold and known is not None:
        return f"{known:.0%} of the time in collectives is waiting for the last rank"
    said = "how much of it is waiting is unknown, for not all ranks were recorded"
    if stages:
        said += " (nor how much of the pipeline's sends and receives is bubbles: that takes the neighbouring stages)"
    if known is not None:
        said += f" (the recorded ranks wait for each other {known:.0%} of their time in collectives)"
    suspected = float(np.nansum(unrecorded.exposed_us[inside])) / unrecorded.exposed_us.shape[1] / max(steps, 1)
    if suspected >= LEAST_EXPOSED_SHARE * account.exposed_comm_us / max(steps, 1):
        said += f"; at least {suspected / 1e3:.2f} ms of it by what its collectives usually take"
    return said


def find_suspected_waits(a: Analysis) -> Iterator[Finding]:
    """Yield a finding if collectives take far longer than usual, and so seem to wait for ranks without a trace."""
    job, w, unrecorded, steps = a.job, a.waits, a.unrecorded, a.job.num_steps
    rows = np.flatnonzero((w.step >= 0) & (unrecorded.excess_us > 0))
    exposed = float(np.nansum(unrecorded.exposed_us[rows])) / len(job.ranks) / steps
    # may exceed the exposed time, where other collectives queue up behind the waiting one
    cost = a.saved_us.get(NO_SUSPECTED_WAITING, exposed)
    if not len(rows) or cost < _LEAST_SUSPECTED_SHARE * a.step_us:
        return
    by_op: dict[str, list[float]] = defaultdict(list)
    for j in rows.tolist():
        by_op[job.joined.op[j]].append(float(unrecorded.excess_us[j]) / steps)
    parts = ", ".join(
        f"{op} {sum(us) / 1e3:.2f} ms in {counted(len(us), 'call')}"
        for op, us in sorted(by_op.items(), key=lambda i: -sum(i[1]))[:4]
    )
    worst = int(rows[np.argmax(np.nanmean(unrecorded.exposed_us[rows], axis=1))])
    one, took = a.collectives[worst], float(np.nanmin(w.transfer[worst]))
    unsized = " (sizes are unknown: kernels of one name and grid count as equal)" if one.bytes is None else ""
    rank = "that was not recorded" if job.missing or len(job.ranks) == 1 else "whose part in them was not recorded"
    yield Finding.of(
        "suspected_wait",
        cost,
        a.step_us,
        title=f"{'Probably' if unsized else 'At least'} {cost / 1e3:.2f} ms of communication {job.each} is waiting for "
        f"a rank {rank}",
        evidence=f"beyond what the operation usually takes in this recording{unsized}, {job.each}: {parts}; worst: "
        f"{one.op} #{one.index} of group {one.group}{in_parentheses(one.parallel, one.phase, one.module)} took "
        f"{took / 1e3:.2f} ms, where {unrecorded.usual_us[worst] / 1e3:.2f} ms is usual",
        advice="record all ranks in the same steps and diagnose them together, which names the late one and why; "
        "until then look for it in the logs of the other ranks (input, checkpoints, evaluation, a slow GPU)",
        start_us=float(np.nanmin(job.joined.start[worst])),
        end_us=float(np.nanmax(job.joined.end[worst])),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _SlowGroup:
    """Holds a process group that needs longer than other groups for the same operation and size; times in µs."""

    ranks: tuple[int, ...]
    op: str
    size: int
    took: float  # median after the last rank has arrived
    usual: float  # median of the other groups
    rows: I64  # of Joined


def find_slow_links(a: Analysis) -> Iterator[Finding]:
    """Yield a finding on the process group that loses most time by a link slower than other groups' links.

    The cost is the exposed time per step that its ranks would save at the usual speed, at most the time that the replay
    saves without any communication.
    """
    job, w = a.job, a.waits
    moving = np.nan_to_num(w.transfer).max(axis=1, initial=0.0)
    lost: dict[tuple[int, ...], list[tuple[float, _SlowGroup]]] = defaultdict(list)
    for slow in _slow_groups(w, a.collectives, moving):
        columns = np.flatnonzero(np.isin(job.ranks, slow.ranks))
        longer = np.maximum(moving[slow.rows] - slow.usual, 0.0)[:, None]
        exposed = np.minimum(longer, np.nan_to_num(w.exposed[np.ix_(slow.rows, columns)]))
        lost[slow.ranks].append((float(exposed.mean(axis=1).sum()) / job.num_steps, slow))
    costs = {ranks: sum(us for us, _ in found) for ranks, found in lost.items()}
    by_cost = sorted(costs, key=lambda ranks: -costs[ranks])
    cost = min(costs[by_cost[0]], a.saved_us.get("communication free", a.step_us)) if by_cost else 0.0
    if not by_cost or cost < _LEAST_LINK_SHARE * a.step_us:
        return
    most = max(lost[by_cost[0]], key=lambda found: found[0])[1]
    whose, worst = ranks_in_words(most.ranks), int(most.rows[moving[most.rows].argmax()])
    look = _LINK_TOOLS.get(a.stack.vendor or "", "")
    more = "; ".join(ranks_in_words(ranks) for ranks in by_cost[1:3] if costs[ranks] >= _LEAST_LINK_SHARE * a.step_us)
    yield Finding.of(
        "slow_link",
        cost,
        a.step_us,
        title=f"The link between {whose} is slow: {most.op} takes {most.took / most.usual:.1f} x as long as in "
        "other groups",
        evidence=f"{most.op} of {most.size / 2**20:.1f} MiB takes {most.took / 1e3:.2f} ms after the last rank has "
        f"arrived, where other groups of {len(most.ranks)} ranks need {most.usual / 1e3:.2f} ms (medians of "
        f"{len(most.rows)} calls){f'; slow, too: {more}' if more else ''}",
        advice=f"look at what joins {whose}: a link that is down or slow ({look}between hosts ibstat and the "
        f"switch), a transport that falls back{' (NCCL_DEBUG=INFO names it)' * a.stack.nccl}, other traffic. If only "
        "they are on different hosts, place them on one",
        rank=most.ranks[0],
        start_us=float(np.nanmin(job.joined.start[worst])),
        end_us=float(np.nanmax(job.joined.end[worst])),
    )


def find_odd_payloads(a: Analysis) -> Iterator[Finding]:
    """Yield a finding if NCCL's gathers or scatters are slow because a rank's part is no multiple of 16 bytes.

    They are compared with calls of the same operation and group, of similar size, with multiples.
    """
    sized = [
        (kind, kind.bytes, kind.bytes % (_PACK_BYTES * kind.ranks) > 0)
        for kind in a.kinds
        if a.stack.nccl and kind.op in ("all_gather", "reduce_scatter") and kind.ranks and kind.transfer_us > 0
        if kind.bytes and kind.bytes >= _LEAST_PAYLOAD
    ]
    found = []
    for kind, size, odd in sized:
        rates = [n / k.transfer_us for k, n, other in sized if (k.op, k.group) == (kind.op, kind.group) and not other
                 and size <= _SIMILAR * n and n <= _SIMILAR * size]  # fmt: skip
        if odd and rates and (slower := kind.transfer_us * float(np.median(rates)) / size) >= _SLOW_FACTOR:
            found.append((slower, kind.exposed_us * (1 - 1 / slower), kind))
    cost = min(sum(us for _, us, _ in found), a.saved_us.get("communication free", a.step_us))
    if cost >= _LEAST_LINK_SHARE * a.step_us:
        slower, _, worst = max(found, key=lambda one: one[0])
        yield Finding.of(
            "odd_payload",
            cost,
            a.step_us,
            title=f"{counted(sum(kind.count for *_, kind in found), 'collective')} slow because a rank's part is no "
            f"multiple of {_PACK_BYTES} bytes",
            evidence=f"worst: {worst.op} of {(worst.bytes or 0) // (worst.ranks or 1):,} bytes a rank takes "
            f"{slower:.1f} x as long for its size as calls of the group with a multiple",
            advice=f"pad what each rank sends or receives to a multiple of {_PACK_BYTES} bytes: under FSDP2 the sum of "
            "a unit's shards, for instance a vocabulary that is a multiple of 8 x the number of ranks in bf16",
        )


def _slow_groups(w: Waits, collectives: tuple[Collective, ...], moving: F64) -> Iterator[_SlowGroup]:
    """Yield process groups whose collectives take longer than equally large ones of other groups of as many ranks."""
    alike: dict[tuple[str, int, int, str | None], dict[tuple[int, ...], list[int]]] = defaultdict(dict)
    for j in np.flatnonzero((w.step >= 0) & w.complete).tolist():
        c = collectives[j]
        if c.bytes and len(c.ranks) > 1 and (c.op != "send_recv" or c.joined_by in _JOINED_SURELY):
            alike[c.op, c.bytes, len(c.ranks), c.parallel].setdefault(c.ranks, []).append(j)
    for (op, size, _, _), groups in alike.items():
        took = {ranks: float(np.median(moving[rows])) for ranks, rows in groups.items() if len(rows) >= _LEAST_CALLS}
        for ranks in took if len(took) >= _LEAST_GROUPS else ():
            usual = float(np.median([us for other, us in took.items() if other != ranks]))
            if took[ranks] >= _SLOW_FACTOR * usual > 0:
                rows = np.array(groups[ranks], np.int64)
                yield _SlowGroup(ranks=ranks, op=op, size=size, took=took[ranks], usual=usual, rows=rows)
