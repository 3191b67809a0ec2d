"""Predict a measured step on more nodes or another network, from the traced compute and communication of ranks.

    T    = compute + exposed + waits + rest                              as measured: n ranks, per step and rank
    compute' = compute - lists · (1 - n / n')            if shards grow with the job; lists: the part of compute in
                                                         which only kernels over lists of tensors run
    C'   = Σ over collectives of transfer · estimate(there) / estimate(here)
    exposed' = C' - h · min(compute', C'),   h = (C - exposed) / min(compute, C) as measured
    waits'   = waits · z(n') / z(n),         z(n): expected slowest of n in standard deviations (`step.py`)

The batch of a rank stays (weak scaling), so its compute, copies and idle time stay, too, except for the kernels over a
rank's shards: optimizer, clipping, casts. Of the groups of ranks only those with the largest stride (of replicas) grow
with the job. Shards get smaller if these groups gather parameters. The model only says how a
collective's time changes from one machine to the other: its error on the measured machine cancels.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from counterpoint.errors import Misconfigured, printable
from counterpoint.plan.job.changes import build_job
from counterpoint.plan.job.cluster import Cluster
from counterpoint.plan.job.job import parse_job
from counterpoint.plan.network.estimate import estimate
from counterpoint.plan.network.group import Group
from counterpoint.plan.network.network import OPERATIONS, all_levels, names, network_of
from counterpoint.plan.step.step import expected_slowest
from counterpoint.records import Record
from counterpoint.records.diagnosis import Collective, Diagnosis
from counterpoint.records.prediction import Prediction, TimePart

NOTE = "compute, copies and idle time of the trace; transfers by the ratio of the model's estimates"
LINKS = ("nic_gbit", "nics", "failed_nics", "oversubscription")
ALLOWED = ("weak_nodes", "network", *(f"cluster.{name}" for name in LINKS), "ranks.slow")
"""Flags and fields that a trace can answer; others would change the compute of each rank."""
VALIDATED = (
    "not validated: between hosts nothing was compared yet; 2, 4 and 8 H200 of a host predict each other's FSDP2 step "
    "with a mean error of 0.9%, 1.3% at worst (results/plan-from-trace.md)"
)
ONE_NODE = {"H200": "h100"}  # GPUs whose NVLink network is named after another GPU with the same links


class MeasuredCollective(Record, frozen=True, kw_only=True):
    """Holds one kind of collective in a step; `calls` and `transfer_us` are sums over a step, averaged over ranks."""

    operation: str
    num_bytes: int
    group: Group
    calls: float
    transfer_us: float


class MeasuredStep(Record, frozen=True, kw_only=True):
    """Holds a step averaged over steps and ranks; compute + exposed + waits + rest = step."""

    ranks: int  # of the job
    gpu: str  # as the data sheets name it
    step_us: float  # of the step
    compute_us: float  # time in which compute runs
    lists_us: float  # the part of compute in which only kernels over lists of tensors run
    exposed_us: float  # time of transfers while no compute runs
    waits_us: float  # waits for the last rank while no compute runs
    rest_us: float  # copies and idle time
    collectives: tuple[MeasuredCollective, ...]  # by operation, size and kind of group
    mfu: float | None  # null if the diagnosis has none
    left_out: int  # collectives without a known size

    @property
    def transfer_us(self) -> float:
        """Return the µs of the transfers of all collectives."""
        return sum(each.transfer_us for each in self.collectives)

    @property
    def hidden(self) -> float:
        """Return the overlapped communication as a fraction of the shorter of compute and communication."""
        shorter = min(self.compute_us, self.transfer_us)
        return (self.transfer_us - self.exposed_us) / shorter if shorter else 0.0


def answer_from_trace(diagnosis: Diagnosis, *, recorded_on: str | None, asked: Mapping[str, str]) -> Prediction:
    """Predict a traced step after the changes `asked`; `recorded_on`: the trace's network (None: one NVLink node)."""
    for name in asked:
        if name not in ALLOWED:
            raise Misconfigured(
                f"{printable(name, 80)} with --from-trace: a trace can answer {', '.join(ALLOWED)}; give a job instead"
            )
    measured = measured_step(diagnosis)
    network = recorded_on or _nvlink(measured)
    stand_in = {  # a job with the trace's ranks, which has no compute
        "model": {"name": "trace", "layers": 1, "hidden": 1, "heads": 1, "vocab": 1},
        "training": {"sequence": 1, "global_batch": measured.ranks},
        "parallel": {"dp": measured.ranks},
        "cluster": {"gpu": measured.gpu, "network": network},
    }
    here, job = parse_job(stand_in).cluster, build_job(stand_in, asked)
    found = predict_on(measured, here, job.cluster, ranks=job.parallel.world_size, slow=job.ranks.slow)
    return replace(found, asked=dict(asked))


def _nvlink(measured: MeasuredStep) -> str:
    """Return the name of the NVLink network of the traced GPUs' nodes; raise Misconfigured if none is known."""
    name = f"nvlink-{ONE_NODE.get(measured.gpu, measured.gpu.lower())}"
    if name in names() and measured.ranks <= all_levels(name)[-1].size:
        return name
    raise Misconfigured(
        f"--recorded-on is missing: name the network of {measured.ranks} × {measured.gpu}, one of {', '.join(names())}"
    )


