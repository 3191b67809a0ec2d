"""Split the time of each rank into compute, communication, copies and idle, and collectives into wait and transfer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from counterpoint.diagnosis.analysis.parallel_groups import parallels
from counterpoint.diagnosis.reading.intervals import Intervals
from counterpoint.diagnosis.reading.traced_job import TracedJob, gpus_of
from counterpoint.machine.bus_bandwidth import bus_factor, bus_gb_per_s
from counterpoint.machine.gpus import link_gb_per_s, peak_tflops
from counterpoint.machine.profile import own_profile_of_traces
from counterpoint.records.diagnosis import Account, Collective, CollectiveKind, GpuAccount, RankAccount, StepTime
from counterpoint.trace.classify import is_multi_tensor
from counterpoint.trace.timeline import F64, I64, ROUNDED_US, Bools, Kind, device_of, previous_on_stream


@dataclass(frozen=True, kw_only=True, slots=True)
class Activity:
    """Holds when one rank's GPU computed, communicated, copied, or did any of these (µs on the job's clock).

    Where one process drives several GPUs, these times are the union over its GPUs, and `gpus` has each GPU's times.
    """

    compute: Intervals
    comm: Intervals
    memcpy: Intervals
    any: Intervals
    gpus: dict[int, Activity] = field(default_factory=dict)  # empty for one GPU

    def by_gpu(self, stream: I64) -> list[tuple[I64, Activity]]:
        """Return, per GPU, the indices of the elements of `stream` that lie on the GPU, and the GPU's activity."""
        number = device_of(stream)
        if not self.gpus:
            return [(np.arange(len(stream)), self)]
        return [(np.flatnonzero(number == n), self.gpus.get(n, self)) for n in np.unique(number).tolist()]


@dataclass(frozen=True, kw_only=True, slots=True)
class Waits:
    """Holds each rank's arrival, wait and transfer in each collective: [J, R] in µs; NaN: the rank took no part."""

    arrival: F64  # start of the rank's kernel; of peer copies: when they were launched and next on their stream
    last_start: F64  # [J] start of the rank that started last
    last_column: I64  # [J] the rank that arrived last
    wait: F64
    transfer: F64
    exposed: F64  # the part of the collective during which no compute runs
    exposed_once: F64  # exposed time in steps; of concurrent collectives, only the one that compute waits for has it
    exposed_wait: F64  # the part of the wait during which no compute runs
    step: I64  # [J] index of the step, -1: outside
    complete: Bools  # [J] every rank of the group is joined; if not, the wait is not fully known
    told: Bools  # [J] complete, or at least two ranks are joined: the wait is a lower bound


def activity(job: TracedJob, column: int) -> Activity:
    """Return when one rank's GPU computed, communicated and copied."""
    gpus, number = gpus_of(job.digests[column]), device_of(job.digests[column].gpu.stream)
    several = {n: _activity(job, column, number == n) for n in gpus} if len(gpus) > 1 else {}
    return replace(_activity(job, column, np.ones(len(number), bool)), gpus=several)


def _activity(job: TracedJob, column: int, rows: Bools) -> Activity:
    kind = job.digests[column].gpu.kind
    compute, comm, memcpy = (job.runs(column, rows & (kind == k)) for k in (Kind.COMPUTE, Kind.COMM, Kind.MEMCPY))
    return Activity(compute=compute, comm=comm, memcpy=memcpy, any=compute | comm | memcpy)


def waits(job: TracedJob, busy: list[Activity]) -> Waits:
    """Return each rank's µs in every collective, split into the wait for the last rank and the transfer afterwards."""
    start, end = job.joined.start, job.joined.end
    arrival, copies = _arrivals(job)
    last = np.nanmax(start, axis=1)
    until = np.where(copies, np.nanmax(arrival, axis=1), last)
    wait = np.where(copies[:, None], until[:, None], np.minimum(last[:, None], end)) - arrival
    exposed, exposed_once, exposed_wait = (np.full_like(start, np.nan) for _ in range(3))
    for column, rank in enumerate(busy):
        every = np.flatnonzero(np.isfinite(start[:, column]))
        for rows, gpu in rank.by_gpu(_streams(job, column, every)):
            there = every[rows]
            low, high = start[there, column], end[there, column]
            came = arrival[there, column]
            exposed[there, column] = (high - low) - gpu.compute.within(low, high)
            exposed_once[there, column] = _exposed_once(job, column, gpu, low, high) / max(len(rank.gpus), 1)
            exposed_wait[there, column] = wait[there, column] - gpu.compute.within(came, came + wait[there, column])
    step = np.searchsorted(job.step_start.min(axis=1), last, side="right") - 1
    step[last >= job.step_end.max(axis=1)[step]] = -1  # between steps, or after the last
    complete = _complete(job)
    return Waits(
        complete=complete,
        told=complete | ((job.joined.row >= 0).sum(axis=1) >= 2),
        arrival=arrival,
        last_start=last,
        last_column=np.nanargmax(arrival, axis=1),
        wait=wait,
        transfer=np.maximum(end - np.maximum(last[:, None], start), 0.0),
        exposed=exposed,
        exposed_once=exposed_once,
        exposed_wait=np.maximum(exposed_wait, 0.0),
        step=step,
    )


