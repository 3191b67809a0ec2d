"""Account for the time of each rank, and split each collective into waiting and moving bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from counterpoint.diagnosis.intervals import Intervals
from counterpoint.diagnosis.job import TracedJob
from counterpoint.machine.bus_bandwidth import bus_factor
from counterpoint.machine.gpus import peak_tflops
from counterpoint.records.diagnosis import Account, Collective, RankAccount, StepTime
from counterpoint.trace.classify import is_multi_tensor
from counterpoint.trace.timeline import F64, I64, Kind, previous_on_stream


@dataclass(frozen=True, kw_only=True, slots=True)
class Activity:
    """Holds when one rank's GPU was busy with what, on the job's clock."""

    compute: Intervals
    comm: Intervals
    memcpy: Intervals
    any: Intervals


@dataclass(frozen=True, kw_only=True, slots=True)
class Waits:
    """Holds, of joined collectives, when each rank came, waited and moved bytes: [J, R] in µs, NaN: took no part."""

    arrival: F64  # own start; of copies, which begin when all are ready: when launched and next on their stream
    last_start: F64  # [J]
    last_column: I64  # [J]
    wait: F64
    transfer: F64
    exposed: F64  # of the whole collective: no compute runs
    exposed_wait: F64  # of its waiting
    step: I64  # [J] index of the step, -1: outside


def activity(job: TracedJob, column: int) -> Activity:
    """Return when one rank's GPU was busy with what."""
    compute, comm, memcpy = (job.busy(column, kind) for kind in (Kind.COMPUTE, Kind.COMM, Kind.MEMCPY))
    return Activity(compute=compute, comm=comm, memcpy=memcpy, any=compute | comm | memcpy)


def waits(job: TracedJob, busy: list[Activity]) -> Waits:
    """Split every collective into waiting for the last rank and transfer after it."""
    start, end = job.joined.start, job.joined.end
    arrival, copies = _arrivals(job)
    last = np.nanmax(start, axis=1)
    until = np.where(copies, np.nanmax(arrival, axis=1), last)
    wait = np.where(copies[:, None], until[:, None], np.minimum(last[:, None], end)) - arrival
    exposed, exposed_wait = np.full_like(start, np.nan), np.full_like(start, np.nan)
    for column, rank in enumerate(busy):
        there = np.isfinite(start[:, column])
        low, high = start[there, column], end[there, column]
        came = arrival[there, column]
        exposed[there, column] = (high - low) - rank.compute.within(low, high)
        exposed_wait[there, column] = wait[there, column] - rank.compute.within(came, came + wait[there, column])
    step = np.searchsorted(job.step_start.min(axis=1), last, side="right") - 1
    step[last >= job.step_end.max()] = -1
    return Waits(
        arrival=arrival,
        last_start=last,
        last_column=np.nanargmax(arrival, axis=1),
        wait=wait,
        transfer=np.maximum(end - np.maximum(last[:, None], start), 0.0),
        exposed=exposed,
        exposed_wait=np.maximum(exposed_wait, 0.0),
        step=step,
    )


def _arrivals(job: TracedJob) -> tuple[F64, np.typing.NDArray[np.bool_]]:
    """Return when each rank was ready for each collective [J, R], and which of them [J] copy engines carry out.

    A kernel waits inside itself; copies are held back by the stream until the peers are ready, and nothing shows.
    """
    arrival = job.joined.start.copy()
    copies = np.zeros(len(job.joined), bool)
    for column, d in enumerate(job.digests):
        there = np.flatnonzero(job.joined.row[:, column] >= 0)
        rows = job.joined.row[there, column]
        there, rows = there[d.comm.ctas[rows] == 0], rows[d.comm.ctas[rows] == 0]
        copies[there] = True
        first = d.comm.first[rows]
        before = previous_on_stream(d.gpu.stream)[first]
        free = np.where(before >= 0, job.op_end[column][before], np.nan)
        ready = np.fmax(free, job.launch[column][first])
        arrival[there, column] = np.fmin(arrival[there, column], ready)
    held = np.full(len(job.digests), -np.inf)  # the same wait counts once
    for j in np.flatnonzero(copies).tolist():
        arrival[j] = np.minimum(job.joined.start[j], np.maximum(arrival[j], held))
        held[np.isfinite(arrival[j])] = np.nanmax(arrival[j])
    return arrival, copies


def steps(job: TracedJob) -> tuple[StepTime, ...]:
    """Return the steps of the job, with means over ranks."""
    return tuple(
        StepTime(name=name, start_us=float(s.min()), duration_us=float((e - s).mean()))
        for name, s, e in zip(job.step_names, job.step_start, job.step_end, strict=True)
    )


def rank_accounts(job: TracedJob, busy: list[Activity], w: Waits) -> tuple[RankAccount, ...]:
    """Return one account per rank over all steps."""
    return tuple(_account(job, column, rank, w) for column, rank in enumerate(busy))


