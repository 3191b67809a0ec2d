"""Find copies between host and GPU that hold up the step: offload, and input from pageable memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from counterpoint.diagnosis.analysis.accounts import Activity
from counterpoint.diagnosis.analysis.analysis import Analysis
from counterpoint.diagnosis.findings.advice import saves_otherwise
from counterpoint.diagnosis.reading.intervals import Intervals
from counterpoint.diagnosis.reading.traced_job import TracedJob
from counterpoint.records.causes import IDLE_CAUSES
from counterpoint.records.diagnosis import Finding
from counterpoint.trace.timeline import MIGRATION, Kind

_LEAST_SHARE = 0.03  # of a step
_LAUNCHED_SHARE = 0.9  # of the operations: if fewer have a recorded launch, the replay cannot change host times
_WAY = re.compile(r"\b(HtoD|DtoH|DtoD|HtoH)\b|HostToDevice|DeviceToHost|DeviceToDevice", re.I)
_SPELT = {"hosttodevice": "HtoD", "devicetohost": "DtoH", "devicetodevice": "DtoD"}
_WHAT = {
    "HtoD": "to the GPU", "DtoH": "from the GPU", "DtoD": "within the GPU", "HtoH": "within the host",
    "memset": "memsets", "other": "of unknown direction",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class _Copies:
    """Holds the sums, over all steps and ranks, of the copies with one direction and kind of host memory."""

    way: str
    memory: str  # pageable | pinned | unified | ""
    exposed_us: float
    hidden_us: float
    crossed_us: float  # µs of copying while copies of another direction run
    aside: bool  # most of them run on streams that compute nothing
    count: int
    gb_per_s: float | None


def find_copies(a: Analysis) -> Iterator[Finding]:
    """Yield a finding if exposed copies, beside which nothing else runs, take a notable share of a step."""
    job, busy, step = a.job, a.busy, a.step_us
    steps, ranks = job.num_steps, len(job.ranks)
    exposed = whole = 0.0
    for c, rank in enumerate(busy):
        whole += float(rank.memcpy.within(job.step_start[:, c], job.step_end[:, c]).sum()) / (steps * ranks)
        alone = (rank.any.within(job.step_start[:, c], job.step_end[:, c])
                 - (rank.compute | rank.comm).within(job.step_start[:, c], job.step_end[:, c]))  # fmt: skip
        exposed += float(alone.sum()) / (steps * ranks)
    launched = min(float(np.isfinite(at).mean()) if len(at) else 0.0 for at in job.launch)
    # idle time is counted separately
    cost = min(a.saved_us.get("no copies", exposed) if launched >= _LAUNCHED_SHARE else exposed, whole)
    if min(cost, exposed) < _LEAST_SHARE * step:
        return
    kinds = _kinds(job, busy)
    scale = 1.0 / (steps * ranks * 1e3)
    parts = []
    for k in kinds[:3]:
        rate = f" at {k.gb_per_s:.3g} GB/s" if k.gb_per_s is not None else ""
        memory = f" ({k.memory} {'memory' if k.memory == 'unified' else 'host memory'})" if k.memory else ""
        parts.append(
            f"{_WHAT[k.way]}{memory} {(k.exposed_us + k.hidden_us) * scale:.2f} ms in "
            f"{_copies(k.count / (steps * ranks))}{rate}, {k.hidden_us * scale:.2f} ms of it beside other work"
            + (f", {k.crossed_us * scale:.2f} ms beside copies another way" if k.crossed_us * scale >= 0.005 else "")
        )
    between = " between host and GPU" if kinds[0].way in ("HtoD", "DtoH") else ""
    yield Finding.of(
        "copies",
        cost,
        step,
        title=f"{exposed / step:.0%} of the {job.whole} ({exposed / 1e3:.2f} ms) is copying{between} with nothing "
        "beside it",
        evidence=f"{job.each_rank}: {'; '.join(parts)}{saves_otherwise(job, cost, exposed)}",
        advice=_advise(kinds, job.uses_torch),
    )


def _copies(count: float) -> str:
    """Return the number of copies per step and rank as text."""
    return f"{count:,.0f} copies" if count >= 1.5 else "1 copy" if count >= 0.95 else "less than 1 copy"


def _kinds(job: TracedJob, busy: list[Activity]) -> list[_Copies]:
    """Return the copies in the steps, summed by direction and kind of host memory, most exposed first."""
    sums: dict[tuple[str, str], list[float]] = {}
    for c, d in enumerate(job.digests):
        labels = [_label(name) for name in d.names]
        kinds = sorted(set(labels))
        number = np.array([kinds.index(label) for label in labels], np.int64)
        inside = job.in_steps(c, np.arange(len(job.step_names))) & (d.gpu.kind == Kind.MEMCPY)
        rows = np.flatnonzero(inside)
        which = number[d.gpu.name[rows]]
        others = busy[c].compute | busy[c].comm
        computing = np.unique(d.gpu.stream[d.gpu.kind == Kind.COMPUTE])
        for at in np.unique(which).tolist():
            own = rows[which == at]
            time = Intervals.union(job.op_start[c][own], job.op_end[c][own])
            hidden = float(others.within(time.start, time.end).sum())
            sized = own[d.gpu.bytes[own] > 0]
            other = rows[np.array([way != kinds[at][0] for way, _ in kinds])[which]]
            crossed = Intervals.union(job.op_start[c][other], job.op_end[c][other]) & time
            aside = own[~np.isin(d.gpu.stream[own], computing)]
            total = sums.setdefault(kinds[at], [0.0] * 7)
            whole = float((time.end - time.start).sum())
            values = (whole - hidden, hidden, len(own), float(d.gpu.bytes[sized].sum()),
                      float((d.gpu.end - d.gpu.start)[sized].sum()), float((crossed.end - crossed.start).sum()),
                      float((d.gpu.end - d.gpu.start)[aside].sum()) if len(computing) else 0.0)  # fmt: skip
            sums[kinds[at]] = [a + b for a, b in zip(total, values, strict=True)]
    found = [
        _Copies(way=way, memory=memory, exposed_us=exposed, hidden_us=hidden, crossed_us=crossed,
                aside=aside > 0.5 * (exposed + hidden), count=int(count),
                gb_per_s=size / time / 1e3 if time > 0 and way != "memset" else None)
        for (way, memory), (exposed, hidden, count, size, time, crossed, aside) in sums.items()
    ]  # fmt: skip
    return sorted(found, key=lambda k: -k.exposed_us)


def _label(name: str) -> tuple[str, str]:
    if "memset" in name.lower() or name.startswith("FillBuffer"):
        return "memset", ""
    found = _WAY.search(name)
    way = _SPELT.get(found.group(0).lower(), found.group(0)) if found else "other"
    memory = (
        "unified"
        if name.startswith(MIGRATION)
        else "pageable"
        if "Pageable" in name
        else "pinned"
        if "Pinned" in name
        else ""
    )
    return way, memory if way in ("HtoD", "DtoH") else ""


def _advise(kinds: list[_Copies], torch: bool) -> str:
    """Return advice on the most exposed kind of copies; for pageable copies, with the rate of pinned ones if known."""
    worst = kinds[0]
    if worst.memory == "unified":
        return IDLE_CAUSES["page_migration"].advice
    if worst.memory == "pageable":
        pinned = next((k for k in kinds if k.way == worst.way and k.memory == "pinned" and k.gb_per_s), None)
        seen = f" (pinned copies of this job reach {pinned.gb_per_s:.1f} GB/s)" if pinned else ""
        if not torch:
            return f"copy from and to pinned memory{seen}: cudaHostAlloc or cudaHostRegister, and cudaMemcpyAsync"
        return (
            f"copy from and to pinned memory{seen}: DataLoader(pin_memory=True) or tensor.pin_memory(), and "
            ".to(device, non_blocking=True)"
        )
    if worst.way in ("HtoD", "DtoH") and worst.aside:
        rate = f", at {worst.gb_per_s:.1f} GB/s" if worst.gb_per_s is not None else ""
        return (
            "copy fewer bytes (offload less, a smaller dtype), or begin earlier: the copies run on a stream of their "
            f"own already{rate}. Where the link is slower than others like it, bind the process to the GPU's NUMA node"
        )
    if worst.way in ("HtoD", "DtoH") and not torch:
        return "copy on a stream of its own by cudaMemcpyAsync, beside kernels that do not need it, and wait by events"
    if worst.way == "HtoD":
        return (
            "copy ahead on a stream of its own: the next batch while this one computes "
            "(non_blocking=True from pinned memory), offloaded parameters one layer before they are needed"
        )
    if worst.way == "DtoH":
        return (
            "copy back on a stream of its own into pinned memory with non_blocking=True, and wait for it only where "
            "the host needs the values; offload less if the link is the limit"
        )
    if worst.way == "memset" and torch:
        return "allocate with torch.empty where everything is overwritten, and zero_grad(set_to_none=True)"
    if not torch:
        return "leave out copies and memsets of what a kernel could write at once"
    return "avoid the copy: .contiguous(), .clone() and torch.cat on large tensors; write into the final buffer instead"
