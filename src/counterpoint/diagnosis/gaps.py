"""Find where a rank's GPU ran dry, and what its host was doing meanwhile."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from counterpoint.trace.timeline import F64, GpuOps, HostKind, HostOps, Timeline

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
    """Describes a time [start, end) without GPU operations, which the host explains in [host_start, host_end)."""

    start: float
    end: float
    op: int  # the GPU operation that ended it
    host_start: float
    host_end: float
    category: str  # allocator | garbage_collection | late_input | synchronise | operation | unrecorded | launch
    operation: str | None = None  # what the host was in; None: nothing was recorded
    inside: str | None = None  # the range around it


def find_gaps(timeline: Timeline) -> list[Gap]:
    """Return the longest gaps of a rank, in order of time."""
    gpu, host = timeline.gpu, timeline.host
    if len(gpu) < 2:
        return []
    busy_until = np.maximum.accumulate(gpu.end)[:-1]
    length = gpu.start[1:] - busy_until
    at = np.flatnonzero(length >= _SHORTEST_US)
    if len(at) > _MOST:
        at = np.sort(at[np.argpartition(-length[at], _MOST)[:_MOST]])
    launches = _Launches.of(gpu)
    ranges = _HostRanges.of(host)
    return [_explain(timeline, launches, ranges, int(i) + 1, float(busy_until[i])) for i in at]


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
class _HostRanges:
    """Finds host ranges by time; `long` are the rows of those longer than the look-back of a search."""

    host: HostOps
    long: Any

    @classmethod
    def of(cls, host: HostOps) -> _HostRanges:
        return cls(host, np.flatnonzero(host.end - host.start > 1000.0))

    def during(self, start: float, end: float) -> Any:
        """Return the rows of ranges that overlap [start, end)."""
        host = self.host
        low, high = np.searchsorted(host.start, [start - 1000.0, end])
        near = np.arange(low, high)
        far = self.long[self.long < low]
        rows = np.concatenate((far, near))
        return rows[(host.end[rows] > start) & (host.start[rows] < end)]


def _explain(timeline: Timeline, launches: _Launches, ranges: _HostRanges, op: int, start: float) -> Gap:
    gpu, end = timeline.gpu, float(timeline.gpu.start[op])
    launched, launch_end = float(gpu.launch_start[op]), float(gpu.launch_end[op])
    if not np.isfinite(launched):
        return Gap(start=start, end=end, op=op, host_start=start, host_end=end, category="unrecorded")
    before = launches.last_before(launched)
    host_start = max(start, min(before, launched)) if before is not None else start
    if launched - host_start < 0.25 * (end - start):
        if launch_end - launched < 0.5 * (end - start):
            return Gap(start=start, end=end, op=op, host_start=host_start, host_end=launched, category="launch")
        host_start, launched = launched, launch_end  # the launch call itself took the time
    operation, category, inside = _occupation(timeline, ranges, int(gpu.launch_thread[op]), host_start, launched)
    return Gap(start=start, end=end, op=op, host_start=host_start, host_end=launched,
               operation=operation, category=category, inside=inside)  # fmt: skip


def _occupation(
    timeline: Timeline, ranges: _HostRanges, thread: int, start: float, end: float
) -> tuple[str | None, str, str | None]:
    """Return operation, category and enclosing range of the time in which a thread launched nothing."""
    host, names = timeline.host, timeline.names
    rows = ranges.during(start, end)
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
