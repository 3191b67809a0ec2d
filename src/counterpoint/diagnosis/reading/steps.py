"""Find where training steps begin and end on one rank.

`ProfilerStep#N` ranges are host time, and the host runs ahead of the GPU. A step's window therefore ends when the
last operation launched in it has ended, or the next range begins, and the next window begins there: windows leave no
time between them, unless a range comes only after a pause of many steps. Without such ranges, these are tried in
turn: ranges of the program (`iteration 7`, `train_step`, `execute_context_1(...)`, or any name that repeats and
covers most of the work, at the outermost level that repeats); the time from one optimizer step to the next; repeating
GPU operations. Failing that, the whole trace is one step.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from counterpoint.diagnosis.reading.host_categories import ALLOCATION, CAPTURE, COMPILATION, CUDA_START, says
from counterpoint.diagnosis.reading.intervals import Intervals
from counterpoint.diagnosis.reading.repetition import repeated_steps
from counterpoint.records.diagnosis import WHOLE_TRACE
from counterpoint.trace.timeline import F64, I64, Bools, GpuOps, HostKind, Timeline, previous_on_stream

FOUND_BY = ("profiler", "annotation", "optimizer", "repetition", "whole")  # the best first
_PROFILER_STEP = re.compile(r"^ProfilerStep\s*#?\s*(\d+)")
_STEP_NAME = (
    re.compile(  # names of steps in vLLM, SGLang, Megatron, Lightning, diffusion servers and hand-written loops
        r"(?:^|[^a-z])(?:step|iter|iteration|training_?batch|train_?batch|mini_?batch)s?(?:[^a-z]|$)|^batch[ _#:]?\d+$"
        r"|^execute_\w*(?:context|model|diffusion)|^model_(?:inference|execute)|^run_(?:batch|iteration)",
        re.IGNORECASE,
    )
)
_PART_NAME = re.compile(  # names of parts of a step, and of ranges that are not steps
    r"forward|backward|optimizer|zero_grad|loss|loader|micro_?batch|fsdp|distributeddataparallel|compiledfxgraph|dynamo"
    r"|capture|warm_?up|layer|attention|attn|mlp|bucket|reducer|h2d|d2h|copy|checkpoint|[a-z]+:\w|^##|^\[param\|",
    re.IGNORECASE,
)
_PART_UNLESS_STEP = re.compile(r"epoch|sampl|norm|preprocess|postprocess|block|module|stage|expert", re.IGNORECASE)
_VARYING = re.compile(r"\d+|\([^()]*\)|\[[^\[\]]*\]")
_OPTIMIZER_STEP = "Optimizer.step#"
_COVERS, _COVERS_UNNAMED = 0.5, 0.8  # least share of GPU time that step ranges launch: with, without a step's name
_LEAST_OF_RECORDING = 0.1  # unnamed ranges that take less are parts of the program, such as one kind of operator
_SIMILAR_FACTOR = 10.0  # times the median, or a tenth: ranges that last longer or shorter are not alike
_PAUSE = 10.0  # times a usual step: a longer pause (a server without requests) belongs to no step
_ROUNDING_US = 1.0  # by which ranges that follow one another may overlap
_OUTSIDE = 0.05  # of the recording: if more of it lies in no step, a note says so ...
_TOLD_US = 50.0  # ... unless it would print as 0.0 ms
_SET_UP_SHARE = 0.1  # of a step: a step with more graph capture or compilation is unusual
_START_UP_SHARE = 0.2
_LITTLE = 0.05
_QUEUED_US = 1000.0  # a longer time from launch to start means that the GPU was busy


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWindows:
    """Holds the steps of one rank as windows [start, end) in µs since the rank's origin."""

    names: tuple[str, ...]
    start: F64
    end: F64
    found_by: str  # one of FOUND_BY
    notes: tuple[str, ...] = ()  # which steps are unusual, and why; how much time lies in no step
    left_out: tuple[str, ...] = ()  # names of unusual steps


@dataclass(frozen=True, kw_only=True, slots=True)
class _SetUp:
    """Holds when a rank's host did one kind of set-up work: graph capture, compilation or start-up."""

    label: str
    ranges: Intervals
    longest: str
    share: float  # share of a step; a step with more of this work is unusual: noted, and left out if others remain
    first_only: bool  # whether it counts only in the first steps: later, such calls are a problem of the program


