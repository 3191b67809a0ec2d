"""Where a rank's GPU ran dry, and what its host was doing meanwhile."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from counterpoint.trace.timeline import F64, GpuOps, HostKind, HostOps, Timeline

__all__ = ["Gap", "find_gaps"]

_SHORTEST_US = 20.0
_MOST = 256  # the longest gaps are explained; the rest only counted in the accounts
_CATEGORIES = (
    ("allocator", re.compile(r"^(cuda|hip)(Malloc|Free|HostAlloc|HostFree|Mem(Pool|Create|Map|Unmap|Release|SetAccess))"
                             r"|^cuMem(Alloc|Create|Map|Unmap|Release|SetAccess|Free|AddressReserve)")),
    ("garbage_collection", re.compile(r"\bgc\b.*collect|^gc\.|python gc|garbage", re.I)),
    ("late_input", re.compile(r"dataloader|datapipe|__next__.*(loader|iter)|enumerate\(|pin_memory|prefetch.*batch"
                              r"|next_batch|get_batch|load_batch|fetch_data|data_?loading", re.I)),
    ("synchronise", re.compile(r"synchronize|^cudaMemcpy$|^aten::(item|_local_scalar_dense)$|^(Stream|Context|Event|"
                               r"Device) Sync", re.I)),
)  # fmt: skip
_FRAME = re.compile(r"^(ProfilerStep|PyTorch Profiler|torch/profiler|profiler)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """No operation ran on the GPU in [start, end); the host explains it in [host_start, host_end)."""

    start: float
    end: float
    op: int  # the GPU operation that ended it
    host_start: float
    host_end: float
    operation: str | None  # what the host sat in; None: nothing was recorded
    category: str  # allocator | garbage_collection | late_input | synchronise | operation | unrecorded | launch
    inside: str | None  # the range around it


def find_gaps(timeline: Timeline) -> list[Gap]:
    """The longest gaps of a rank, in order of time."""
    gpu, host = timeline.gpu, timeline.host
    if len(gpu) < 2:
        return []
    busy_until = np.maximum.accumulate(gpu.end)[:-1]
    length = gpu.start[1:] - busy_until
    at = np.flatnonzero(length >= _SHORTEST_US)
    if len(at) > _MOST:
        at = np.sort(at[np.argpartition(-length[at], _MOST)[:_MOST]])
    launches = _Launches.of(gpu)
    stage = _Stage.of(host)
    return [_explain(timeline, launches, stage, int(i) + 1, float(busy_until[i])) for i in at]


@dataclass(frozen=True, slots=True)
class _Launches:
    start: F64  # sorted
    reach: F64  # the latest end so far

    @classmethod
    def of(cls, gpu: GpuOps) -> _Launches:
        known = np.flatnonzero(np.isfinite(gpu.launch_start))
        order = known[np.argsort(gpu.launch_start[known], kind="stable")]
        return cls(gpu.launch_start[order], np.maximum.accumulate(gpu.launch_end[order]))

    def last_before(self, at: float) -> float | None:
        index = int(np.searchsorted(self.start, at, side="left")) - 1
        return float(self.reach[index]) if index >= 0 else None


@dataclass(frozen=True, slots=True)
class _Stage:
    """Host ranges, and the rows of those longer than the look-back of a search."""

    host: HostOps
    long: Any

    @classmethod
    def of(cls, host: HostOps) -> _Stage:
        return cls(host, np.flatnonzero(host.end - host.start > 1000.0))

    def during(self, start: float, end: float) -> Any:
        """Rows of ranges that overlap [start, end)."""
        host = self.host
        low, high = np.searchsorted(host.start, [start - 1000.0, end])
        near = np.arange(low, high)
        far = self.long[self.long < low]
        rows = np.concatenate((far, near))
        return rows[(host.end[rows] > start) & (host.start[rows] < end)]


def _explain(timeline: Timeline, launches: _Launches, stage: _Stage, op: int, gap_start: float) -> Gap:
    gpu = timeline.gpu
    gap_end = float(gpu.start[op])
    launched = float(gpu.launch_start[op])
    if not np.isfinite(launched):
        return _gap(gap_start, gap_end, op, gap_start, gap_end, None, "unrecorded", None)
    before = launches.last_before(launched)
    host_start = max(gap_start, min(before, launched)) if before is not None else gap_start
    if launched - host_start < 0.25 * (gap_end - gap_start):
        call_us = float(gpu.launch_end[op]) - launched
        if call_us < 0.5 * (gap_end - gap_start):
            return _gap(gap_start, gap_end, op, host_start, launched, None, "launch", None)
        host_start, launched = launched, float(gpu.launch_end[op])  # the launch call itself took the time
    operation, category, inside = _sat_in(timeline, stage, int(gpu.launch_thread[op]), host_start, launched)
    return _gap(gap_start, gap_end, op, host_start, launched, operation, category, inside)


def _gap(start: float, end: float, op: int, host_start: float, host_end: float, operation: str | None,
         category: str, inside: str | None) -> Gap:  # fmt: skip
    return Gap(start=start, end=end, op=op, host_start=host_start, host_end=host_end,
               operation=operation, category=category, inside=inside)  # fmt: skip


def _sat_in(
    timeline: Timeline, stage: _Stage, thread: int, start: float, end: float
) -> tuple[str | None, str, str | None]:
    """(operation, category, enclosing range) for the time that a thread spent without launching anything."""
    host, names = timeline.host, timeline.names
    rows = stage.during(start, end)
    rows = rows[host.kind[rows] != HostKind.SYNC]
    shared: dict[str, float] = {}
    for row in rows[np.isin(host.kind[rows], (HostKind.RUNTIME, HostKind.PYTHON))].tolist():
        name = names[host.name[row]]
        if (category := _category(name)) in ("allocator", "garbage_collection"):
            shared[category] = shared.get(category, 0.0) + min(host.end[row], end) - max(host.start[row], start)
    own = rows[host.thread[rows] == thread]
    overlap = np.minimum(host.end[own], end) - np.maximum(host.start[own], start)
    covering = own[overlap >= 0.5 * (end - start)]
    covering = covering[np.argsort(host.end[covering] - host.start[covering], kind="stable")]
    named = [names[host.name[row]] for row in covering.tolist() if not _FRAME.match(names[host.name[row]])]
    inside = named[1] if len(named) > 1 else None
    for category, time in shared.items():
        if time >= 0.3 * (end - start):
            return (named[0] if named else category), category, inside
    for name in named[:8]:
        if (category := _category(name)) != "operation":
            return name, category, inside
    if named:
        return named[0], "operation", inside
    frames = [names[host.name[row]] for row in covering.tolist()]
    return None, "unrecorded", (frames[0] if frames else None)


def _category(name: str) -> str:
    return next((category for category, pattern in _CATEGORIES if pattern.search(name)), "operation")
