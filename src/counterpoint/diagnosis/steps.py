"""Find where training steps begin and end on one rank.

`ProfilerStep#N` ranges are host time, and the host runs ahead of the GPU. A step's window therefore ends when the last
operation launched in it has ended, and the next begins there: windows follow one another and together hold all the
time. Without such ranges steps are found from repetition of the operations; failing that the whole trace is one step.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from counterpoint.trace.timeline import F64, I64, GpuOps, HostKind, Timeline

_PROFILER_STEP = re.compile(r"^ProfilerStep\s*#?\s*(\d+)")
_LONGEST_PATTERN = 1 << 18


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWindows:
    """Holds windows [start, end) in µs since the rank's origin; `found_by` is profiler | repetition | whole."""

    names: tuple[str, ...]
    start: F64
    end: F64
    found_by: str


def find_steps(timeline: Timeline) -> StepWindows:
    """Return the steps of one rank."""
    gpu, host = timeline.gpu, timeline.host
    numbers = {i: int(m.group(1)) for i, n in enumerate(timeline.names) if (m := _PROFILER_STEP.match(n))}
    rows = np.flatnonzero((host.kind == HostKind.ANNOTATION) & np.isin(host.name, list(numbers)))
    if len(rows):
        return _from_profiler(timeline, rows)
    if len(gpu) and (repeated := _from_repetition(timeline)):
        return repeated
    ran = gpu if len(gpu) else host
    start, end = np.array([ran.start.min()]), np.array([ran.end.max()])
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
    start = np.maximum(cpu_start, np.concatenate(([_earlier_work(gpu, cpu_start[0], step_of >= 0)], end[:-1])))
    names = tuple(timeline.names[i] for i in host.name[rows].tolist())
    return StepWindows(names=names, start=start, end=end, found_by="profiler")


def _earlier_work(gpu: GpuOps, begins: float, launched_inside: npt.NDArray[np.bool_]) -> float:
    """Return when the GPU is done with what was launched before the first step, if it still ran as that began.

    An operation without a launch, in a trace that has launches, was launched before the recording.
    """
    if not len(gpu):
        return -np.inf
    known = np.isfinite(gpu.launch_start)
    own = launched_inside & known if known.mean() > 0.5 else launched_inside
    if not own.any():
        return -np.inf
    first = float(gpu.start[own].min())
    earlier = ~own & (gpu.start < first)
    return first if (gpu.end[earlier] > begins).any() else -np.inf


def _from_repetition(timeline: Timeline) -> StepWindows | None:
    """Find steps on the busiest stream, whose operations keep their order; how streams interleave differs by step."""
    gpu = timeline.gpu
    streams, count = np.unique(gpu.stream, return_counts=True)
    rows = np.flatnonzero(gpu.stream == streams[np.argmax(count)])
    if (period := _period(timeline, rows)) is None:
        return None
    first, length = period
    edges = np.arange(first, len(rows) + 1, length)
    end = np.maximum.accumulate(gpu.end[rows])[edges[1:] - 1]
    start = np.append(gpu.start[rows[first]], end[:-1])
    if first == 0:
        start[0] = gpu.start.min()
    if edges[-1] == len(rows):
        end[-1] = gpu.end.max()
    names = tuple(f"step {i} (found from repetition)" for i in range(len(end)))
    return StepWindows(names=names, start=start, end=end, found_by="repetition")


def _period(timeline: Timeline, rows: I64) -> tuple[int, int] | None:
    """Return the first operation and the operations per step if these repeat as a whole, else None.

    A layer repeats too, so a period counts only if one of its windows holds nearly all kinds of operations that recur,
    and nearly every operation equals the one a period later. Of the phases that leave the most whole steps, the one
    with the longest pauses before it begins a step.
    """
    gpu = timeline.gpu
    kinds = np.stack([gpu.name[rows], gpu.grid[rows, 0]])
    tokens = np.unique(kinds, axis=1, return_inverse=True)[1].ravel().astype(np.int64)[:_LONGEST_PATTERN]
    if not 8 <= len(rows) <= _LONGEST_PATTERN * 8:
        return None
    occurrences = np.bincount(tokens).astype(np.int64)
    recurring = np.flatnonzero(occurrences >= 2).astype(np.int64)
    if not len(recurring):
        return None
    span = np.zeros(len(occurrences), np.int64)  # from first to last
    np.maximum.at(span, tokens, np.arange(len(tokens)))
    span -= np.unique(tokens, return_index=True)[1]
    best: tuple[float, int] | None = None
    for period in _candidates(tokens, recurring, occurrences):
        same = float((tokens[period:] == tokens[:-period]).mean())
        middle = (len(tokens) - period) // 2
        lasting = recurring[span[recurring] >= period]  # not only within one step, as in a warm-up
        held = len(np.intersect1d(tokens[middle : middle + period], lasting)) / max(len(lasting), 1)
        if same >= 0.97 and held >= 0.9 and (best is None or same > best[0] + 0.005):
            best = (same, period)
    if best is None:
        return None
    period = best[1]
    pause = np.concatenate(([0.0], gpu.start[rows[1:]] - np.maximum.accumulate(gpu.end[rows])[:-1]))
    phases = [float(pause[phase::period].mean()) for phase in range(len(rows) % period + 1)]
    return int(np.argmax(phases)), period


def _candidates(tokens: I64, recurring: I64, occurrences: I64) -> list[int]:
    """Return distances between repeats of the rarest operations, most frequent first."""
    distances: dict[int, int] = {}
    for token in recurring[np.argsort(occurrences[recurring], kind="stable")][:64].tolist():
        for gap in np.diff(np.flatnonzero(tokens == token)).tolist():
            if 4 <= gap <= len(tokens) // 2:
                distances[gap] = distances.get(gap, 0) + 1
    return sorted(sorted(distances, key=lambda d: -distances[d])[:32])
