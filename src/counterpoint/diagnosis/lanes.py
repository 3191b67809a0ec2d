"""Draw the timeline of a job: when each rank computed, moved bytes, waited for others, copied, or for its host."""

from __future__ import annotations

import numpy as np

from counterpoint.diagnosis.accounts import Waits
from counterpoint.diagnosis.job import TracedJob
from counterpoint.records.diagnosis import TimelineLane
from counterpoint.trace.timeline import F64, Kind

__all__ = ["draw_lanes"]

_SPANS = 6000  # per lane: more are not seen on any screen
_LONGEST_LABEL = 80


def draw_lanes(job: TracedJob, w: Waits) -> tuple[TimelineLane, ...]:
    """Return the lanes of every rank, clipped to the analysed steps."""
    out: list[TimelineLane] = []
    for column in range(len(job.ranks)):
        for kind, name in ((Kind.COMPUTE, "compute"), (Kind.MEMCPY, "memcpy")):
            rows = np.flatnonzero(job.digests[column].gpu.kind == kind)
            names = job.digests[column].names
            labels = [names[i] for i in job.digests[column].gpu.name[rows].tolist()]
            out += _lane(job, column, name, job.op_start[column][rows], job.op_end[column][rows], labels)
        out += _communication(job, column, w)
        gaps = [g for g in job.digests[column].gaps if g.category not in ("launch",) and g.end - g.start > 100]
        start = job.on_job_clock(column, np.array([g.start for g in gaps]))
        end = job.on_job_clock(column, np.array([g.end for g in gaps]))
        out += _lane(
            job, column, "host", start, end, [g.operation or f"{g.category} ({g.inside or '?'})" for g in gaps]
        )
    return tuple(out)


def _communication(job: TracedJob, column: int, w: Waits) -> list[TimelineLane]:
    joined = job.joined
    rows = np.flatnonzero(joined.row[:, column] >= 0)
    start, end = joined.start[rows, column], joined.end[rows, column]
    arrived = start + np.maximum(w.wait[rows, column], 0.0)
    labels = [f"{joined.op[j]} #{joined.index[j]} (group {joined.group[j]})" for j in rows.tolist()]
    waited = [f"waiting for rank {job.ranks[int(w.last_column[j])]}: {joined.op[j]} #{joined.index[j]}" for j in rows]
    return [
        *_lane(job, column, "communication", arrived, end, labels),
        *_lane(job, column, "wait", start, arrived, waited),
    ]


def _lane(job: TracedJob, column: int, name: str, start: F64, end: F64, labels: list[str]) -> list[TimelineLane]:
    low, high = job.step_start[0, column], job.step_end[-1, column]
    keep = np.flatnonzero((end > low) & (start < high) & (end > start))
    if not len(keep):
        return []
    keep = keep[np.argsort(start[keep], kind="stable")]
    start, end = np.maximum(start[keep], low), np.minimum(end[keep], high)
    text = [labels[i][:_LONGEST_LABEL] for i in keep.tolist()]
    start, end, text = _merged(start, end, text)
    return [
        TimelineLane(
            rank=job.ranks[column],
            name=name,
            start_us=tuple(start.round(3).tolist()),
            duration_us=tuple((end - start).round(3).tolist()),
            labels=tuple(text),
        )
    ]


def _merged(start: F64, end: F64, text: list[str]) -> tuple[F64, F64, list[str]]:
    """Merge neighbours closer than a growing distance until `_SPANS` spans are left, named after the longest."""
    pause = 0.0
    while len(start) > _SPANS:
        pause = max(2 * pause, 0.5)
        cut = np.concatenate(([True], start[1:] - np.maximum.accumulate(end)[:-1] > pause))
        first = np.flatnonzero(cut)
        last = np.append(first[1:], len(start))
        longest = [int(a + np.argmax(end[a:b] - start[a:b])) for a, b in zip(first, last, strict=True)]
        text = [text[i] for i in longest]
        end = np.maximum.reduceat(end, first)
        start = start[first]
    return start, end, text
