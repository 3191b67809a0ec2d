"""Write a diagnosis as a Chrome trace that ui.perfetto.dev opens: lanes, findings as marks, counters.

Each rank is a process (pid = rank) and each of its lanes a thread. One more process holds the findings and the counters
of the whole job. Times stay µs on the clock of `StepTime`; names are escaped, since they come from traces.
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
from counterpoint.records.diagnosis import Diagnosis, Finding, TimelineLane
from counterpoint.report.files import replacing

Event = dict[str, Any]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

JOB = 1_000_000_000  # pid of the job's own process: above every rank
FINDINGS, STEPS = 1, 2  # its threads
BATCH = 4096  # events encoded at a time: bounds memory, keeps writes large


def write_perfetto(path: Path, diagnosis: Diagnosis, lanes: Sequence[TimelineLane]) -> None:
    """Write the trace; `path` appears whole or not at all. Spans without a finite time are left out.

    Raises:
        OSError: the folder is missing or may not be written to.
    """
    encoder = msgspec.json.Encoder()
    with replacing(path) as file:
        file.write(b'{"displayTimeUnit":"ms","otherData":')
        file.write(encoder.encode({"schema": diagnosis.schema, "verdict": printable(diagnosis.verdict)}))
        file.write(b',"traceEvents":[\n')
        events, separator = _events(diagnosis, lanes), b""
        while batch := list(islice(events, BATCH)):
            file.write(separator + b",\n".join(encoder.encode(event) for event in batch))
            separator = b",\n"
        file.write(b"\n]}\n")


def _events(diagnosis: Diagnosis, lanes: Sequence[TimelineLane]) -> Iterator[Event]:
    yield from _process(JOB, "counterpoint", -1, {FINDINGS: "findings", STEPS: "steps"})
    rows: dict[int, dict[int, str]] = {rank: {} for rank in diagnosis.ranks}
    for thread, lane in enumerate(lanes, start=1):
        rows.setdefault(lane.rank, {})[thread] = lane.name
    for rank, threads in sorted(rows.items()):
        yield from _process(rank, f"rank {rank}", rank, threads)
    for step in diagnosis.steps:
        yield _slice(printable(step.name), JOB, STEPS, step.start_us, step.duration_us, "step") | {"args": {}}
    for number, finding in enumerate(diagnosis.findings, start=1):
        yield from _mark(number, finding, diagnosis)
    for thread, lane in enumerate(lanes, start=1):
        yield from _spans(lane, thread)
    yield from _counters(lanes)


def _process(pid: int, name: str, order: int, threads: dict[int, str]) -> Iterator[Event]:
    def metadata(kind: str, tid: int, args: Event) -> Event:
        return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": args}

    yield metadata("process_name", 0, {"name": name})
    yield metadata("process_sort_index", 0, {"sort_index": order})
    for tid, label in threads.items():
        yield metadata("thread_name", tid, {"name": printable(label)})
        yield metadata("thread_sort_index", tid, {"sort_index": tid})


def _slice(name: str, pid: int, tid: int, start_us: float, duration_us: float, category: str) -> Event:
    return {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid, "ts": start_us, "dur": duration_us}


def _mark(number: int, finding: Finding, diagnosis: Diagnosis) -> Iterator[Event]:
    """Yield a slice on the findings track over the range of the finding (or all steps), and an instant."""
    start, end = finding.start_us, finding.end_us
    if start is None or end is None:
        start = min((step.start_us for step in diagnosis.steps), default=0.0)
        end = max((step.start_us + step.duration_us for step in diagnosis.steps), default=start)
    name = f"{number}. {printable(finding.title)}"
    fields = msgspec.to_builtins(finding).items()
    args = {key: printable(value, 2000) if isinstance(value, str) else value for key, value in fields}
    yield _slice(name, JOB, FINDINGS, start, max(0.0, end - start), "finding") | {"args": args}
    scope, pid, tid = ("g", JOB, FINDINGS) if finding.rank is None else ("p", finding.rank, 0)
    instant = {"ph": "i", "s": scope, "name": name, "cat": "finding", "pid": pid, "tid": tid, "ts": start}
    yield {**instant, "args": args}


def _spans(lane: TimelineLane, tid: int) -> Iterator[Event]:
    pid, category = lane.rank, printable(lane.name)
    names = {label: printable(label) for label in set(lane.labels)}
    for start, duration, label in zip(lane.start_us, lane.duration_us, lane.labels, strict=True):
        if abs(start) < float("inf") and 0 <= duration < float("inf"):  # NaN fails both
            yield _slice(names[label], pid, tid, start, duration, category)


def _counters(lanes: Sequence[TimelineLane]) -> Iterator[Event]:
    """Yield counters: for a rank, how many of compute and communication run, and what is exposed; of all, who waits."""
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
    """Return the instants `[n]` at which lanes of `names` change, and what runs from then on, `[names, n]`, 0 or 1."""
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
