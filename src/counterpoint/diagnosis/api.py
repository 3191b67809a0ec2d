"""Implement `counterpoint.diagnose(...)`: read traces and return the diagnosis, timeline lanes and polars frames."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from counterpoint.diagnosis.analysis.accounts import steps
from counterpoint.diagnosis.analysis.analysis import Analysis
from counterpoint.diagnosis.comparison import compare, is_diagnosis, read_diagnosis
from counterpoint.diagnosis.findings.findings import find_findings, verdict
from counterpoint.diagnosis.findings.imbalance import notes_on_gpus
from counterpoint.diagnosis.many_ranks import MOST_DETAILED, ManyRanks, read_many
from counterpoint.diagnosis.nccl_report import nccl_report
from counterpoint.diagnosis.reading.digest import Engine, RankDigest, digest_all
from counterpoint.diagnosis.reading.host_categories import CATEGORIES
from counterpoint.diagnosis.reading.traced_job import TracedJob, assemble
from counterpoint.errors import BadTrace
from counterpoint.records.diagnosis import Comparison, Diagnosis, Source, TimelineLane
from counterpoint.records.nccl import NcclReport
from counterpoint.trace.nccl_log import read_nccl_logs
from counterpoint.trace.source import Limits, TraceFile, find_traces, recordings
from counterpoint.trace.timeline import F64, I64, Kind

if TYPE_CHECKING:
    import polars as pl


_SPANS = 6000  # most spans per lane; a screen cannot show more
_LONGEST_LABEL = 80
_KINDS = 256  # most kinds of collectives in the table: their sizes may all differ
_SHORTEST_GAP_US = 100.0  # the shortest gap that is drawn


@dataclass(frozen=True, kw_only=True)
class Result:
    """Holds a diagnosis, and computes timeline lanes and polars frames from it."""

    diagnosis: Diagnosis
    analysis: Analysis

    def __repr__(self) -> str:
        """Return the verdict as one line of text."""
        return f"Result({self.diagnosis!r})"

    def _repr_html_(self) -> str:
        """Return the verdict and the findings as HTML for a notebook."""
        return self.diagnosis._repr_html_()

    @property
    def lanes(self) -> tuple[TimelineLane, ...]:
        """Return timeline lanes: when each rank computed, communicated, waited for others, copied or idled."""
        return _draw_lanes(self.analysis)

    @property
    def stream_lanes(self) -> tuple[TimelineLane, ...]:
        """Return the timeline lanes split by stream, for trace viewers that show one row per stream."""
        return _draw_lanes(self.analysis, by_stream=True)

    @property
    def frames(self) -> dict[str, pl.DataFrame]:
        """Return polars frames by name: steps, per_rank, collectives, stragglers, kernels, operators and others."""
        from counterpoint.diagnosis.frames import frames

        return frames(self.diagnosis)

    def against(self, base: Result | Diagnosis | str | os.PathLike[str]) -> Comparison:
        """Return the comparison of this recording's mean step with an earlier recording's mean step.

        `base`: the earlier run's result or diagnosis, the file that `--json` wrote, or the traces.
        """
        if isinstance(base, str | os.PathLike):
            base = read_diagnosis(Path(base)) if is_diagnosis(base) else diagnose(base)
        return compare(self.diagnosis, base.diagnosis if isinstance(base, Result) else base)


def diagnose(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    engine: Engine | None = None,
    limits: Limits | None = None,
    progress: Callable[[int, int, str], None] | None = None,
    nccl_logs: Sequence[str | os.PathLike[str]] = (),
) -> Result:
    """Return the diagnosis of the traces of one job.

    Args:
        source: a file, folder, glob or tar of Kineto JSON (plain, gzip or zstd) or Nsight Systems SQLite, or several;
            or digests of traces. Of more than 256 digests, 256 ranks are looked at closely.
        engine: how the ranks are read; by default in processes of this machine.
        limits: caps on what compressed inputs may expand to.
        progress: called with (files done, number of files, text about the current work).
        nccl_logs: files, folders or globs of logs of NCCL (`NCCL_DEBUG=INFO`, NCCL Inspector) of the same job.

    Raises:
        BadTrace: nothing to read, a damaged file, or ranks of different jobs; names the file and the byte offset.
        Unsupported: the engine is dask, but its package is not installed or its scheduler does not answer.
    """
    notes: list[str] = []
    limits = limits or Limits()
    if nccl_logs:
        report = nccl_report(read_nccl_logs([os.fspath(log) for log in nccl_logs]))
        result = diagnose(source, engine=engine, limits=limits, progress=progress)
        return replace(result, diagnosis=_with_nccl(result.diagnosis, report))
    with _files(source, limits, notes) as files:
        if len(files) > MOST_DETAILED and all(file.format == "digest" for file in files):
            return _diagnose_many(files, limits, notes, engine or Engine(workers=1), progress)
        digests, names = _digests(files, limits, engine, progress)
    return diagnose_digests(digests, names, notes)


def _with_nccl(d: Diagnosis, report: NcclReport) -> Diagnosis:
    """Return a diagnosis with what NCCL's logs say; the verdict names the first problem that they show."""
    titles = [remark.title for remark in report.remarks if remark.kind != "warning"]
    said = f" NCCL's log says: {titles[0]}." if titles else ""
    return msgspec.structs.replace(d, nccl=report, verdict=d.verdict + said)