def find_steps(timeline: Timeline) -> StepWindows:
    """Return the steps of one rank, with notes on start-up, graph capture and compilation in the steps."""
    set_up = _set_up(timeline)
    steps = _find(timeline)
    if steps.found_by == "repetition" and any(
        not s.first_only and _share(s, steps).sum() > len(steps.names) / 2 for s in set_up
    ):
        steps = _whole(timeline)  # the repeats are layers of a graph that is being captured
    return _without_set_up(replace(steps, notes=(*steps.notes, *_outside(timeline, steps))), set_up)


def _find(timeline: Timeline) -> StepWindows:
    gpu, host = timeline.gpu, timeline.host
    numbers = {i: int(m.group(1)) for i, n in enumerate(timeline.names) if (m := _PROFILER_STEP.match(n))}
    every = np.flatnonzero(np.isin(host.name, list(numbers)))
    for kind in (HostKind.ANNOTATION, HostKind.OP):  # Kineto of 2021 calls them operations
        if len(rows := every[host.kind[every] == kind]):
            names = tuple(timeline.names[i] for i in host.name[rows].tolist())
            follows = np.diff([numbers[i] for i in host.name[rows].tolist()]) == 1
            return _windows(timeline, names, host.start[rows], host.end[rows], "profiler", follows)
    if len(gpu) and (named := _from_annotations(timeline) or _between_optimizers(timeline)):
        return named
    if len(gpu) and (repeated := repeated_steps(timeline)):
        start, end = repeated
        names = tuple(f"step {i} (found from repetition)" for i in range(len(end)))
        return StepWindows(names=names, start=start, end=end, found_by="repetition")
    return _whole(timeline)


def _whole(timeline: Timeline) -> StepWindows:
    ran = timeline.gpu if len(timeline.gpu) else timeline.host
    start, end = np.array([ran.start.min()]), np.array([ran.end.max()])
    return StepWindows(names=(WHOLE_TRACE,), start=start, end=end, found_by="whole")


def _windows(
    timeline: Timeline, names: tuple[str, ...], begin: F64, until: F64, found_by: str, follows: Bools | None = None
) -> StepWindows:
    """Return one step per host range (sorted by start); a step ends with the last GPU work that the range launched.

    The time between two ranges belongs to the first of them, unless it is longer than `_PAUSE` usual steps, or
    `follows` says that the ranges are not consecutive.
    """
    gpu = timeline.gpu
    worked = _reach(gpu, begin, until)
    usual = float(np.median(worked - begin))
    if len(begin) > 2:
        usual = max(usual, float(np.quantile(np.diff(begin), 0.5, method="lower")))
    joins = begin[1:] - worked[:-1] <= _PAUSE * usual
    if follows is not None:
        joins &= follows
    until = np.append(np.where(joins, begin[1:], until[:-1]), until[-1:])
    end = np.maximum.accumulate(_reach(gpu, begin, until))
    inside = _launched(gpu) >= begin[0]
    earlier = _earlier_work(gpu, begin[0], inside, found_by)
    start = np.maximum(begin, np.concatenate(([earlier], end[:-1])))
    notes: tuple[str, ...] = ()
    if earlier - begin[0] > _QUEUED_US and found_by != "profiler":
        late = (earlier - begin[0]) / 1e3
        notes = (
            f"the first {late:.1f} ms of {names[0][:80]} are left out: the GPU is taken to be busy with earlier work",
        )
    return StepWindows(names=names, start=start, end=end, found_by=found_by, notes=notes)


def _reach(gpu: GpuOps, begin: F64, until: F64) -> F64:
    """Return the µs at which each host range (sorted by start), and all work that it launched, has ended."""
    launched = _launched(gpu)
    step_of = np.searchsorted(begin, launched, side="right") - 1
    inside = (step_of >= 0) & (launched < until[np.maximum(step_of, 0)])
    reach = until.copy()
    np.maximum.at(reach, step_of[inside], gpu.end[inside])
    return reach