def _exposed_once(job: TracedJob, column: int, busy: Activity, start: F64, end: F64) -> F64:
    """Return a rank's exposed µs of each collective in the steps; time that collectives share counts only once.

    Of concurrent collectives, the one that compute follows soonest gets the time, since compute waits for it. A
    collective that ends while compute runs holds up nothing.
    """
    steps = job.steps_of(column)
    comm = busy.comm & steps
    both = comm & busy.compute
    starts = np.append(busy.compute.start, np.inf)
    until_compute = starts[np.searchsorted(starts, end - ROUNDED_US)] - end
    until_compute[busy.compute.covers(end - ROUNDED_US)] = np.inf
    edges = np.unique(np.concatenate((start, end)))
    alone = comm.within(edges[:-1], edges[1:]) - both.within(edges[:-1], edges[1:])
    owner = np.full(len(alone), -1)
    order = np.lexsort((-start, -until_compute))  # later ones take over shared time
    low, high = np.searchsorted(edges, start[order]), np.searchsorted(edges, end[order])
    for row, first, last in zip(order.tolist(), low.tolist(), high.tolist(), strict=True):
        owner[first:last] = row
    return np.bincount(owner[owner >= 0], alone[owner >= 0], len(start)).astype(np.float64)


def _complete(job: TracedJob) -> Bools:
    """Return a mask of collectives [J] of which all ranks of the group (unknown size: at least two) have a trace."""
    present, size = (job.joined.row >= 0).sum(axis=1), most_stated(job, "size")
    return np.asarray((size == 1) | job.alone | (present >= 2) & ((present >= size) | (not job.missing)))


def _arrivals(job: TracedJob) -> tuple[F64, Bools]:
    """Return when each rank was ready for each collective [J, R], and which collectives [J] copy engines carry out.

    A kernel starts and then waits for its peers. Peer copies start only when the peers are ready, so no operation
    shows their wait.
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
    held = np.full(len(job.digests), -np.inf)  # latest arrival so far: collectives in a row share no waiting time
    for j in np.flatnonzero(copies).tolist():
        arrival[j] = np.minimum(job.joined.start[j], np.maximum(arrival[j], held))
        held[np.isfinite(arrival[j])] = np.nanmax(arrival[j])
    return arrival, copies


def steps(job: TracedJob) -> tuple[StepTime, ...]:
    """Return the steps of the job, with their times as means over ranks."""
    return tuple(
        StepTime(name=name, start_us=float(s.min()), duration_us=float((e - s).mean()))
        for name, s, e in zip(job.step_names, job.step_start, job.step_end, strict=True)
    )


def rank_accounts(job: TracedJob, busy: list[Activity], w: Waits) -> tuple[RankAccount, ...]:
    """Return each rank's times by activity, over all steps; for a process with several GPUs, means over its GPUs."""
    return tuple(_rank_account(job, column, rank, w) for column, rank in enumerate(busy))


def gpu_accounts(job: TracedJob, busy: list[Activity], w: Waits) -> tuple[GpuAccount, ...]:
    """Return the times by activity of each GPU of processes that drive several GPUs."""
    return tuple(gpu for column, rank in enumerate(busy) for gpu in _gpus(job, column, rank, w))


def _gpus(job: TracedJob, column: int, busy: Activity, w: Waits) -> list[GpuAccount]:
    rank = job.digests[column].rank
    found = ((n, msgspec.structs.asdict(_account(job, column, own, w, n))) for n, own in busy.gpus.items())
    return [GpuAccount(rank=rank, gpu=n, **account) for n, account in found]


def _rank_account(job: TracedJob, column: int, busy: Activity, w: Waits) -> RankAccount:
    rank = job.digests[column].rank
    if not busy.gpus:
        return RankAccount(rank=rank, **msgspec.structs.asdict(_account(job, column, busy, w)))
    mean = totals(_gpus(job, column, busy, w))
    working = float(busy.any.within(job.step_start[:, column], job.step_end[:, column]).sum())
    turns = max(mean.idle_us - (mean.duration_us - working), 0.0)
    return RankAccount(rank=rank, other_gpu_us=turns, **msgspec.structs.asdict(mean))


