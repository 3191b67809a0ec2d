"""List one rank's collectives: each row is a communication kernel, or successive peer copies on one stream."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from counterpoint.diagnosis.reading.modules import PHASES, NamedRanges, module_of
from counterpoint.errors import BadTrace
from counterpoint.trace import classify
from counterpoint.trace.timeline import F64, I32, I64, Bools, CollectiveInfo, GpuOps, HostKind, Kind, Timeline

_SAYS_LITTLE = ("send_recv", "send", "recv", "nccl", "unknown")  # kernel names that serve several collectives
_DDP = re.compile(r"^DistributedDataParallel\.forward")
MOST_RANKS = 1 << 24  # most ranks of a group: more than any machine has GPUs
_COPY_PAUSE_US = 30.0  # a longer pause between peer copies separates two collectives


@dataclass(frozen=True, kw_only=True, slots=True)
class CommRows:
    """Holds the collectives of one rank, sorted by start; columns have one length; bytes -1: not stated."""

    op: tuple[str, ...]
    group: tuple[str, ...]  # name of the process group, "?" where the trace does not say
    group_ranks: tuple[tuple[int, ...] | None, ...]
    seq: I64  # -1: not stated
    comms_id: tuple[str | None, ...]
    bytes: I64  # of the full array, as nccl-tests counts
    sent: I64  # bytes of this rank's own input, and of its output; -1: not stated
    received: I64
    dtype: tuple[str | None, ...]  # as torch names it: "bfloat16"
    size: I32  # ranks in the group; 0: not stated
    ctas: I32  # blocks of the kernel; 0 for copies; -1 unknown
    first: I32  # first and last row of GpuOps
    last: I32
    start: F64
    end: F64
    launch: F64  # start of the launching host call; NaN: unknown
    stream: I64
    group_desc: tuple[str | None, ...]  # what the program calls the group
    phase: tuple[str | None, ...]  # forward | backward | optimizer
    module: tuple[str | None, ...]  # module or layer whose range is around the launch
    serves: tuple[str | None, ...]  # parallelism, by launch or kernel: dp | tp | ep

    def __len__(self) -> int:
        return len(self.start)


def comm_rows(timeline: Timeline, ranges: NamedRanges) -> CommRows:
    """Return the collectives of one rank: communication kernels, and series of peer copies."""
    gpu = timeline.gpu
    rows = np.flatnonzero(gpu.kind == Kind.COMM)
    is_copy = np.array([n.startswith("Memcpy") for n in timeline.names], bool)[gpu.name[rows]]
    first, last = _runs(gpu, rows, is_copy, timeline.world_size)
    copy = is_copy[np.searchsorted(rows, first)]
    infos = [timeline.collectives[i] if i >= 0 else None for i in gpu.collective[first].tolist()]
    names = [timeline.names[i] for i in gpu.name[first].tolist()]
    runs = [_members(gpu, f, b) for f, b in zip(first.tolist(), last.tolist(), strict=True)]
    copied = [int(gpu.bytes[members].sum()) if c else -1 for members, c in zip(runs, copy.tolist(), strict=True)]
    sizes = [(info and info.group_size) or timeline.world_size or 0 for info in infos]
    if max(sizes, default=0) > MOST_RANKS:
        raise BadTrace(f"a group of {max(sizes)} ranks: give a trace as its profiler wrote it", path=timeline.path)
    size = np.array(sizes, np.int32)
    ops = tuple(_op(*row) for row in zip(infos, _host_ops(timeline, first), names, strict=True))
    grid = gpu.grid[first].astype(np.int64)
    places, told = ranges.launches(first)
    group = tuple((info.group if info and info.group else "?") for info in infos)
    phase = tuple(PHASES[i] for i in places.phase.tolist())
    return CommRows(
        op=ops,
        group=group,
        group_ranks=tuple(_ranks(info) for info in infos),
        seq=np.array([-1 if info is None or info.seq is None else info.seq for info in infos], np.int64),
        comms_id=tuple(info.comms_id if info else None for info in infos),
        bytes=np.array([_bytes(*row) for row in zip(infos, ops, size.tolist(), copied, strict=True)], np.int64),
        sent=np.array([_payload(info and info.in_nelems, info) for info in infos], np.int64),
        received=np.array([_payload(info and info.out_nelems, info) for info in infos], np.int64),
        dtype=tuple(classify.torch_dtype(info.dtype) if info else None for info in infos),
        size=size,
        ctas=np.where(copy, 0, np.where(grid[:, 0] > 0, grid.prod(axis=1), -1)).astype(np.int32),
        first=first.astype(np.int32),
        last=last.astype(np.int32),
        start=gpu.start[first],
        end=np.array([float(gpu.end[members].max()) for members in runs]),
        launch=gpu.launch_start[first],
        stream=gpu.stream[first],
        group_desc=tuple(info.group_desc if info else None for info in infos),
        phase=phase,
        module=tuple(module_of(timeline.names[i]) if i >= 0 else None for i in places.module.tolist()),
        serves=_serves(timeline, told, names, ops, group, phase),
    )


def _serves(
    timeline: Timeline,
    told: tuple[str | None, ...],
    kernels: list[str],
    ops: tuple[str, ...],
    group: tuple[str, ...],
    phase: tuple[str | None, ...],
) -> tuple[str | None, ...]:
    """Return each collective's parallelism, as host ranges around the launch, the kernel or signs of DDP show it.

    DDP reduces gradients in backward: a group all of whose all-reduces run in backward is DDP's.
    """
    replicas: set[str] = set()
    if any(_DDP.search(name) for name in timeline.names):
        reduced = [(g, p) for op, g, p in zip(ops, group, phase, strict=True) if op == "all_reduce"]
        replicas = {g for g, p in reduced if p == "backward"} - {g for g, p in reduced if p != "backward"}
    made_for = {name: classify.parallelism(name) for name in set(kernels)}
    return tuple(
        said or ("dp" if op == "all_reduce" and g in replicas else made_for[kernel])
        for said, kernel, op, g in zip(told, kernels, ops, group, strict=True)
    )


def _members(gpu: GpuOps, first: int, last: int) -> I64:
    """Return the rows of the communication operations from `first` to `last` on the stream of `first`."""
    if first == last:
        return np.array([first])
    part = slice(first, last + 1)
    return first + np.flatnonzero((gpu.stream[part] == gpu.stream[first]) & (gpu.kind[part] == Kind.COMM))


def _runs(gpu: GpuOps, rows: I64, is_copy: Bools, world: int | None) -> tuple[I64, I64]:
    """Return the first and last GPU operation of each collective: a kernel, or successive copies on one stream."""
    first, last = list(rows[~is_copy]), list(rows[~is_copy])
    copies = rows[is_copy]
    for stream in np.unique(gpu.stream[copies]):
        own = copies[gpu.stream[copies] == stream]
        others = np.flatnonzero((gpu.stream == stream) & (gpu.kind != Kind.COMM))
        between = np.searchsorted(others, own[1:]) != np.searchsorted(others, own[:-1])
        pause = gpu.start[own[1:]] - gpu.end[own[:-1]] > _COPY_PAUSE_US
        other_info = gpu.collective[own[1:]] != gpu.collective[own[:-1]]
        cuts = np.flatnonzero(pause | between | other_info) + 1
        for run in np.split(own, cuts):
            for part in _rounds(gpu, run, world):
                first.append(part[0])
                last.append(part[-1])
    order = np.argsort(np.array(first, np.int64), kind="stable")
    return np.array(first, np.int64)[order], np.array(last, np.int64)[order]


def _rounds(gpu: GpuOps, run: I64, world: int | None) -> list[I64]:
    """Split successive copies into collectives of world - 1 equal copies; else return them as one collective."""
    peers = (world or 0) - 1
    if peers >= 1 and len(run) > peers and len(run) % peers == 0:
        parts = np.split(run, len(run) // peers)
        if all(len(np.unique(gpu.bytes[part])) == 1 for part in parts):
            return parts
    return [run]


def _op(info: CollectiveInfo | None, host: str | None, name: str) -> str:
    """Return a collective's operation by its metadata, else its kernel's name, else the host range that launched it.

    NCCL runs an all-to-all with the kernel of sends and receives, so the host range decides between them.
    """
    if info and info.op and classify.is_known_op(info.op):
        op = info.op
    else:
        op = classify.collective_op(name)
        if op in _SAYS_LITTLE and host is not None:
            op = host
    return "send_recv" if op in ("send", "recv") else op


def _host_ops(timeline: Timeline, rows: I64) -> list[str | None]:
    """Return, per GPU operation, the collective that host ranges around its launch name: the innermost that does."""
    gpu, host = timeline.gpu, timeline.host
    begun = [classify.host_collective(name) for name in timeline.names]
    says = np.array([op is not None for op in begun], bool)
    ranges = np.isin(host.kind, (HostKind.OP, HostKind.ANNOTATION))
    ranges[ranges] = says[host.name[ranges]]
    found: list[str | None] = [None] * len(rows)
    for thread in np.unique(gpu.launch_thread[rows]).tolist():
        own = np.flatnonzero(ranges & (host.thread == thread))
        here = np.flatnonzero((gpu.launch_thread[rows] == thread) & np.isfinite(gpu.launch_start[rows]))
        if not len(own) or not len(here):
            continue
        at = gpu.launch_start[rows[here]]
        last = np.searchsorted(host.start[own], at, side="right") - 1
        inside = (last >= 0) & (host.end[own[np.maximum(last, 0)]] >= at)
        for row, around in zip(here[inside].tolist(), host.name[own[last[inside]]].tolist(), strict=True):
            found[row] = begun[around]
    return found


def _ranks(info: CollectiveInfo | None) -> tuple[int, ...] | None:
    """Return the ranks of a collective's group; None if the profiler did not print all of them."""
    return None if info is None or not info.group_ranks else _parsed(info.group_ranks)


@lru_cache(maxsize=1024)  # a rank's collectives are of few groups, with up to thousands of ranks each
def _parsed(printed: str) -> tuple[int, ...] | None:
    if "..." in printed:
        return None
    parts = printed.strip("[]() ").replace(" ", "").split(",")
    if not all(part.isdigit() and len(part) < 8 for part in parts):
        return None
    return tuple(int(part) for part in parts)


def _payload(elements: int | None, info: CollectiveInfo | None) -> int:
    item = classify.dtype_bytes(info.dtype) if info else None
    return -1 if elements is None or item is None else elements * item


def _bytes(info: CollectiveInfo | None, op: str, size: int, copied: int) -> int:
    """Return a collective's message size, as nccl-tests counts it: the bytes of the full array; -1: not known."""
    if info is not None and info.in_nelems is not None and info.out_nelems is not None:
        item = classify.dtype_bytes(info.dtype)
        if item is not None and not classify.is_barrier(op):
            return max(info.in_nelems, info.out_nelems) * item
    if copied >= 0:
        return copied * size // (size - 1) if size > 1 else copied
    return -1