def _outside(timeline: Timeline, steps: StepWindows) -> tuple[str, ...]:
    """Return a note on recorded time outside the steps, if it is long."""
    tables = [t for t in (timeline.gpu, timeline.host) if len(t)]
    low, high = min(float(t.start.min()) for t in tables), max(float(t.end.max()) for t in tables)
    pauses = np.maximum(steps.start[1:] - steps.end[:-1], 0.0)
    before, after = max(float(steps.start[0]) - low, 0.0), max(high - float(steps.end[-1]), 0.0)
    outside = before + float(pauses.sum()) + after
    if outside <= max(_OUTSIDE * (high - low), _TOLD_US):
        return ()
    what = "the GPU's work" if steps.found_by == "whole" else "the steps"
    said = [f"{before / 1e3:.1f} before {what}"] if before > _TOLD_US else []
    if pauses.sum() > _TOLD_US:
        longest = int(pauses.argmax())
        said.append(
            f"{pauses.sum() / 1e3:.1f} between the steps (longest: {pauses[longest] / 1e3:.1f} after "
            f"{steps.names[longest][:80]})"
        )
    said += [f"{after / 1e3:.1f} after {what}"] if after > _TOLD_US else []
    return (f"{outside / 1e3:.1f} of {(high - low) / 1e3:.1f} ms of the recording are not counted: {', '.join(said)}",)


def _launched(gpu: GpuOps) -> F64:
    """Return the µs at which each operation was launched, or at which it started if the launch is unknown."""
    return np.where(np.isfinite(gpu.launch_start), gpu.launch_start, gpu.start)


def _earlier_work(gpu: GpuOps, begins: float, launched_inside: Bools, found_by: str) -> float:
    """Return when the first step's work starts on the GPU (µs) if earlier work delayed it; else -infinity.

    An operation without a launch, in a trace that has launches, was launched before the recording. If the first
    operation of a stream, before most of the work, starts long after its launch, and nothing recorded ran between, the
    GPU was busy with work that is not recorded (not checked for `ProfilerStep`, which begins with its range).
    """
    if not len(gpu):
        return -np.inf
    known = np.isfinite(gpu.launch_start)
    own = launched_inside & known if known.mean() > 0.5 else launched_inside
    if not own.any():
        return -np.inf
    first = float(gpu.start[own].min())
    earlier = ~own & (gpu.start < first)
    if (gpu.end[earlier] > begins).any():
        return first
    if found_by == "profiler" or earlier.any():
        return -np.inf
    took = np.where(own, gpu.end - gpu.start, 0.0)
    little = np.cumsum(took) - took <= _LITTLE * took.sum()  # only a little of the work began before
    rows = np.flatnonzero(own & little & (previous_on_stream(gpu.stream) < 0))
    ran = Intervals.union(gpu.start, gpu.end).within(gpu.launch_end[rows], gpu.start[rows])
    queued = rows[(gpu.start[rows] - gpu.launch_end[rows] > _QUEUED_US) & (ran == 0)]  # unknown launches are NaN
    return float(gpu.start[queued].max(initial=-np.inf))


def _from_annotations(timeline: Timeline) -> StepWindows | None:
    """Return steps by the program's ranges: the longest repeating ones that launch most work, else a single range.

    Return None if no range with the name of a step, and no repeating range, launches enough of the work.
    """
    gpu, host = timeline.gpu, timeline.host
    order = np.argsort(launched := _launched(gpu), kind="stable")
    launched, work = launched[order], np.concatenate(([0.0], np.cumsum((gpu.end - gpu.start)[order])))
    best: tuple[bool, bool, float] | None = None
    chosen = np.empty(0, np.int64)
    recorded_us = max(gpu.end.max(), host.end.max(initial=0.0)) - min(gpu.start.min(), host.start.min(initial=np.inf))
    for named, rows in _families(timeline):
        begin, until = host.start[rows], host.end[rows]
        inside = work[np.searchsorted(launched, until)] - work[np.searchsorted(launched, begin)]
        covered = float(inside.sum()) / work[-1] if work[-1] > 0 else 0.0
        if covered < (_COVERS if named else _COVERS_UNNAMED):
            continue
        if not named and (
            len(rows) < 2
            or float((until - begin).sum()) < _LEAST_OF_RECORDING * recorded_us
            or not _alike(until - begin, inside)
            or _is_part(timeline, int(rows[0]))
        ):
            continue
        rank = (len(rows) > 1, named, float((until - begin).mean()))
        if best is None or rank > best:
            best, chosen = rank, rows
    if best is None:
        return None
    texts = [timeline.names[i] for i in host.name[chosen].tolist()]
    if len(set(texts)) < len(texts) or not all(re.search(r"\d", text) for text in texts):
        texts = [f"{text} #{i}" for i, text in enumerate(texts)] if len(texts) > 1 else texts
    return _windows(timeline, tuple(texts), host.start[chosen], host.end[chosen], "annotation")