def _account(job: TracedJob, column: int, busy: Activity, w: Waits, only: int | None = None) -> Account:
    """Return the times by activity of a rank, or of GPU `only` of the rank's process."""
    d, start, end = job.digests[column], job.step_start[:, column], job.step_end[:, column]
    mine = np.ones(len(d.gpu), bool) if only is None else device_of(d.gpu.stream) == only
    duration = float((end - start).sum())
    compute, comm = float(busy.compute.within(start, end).sum()), float(busy.comm.within(start, end).sum())
    overlapped = float((busy.compute & busy.comm).within(start, end).sum())
    there = np.flatnonzero((w.step >= 0) & np.isfinite(w.wait[:, column]))
    there = there if only is None else there[device_of(_streams(job, column, there)) == only]
    told = there[w.told[there]]
    known = bool(len(told)) or not len(there)
    came, own_end = w.arrival[told, column], job.joined.end[told, column]
    waiting = Intervals.union(came, came + w.wait[told, column])
    moving = Intervals.union(own_end - w.transfer[told, column], own_end)
    moved = float(moving.within(start, end).sum())
    flops = float(np.nansum(d.flops[mine & job.in_steps(column, np.arange(len(start)))]))
    peak = peak_tflops(d.device.name)
    return Account(
        duration_us=duration,
        compute_us=compute,
        comm_us=comm,
        exposed_wait_us=min(float(w.exposed_wait[told, column].sum()), comm - overlapped) if known else None,
        overlapped_us=overlapped,
        exposed_comm_us=comm - overlapped,
        memcpy_us=float(busy.memcpy.within(start, end).sum()),
        idle_us=duration - float(busy.any.within(start, end).sum()),
        wait_us=float((waiting | moving).within(start, end).sum()) - moved if known else None,
        transfer_us=moved if known else None,
        hidden=overlapped / comm if comm > 0 else None,
        comm_to_compute=comm / compute if compute > 0 else None,
        mfu=flops / (duration * 1e-6) / (peak * 1e12) if peak and flops > 0 and duration > 0 else None,
        multi_tensor_us=compute - float(_single_tensor(job, column, mine).within(start, end).sum()),
    )


def _streams(job: TracedJob, column: int, collectives: I64) -> I64:
    """Return the stream of each of `collectives` on a rank that takes part in all of them."""
    return np.asarray(job.digests[column].comm.stream[job.joined.row[collectives, column]])


def _single_tensor(job: TracedJob, column: int, rows: Bools) -> Intervals:
    """Return when compute kernels run, except kernels that process lists of tensors (foreach, fused optimizers)."""
    gpu, lists = job.digests[column].gpu, np.array([is_multi_tensor(name) for name in job.digests[column].names], bool)
    return job.runs(column, rows & (gpu.kind == Kind.COMPUTE) & ~lists[gpu.name])


def totals(accounts: Sequence[Account]) -> Account:
    """Return the mean of accounts (of ranks, or of the GPUs of one rank), with ratios computed from the means."""
    waiting = ("wait_us", "transfer_us", "exposed_wait_us")
    fields = [f for f in Account.__struct_fields__ if f.endswith("_us") and f not in waiting]
    mean = {f: float(np.mean([getattr(a, f) for a in accounts])) for f in fields}
    known = {f: [value for a in accounts if (value := getattr(a, f)) is not None] for f in waiting}
    mfus = [a.mfu for a in accounts if a.mfu is not None]
    comm, compute = mean["comm_us"], mean["compute_us"]
    return Account(
        **mean,
        hidden=mean["overlapped_us"] / comm if comm > 0 else None,
        comm_to_compute=comm / compute if compute > 0 else None,
        mfu=_mean(mfus),
        wait_us=_mean(known["wait_us"]),
        transfer_us=_mean(known["transfer_us"]),
        exposed_wait_us=_mean(known["exposed_wait_us"]),
    )


def _mean(values: list[float]) -> float | None:
    return float(np.mean(values)) if values else None


def collectives(job: TracedJob, w: Waits) -> tuple[Collective, ...]:
    """Return every collective, in order of time."""
    joined, ranks = job.joined, job.ranks
    first, end = np.nanmin(joined.start, axis=1), np.nanmax(joined.end, axis=1)
    transfer = np.maximum(end - w.last_start, 0.0)
    exposed = np.nanmean(w.exposed, axis=1)
    sizes, members, ctas = (most_stated(job, column) for column in ("bytes", "size", "ctas"))
    there = joined.row >= 0
    serves = parallels(job)
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
                wait_us={
                    str(ranks[c]): float(w.last_start[j] - joined.start[j, c]) if w.told[j] else None for c in columns
                },
                transfer_us=float(transfer[j]),
                algo_gb_per_s=algo,
                bus_gb_per_s=algo * bus if algo is not None else None,
                exposed_us=float(exposed[j]),
                num_ctas=int(ctas[j]) if ctas[j] >= 0 else None,
                joined_by=joined.by[j],
                step=job.step_names[int(w.step[j])] if w.step[j] >= 0 else None,
                parallel=serves[j],
                phase=_named(job, j, "phase"),
                module=_named(job, j, "module"),
            )
        )
    return tuple(out)


