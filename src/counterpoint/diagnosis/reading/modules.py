"""Find the phase and the module or layer in which a launch or gap lies, by the host ranges around it.

Nothing is guessed from order or size: a name comes from ranges of the host around a launch or a time, or from the
thread that launched.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from counterpoint.diagnosis.reading.gaps import Gaps
from counterpoint.diagnosis.reading.host_categories import says
from counterpoint.diagnosis.reading.host_threads import LIBRARY
from counterpoint.diagnosis.reading.intervals import unique_rows
from counterpoint.trace.timeline import F64, I32, I64, U8, Bools, HostKind, Kind, Timeline

_MOST_PAIRS = 4_000_000  # most pairs of a time and a range around it: beyond, the widest ranges are left out
_MOST_PLACED = 50_000  # most gaps, and most compute operations, that get a place: the longest ones
_FRAMES = 4  # Python functions that a stack names
_LONGEST_FRAME = 120
_LONGEST_NAME = 400  # longest name of a range that counts as naming a phase or module
_FORWARD = re.compile(r"FSDP::(pre|post)_forward|forward$|\.forward\b|^#* ?forward ?#*$|^nn\.Module: ", re.IGNORECASE)
_BACKWARD = re.compile(
    r"FSDP::(root_)?(pre|post)_backward|FSDP::backward|^autograd::engine::evaluate_function|^torch::autograd::"
    r"|Backward\d*$|^#* ?backward ?#*$",
    re.IGNORECASE,
)
_OPTIMIZER = re.compile(r"^Optimizer\.step#|^#* ?optimi[sz]er([ ._]step)? ?#*$", re.IGNORECASE)
_MODULE = re.compile(r"^nn\.Module: (.+)$|^FSDP::\w+ \((.+)\)$")
_SERVES = (
    ("dp", re.compile(r"^FSDP::|FullyShardedDataParallel\._(?:pre|post|unshard|reduce)")),
    ("tp", re.compile(r"^(?:vllm|sglang|sgl_kernel)::(?:inplace_|outplace_|reg_)?all_reduce")),
)
_AUTOGRAD = "autograd::engine::evaluate_function"
_OF_THE_MAIN_THREAD = ("ProfilerStep", "Optimizer.step")
PHASES = (None, "forward", "backward", "optimizer")
_BACKWARD_PHASE = PHASES.index("backward")


@dataclass(frozen=True, kw_only=True, slots=True)
class Places:
    """Holds where in the program gaps or operations lie: phase and module; columns have one length."""

    phase: U8  # into PHASES
    module: I32  # name of the range that names it, as an index into the rank's names; -1: unknown


@dataclass(frozen=True, kw_only=True, slots=True)
class Origins:
    """Holds from which phase, module and Python functions outside of PyTorch each GPU operation comes.

    An operation of the backward pass comes from the forward operation whose gradient it computes.
    """

    phase: U8  # into PHASES
    module: I32  # name of the range that names it, as an index into the rank's names; -1: unknown
    stack: I32  # into `stacks`
    stacks: tuple[str, ...]  # innermost function first: "model.py(12): forward < train.py(40): step"; "": unknown


@dataclass(frozen=True, slots=True)
class NamedRanges:
    """Holds the host ranges of a rank that name a phase, a module, or the parallelism that a launch serves."""

    timeline: Timeline
    row: I64  # of HostOps
    phase: U8  # by name: index into PHASES
    names_module: Bools  # by name
    serves: I64  # by name: 1 + index into _SERVES; 0: says nothing
    backward: frozenset[int]  # threads that run nothing but backward: autograd's own, one per device

    @classmethod
    def of(cls, timeline: Timeline) -> NamedRanges:
        """Return a rank's host ranges that name a phase, a module or a parallelism."""
        host, names = timeline.host, timeline.names
        count = len(names)
        phase, module, serves = np.zeros(count, np.uint8), np.zeros(count, bool), np.zeros(count, np.int64)
        kinds = np.isin(host.kind, (HostKind.OP, HostKind.ANNOTATION, HostKind.PYTHON))
        for i in np.flatnonzero(np.bincount(host.name[kinds], minlength=count)).tolist():
            if len(names[i]) <= _LONGEST_NAME:
                phase[i], module[i] = _phase_of(names[i]), _MODULE.match(names[i]) is not None
                serves[i] = next((n for n, (_, sign) in enumerate(_SERVES, 1) if sign.search(names[i])), 0)
        told = (phase > 0) | module | (serves > 0)
        row = np.flatnonzero(kinds)
        return cls(timeline, row[told[host.name[row]]], phase, module, serves, _autograd_threads(timeline))

    def at(self, thread: I64, time: F64) -> tuple[Places, I64]:
        """Return phase and module at each time on a thread, and the parallelism named (1 + index into _SERVES)."""
        host = self.timeline.host
        phase, module = np.zeros(len(time), np.uint8), np.full(len(time), -1, np.int32)
        serves = np.zeros(len(time), np.int64)
        order = np.lexsort((time, thread))
        order = order[np.isfinite(time[order])]
        threads, first = np.unique(thread[order], return_index=True)
        for number, here in zip(threads.tolist(), np.split(order, first)[1:], strict=True):
            own = self.row[host.thread[self.row] == number]
            which, at = _around(time[here], host.start[own], host.end[own])
            name = host.name[own[which]]
            np.maximum.at(phase, here[at], self.phase[name])  # other phases outrank forward, which they may enclose
            np.maximum.at(serves, here[at], self.serves[name])
            inner = self.names_module[name]
            module[here[at[inner]]] = name[inner]  # of several the last counts, which is the innermost
        return Places(phase=phase, module=module), serves

    def launches(self, rows: I64) -> tuple[Places, tuple[str | None, ...]]:
        """Return the phase, the module and the parallelism in which the GPU operations `rows` were launched."""
        gpu = self.timeline.gpu
        thread = gpu.launch_thread[rows].astype(np.int64)
        found, serves = self.at(thread, gpu.launch_start[rows])
        known = np.isin(thread, list(self.backward)) & np.isfinite(gpu.launch_start[rows])
        found.phase[known] = np.maximum(found.phase[known], _BACKWARD_PHASE)
        return found, tuple(_SERVES[s - 1][0] if s else None for s in serves.tolist())

    def compute(self) -> Places:
        """Return phase and module of each GPU operation's launch, but only for the longest compute operations."""
        gpu = self.timeline.gpu
        found = Places(phase=np.zeros(len(gpu), np.uint8), module=np.full(len(gpu), -1, np.int32))
        rows = _longest(np.flatnonzero(gpu.kind == Kind.COMPUTE), gpu.end - gpu.start)
        places, _ = self.launches(rows)
        found.phase[rows], found.module[rows] = places.phase, places.module
        return found

    def origins(self) -> Origins:
        """Return where the longest GPU operations come from; communication has no origin."""
        gpu, host, from_host = self.timeline.gpu, self.timeline.host, self.timeline.device.from_host
        called = gpu.start if from_host else gpu.launch_start
        rows = _longest(np.flatnonzero((gpu.kind != Kind.COMM) & np.isfinite(called)), gpu.end - gpu.start)
        thread, time = gpu.launch_thread[rows].astype(np.int64), called[rows]
        found, frames = self.at(thread, time)[0], self._frames(thread, time)
        forward = self._forward_calls(thread, time)
        back = np.flatnonzero(forward >= 0)
        place, began = host.thread[forward[back]].astype(np.int64), host.start[forward[back]]
        stack, called_in = self._frames(place, began), self.at(place, began)[0].module
        frames[back] = np.where(stack[:, :1] >= 0, stack, frames[back])
        found.module[back] = np.where(found.module[back] < 0, called_in, found.module[back])
        found.phase[back] = np.maximum(found.phase[back], _BACKWARD_PHASE)
        distinct, which = unique_rows(np.vstack((np.full((1, _FRAMES), -1), frames)))
        module, of = np.full(len(gpu), -1, np.int32), np.full(len(gpu), which[0], np.int32)
        phase = np.zeros(len(gpu), np.uint8)
        phase[rows], module[rows], of[rows] = found.phase, found.module, which[1:]
        names = self.timeline.names
        texts = [" < ".join(names[n][:_LONGEST_FRAME] for n in stack if n >= 0) for stack in distinct.tolist()]
        return Origins(phase=phase, module=module, stack=of, stacks=tuple(texts))

    def _frames(self, thread: I64, time: F64) -> I64:
        """Return the names of the innermost Python functions, outside of PyTorch, at each time, `[n, _FRAMES]`."""
        host, names = self.timeline.host, self.timeline.names
        frames = np.full((len(time), _FRAMES), -1, np.int64)
        python = np.flatnonzero(host.kind == HostKind.PYTHON)
        own = np.zeros(len(names), bool)
        for number in np.unique(host.name[python]).tolist():
            own[number] = not says(names[number], LIBRARY)
        for here, which, at in self._inside(thread, time, python[own[host.name[python]]]):
            inner = np.lexsort((-which, at))  # of several, the range that began last is the innermost
            which, at = which[inner], at[inner]
            depth = np.arange(len(at)) - np.searchsorted(at, at)
            kept = depth < _FRAMES
            frames[here[at[kept]], depth[kept]] = host.name[which[kept]]
        return frames

    def _forward_calls(self, thread: I64, time: F64) -> I64:
        """Find the forward operation whose gradient each thread computes at a time.

        Returns:
            Its row; -1: none. Both have one sequence number; of nested gradients, as in recomputation, the outermost
            counts.
        """
        host, names = self.timeline.host, self.timeline.names
        found = np.full(len(time), -1, np.int64)
        if host.sequence is None:
            return found
        numbered = np.flatnonzero(host.sequence >= 0)
        begins = np.array([name.startswith(_AUTOGRAD) for name in names], bool)
        inner = np.array([_BACKWARD.search(name) is not None for name in names], bool)
        forward = numbered[~inner[host.name[numbered]] & ~np.isin(host.thread[numbered], list(self.backward))]
        forward = forward[np.argsort(host.sequence[forward], kind="stable")]
        wanted = np.full(len(time), -1, np.int64)
        for here, which, at in self._inside(thread, time, numbered[begins[host.name[numbered]]]):
            wanted[here[at[::-1]]] = host.sequence[which[::-1]]
        last = np.searchsorted(host.sequence[forward], wanted, side="right") - 1
        known = (wanted >= 0) & (last >= 0)
        known[known] = host.sequence[forward[last[known]]] == wanted[known]
        found[known] = forward[last[known]]
        return found

    def _inside(self, thread: I64, time: F64, ranges: I64) -> Iterator[tuple[I64, I64, I64]]:
        """Yield, per thread, the indices of its times, and all pairs of a range and an index among them, by range."""
        host = self.timeline.host
        order = np.lexsort((time, thread))
        for number in np.unique(thread).tolist():
            here = order[thread[order] == number]
            own = ranges[host.thread[ranges] == number]
            which, at = _around(time[here], host.start[own], host.end[own])
            yield here, own[which], at

    def gaps(self, gaps: Gaps) -> Places:
        """Return each gap's phase and module: at the gap's middle, on the thread that launched the next operation.

        If that operation was launched before the middle of the gap, the place of its launch counts instead.
        """
        gpu = self.timeline.gpu
        found = Places(phase=np.zeros(len(gaps), np.uint8), module=np.full(len(gaps), -1, np.int32))
        if not len(gpu):
            return found
        rows = _longest(np.arange(len(gaps)), gaps.time)
        follows = np.searchsorted(gpu.start, gaps.end[rows])
        rows, follows = rows[follows < len(gpu)], follows[follows < len(gpu)]
        thread = gpu.launch_thread[follows].astype(np.int64)
        middle = (gaps.start[rows] + gaps.end[rows]) / 2
        places, _ = self.at(thread, np.fmin(middle, gpu.launch_start[follows]))
        same = (thread == gpu.launch_thread[np.maximum(follows - 1, 0)]) & np.isin(thread, list(self.backward))
        found.phase[rows] = np.where(same, np.maximum(places.phase, _BACKWARD_PHASE), places.phase)
        found.module[rows] = places.module
        return found