def _alike(length: F64, work: F64) -> bool:
    """Return whether ranges are like steps: most of them, with most of the work, have similar lengths."""
    median = np.quantile(length, 0.5, method="lower")
    alike = (length <= _SIMILAR_FACTOR * median) & (length * _SIMILAR_FACTOR >= median)
    return bool(alike.mean() > 0.5 and work[alike].sum() > 0.5 * work.sum())


def _is_part(timeline: Timeline, row: int) -> bool:
    """Return whether a range's name begins with the name of a range around it: `predict 0 1` inside `predict 0`."""
    host, own = timeline.host, timeline.names[timeline.host.name[row]]
    around = (host.kind == HostKind.ANNOTATION) & (host.thread == host.thread[row])
    around &= (host.start <= host.start[row]) & (host.end >= host.end[row])
    outer = {timeline.names[i] for i in np.unique(host.name[around]).tolist()} - {own}
    return any(own.startswith(name) for name in outer if name)


def _families(timeline: Timeline) -> Iterator[tuple[bool, I64]]:
    """Yield (whether a name is typical of steps, rows of ranges with that name) for each name and thread.

    Names that differ only in numbers or in brackets count as one. Ranges inside a range of the same name are left out.
    """
    host = timeline.host
    rows = np.flatnonzero(host.kind == HostKind.ANNOTATION)
    family_of: dict[int, int] = {}
    families: dict[str, int] = {}
    named: list[bool] = []
    for name in np.unique(host.name[rows]).tolist():
        text = timeline.names[name]
        step = bool(_STEP_NAME.search(text))
        if _PART_NAME.search(text) or (not step and _PART_UNLESS_STEP.search(text)):
            continue
        key = _VARYING.sub("#", _VARYING.sub("#", text))
        family_of[name] = families.setdefault(key, len(families))
        if len(named) < len(families):
            named.append(step)
    rows = rows[np.isin(host.name[rows], list(family_of))]
    family = np.array([family_of[name] for name in host.name[rows].tolist()], np.int64)
    order = np.lexsort((host.start[rows], host.thread[rows], family))
    rows, family = rows[order], family[order]
    cut = np.flatnonzero((np.diff(family) != 0) | (np.diff(host.thread[rows]) != 0)) + 1
    parts = [part for part in np.split(np.arange(len(rows)), cut) if len(part)]
    threads = np.bincount([family[part[0]] for part in parts], minlength=len(named))
    for part in parts:
        which = int(family[part[0]])
        if named[which] or threads[which] == 1:  # a name that occurs on several threads is a task, not a step
            yield named[which], _outermost(timeline, rows[part])


def _outermost(timeline: Timeline, rows: I64) -> I64:
    """Return the ranges of `rows` (sorted by start) that begin while no earlier one is open."""
    host = timeline.host
    reach = np.concatenate(([-np.inf], np.maximum.accumulate(host.end[rows])[:-1]))
    return rows[host.start[rows] >= reach - _ROUNDING_US]


def _between_optimizers(timeline: Timeline) -> StepWindows | None:
    """Return steps that each end with PyTorch's range of an optimizer step; None if there are fewer than two steps."""
    gpu, host = timeline.gpu, timeline.host
    marks = np.array([name.startswith(_OPTIMIZER_STEP) for name in timeline.names], bool)
    rows = np.flatnonzero(np.isin(host.kind, (HostKind.ANNOTATION, HostKind.OP)) & marks[host.name])
    ends = [
        host.end[own]
        for thread in np.unique(host.thread[rows]).tolist()
        for name in np.unique(host.name[rows]).tolist()
        if len(own := _outermost(timeline, rows[(host.thread[rows] == thread) & (host.name[rows] == name)])) > 1
    ]
    if not ends:
        return None
    until = min(ends, key=len)  # of several optimizers, the one that steps least often
    apart = np.diff(until)
    until = until[np.concatenate((apart > 0.1 * apart.max(), [True]))]  # two of one class in a row end one step
    if len(until) < 2:
        return None
    begin = np.concatenate(([min(float(_launched(gpu).min()), float(host.start.min()))], until[:-1]))
    names = tuple(f"step {i} (to its optimizer's end)" for i in range(len(until)))
    return _windows(timeline, names, begin, until, "optimizer")


