"""Where training steps begin and end on one rank.

`ProfilerStep#N` ranges are host time, and the host runs ahead of the GPU. A step's window therefore ends when the last
operation launched in it has ended, and the next begins there: windows follow one another and together hold all the
time. Without such ranges steps are found from repetition of the operations; failing that the whole trace is one step.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from counterpoint.trace.timeline import F64, I64, HostKind, Timeline

__all__ = ["StepWindows", "find_steps"]

_PROFILER_STEP = re.compile(r"^ProfilerStep\s*#?\s*(\d+)")
_LONGEST_PATTERN = 1 << 18


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWindows:
    """Windows [start, end) in µs since the rank's origin; `found_by` is profiler | repetition | whole."""

    names: tuple[str, ...]
    start: F64
    end: F64
    found_by: str


def find_steps(timeline: Timeline) -> StepWindows:
    """The steps of one rank."""
    gpu, host = timeline.gpu, timeline.host
    numbers = {i: int(m.group(1)) for i, n in enumerate(timeline.names) if (m := _PROFILER_STEP.match(n))}
    rows = np.flatnonzero((host.kind == HostKind.ANNOTATION) & np.isin(host.name, list(numbers)))
    if len(rows):
        return _from_profiler(timeline, rows)
    if len(gpu) and (period := _period(timeline)):
        first, length = period
        starts = np.arange(first, len(gpu) - length + 1, length)
        start = gpu.start[starts]
        last_end = gpu.end[starts[-1] : starts[-1] + length].max()
        end = np.append(start[1:], last_end)
        names = tuple(f"step {i} (found from repetition)" for i in range(len(starts)))
        return StepWindows(names=names, start=start, end=end, found_by="repetition")
    parts = [t for t in (gpu, host) if len(t)]
    if len(gpu):
        parts = [gpu]
    start = np.array([min(float(t.start.min()) for t in parts)])
    end = np.array([max(float(t.end.max()) for t in parts)])
    return StepWindows(names=("whole trace",), start=start, end=end, found_by="whole")


def _from_profiler(timeline: Timeline, rows: I64) -> StepWindows:
    gpu, host = timeline.gpu, timeline.host
    cpu_start, cpu_end = host.start[rows], host.end[rows]
    launched = np.where(np.isfinite(gpu.launch_start), gpu.launch_start, gpu.start)
    step_of = np.searchsorted(cpu_start, launched, side="right") - 1
    inside = (step_of >= 0) & (launched < cpu_end[np.maximum(step_of, 0)])
    reach = cpu_end.copy()
    np.maximum.at(reach, step_of[inside], gpu.end[inside])
    end = np.maximum.accumulate(reach)
    start = np.maximum(cpu_start, np.concatenate(([-np.inf], end[:-1])))
    names = tuple(timeline.names[i] for i in host.name[rows].tolist())
    return StepWindows(names=names, start=start, end=end, found_by="profiler")


def _period(timeline: Timeline) -> tuple[int, int] | None:
    """(first operation, operations per step) if the GPU operations repeat as a whole; None if they do not.

    A layer repeats too, so a period counts only if one of its windows holds nearly all kinds of operations that recur,
    and nearly every operation equals the one a period later.
    """
    gpu = timeline.gpu
    tokens = (
        np.unique(np.stack([gpu.name, gpu.grid[:, 0], gpu.stream]), axis=1, return_inverse=True)[1]
        .ravel()
        .astype(np.int64)
    )
    count = len(tokens)
    if not 8 <= count <= _LONGEST_PATTERN * 8:
        return None
    tokens = tokens[:_LONGEST_PATTERN]
    count = len(tokens)
    occurrences = np.bincount(tokens).astype(np.int64)
    recurring = np.flatnonzero(occurrences >= 2).astype(np.int64)
    if not len(recurring):
        return None
    best: tuple[float, int] | None = None
    for period in _candidates(tokens, recurring, occurrences):
        same = float((tokens[period:] == tokens[:-period]).mean())
        held = len(np.intersect1d(tokens[:period], recurring)) / len(recurring)
        if same >= 0.97 and held >= 0.9 and (best is None or same > best[0] + 0.005):
            best = (same, period)
    if best is None:
        return None
    period = best[1]
    idle_before = np.concatenate(([0.0], gpu.start[1:count] - np.maximum.accumulate(gpu.end[: count - 1])))
    phases = [float(idle_before[phase::period].mean()) for phase in range(min(period, count - 2 * period + 1))]
    first = int(np.argmax(phases)) if phases and max(phases) > 0 else 0
    return first, period


def _candidates(tokens: I64, recurring: I64, occurrences: I64) -> list[int]:
    """Distances between repeats of the rarest operations, most frequent first."""
    distances: dict[int, int] = {}
    for token in recurring[np.argsort(occurrences[recurring], kind="stable")][:64].tolist():
        for gap in np.diff(np.flatnonzero(tokens == token)).tolist():
            if 4 <= gap <= len(tokens) // 2:
                distances[gap] = distances.get(gap, 0) + 1
    return sorted(sorted(distances, key=lambda d: -distances[d])[:32])