def _diagnose_many(
    files: list[TraceFile],
    limits: Limits,
    notes: list[str],
    engine: Engine,
    progress: Callable[[int, int, str], None] | None,
) -> Result:
    """Return the diagnosis of more digests than are joined whole: accounts of all ranks, details of some."""
    many = read_many(files, limits, progress)
    by_name = {file.label: file for file in files}
    digests = digest_all([by_name[many.paths[c]] for c in many.detailed], limits, engine, progress)
    known = [replace(d, rank=many.ranks[c], rank_known=True) for d, c in zip(digests, many.detailed, strict=True)]
    return diagnose_digests(known, many.paths, notes, many)


def read_ranks(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    notes: list[str],
    *,
    engine: Engine | None = None,
    limits: Limits | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> tuple[list[RankDigest], list[str]]:
    """Return the digests of a job's ranks, and the file names; read only the last of several recordings.

    Args:
        source: as in `diagnose`.
        notes: list to which notes on the files are appended.
        engine: how the ranks are read; by default in processes of this machine.
        limits: caps on what compressed inputs may expand to.
        progress: called with (files done, number of files, text about the current work).

    Raises:
        BadTrace: as in `diagnose`.
    """
    limits = limits or Limits()
    with _files(source, limits, notes) as files:
        return _digests(files, limits, engine, progress)


def _digests(
    files: list[TraceFile],
    limits: Limits,
    engine: Engine | None,
    progress: Callable[[int, int, str], None] | None,
) -> tuple[list[RankDigest], list[str]]:
    """Return the digests of the ranks in these files, and the files' names; raise `BadTrace` if there is no rank."""
    names = [file.label for file in files]
    digests = digest_all(files, limits, engine or Engine(), progress)
    if not digests:
        raise BadTrace("no rank in these files", path=names[0])
    return digests, names


@contextmanager
def _files(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], limits: Limits, notes: list[str]
) -> Iterator[list[TraceFile]]:
    """Yield the files of a job's last recording."""
    sources = [os.fspath(source)] if isinstance(source, str | os.PathLike) else [os.fspath(s) for s in source]
    with find_traces(sources, limits, notes) as files:
        yield _last_recording(files, notes)


def _last_recording(files: list[TraceFile], notes: list[str]) -> list[TraceFile]:
    """Return the files of a job's last recording; if there are others, append a note that names them to `notes`."""
    found = recordings(files)
    *others, last = found
    if others:
        shown = ", ".join(others[-8:]) + (" …" if len(others) > 8 else "")
        notes.append(
            f"{len(found)} recordings of one job: the last, {last}, is read; give another one by itself, or two by "
            f"--against: {shown}"
        )
    return found[last]


def diagnose_digests(
    digests: list[RankDigest], files: Sequence[str], notes: Sequence[str] = (), many: ManyRanks | None = None
) -> Result:
    """Return the diagnosis of a job from the digests of its ranks.

    Args:
        digests: one per rank, in any order.
        files: the names of their traces.
        notes: notes on the input files, to be put before the notes on the job.
        many: what the summaries of all ranks tell, where `digests` are of some of them.
    """
    a = Analysis(assemble(digests)) if many is None else Analysis(assemble(digests, many.ranks), many.accounts)
    job, clocks, ranks = a.job, a.job.clocks, a.job.ranks
    findings = find_findings(a)
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
        verdict=verdict(a, findings),
        notes=(*notes, *job.notes, *notes_on_gpus(a)),
        steps=steps(job),
        totals=a.totals,
        per_rank=a.per_rank,
        per_gpu=a.per_gpu,
        collectives=a.collectives,
        collective_kinds=a.kinds[:_KINDS],
        stragglers=a.stragglers,
        kernels=a.kernels.kernels,
        findings=findings,
        replay=a.replay,
        idle=a.idle,
        operators=a.operators if job.gpu_recorded else (),
        card=a.card,
    )
    if many is not None:
        diagnosis = _of_all(diagnosis, many)
    return Result(diagnosis=diagnosis, analysis=a)


