"""Write a diagnosis as a Chrome trace for ui.perfetto.dev: lanes, findings as marks, counters.

Each rank is a process (pid = rank) and each of its streams a thread; the host's gaps are one more. Another process
holds the findings and the counters of the whole job. On one thread of a trace slices have to follow or enclose one
another: what would cut into another slice goes to a thread beside it. Times stay µs on the clock of `StepTime`;
names are escaped, since they come from traces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from counterpoint.errors import printable
from counterpoint.records.diagnosis import OWN_MARK, Diagnosis, Finding, TimelineLane
from counterpoint.rendering.files import replacing

Event = dict[str, Any]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

JOB = 1_000_000_000  # pid of the job's own process: above every rank
FINDINGS, STEPS = 1, 2  # thread ids in the job's process; threads for overlapping slices follow
MOST_BESIDE = 32  # threads for what overlaps on one stream: beyond, slices are left out
BATCH = 4096  # events encoded at a time: bounds memory, keeps writes large


def write_perfetto(path: Path, diagnosis: Diagnosis, lanes: Sequence[TimelineLane]) -> None:
    """Write a diagnosis as a trace; `path` appears complete or not at all. Spans of infinite time are left out.

    Raises:
        OSError: the folder is missing or may not be written to.
    """
    encoder = msgspec.json.Encoder()
    with replacing(path) as file:
        file.write(b'{"displayTimeUnit":"ms","otherData":')
        file.write(
            encoder.encode(
                {"written_by": OWN_MARK, "schema": diagnosis.schema, "verdict": printable(diagnosis.verdict)}
            )
        )
        file.write(b',"traceEvents":[\n')
        events, separator = _events(diagnosis, lanes), b""
        while batch := list(islice(events, BATCH)):
            file.write(separator + b",\n".join(encoder.encode(event) for event in batch))
            separator = b",\n"
        file.write(b"\n]}\n")


def _events(diagnosis: Diagnosis, lanes: Sequence[TimelineLane]) -> Iterator[Event]:
    marks = [_marks(number, finding, diagnosis) for number, finding in enumerate(diagnosis.findings, start=1)]
    steps = [
        _slice(printable(step.name), JOB, STEPS, step.start_us, step.duration_us, "step") | {"args": {}}
        for step in diagnosis.steps
    ]
    yield from _threads(JOB, "counterpoint", -1, {"findings": [over for over, _ in marks], "steps": steps})
    yield from (begin for _, begin in marks)
    by_rank: dict[int, dict[str, list[TimelineLane]]] = {rank: {} for rank in diagnosis.ranks}
    for lane in lanes:
        by_rank.setdefault(lane.rank, {}).setdefault(lane.stream or lane.name, []).append(lane)
    for rank, tracks in sorted(by_rank.items()):
        slices = {name: [each for lane in track for each in _spans(lane)] for name, track in tracks.items()}
        yield from _threads(rank, f"rank {rank}", rank, slices)
    yield from _counters(lanes)


def _threads(pid: int, process: str, order: int, tracks: dict[str, list[Event]]) -> Iterator[Event]:
    """Yield the events of a process with one thread per track; slices that would partly overlap get more threads."""
    names: dict[int, str] = {}
    placed: list[Event] = []
    for number, (name, slices) in enumerate(tracks.items(), start=1):
        for beside, part in enumerate(_nested(slices)):
            tid = number + beside * len(tracks)
            names[tid] = f"{name} (overlapping {beside})" if beside else name
            placed += [each | {"tid": tid} for each in part]
        names.setdefault(number, name)
    yield from _process(pid, process, order, names)
    yield from placed


def _nested(slices: list[Event]) -> list[list[Event]]:
    """Return the slices split into few lists; any two slices of a list follow or enclose each other."""
    levels: list[list[Event]] = []
    open_ends: list[list[int]] = []  # of the slices around the last one of each list, ns
    for each in sorted(slices, key=lambda each: (each["ts"], -each["dur"])):
        start, end = round(each["ts"] * 1000), round(each["ts"] * 1000) + round(each["dur"] * 1000)
        for around in open_ends:
            while around and around[-1] <= start:
                around.pop()
        found = next((n for n, around in enumerate(open_ends) if not around or end <= around[-1]), len(levels))
        if found > MOST_BESIDE:
            continue
        if found == len(levels):
            levels.append([])
            open_ends.append([])
        levels[found].append(each)
        open_ends[found].append(end)
    return levels


def _process(pid: int, name: str, order: int, threads: dict[int, str]) -> Iterator[Event]:
    def metadata(kind: str, tid: int, args: Event) -> Event:
        return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": args}

    yield metadata("process_name", 0, {"name": name})
    yield metadata("process_sort_index", 0, {"sort_index": order})
    for tid, label in threads.items():
        yield metadata("thread_name", tid, {"name": printable(label)})
        yield metadata("thread_sort_index", tid, {"sort_index": tid})


def _slice(name: str, pid: int, tid: int, start_us: float, duration_us: float, category: str) -> Event:
    """Return a slice with both ends rounded to ns, so that consecutive slices do not overlap by rounding."""
    start, end = round(start_us * 1000), round((start_us + duration_us) * 1000)
    times = {"ts": start / 1000, "dur": (end - start) / 1000}
    return {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid, **times}


def _marks(number: int, finding: Finding, diagnosis: Diagnosis) -> tuple[Event, Event]:
    """Return a finding's slice on the findings' track, and its instant mark on the finding's rank or the whole job.

    The slice covers the time range of the finding, or all steps.
    """
    start, end = finding.start_us, finding.end_us
    if start is None or end is None:
        start = min((step.start_us for step in diagnosis.steps), default=0.0)
        end = max((step.start_us + step.duration_us for step in diagnosis.steps), default=start)
    scope, pid, tid = ("g", JOB, FINDINGS) if finding.rank is None else ("p", finding.rank, 0)
    name = f"{number}. {printable(finding.title)}"
    fields = msgspec.to_builtins(finding).items()
    facts = {key: printable(value, 2000) if isinstance(value, str) else value for key, value in fields}
    over = _slice(name, JOB, FINDINGS, start, max(0.0, end - start), "finding")
    begin = {"ph": "i", "s": scope, "name": name, "cat": "finding", "pid": pid, "tid": tid, "ts": start}
    return over | {"args": facts}, begin | {"args": facts}


def _spans(lane: TimelineLane) -> Iterator[Event]:
    category = printable(lane.name)
    names = {label: printable(label) for label in set(lane.labels)}
    for start, duration, label in zip(lane.start_us, lane.duration_us, lane.labels, strict=True):
        if abs(start) < float("inf") and 0 <= duration < float("inf"):  # NaN fails both
            yield _slice(names[label], lane.rank, 0, start, duration, category)


def _counters(lanes: Sequence[TimelineLane]) -> Iterator[Event]:
    """Yield counters: per rank, compute and communication at once, exposed communication; per job, waiting ranks."""
    ranks = sorted({lane.rank for lane in lanes})
    waits: list[tuple[F64, I64]] = []
    for rank in ranks:
        time, (compute, comm) = _running(lanes, rank, ("compute", "communication"))
        yield from _counter("compute and communication at once", rank, "running", time, compute + comm)
        yield from _counter("exposed communication", rank, "exposed", time, comm * (1 - compute))
        time, (waiting,) = _running(lanes, rank, ("wait",))
        waits.append((time, np.diff(waiting, prepend=0)))
    if waits:
        times = np.concatenate([time for time, _ in waits])
        order = np.argsort(times, kind="stable")
        waiting = np.cumsum(np.concatenate([change for _, change in waits])[order])
        yield from _counter("ranks in wait", JOB, "ranks", times[order], waiting)


def _counter(name: str, pid: int, unit: str, time: F64, value: I64) -> Iterator[Event]:
    """Yield one counter event for each change of `value`, not for each span."""
    changed = np.diff(value, prepend=-1) != 0
    for at, now in zip(time[changed].tolist(), value[changed].tolist(), strict=True):
        yield {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": at, "args": {unit: now}}


def _running(lanes: Sequence[TimelineLane], rank: int, names: tuple[str, ...]) -> tuple[F64, I64]:
    """Return the instants `[n]` when lanes in `names` start or end, and which lanes run from then on, `[names, n]`."""
    times, rows, deltas = [np.empty(0)], [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for lane in lanes:
        if lane.rank == rank and lane.name in names:
            start = np.asarray(lane.start_us, np.float64)
            end = start + np.asarray(lane.duration_us, np.float64)
            keep = np.isfinite(start) & np.isfinite(end) & (end > start)
            times += [start[keep], end[keep]]
            rows.append(np.full(2 * int(keep.sum()), names.index(lane.name)))
            deltas.append(np.repeat([1, -1], int(keep.sum())))
    time = np.concatenate(times)
    order = np.argsort(time, kind="stable")
    change = np.zeros((len(names), len(time)), np.int64)
    change[np.concatenate(rows), np.arange(len(time))] = np.concatenate(deltas)
    running = (np.cumsum(change[:, order], axis=1) > 0).astype(np.int64)
    instants, from_end = np.unique(time[order][::-1], return_index=True)  # the last change at an instant is what holds
    return instants, running[:, len(time) - 1 - from_end]
