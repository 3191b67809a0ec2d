"""Find where work is divided unevenly: between pipeline stages, experts, or the GPUs of one process."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from counterpoint.diagnosis.analysis.accounts import Activity, Waits
from counterpoint.diagnosis.analysis.analysis import Analysis
from counterpoint.diagnosis.findings.advice import ADVICE_ON_EXPERTS
from counterpoint.diagnosis.reading.traced_job import TracedJob
from counterpoint.records.diagnosis import Finding, counted
from counterpoint.trace.timeline import F64, I64

_LEAST_BUBBLE_SHARE = 0.05  # of a step
_LEAST_TURN_SHARE = 0.03  # of a step
_GPUS_AT_ONCE = 1.25  # mean number of busy GPUs of a process while any is busy: up to this, GPUs work one after another
_GPUS_SHOWN = 8
_RANKS_SHOWN = 3
_PER_PROCESS = "one process per GPU (DistributedDataParallel, FSDP2 or tensor parallelism)"
_ADVICE_IN_TURN = (
    "layers that are split over GPUs run one after another (device_map='auto', .to('cuda:1')): give every GPU work at "
    f"the same time by {_PER_PROCESS}, microbatches (torch.distributed.pipelining) or several requests at once. If one "
    "GPU has the memory, use one"
)
_ADVICE_IN_PART = (
    f"{_PER_PROCESS} instead of one thread that launches for all, as in DataParallel; give each GPU equally much work"
)


def find_pipeline_bubbles(a: Analysis) -> Iterator[Finding]:
    """Yield a finding if pipeline stages wait for their neighbours, in sends and receives matched by ids.

    Idle time of the late stage before its send or receive does not count as bubble: its host caused the delay.
    """
    job, w = a.job, a.waits
    sure = [
        c.op == "send_recv" and c.parallel == "pp" and len(c.ranks) == 2 and c.joined_by in ("seq", "comms_id")
        for c in a.collectives
    ]
    rows = np.flatnonzero(np.array(sure, bool) & (w.step >= 0))
    exposed = np.maximum(w.exposed_wait[rows] - _idle_before(job, w, a.busy, rows)[:, None], 0.0)
    waited = np.nansum(exposed, axis=0) / job.num_steps
    cost = float(waited.mean())
    if cost < _LEAST_BUBBLE_SHARE * a.step_us:
        return
    most = int(waited.argmax())
    worst = int(rows[np.nanargmax(np.nanmax(exposed, axis=1))])
    yield Finding.of(
        "pipeline_bubble",
        cost,
        a.step_us,
        title=f"Pipeline bubbles: stages wait {cost / 1e3:.2f} ms {job.each} for their neighbours",
        evidence=f"waiting in {len(rows)} sends and receives of the pipeline's group, with no compute beside it, "
        f"while the neighbour computes or waits itself, mean over ranks; rank {job.ranks[most]} waits longest, "
        f"{waited[most] / 1e3:.2f} ms {job.each}",
        advice="more microbatches per step, an interleaved or zero-bubble schedule, or stages that take equally "
        "long (move layers from the slowest stage)",
        start_us=float(np.nanmin(job.joined.start[worst])),
        end_us=float(w.last_start[worst]),
    )


def _idle_before(job: TracedJob, w: Waits, busy: list[Activity], rows: I64) -> F64:
    """Return, per collective, the µs that its last rank idled between its previous communication and its arrival."""
    idle = np.zeros(len(rows))
    for column in np.unique(w.last_column[rows]).tolist():
        own = rows[w.last_column[rows] == column]
        came, ends = w.arrival[own, column], job.joined.end[:, column]
        ends = np.concatenate((job.step_start[:1, column], np.sort(ends[np.isfinite(ends)])))
        since = np.minimum(ends[np.maximum(np.searchsorted(ends, came, side="right") - 1, 0)], came)
        idle[w.last_column[rows] == column] = came - since - busy[column].any.within(since, came)
    return idle


def find_expert_imbalance(a: Analysis) -> Iterator[Finding]:
    """Yield a finding if ranks wait for a rank whose experts have most work, unless that rank is slow otherwise too."""
    job, found = a.job, a.expert_imbalance
    if found is None:
        return
    yield Finding.of(
        "expert_imbalance",
        found.cost_us,
        a.step_us,
        title=f"Expert imbalance{', probably' * (not found.sure)}: ranks wait for those whose experts have most to do",
        evidence=f"{found.load}; the busiest rank of each exchange takes {found.longest:.1f} x the mean of its group "
        f"(median of {found.exchanges}). Equal shares of the same work would save {found.evened_us / 1e3:.2f} ms "
        f"{job.each}",
        advice=ADVICE_ON_EXPERTS,
        rank=job.ranks[found.column],
        start_us=float(np.nanmin(job.joined.start[found.worst])),
        end_us=float(a.waits.last_start[found.worst]),
    )


def find_turns(a: Analysis) -> Iterator[Finding]:
    """Yield a finding if a GPU idles while another GPU of its process works; the cost is this time per step and GPU."""
    job, per_rank, per_gpu = a.job, a.per_rank, a.per_gpu
    if any(d.processes > 1 for d in job.digests):
        return  # GPUs of several processes may be waiting for one another
    what = job.whole
    cost = sum(rank.other_gpu_us for rank in per_rank) / len(per_rank) / job.num_steps
    if not per_gpu or cost < _LEAST_TURN_SHARE * a.step_us:
        return
    worst = max(per_rank, key=lambda rank: rank.other_gpu_us)
    gpus = [gpu for gpu in per_gpu if gpu.rank == worst.rank]
    busy = np.array([gpu.duration_us - gpu.idle_us for gpu in gpus])
    working = worst.duration_us - (worst.idle_us - worst.other_gpu_us)  # µs in which at least one GPU works
    at_once = float(busy.sum()) / working
    in_turn = at_once <= _GPUS_AT_ONCE
    count, low, high = len(gpus), *(_share(us, worst.duration_us) for us in (busy.min(), busy.max()))
    shares = low if low == high else f"{low} to {high}"
    do = "take turns" if in_turn else "work at the same time only in part"
    yield Finding.of(
        "gpu_turns",
        cost,
        a.step_us,
        title=f"The {count} GPUs of one process {do}: each is busy {shares} of the {what}",
        evidence=f"while any of them works, {at_once:.2f} do on average; a GPU idles {cost / 1e3:.2f} ms of the "
        f"{what} while another one works, which is what sharing the work evenly and at once would save",
        advice=_ADVICE_IN_TURN if in_turn else _ADVICE_IN_PART,
        rank=worst.rank,
    )


def notes_on_gpus(a: Analysis) -> tuple[str, ...]:
    """Return, per rank whose process drives several GPUs, a note that times are means, and how busy each GPU is."""
    per_gpu = a.per_gpu
    processes = {d.rank: d.processes for d in a.job.digests}
    ranks = sorted({gpu.rank for gpu in per_gpu})
    notes = []
    for rank in ranks[:_RANKS_SHOWN]:
        gpus = [gpu for gpu in per_gpu if gpu.rank == rank]
        shown = [f"GPU {g.gpu} {_share(g.duration_us - g.idle_us, g.duration_us)}" for g in gpus[:_GPUS_SHOWN]]
        more = " …" if len(gpus) > _GPUS_SHOWN else ""
        who = "one process that drives"
        if processes[rank] > 1:
            who = f"{processes[rank]} processes, which the file does not tell apart, that drive"
        notes.append(
            f"rank {rank} is {who} {len(gpus)} GPUs: its times are means over them. Busy: {', '.join(shown)}{more}"
        )
    if len(ranks) > _RANKS_SHOWN:
        notes.append(f"{counted(len(ranks) - _RANKS_SHOWN, 'more rank')} with several GPUs")
    return tuple(notes)


def _share(us: float, whole_us: float) -> str:
    return f"{us / whole_us:.0%}" if whole_us > 0 else "unknown"
