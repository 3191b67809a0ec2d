"""Find groups of ranks whose links are slower than those of other groups that move the same."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from counterpoint.diagnosis.analysis.accounts import Waits
from counterpoint.diagnosis.analysis.vendor import TracedStack
from counterpoint.diagnosis.reading.traced_job import TracedJob
from counterpoint.records.diagnosis import Collective, Finding, ranks_in_words, severity_of
from counterpoint.trace.timeline import F64, I64

_SLOWER = 1.5  # times what the median other group needs for the same
_GROUPS = 3  # that are compared, at least: of two it is not known which one is unusual
_CALLS = 3  # of each
_WORTH = 0.02  # of a step
_SURE = ("seq", "comms_id")  # how sends and receives must be joined: they are not in one order on all ranks
_LOOK = {"nvidia": "nvidia-smi topo -m, nvidia-smi nvlink --status; ", "amd": "amd-smi topology, amd-smi xgmi; "}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Slow:
    """Holds what one group needs longer than others for one operation and size; times in µs."""

    ranks: tuple[int, ...]
    op: str
    size: int
    took: float  # median after the last rank has arrived
    usual: float  # median of the other groups
    rows: I64  # of Joined


def find_slow_links(
    job: TracedJob,
    w: Waits,
    collectives: tuple[Collective, ...],
    saved: dict[str, float],
    step: float,
    stack: TracedStack,
) -> list[Finding]:
    """Return a finding on the group that loses most because it needs longer than other groups to move the same.

    The cost is what its ranks would save a step, as far as no compute runs beside it, by the replay at most what
    communication costs.

    Args:
        job: ranks on one clock.
        w: waits in collectives.
        collectives: every one, in the order of `job.joined`.
        saved: what a step would be shorter by, by what-if.
        step: mean time of a step.
        stack: whose GPUs the trace shows.
    """
    moving = np.nan_to_num(w.transfer).max(axis=1, initial=0.0)
    lost: dict[tuple[int, ...], list[tuple[float, _Slow]]] = defaultdict(list)
    for slow in _slow_groups(w, collectives, moving):
        columns = np.flatnonzero(np.isin(job.ranks, slow.ranks))
        longer = np.maximum(moving[slow.rows] - slow.usual, 0.0)[:, None]
        exposed = np.minimum(longer, np.nan_to_num(w.exposed[np.ix_(slow.rows, columns)]))
        lost[slow.ranks].append((float(exposed.mean(axis=1).sum()) / job.num_steps, slow))
    costs = {ranks: sum(us for us, _ in found) for ranks, found in lost.items()}
    by_cost = sorted(costs, key=lambda ranks: -costs[ranks])
    cost = min(costs[by_cost[0]], saved.get("communication free", step)) if by_cost else 0.0
    if not by_cost or cost < _WORTH * step:
        return []
    most = max(lost[by_cost[0]], key=lambda found: found[0])[1]
    whose, worst = ranks_in_words(most.ranks), int(most.rows[moving[most.rows].argmax()])
    look = _LOOK.get(stack.vendor or "", "")
    more = "; ".join(ranks_in_words(ranks) for ranks in by_cost[1:3] if costs[ranks] >= _WORTH * step)
    return [
        Finding(
            kind="slow_link",
            cost_us=cost,
            severity=severity_of(cost, step),
            title=f"The link between {whose} is slow: {most.op} takes {most.took / most.usual:.1f} x as long as in "
            "other groups",
            evidence=f"{most.op} of {most.size / 2**20:.1f} MiB takes {most.took / 1e3:.2f} ms after the last rank has "
            f"arrived, where other groups of {len(most.ranks)} ranks need {most.usual / 1e3:.2f} ms (medians of "
            f"{len(most.rows)} calls){f'; slow, too: {more}' if more else ''}",
            advice=f"look at what joins {whose}: a link that is down or slow ({look}between hosts ibstat and the "
            f"switch), a transport that falls back{' (NCCL_DEBUG=INFO names it)' * stack.nccl}, other traffic. If only "
            "they are on different hosts, place them on one",
            rank=most.ranks[0],
            start_us=float(np.nanmin(job.joined.start[worst])),
            end_us=float(np.nanmax(job.joined.end[worst])),
        )
    ]


def _slow_groups(w: Waits, collectives: tuple[Collective, ...], moving: F64) -> Iterator[_Slow]:
    """Yield groups that need longer than the median other group of as many ranks, for the same operation and size."""
    alike: dict[tuple[str, int, int, str | None], dict[tuple[int, ...], list[int]]] = defaultdict(dict)
    for j in np.flatnonzero((w.step >= 0) & w.complete).tolist():
        c = collectives[j]
        if c.bytes and len(c.ranks) > 1 and (c.op != "send_recv" or c.joined_by in _SURE):
            alike[c.op, c.bytes, len(c.ranks), c.parallel].setdefault(c.ranks, []).append(j)
    for (op, size, _, _), groups in alike.items():
        took = {ranks: float(np.median(moving[rows])) for ranks, rows in groups.items() if len(rows) >= _CALLS}
        for ranks in took if len(took) >= _GROUPS else ():
            usual = float(np.median([us for other, us in took.items() if other != ranks]))
            if took[ranks] >= _SLOWER * usual > 0:
                rows = np.array(groups[ranks], np.int64)
                yield _Slow(ranks=ranks, op=op, size=size, took=took[ranks], usual=usual, rows=rows)