def measured_step(diagnosis: Diagnosis) -> MeasuredStep:
    """Return the mean step of a diagnosis; raise Misconfigured if ranks, steps or all message sizes are missing."""
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
    sheet = re.search(r"\b[A-Z]{1,2}\d{3}\b", diagnosis.gpu or "")  # H100 of "NVIDIA H100 80GB HBM3"
    return MeasuredStep(
        ranks=diagnosis.world_size, gpu=sheet.group() if sheet else diagnosis.gpu or "unknown",
        step_us=totals.duration_us / steps, compute_us=totals.compute_us / steps,
        lists_us=totals.multi_tensor_us / steps, exposed_us=exposed, waits_us=waits,
        rest_us=(totals.duration_us - totals.compute_us - totals.exposed_comm_us) / steps,
        collectives=_by_kind(known, diagnosis.world_size, steps), mfu=totals.mfu,
        left_out=len(diagnosis.collectives) - len(known),
    )  # fmt: skip


def _by_kind(known: Iterable[Collective], world_size: int, steps: int) -> tuple[MeasuredCollective, ...]:
    """Return collectives merged by operation, size, group size and stride; calls and µs are means per rank and step."""
    found: dict[tuple[str, int, int, int], list[Collective]] = defaultdict(list)
    for each in known:
        stride = each.ranks[1] - each.ranks[0]
        found[each.op, each.bytes or 0, len(each.ranks), stride].append(each)
    return tuple(
        MeasuredCollective(
            operation=op,
            num_bytes=size,
            group=Group(ranks=ranks, stride=stride),
            calls=len(calls) * ranks / world_size / steps,
            transfer_us=sum(call.transfer_us for call in calls) * ranks / world_size / steps,
        )
        for (op, size, ranks, stride), calls in found.items()
    )


def predict_on(measured: MeasuredStep, here: Cluster, there: Cluster, *, ranks: int, slow: float = 1.0) -> Prediction:
    """Return a measured step predicted on `ranks` ranks of another cluster, a multiple or divisor of the measured ones.

    It was measured on `here`, and `slow` is a factor on the compute time of the slowest rank. Raise Misconfigured if a
    group cannot grow so far.
    """
    times = []
    for each in measured.collectives:
        before = estimate(each.operation, each.num_bytes, each.group, network_of(here)).us
        after = estimate(each.operation, each.num_bytes, _grown(each.group, measured, ranks), network_of(there)).us
        times.append((each, each.transfer_us * (after / before)))
    parts = _parts(measured, sum(us for _, us in times), ranks, slow)
    compute_us, exposed_us = parts[0].us, parts[1].us + parts[2].us
    step_us = sum(part.us for part in parts)
    alone: dict[str, float] = defaultdict(float)
    for each, us in times:
        alone[each.operation] += us
    comm_us = sum(alone.values())
    left_out = (f"{measured.left_out} collectives without a known size are left out",) if measured.left_out else ()
    return Prediction(
        model="trace",
        gpu=measured.gpu,
        gpus=ranks,
        step_us=step_us,
        parts=tuple(part for part in parts if part.us > 0),
        comm=tuple(TimePart(name=name, us=us, means="transfers of a step") for name, us in alone.items()),
        exposed_comm_us=exposed_us,
        comm_to_compute=comm_us / compute_us,
        serial_us=step_us - exposed_us + comm_us,
        ideal_us=max(step_us - exposed_us, comm_us),
        mfu=None if measured.mfu is None else measured.mfu * measured.step_us / step_us,
        memory={},
        verdict=f"measured: {measured.step_us / 1e3:,.1f} ms a step on {measured.ranks} × {measured.gpu}",
        validated=VALIDATED,
        notes=(NOTE, *left_out),
        job={},
    )


def _parts(measured: MeasuredStep, comm_us: float, ranks: int, slow: float) -> tuple[TimePart, ...]:
    """Return a step's compute, exposed communication, waits and rest on `ranks` ranks; `comm_us`: all transfers."""
    shrinks_us = measured.lists_us * (1.0 - measured.ranks / ranks) if _shards_grow(measured) else 0.0
    compute_us = (measured.compute_us - shrinks_us) * slow
    exposed_us = max(comm_us - measured.hidden * min(compute_us, comm_us), 0.0)
    waits_us = measured.waits_us * _slowest(ranks) / _slowest(measured.ranks) if measured.waits_us else 0.0
    less = f", {abs(shrinks_us) / 1e3:.1f} ms {'less' if shrinks_us > 0 else 'more'} for shards of another size"
    as_traced = "as in the trace" + less * bool(shrinks_us) + f", the slowest {slow:g} times" * (slow > 1)
    hidden = f"communication that compute does not hide; {measured.hidden:.0%} as measured"
    return (
        TimePart(name="compute", us=compute_us, means=as_traced),
        TimePart(name="exposed", us=exposed_us, means=hidden),
        TimePart(name="waits", us=waits_us, means="for the last rank to come, outside compute"),
        TimePart(name="rest", us=measured.rest_us, means="copies and idle time, as in the trace"),
    )


def _shards_grow(measured: MeasuredStep) -> bool:
    """Return whether the groups of the largest stride shard parameters: run both all_gather and reduce_scatter."""
    outermost = max(each.group.stride for each in measured.collectives)
    grown = {each.operation for each in measured.collectives if each.group.stride == outermost}
    return {"all_gather", "reduce_scatter"} <= grown


def _grown(group: Group, measured: MeasuredStep, ranks: int) -> Group:
    """Return a group's shape in a job of `ranks` ranks: only groups of the largest stride (between replicas) grow."""
    outermost = max(each.group.stride for each in measured.collectives)
    if group.stride < outermost:
        return group
    if (group.ranks * ranks) % measured.ranks:
        trace = f"a trace of {measured.ranks}: its groups of {group.ranks}"
        raise Misconfigured(f"{ranks} ranks from {trace} cannot grow so; give a multiple")
    return Group(ranks=group.ranks * ranks // measured.ranks, stride=group.stride)


def _slowest(ranks: int) -> float:
    return expected_slowest(1.0, ranks) - 1.0