def _named(job: TracedJob, j: int, column: str) -> str | None:
    """Return the value of a `CommRows` column for a collective, if all ranks that state a value agree; else None."""
    said = {
        getattr(d.comm, column)[row] for d, row in zip(job.digests, job.joined.row[j].tolist(), strict=True) if row >= 0
    } - {None}
    return str(said.pop()) if len(said) == 1 else None


def collective_kinds(job: TracedJob, w: Waits, every: tuple[Collective, ...]) -> tuple[CollectiveKind, ...]:
    """Return the table of collectives by operation, group, size and phase in the analysed steps, most exposed first."""
    sizes, steps = most_stated(job, "size"), job.num_steps
    kinds: dict[tuple[str, str, str | None, int | None, str | None], list[int]] = {}
    for j, c in enumerate(every):
        if c.step is not None:
            kinds.setdefault((c.op, c.group, _named(job, j, "group_desc"), c.bytes, c.phase), []).append(j)
    found = []
    for (op, group, name, size, phase), rows in kinds.items():
        moving = float(np.median([every[j].transfer_us for j in rows]))
        ranks = max(*(int(sizes[j]) for j in rows), *(len(every[j].ranks) for j in rows))
        first = int((job.joined.row[rows[0]] >= 0).argmax())
        members = job.digests[first].comm.group_ranks[job.joined.row[rows[0], first]]
        known = members is not None or ranks == job.world_size
        told = [us for j in rows if w.complete[j] for us in every[j].wait_us.values() if us is not None]
        found.append(
            CollectiveKind(
                op=op,
                group=group,
                group_name=name,
                parallel=every[rows[0]].parallel,
                ranks=ranks if ranks > 1 else None,
                bytes=size,
                phase=phase,
                count=len(rows),
                wait_us=float(np.mean(told)) if told and w.complete[rows].all() else None,
                transfer_us=moving,
                bus_gb_per_s=bus_gb_per_s(op, size, ranks, moving) if size and moving > 0 and ranks > 1 else None,
                best_gb_per_s=None,
                exposed_us=float(np.nansum(w.exposed_once[rows])) / len(job.ranks) / steps,
                link_gb_per_s=link_of_group(job, members) if known else None,
            )
        )
    best: dict[str, float] = {}
    for kind in found:
        best[kind.group] = max(best.get(kind.group, 0.0), kind.bus_gb_per_s or 0.0)
    found = [msgspec.structs.replace(kind, best_gb_per_s=best[kind.group] or None) for kind in found]
    return tuple(sorted(found, key=lambda kind: -kind.exposed_us))


def most_stated(job: TracedJob, column: str) -> I64:
    """Return, for each collective, the largest value of a `CommRows` column over its ranks; -1 if no rank states it."""
    most: I64 = stated(job, column).max(axis=1, initial=-1)
    return most


def stated(job: TracedJob, column: str) -> I64:
    """Return a `CommRows` column for every collective and rank, [J, R]; -1: not stated, or the rank took no part."""
    found = np.full(job.joined.row.shape, -1, np.int64)
    for c, d in enumerate(job.digests):
        took = np.flatnonzero(job.joined.row[:, c] >= 0)
        found[took, c] = getattr(d.comm, column)[job.joined.row[took, c]]
    return found


def link_of_group(job: TracedJob, members: tuple[int, ...] | None) -> float | None:
    """Return the link bandwidth (GB/s) into one GPU of a group, from the user's machine profile, else the data sheet.

    None: the GPU is unknown or has no link of its own, or the group is not known to be on one host.
    """
    device = job.digests[0].device
    if any(d.device.name != device.name for d in job.digests) or not _on_one_host(job, members):
        return None
    own = own_profile_of_traces(device.name) if device.name else None
    return own.rates.link_gb_per_s if own else link_gb_per_s(device.name)


def _on_one_host(job: TracedJob, members: tuple[int, ...] | None) -> bool:
    """Return whether all ranks of a group are on one host; False if the recorded ranks do not fill hosts in order.

    `members` None: all ranks.
    """
    gpus = job.digests[0].device.host_gpus
    if gpus is None or any(d.device.host_gpus != gpus or d.device.index != d.rank % gpus for d in job.digests):
        return False
    if job.world_size % gpus:  # the job uses only a part of the GPUs of a host, or of each host
        return len(job.ranks) == job.world_size < gpus
    group = members or tuple(range(job.world_size))
    return group[0] // gpus == group[-1] // gpus
