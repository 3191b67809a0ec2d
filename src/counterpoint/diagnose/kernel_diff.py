"""The kernels of two ranks side by side: the same ones for longer, or others."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from counterpoint.diagnose.job import Job
from counterpoint.trace.timeline import F64, I64, Kind

__all__ = ["KernelDiff", "compare_kernels"]


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelDiff:
    """Compute kernels of a late rank against those of a peer, in some steps.

    Signature = name, grid, block and input shapes. ratio: time of kernels that both ran, mean against mean, weighted by
    the late rank's counts; other_share: part of its kernels whose signature the peer did not run; extra_us: its kernel
    time beyond the peer's that those others, and more of the same, account for; slower_us: what ratio costs.
    """

    peer: int
    count: int
    matched: int
    ratio: float
    slower_us: float
    other_share: float
    extra_us: float
    example: str | None


def compare_kernels(job: Job, column: int, steps: I64) -> KernelDiff:
    """Compare a rank's compute kernels in some steps with those of the typical other rank (median kernel time)."""
    mine = _signatures(job, column, steps)
    others_of = {c: _signatures(job, c, steps) for c in range(len(job.ranks)) if c != column}
    by_time = sorted(others_of, key=lambda c: sum(float(v.sum()) for v in others_of[c].values()))
    peer = by_time[(len(by_time) - 1) // 2]
    theirs = others_of[peer]
    both = mine.keys() & theirs.keys()
    matched = sum(min(len(mine[s]), len(theirs[s])) for s in both)
    count = sum(map(len, mine.values()))
    expected = sum(float(np.mean(theirs[s])) * len(mine[s]) for s in both)
    measured = sum(float(np.mean(mine[s])) * len(mine[s]) for s in both)
    others = {s: v for s, v in mine.items() if s not in theirs}
    lacking = {s: v for s, v in theirs.items() if s not in mine}
    extra = sum(float(v.sum()) for v in others.values()) - sum(float(v.sum()) for v in lacking.values())
    surplus = sum(
        float(mine[s].sum()) * (1 - len(theirs[s]) / len(mine[s])) for s in both if len(mine[s]) > len(theirs[s])
    )
    if others:
        worst = max(others, key=lambda s: float(others[s].sum()))
    elif both:
        worst = max(both, key=lambda s: (float(np.mean(mine[s])) - float(np.mean(theirs[s]))) * len(mine[s]))
    else:
        worst = None
    return KernelDiff(
        peer=job.ranks[peer],
        count=count,
        matched=matched,
        ratio=measured / expected if expected > 0 else 1.0,
        other_share=1 - matched / count if count else 0.0,
        slower_us=measured - expected,
        extra_us=extra + surplus,
        example=worst[0][:120] if worst else None,
    )


def _signatures(job: Job, column: int, steps: I64) -> dict[tuple[str, tuple[int, ...], str], F64]:
    """Durations per (name, grid + block, shapes) of the compute kernels of some steps."""
    d, gpu = job.digests[column], job.digests[column].gpu
    start = job.op_start[column]
    low, high = job.step_start[steps, column], job.step_end[steps, column]
    at = np.searchsorted(low, start, side="right") - 1
    inside = (at >= 0) & (start < high[np.maximum(at, 0)])
    rows = np.flatnonzero((gpu.kind == Kind.COMPUTE) & inside)
    if not len(rows):
        return {}
    facts = np.column_stack([gpu.name[rows], gpu.shape[rows], gpu.grid[rows], gpu.block[rows]])
    kinds, which = np.unique(facts, axis=0, return_inverse=True)
    order = np.argsort(which.ravel(), kind="stable")
    parts = np.split((gpu.end - gpu.start)[rows][order], np.cumsum(np.bincount(which.ravel()))[:-1])
    return {
        (d.names[k[0]], tuple(k[2:]), d.shapes[k[1]] if k[1] >= 0 else ""): part
        for k, part in zip(kinds.tolist(), parts, strict=True)
    }
