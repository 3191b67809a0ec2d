"""Tell of processes that drive several GPUs: how busy each is, and whether they work in turn."""

from __future__ import annotations

import numpy as np

from counterpoint.diagnosis.reading.traced_job import TracedJob
from counterpoint.records.diagnosis import Finding, GpuAccount, RankAccount, severity_of

_WORTH = 0.03  # of a step
_IN_TURN = 1.25  # GPUs of a process at work at once, while any is: no more than that means that they take turns
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


def notes_on_gpus(job: TracedJob, per_gpu: tuple[GpuAccount, ...]) -> tuple[str, ...]:
    """Return what to know of ranks whose process drives several GPUs: their times are means, and how busy each is."""
    processes = {d.rank: d.processes for d in job.digests}
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
        notes.append(f"{len(ranks) - _RANKS_SHOWN} more ranks drive several GPUs")
    return tuple(notes)


def find_turns(job: TracedJob, per_rank: tuple[RankAccount, ...], per_gpu: tuple[GpuAccount, ...]) -> list[Finding]:
    """Return a finding if GPUs of one process idle while others of it work; the cost is their mean idle time so."""
    if any(d.processes > 1 for d in job.digests):
        return []  # of several processes: it may be waiting for one another
    steps, what = job.num_steps, job.whole
    step = float(np.mean([rank.duration_us for rank in per_rank])) / steps
    cost = sum(rank.other_gpu_us for rank in per_rank) / len(per_rank) / steps
    if not per_gpu or cost < _WORTH * step:
        return []
    worst = max(per_rank, key=lambda rank: rank.other_gpu_us)
    gpus = [gpu for gpu in per_gpu if gpu.rank == worst.rank]
    busy = np.array([gpu.duration_us - gpu.idle_us for gpu in gpus])
    working = worst.duration_us - (worst.idle_us - worst.other_gpu_us)  # at least one of them
    at_once = float(busy.sum()) / working
    in_turn = at_once <= _IN_TURN
    count, low, high = len(gpus), *(_share(us, worst.duration_us) for us in (busy.min(), busy.max()))
    shares = low if low == high else f"{low} to {high}"
    do = "take turns" if in_turn else "work at the same time only in part"
    return [
        Finding(
            kind="gpu_turns",
            cost_us=cost,
            severity=severity_of(cost, step),
            title=f"The {count} GPUs of one process {do}: each is busy {shares} of the {what}",
            evidence=f"while any of them works, {at_once:.2f} do on average; a GPU idles {cost / 1e3:.2f} ms of the "
            f"{what} while another one works, which is what sharing the work evenly and at once would save",
            advice=_ADVICE_IN_TURN if in_turn else _ADVICE_IN_PART,
            rank=worst.rank,
        )
    ]


def _share(us: float, whole_us: float) -> str:
    return f"{us / whole_us:.0%}" if whole_us > 0 else "unknown"