def module_of(name: str) -> str | None:
    """Return the module or layer that a range names: `layers.3` of `FSDP::all_gather (layers.3)`."""
    found = _MODULE.match(name)
    return None if found is None else (found.group(1) or found.group(2))[:120]


def in_words(phase: str | None, module: str | None) -> str:
    """Return phase and module as text, ", in backward of layers.3"; empty if neither is known."""
    if phase is None:
        return f", in {module}" if module else ""
    return f", in {phase} of {module}" if module else f", in {phase}"


def _longest(rows: I64, time: F64) -> I64:
    if len(rows) <= _MOST_PLACED:
        return rows
    return np.sort(rows[np.argpartition(-time[rows], _MOST_PLACED)[:_MOST_PLACED]])


def _phase_of(name: str) -> int:
    if _OPTIMIZER.search(name):
        return PHASES.index("optimizer")
    if _BACKWARD.search(name):
        return _BACKWARD_PHASE
    return PHASES.index("forward") if _FORWARD.search(name) else 0


def _autograd_threads(timeline: Timeline) -> frozenset[int]:
    """Return autograd's own threads, one per device, which run nothing but backward."""
    host, names = timeline.host, timeline.names
    begun = np.array([name.startswith(_AUTOGRAD) for name in names], bool)
    other = np.array([name.startswith(_OF_THE_MAIN_THREAD) for name in names], bool)
    if not begun.any() or not other.any():
        return frozenset()
    is_range = host.kind != HostKind.RUNTIME
    main = set(np.unique(host.thread[is_range & other[host.name]]).tolist())
    return frozenset(np.unique(host.thread[is_range & begun[host.name]]).tolist()) - main if main else frozenset()


def _around(
    at: npt.NDArray[np.float64], start: npt.NDArray[np.float64], end: npt.NDArray[np.float64]
) -> tuple[I64, I64]:
    """Return all pairs of a range and a time inside it, as two index arrays, by range; `at` must be sorted."""
    low, high = np.searchsorted(at, start, side="left"), np.searchsorted(at, end, side="right")
    count = np.maximum(high - low, 0)
    if count.sum() > _MOST_PAIRS:
        narrow = np.argsort(count, kind="stable")
        count[narrow[np.cumsum(count[narrow]) > _MOST_PAIRS]] = 0
    which = np.repeat(np.arange(len(start)), count)
    position = np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count) + np.repeat(low, count)
    return which, position
