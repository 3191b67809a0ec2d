"""A measured step on more nodes or another network: compute and communication from real ranks, not from formulas.

    T    = compute + exposed + waits + rest                              as measured: n ranks, per step and rank
    compute' = compute - lists · (1 - n / n')            if shards are what grows: lists, of compute, is what nothing
                                                         but kernels over lists of tensors takes
    C'   = Σ over collectives of transfer · estimate(there) / estimate(here)
    exposed' = C' - h · min(compute', C'),   h = (C - exposed) / min(compute, C) as measured
    waits'   = waits · z(n') / z(n),         z(n): expected slowest of n in standard deviations (`stragglers.py`)

The batch of a rank stays (weak scaling), so its compute and what is neither (copies, idle) stay, too, but for what goes
over a rank's shards: optimizer, clipping, casts. Of the groups of ranks those with the largest stride grow with the
job, which are the replicas; the others stay inside. Shards get smaller if these groups gather them. The model only says
how a collective's time changes from one machine to the other: its error on the measured machine cancels.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from counterpoint.errors import Misconfigured
from counterpoint.plan.cluster import Cluster
from counterpoint.plan.collective_cost import estimate
from counterpoint.plan.groups import Group
from counterpoint.plan.network import OPERATIONS
from counterpoint.plan.networks import network_of
from counterpoint.plan.stragglers import Jitter, expected_slowest
from counterpoint.records import Collective, Diagnosis
from counterpoint.records.base import Record
from counterpoint.records.prediction import Part

__all__ = ["Observed", "Seen", "There", "elsewhere", "observed"]

UNIT = Jitter(spread=1.0)


class Seen(Record, frozen=True, kw_only=True):
    """One kind of collective: µs of transfer in a step, over all of its calls."""

    operation: str
    num_bytes: int
    group: Group
    calls: float
    transfer_us: float


class Observed(Record, frozen=True, kw_only=True):
    """A mean step of a mean rank; compute + exposed + waits + rest = step."""

    ranks: int
    gpu: str
    step_us: float
    compute_us: float
    lists_us: float
    exposed_us: float
    waits_us: float
    rest_us: float
    seen: tuple[Seen, ...]
    mfu: float | None
    left_out: int

    @property
    def transfer_us(self) -> float:
        return sum(each.transfer_us for each in self.seen)

    @property
    def hidden(self) -> float:
        """Of the shorter of compute and communication."""
        shorter = min(self.compute_us, self.transfer_us)
        return (self.transfer_us - self.exposed_us) / shorter if shorter else 0.0


class There(Record, frozen=True, kw_only=True):
    """The step elsewhere; `parts` add up to it."""

    step_us: float
    parts: tuple[Part, ...]
    comm: tuple[Part, ...]
    exposed_us: float
    mfu: float | None


def observed(diagnosis: Diagnosis) -> Observed:
    """What a diagnosis says of a mean step.

    Raises:
        Misconfigured: ranks are missing, or no step or collective with a known size was found.
    """
    if diagnosis.missing_ranks:
        missing = ", ".join(map(str, diagnosis.missing_ranks[:8]))
        raise Misconfigured(
            f"the traces of ranks {missing} are missing: give those of all {diagnosis.world_size} ranks"
        )
    if not diagnosis.steps:
        raise Misconfigured("no steps were found in the traces: record them with the profiler's step()")
    steps, totals = len(diagnosis.steps), diagnosis.totals
    known = [each for each in diagnosis.collectives if each.op in OPERATIONS and each.bytes and len(each.ranks) > 1]
    if not known:
        raise Misconfigured("no collective with a known size was found: record traces with record_shapes=True")
    waits = (totals.exposed_wait_us or 0.0) / steps
    exposed = totals.exposed_comm_us / steps - waits
    return Observed(
        ranks=diagnosis.world_size,
        gpu=_gpu_name(diagnosis.gpu),
        step_us=totals.duration_us / steps,
        compute_us=totals.compute_us / steps,
        lists_us=totals.multi_tensor_us / steps,
        exposed_us=exposed,
        waits_us=waits,
        rest_us=(totals.duration_us - totals.compute_us - totals.exposed_comm_us) / steps,
        seen=_seen(known, diagnosis.world_size, steps),
        mfu=totals.mfu,
        left_out=len(diagnosis.collectives) - len(known),
    )


def _seen(known: Iterable[Collective], world_size: int, steps: int) -> tuple[Seen, ...]:
    """By operation, size and kind of group: a rank is in one group of a kind, so equal groups count once."""
    found: dict[tuple[str, int, int, int], list[Collective]] = defaultdict(list)
    for each in known:
        stride = each.ranks[1] - each.ranks[0]
        found[each.op, each.bytes or 0, len(each.ranks), stride].append(each)
    return tuple(
        Seen(
            operation=op,
            num_bytes=size,
            group=Group(ranks=ranks, stride=stride),
            calls=len(calls) * ranks / world_size / steps,
            transfer_us=sum(call.transfer_us for call in calls) * ranks / world_size / steps,
        )
        for (op, size, ranks, stride), calls in found.items()
    )


def elsewhere(of: Observed, here: Cluster, there: Cluster, *, ranks: int, slow: float = 1.0) -> There:
    """The step on `ranks` ranks of another cluster.

    Args:
        of: the measured step.
        here: the machine it was measured on.
        there: the other.
        ranks: of the job there, a multiple of those here, or a divisor.
        slow: one rank computes so many times as long.

    Raises:
        Misconfigured: the groups cannot grow so, or one of the clusters is too small.
    """
    times = [(each, each.transfer_us * _ratio(each, of, here, there, ranks)) for each in of.seen]
    shrinks = of.lists_us * (1.0 - of.ranks / ranks) if _shards_grow(of) else 0.0
    comm, compute = sum(us for _, us in times), (of.compute_us - shrinks) * slow
    exposed = max(comm - of.hidden * min(compute, comm), 0.0)
    waits = of.waits_us * _slowest(ranks) / _slowest(of.ranks) if of.waits_us else 0.0
    parts = (
        Part(name="compute", us=compute, means=_said(of, shrinks, slow)),
        Part(
            name="exposed", us=exposed, means=f"communication that compute does not hide; {of.hidden:.0%} as measured"
        ),
        Part(name="waits", us=waits, means="for the last rank to come, outside compute"),
        Part(name="rest", us=of.rest_us, means="copies and idle time, as in the trace"),
    )
    step_us = sum(part.us for part in parts)
    alone: dict[str, float] = defaultdict(float)
    for each, us in times:
        alone[each.operation] += us
    return There(
        step_us=step_us,
        parts=parts,
        comm=tuple(Part(name=name, us=us, means="transfers of a step") for name, us in alone.items()),
        exposed_us=exposed + waits,
        mfu=None if of.mfu is None else of.mfu * of.step_us / step_us,
    )


def _said(of: Observed, shrinks: float, slow: float) -> str:
    less = f", {abs(shrinks) / 1e3:.1f} ms {'less' if shrinks > 0 else 'more'} for shards of another size"
    return "as in the trace" + less * bool(shrinks) + f", the slowest {slow:g} times" * (slow > 1)


def _shards_grow(of: Observed) -> bool:
    """Whether the groups that grow with the job are those that gather parameters and scatter gradients."""
    outermost = max(each.group.stride for each in of.seen)
    grown = {each.operation for each in of.seen if each.group.stride == outermost}
    return {"all_gather", "reduce_scatter"} <= grown


def _ratio(each: Seen, of: Observed, here: Cluster, there: Cluster, ranks: int) -> float:
    """The model's time there over its time here."""
    before = estimate(each.operation, each.num_bytes, each.group, network_of(here)).us
    after = estimate(each.operation, each.num_bytes, _grown(each.group, of, ranks), network_of(there)).us
    return after / before


def _grown(group: Group, of: Observed, ranks: int) -> Group:
    """Groups of the largest stride are those between replicas."""
    outermost = max(each.group.stride for each in of.seen)
    if group.stride < outermost:
        return group
    if (group.ranks * ranks) % of.ranks:
        raise Misconfigured(
            f"{ranks} ranks from a trace of {of.ranks}: its groups of {group.ranks} cannot grow so; give a multiple"
        )
    return Group(ranks=group.ranks * ranks // of.ranks, stride=group.stride)


def _gpu_name(text: str | None) -> str:
    """As `gpus.py` has it: H100 of "NVIDIA H100 80GB HBM3"."""
    found = re.search(r"\b[A-Z]{1,2}\d{3}\b", text or "")
    return found.group() if found else text or "unknown"


def _slowest(ranks: int) -> float:
    return expected_slowest(UNIT, ranks) - 1.0