def _of_all(d: Diagnosis, many: ManyRanks) -> Diagnosis:
    """Return a diagnosis of some ranks with the ranks, accounts and clocks of all ranks of the job."""
    return msgspec.structs.replace(
        d,
        source=msgspec.structs.replace(d.source, events=many.events),
        world_size=many.world_size,
        ranks=many.ranks,
        missing_ranks=many.missing,
        clock_offsets_us=_by_rank(many.ranks, many.offset_us),
        clock_uncertainty_us={},
        clock_drift_ppm={},
        notes=(*many.notes, *d.notes),
        per_rank=many.accounts,
    )


def _by_rank(ranks: tuple[int, ...], values: F64) -> dict[str, float | None]:
    return {str(r): float(v) if np.isfinite(v) else None for r, v in zip(ranks, values, strict=True)}


def _draw_lanes(a: Analysis, *, by_stream: bool = False) -> tuple[TimelineLane, ...]:
    """Return the lanes of every rank in the analysed steps: compute, memcpy, communication, wait and host."""
    job, out = a.job, list[TimelineLane]()
    for column in range(len(job.ranks)):
        for kind, name in ((Kind.COMPUTE, "compute"), (Kind.MEMCPY, "memcpy")):
            gpu, names = job.digests[column].gpu, job.digests[column].names
            for stream, rows in _streams(job, column, np.flatnonzero(gpu.kind == kind), gpu.stream, by_stream):
                labels = [names[i] for i in gpu.name[rows].tolist()]
                out += _lane(job, column, name, job.op_start[column][rows], job.op_end[column][rows], labels, stream)
        out += _communication(a, column, by_stream)
        out += _host(job, column)
    return tuple(out)


def _host(job: TracedJob, column: int) -> list[TimelineLane]:
    """Return a lane of a rank's host activity in long GPU gaps, except gaps by slow launches or queued work."""
    gaps, names = job.digests[column].gaps, job.digests[column].names
    late = np.isin(gaps.category, (CATEGORIES.index("launch"), CATEGORIES.index("queued")))
    rows = np.flatnonzero(gaps.whole & ~late & (gaps.end - gaps.start > _SHORTEST_GAP_US))
    labels = []
    for category, operation in zip(gaps.category[rows].tolist(), gaps.operation[rows].tolist(), strict=True):
        labels.append(names[operation] if operation >= 0 else CATEGORIES[category].replace("_", " "))
    start, end = (job.on_job_clock(column, at[rows]) for at in (gaps.start, gaps.end))
    return _lane(job, column, "host", start, end, labels)


def _streams(job: TracedJob, column: int, rows: I64, stream: I64, by_stream: bool) -> list[tuple[str | None, I64]]:
    """Return (name, its elements of `rows`) for each stream; without `by_stream`, only (None, `rows`)."""
    if not by_stream:
        return [(None, rows)]
    kind = "thread" if job.digests[column].device.from_host else "stream"
    found: list[tuple[str | None, I64]] = []
    for number in np.unique(stream[rows]).tolist():
        device = f"device {number >> 32} " if number >> 32 > 0 else ""
        found.append((f"{device}{kind} {number & 0xFFFFFFFF}", rows[stream[rows] == number]))
    return found


def _communication(a: Analysis, column: int, by_stream: bool) -> list[TimelineLane]:
    job, joined = a.job, a.job.joined
    every = np.flatnonzero(joined.row[:, column] >= 0)
    stream = np.zeros(len(joined), np.int64)
    stream[every] = job.digests[column].comm.stream[joined.row[every, column]]
    lanes = []
    for name, rows in _streams(job, column, every, stream, by_stream):
        start, end = joined.start[rows, column], joined.end[rows, column]
        arrived = start + np.maximum(a.waits.wait[rows, column], 0.0)
        calls = [f"{joined.op[j]} #{joined.index[j]}" for j in rows.tolist()]
        labels = [f"{call} (group {joined.group[j]})" for call, j in zip(calls, rows.tolist(), strict=True)]
        last = a.waits.last_column[rows].tolist()
        waited = [f"waiting for rank {job.ranks[c]}: {call}" for call, c in zip(calls, last, strict=True)]
        lanes += _lane(job, column, "communication", arrived, end, labels, name)
        lanes += _lane(job, column, "wait", start, arrived, waited, name)
    return lanes


def _lane(
    job: TracedJob, column: int, name: str, start: F64, end: F64, labels: list[str], stream: str | None = None
) -> list[TimelineLane]:
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
            stream=stream,
        )
    ]


def _merged(start: F64, end: F64, text: list[str]) -> tuple[F64, F64, list[str]]:
    """Merge neighbouring spans until at most `_SPANS` are left; merged spans get the label of the longest one."""
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
