"""Answer `counterpoint.diagnose(...)`: from paths to a diagnosis, as records and as polars frames."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from counterpoint.diagnosis import accounts as account
from counterpoint.diagnosis.digest import RankDigest
from counterpoint.diagnosis.engine import Engine, digest_all
from counterpoint.diagnosis.findings import find_findings, verdict
from counterpoint.diagnosis.job import TracedJob, assemble
from counterpoint.diagnosis.kernels import KernelSet, compare_overlap
from counterpoint.diagnosis.lanes import draw_lanes
from counterpoint.diagnosis.launch_order import Blocked, find_blocked
from counterpoint.diagnosis.replay import replay
from counterpoint.diagnosis.stragglers import find_delays, find_stragglers
from counterpoint.errors import BadTrace
from counterpoint.records.diagnosis import Diagnosis, RankAccount, Replay, Source, Straggler, TimelineLane
from counterpoint.trace.source import Limits, find_traces
from counterpoint.trace.timeline import F64

if TYPE_CHECKING:
    import polars as pl

__all__ = ["Result", "diagnose", "diagnose_digests"]


@dataclass(frozen=True, kw_only=True)
class Result:
    """Holds a diagnosis, the lanes of its picture, and its tables as polars frames."""

    diagnosis: Diagnosis
    job: TracedJob
    waits: account.Waits

    @property
    def lanes(self) -> tuple[TimelineLane, ...]:
        """The picture of when each rank computed, communicated, waited, copied or idled."""
        return draw_lanes(self.job, self.waits)

    @property
    def frames(self) -> dict[str, pl.DataFrame]:
        """The tables steps, per_rank, collectives, stragglers, kernels, findings and what_if as polars frames."""
        from counterpoint.diagnosis.frames import frames

        return frames(self.diagnosis)


def diagnose(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    engine: Engine | None = None,
    limits: Limits | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Result:
    """Return the diagnosis of the traces of one job.

    Args:
        source: a file, folder, glob or tar of Kineto JSON (plain or gzip) or Nsight Systems SQLite, or several.
        engine: how the ranks are read; by default in processes of this machine.
        limits: caps on what compressed inputs may expand to.
        progress: called as (files done, files, what is going on).

    Raises:
        BadTrace: nothing to read, or damaged, or not the ranks of one job; with file and byte offset. The engine dask
            without its package or scheduler raises `Unsupported`.
    """
    sources = [os.fspath(source)] if isinstance(source, str | os.PathLike) else [os.fspath(s) for s in source]
    limits = limits or Limits()
    with find_traces(sources, limits) as files:
        digests = digest_all(files, limits, engine or Engine(), progress)
        names = [f.label for f in files]
    if not digests:
        raise BadTrace("no rank in these files", path=sources[0])
    return diagnose_digests(digests, names)


def diagnose_digests(digests: list[RankDigest], files: Sequence[str]) -> Result:
    """Return the diagnosis of ranks that have been read; `files` are the names of their traces."""
    job = assemble(digests)
    busy = [account.activity(job, column) for column in range(len(job.ranks))]
    waits = account.waits(job, busy)
    per_rank = account.rank_accounts(job, busy, waits)
    total = account.totals(per_rank)
    delays = find_delays(job, waits)
    stragglers = find_stragglers(job, busy, waits, delays)
    kernels = compare_overlap(job, busy)
    blocked = find_blocked(job)
    played = _replay(job, stragglers, kernels, blocked, per_rank)
    findings = find_findings(job, total, waits, stragglers, kernels.kernels, blocked, played)
    clocks, ranks = job.clocks, job.ranks
    formats = {d.format for d in digests}
    diagnosis = Diagnosis(
        source=Source(
            format=formats.pop() if len(formats) == 1 else "mixed",
            files=tuple(files),
            events=sum(d.events for d in digests),
        ),
        world_size=job.world_size,
        ranks=ranks,
        missing_ranks=job.missing,
        gpu=Counter(d.device.name for d in digests).most_common(1)[0][0],
        clock_offsets_us=_by_rank(ranks, clocks.offset),
        clock_uncertainty_us=_by_rank(ranks, clocks.uncertainty),
        clock_drift_ppm=_by_rank(ranks, clocks.drift * 1e6),
        verdict=verdict(job, total, findings, played),
        notes=job.notes,
        steps=account.steps(job),
        totals=total,
        per_rank=per_rank,
        collectives=account.collectives(job, waits),
        stragglers=stragglers,
        kernels=kernels.kernels,
        findings=findings,
        replay=played,
    )
    return Result(diagnosis=diagnosis, job=job, waits=waits)


def _by_rank(ranks: tuple[int, ...], values: F64) -> dict[str, float | None]:
    return {str(r): float(v) if np.isfinite(v) else None for r, v in zip(ranks, values, strict=True)}


def _replay(
    job: TracedJob,
    stragglers: tuple[Straggler, ...],
    kernels: KernelSet,
    blocked: tuple[Blocked, ...],
    per_rank: tuple[RankAccount, ...],
) -> Replay | None:
    """Replay the step; the healthy rank whose compute time is typical stands in for a straggler."""
    late = {job.ranks.index(s.rank) for s in stragglers}
    healthy = sorted((c for c in range(len(job.ranks)) if c not in late), key=lambda c: per_rank[c].compute_us)
    typical = {column: healthy[len(healthy) // 2] for column in late} if healthy else {}
    held = [np.zeros(len(d.gpu), bool) for d in job.digests]
    for b in blocked:
        held[b.column][b.op] = True
    touched = any(np.isfinite(a).any() for a in kernels.alone_us)
    return replay(
        job, typical=typical, alone_us=kernels.alone_us if touched else None, blocked=held if blocked else None
    )