def _set_up(timeline: Timeline) -> list[_SetUp]:
    """Return when the host captured graphs, compiled or started up: one entry per kind of set-up work."""
    host = timeline.host
    found = []
    for label, patterns, share, first_only in (
        ("graph capture", (CAPTURE,), _SET_UP_SHARE, False),
        ("compilation", (COMPILATION,), _SET_UP_SHARE, False),
        ("start-up (memory, streams and modules made)", (CUDA_START, ALLOCATION), _START_UP_SHARE,
         True),
    ):  # fmt: skip
        is_it = np.array([says(name, *patterns) for name in timeline.names], bool)
        if COMPILATION in patterns:  # a range of capture may also have the name of a compilation
            is_it &= ~np.array([says(name, CAPTURE) for name in timeline.names], bool)
        rows = np.flatnonzero(is_it[host.name] & (host.kind != HostKind.SYNC))
        if not len(rows):
            continue
        start, end = _from_begin_to_end(timeline, rows)
        longest = timeline.names[host.name[rows[np.argmax(end - start)]]][:80]
        ranges = Intervals.union(start, end)
        found.append(_SetUp(label=label, ranges=ranges, longest=longest, share=share, first_only=first_only))
    return found


def _share(found: _SetUp, steps: StepWindows) -> F64:
    """Return the share (0 to 1) of each step that the set-up work `found` takes."""
    return found.ranges.within(steps.start, steps.end) / np.maximum(steps.end - steps.start, 1e-3)


def _without_set_up(steps: StepWindows, set_up: list[_SetUp]) -> StepWindows:
    """Return the steps; drop ones with much set-up work, unless no others remain, and add notes on them."""
    keep = np.ones(len(steps.names), bool)
    notes = list(steps.notes)
    for found in set_up:
        share = _share(found, steps)
        unusual = share > max(found.share, 2 * float(np.median(share)) if len(share) > 1 else 0.0)
        if found.first_only:
            unusual = np.logical_and.accumulate(unusual)
        if not unusual.any():
            continue
        inside = found.ranges & Intervals.union(steps.start[unusual], steps.end[unusual])
        spent = found.ranges.within(steps.start, steps.end)[unusual].sum()
        total = (steps.end - steps.start)[unusual].sum()
        which = ", ".join(name for name, odd in zip(steps.names, unusual.tolist(), strict=True) if odd)
        which = "the recording" if steps.found_by == "whole" else which[:120]
        notes.append(
            f"{spent / 1e3:.1f} of {total / 1e3:.1f} ms of {which} are {found.label}, between "
            f"{inside.start[0] / 1e3:.1f} and {inside.end[-1] / 1e3:.1f} ms of its time (longest: {found.longest})"
            + ": no usual step"
            * (steps.found_by != "whole")
        )
        if not unusual.all():
            keep &= ~unusual
    if keep.any() and not keep.all():
        notes.append(f"{int((~keep).sum())} of {len(keep)} steps are left out for that")
        named = list(zip(steps.names, keep.tolist(), strict=True))
        names, left_out = (tuple(name for name, kept in named if kept is which) for which in (True, False))
        steps = replace(steps, names=names, start=steps.start[keep], end=steps.end[keep], left_out=left_out)
    return replace(steps, notes=tuple(notes))


def _from_begin_to_end(timeline: Timeline, rows: I64) -> tuple[F64, F64]:
    """Return start and end of set-up ranges; a StreamEndCapture call counts from its StreamBeginCapture on."""
    host = timeline.host
    begins = np.array([name.endswith("StreamBeginCapture") for name in timeline.names], bool)
    ends = np.array([name.endswith("StreamEndCapture") for name in timeline.names], bool)
    start = host.start[rows].copy()
    for thread in np.unique(host.thread[rows]).tolist():
        began = host.start[begins[host.name] & (host.thread == thread)]
        here = np.flatnonzero((host.thread[rows] == thread) & ends[host.name[rows]])
        at = np.searchsorted(began, start[here]) - 1
        start[here[at >= 0]] = began[at[at >= 0]]
    return start, host.end[rows]