def _account(job: TracedJob, column: int, busy: Activity, w: Waits) -> RankAccount:
    start, end = job.step_start[:, column], job.step_end[:, column]
    duration = float((end - start).sum())
    compute, comm = float(busy.compute.within(start, end).sum()), float(busy.comm.within(start, end).sum())
    overlapped = float((busy.compute & busy.comm).within(start, end).sum())
    there = (w.step >= 0) & np.isfinite(w.wait[:, column])
    came, own_end = w.arrival[there, column], job.joined.end[there, column]
    waiting = Intervals.union(came, came + w.wait[there, column])
    moving = Intervals.union(own_end - w.transfer[there, column], own_end)
    moved = float(moving.within(start, end).sum())
    d = job.digests[column]
    flops = float(np.nansum(d.flops[job.in_steps(column, np.arange(len(start)))]))
    peak = peak_tflops(d.device.name)
    return RankAccount(
        rank=d.rank,
        duration_us=duration,
        compute_us=compute,
        comm_us=comm,
        exposed_wait_us=min(float(w.exposed_wait[there, column].sum()), comm - overlapped),
        overlapped_us=overlapped,
        exposed_comm_us=comm - overlapped,
        memcpy_us=float(busy.memcpy.within(start, end).sum()),
        idle_us=duration - float(busy.any.within(start, end).sum()),
        wait_us=float((waiting | moving).within(start, end).sum()) - moved,
        transfer_us=moved,
        hidden=overlapped / comm if comm > 0 else None,
        comm_to_compute=comm / compute if compute > 0 else None,
        mfu=flops / (duration * 1e-6) / (peak * 1e12) if peak and flops > 0 and duration > 0 else None,
        multi_tensor_us=compute - float(_single_tensor(job, column).within(start, end).sum()),
    )


def _single_tensor(job: TracedJob, column: int) -> Intervals:
    """Return when a compute kernel runs that is not over a list of tensors."""
    gpu, lists = job.digests[column].gpu, np.array([is_multi_tensor(name) for name in job.digests[column].names], bool)
    return job.runs(column, (gpu.kind == Kind.COMPUTE) & ~lists[gpu.name])


def totals(accounts: tuple[RankAccount, ...]) -> Account:
    """Return means over ranks, and ratios of those means."""
    fields = [f for f in Account.__struct_fields__ if f.endswith("_us") and f != "exposed_wait_us"]
    mean = {f: float(np.mean([getattr(a, f) for a in accounts])) for f in fields}
    exposed_waits = [a.exposed_wait_us for a in accounts if a.exposed_wait_us is not None]
    mfus = [a.mfu for a in accounts if a.mfu is not None]
    comm, compute = mean["comm_us"], mean["compute_us"]
    return Account(
        **mean,
        hidden=mean["overlapped_us"] / comm if comm > 0 else None,
        comm_to_compute=comm / compute if compute > 0 else None,
        mfu=float(np.mean(mfus)) if mfus else None,
        exposed_wait_us=float(np.mean(exposed_waits)) if exposed_waits else None,
    )


def collectives(job: TracedJob, w: Waits) -> tuple[Collective, ...]:
    """Return every collective, in order of time."""
    joined, ranks = job.joined, job.ranks
    first, end = np.nanmin(joined.start, axis=1), np.nanmax(joined.end, axis=1)
    transfer = np.maximum(end - w.last_start, 0.0)
    exposed = np.nanmean(w.exposed, axis=1)
    sizes, members, ctas = (_most(job, column) for column in ("bytes", "size", "ctas"))
    there = joined.row >= 0
    out = []
    for j in range(len(joined)):
        columns = np.flatnonzero(there[j]).tolist()
        size = int(sizes[j]) if sizes[j] >= 0 else None
        algo = size / float(transfer[j]) / 1e3 if size and transfer[j] > 0 else None
        bus = bus_factor(joined.op[j], max(int(members[j]), len(columns)))
        out.append(
            Collective(
                op=joined.op[j],
                group=joined.group[j],
                index=int(joined.index[j]),
                bytes=size,
                ranks=tuple(ranks[c] for c in columns),
                last_rank=ranks[int(w.last_column[j])],
                start_us=float(first[j]),
                end_us=float(end[j]),
                wait_us={str(ranks[c]): float(w.last_start[j] - joined.start[j, c]) for c in columns},
                transfer_us=float(transfer[j]),
                algo_gb_per_s=algo,
                bus_gb_per_s=algo * bus if algo is not None else None,
                exposed_us=float(exposed[j]),
                num_ctas=int(ctas[j]) if ctas[j] >= 0 else None,
                joined_by=joined.by[j],
                step=job.step_names[int(w.step[j])] if w.step[j] >= 0 else None,
            )
        )
    return tuple(out)


def _most(job: TracedJob, column: str) -> I64:
    """Return the largest value of a column of `CommRows` over each collective's ranks; -1 where none states it."""
    most = np.full(len(job.joined), -1, np.int64)
    for c, d in enumerate(job.digests):
        took = np.flatnonzero(job.joined.row[:, c] >= 0)
        most[took] = np.maximum(most[took], getattr(d.comm, column)[job.joined.row[took, c]])
    return most
