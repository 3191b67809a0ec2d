"""Read Nsight Systems SQLite exports (schemas 2.x and 3.x, nsys 2021 to 2026) into one `Timeline` per rank.

A rank is a pair of process and device that ran kernels. Whole columns are read, and joined by sorted searches. Columns
that an older export lacks get default values.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from counterpoint.trace.classify import kernel_kind, memcpy_kind
from counterpoint.trace.nsys_nvtx import NcclCalls, NvtxRanges, innermost, nccl_calls, one_per_kernel, read_nvtx
from counterpoint.trace.nsys_tables import MAX_ROWS, Export, RankId, device_of, find_ranks, look_up, open_export, utc_ns
from counterpoint.trace.timeline import (
    F64,
    I32,
    I64,
    MIGRATION,
    U8,
    CollectiveInfo,
    Device,
    GpuOps,
    HostKind,
    HostOps,
    Intern,
    Kind,
    OperatorInputs,
    Timeline,
)

_CUPTI = "CUPTI_ACTIVITY_KIND_"
_STREAMS, _STREAM = "TARGET_INFO_CUDA_STREAM", {"processId": 0, "streamId": -1, "priority": 0}
_GPU_TABLES = ("KERNEL", "MEMCPY", "MEMSET", "GRAPH_TRACE")
_COPY = {1: "HtoD", 2: "DtoH", 3: "HtoA", 4: "AtoH", 5: "AtoA", 6: "AtoD", 7: "DtoA", 8: "DtoD", 9: "HtoH", 10: "PtoP",
         11: "HtoD", 12: "DtoH", 13: "DtoD"}  # fmt: skip
_MEMORY = {0: "Pageable", 1: "Pinned", 2: "Device", 3: "Array", 4: "Managed", 5: "Device Static", 6: "Managed Static"}
_SIDES = {"H": "Unknown", "D": "Device", "A": "Array", "P": "Device"}  # used if the export does not name the memory
_MIGRATIONS = (11, 12, 13)  # of unified memory, page by page; no call launches them
_GRAPH = "CUDA graph"  # with --cuda-graph-trace=graph, all kernels of a graph launch are one span
_PID_BITS = 24  # globalTid = globalPid | tid
_MOST_PIDS = 0xFFFFFF


@dataclass(frozen=True, kw_only=True, slots=True)
class _HostTable:
    """Holds the host ranges of all processes, sorted by start; times in ns."""

    start: I64
    end: I64
    name: I32
    kind: U8
    thread: I64  # globalTid
    correlation: I64
    stream: I64
    waits_for: I64
    waits_on: I64


def read_nsys(path: Path, *, max_rows: int = MAX_ROWS) -> list[Timeline]:
    """Return the timelines of the ranks in the export at `path`, ordered by rank.

    `origin_ns` is UTC where the export states the start of its session, so that files share a time base. Spans of
    whole CUDA graphs (captured without their kernels) become compute operations named `CUDA graph`.

    Rows with impossible times are left out, with a note. A file that is no export, damaged, without GPU activity, with
    many such rows or more than `max_rows` rows in one table raises `BadTrace`.
    """
    with open_export(path, max_rows=max_rows) as export:
        return _read(export, path)


def _read(export: Export, path: Path) -> list[Timeline]:
    names, shapes = Intern[str](), Intern[str]()
    nvtx = read_nvtx(export, names, shapes)
    gpu = _gpu_ops(export, names)
    if export.has_tables("rocpd_"):
        raise export.bad("a database of rocprofv3, which cannot be read; record with torch.profiler instead")
    if not len(gpu["start"]):
        raise export.bad("holds no GPU activity; record with `nsys profile --trace=cuda,nvtx` and export it again")
    runtime = _runtime(export, names)
    launch, gpu["globalPid"] = _launches(gpu["globalPid"], gpu["correlationId"], runtime)
    calls = nccl_calls(export, nvtx, names)
    gpu["collective"], collectives = _collectives(gpu, runtime, launch, calls)
    gpu["shape"], gpu["call"] = _operators(nvtx, runtime, launch)
    gpu["operator"] = np.where(gpu["call"] >= 0, nvtx.name[gpu["call"]], -1) if len(nvtx.name) else gpu["call"]
    host = _merge(runtime, _syncs(export, names, runtime), _annotations(nvtx))
    host = _select(host, np.lexsort((-host.end, host.start)))
    first = min(int(times[0]) for times in (gpu["start"], host.start) if len(times))
    origin_ns = utc_ns(export, first)
    build = _Builder(path=path, gpu=gpu, runtime=runtime, launch=launch, host=host, first=first, origin_ns=origin_ns,
                     names=tuple(names), shapes=tuple(shapes), collectives=collectives,
                     notes=tuple(export.notes), streams=export.ints(_STREAMS, _STREAM))  # fmt: skip
    ranks = find_ranks(export, gpu["globalPid"], gpu["deviceId"], gpu["gridX"] > 0, calls.communicators, path.name)
    return [build.timeline(rank, device_of(export, rank)) for rank in ranks]


def _gpu_ops(export: Export, names: Intern[str]) -> dict[str, I64]:
    """Return kernels, copies, memsets and graph spans of all processes as columns of one table, sorted by start."""
    common = {"start": -1, "end": -1, "deviceId": 0, "streamId": 0, "correlationId": -1, "globalPid": 0}
    kernel = {"demangledName": -1, "shortName": -1, "registersPerThread": 0, "staticSharedMemory": 0,
              "dynamicSharedMemory": 0}  # fmt: skip
    kernel |= {f"{what}{axis}": 1 for what in ("grid", "block") for axis in "XYZ"}
    kernel |= {f"cluster{axis}": 0 for axis in "XYZ"}
    copy = {"bytes": -1, "copyKind": 0, "srcKind": -1, "dstKind": -1, "srcDeviceId": -1, "dstDeviceId": -1}
    extra = {"KERNEL": kernel, "MEMCPY": copy, "MEMSET": {"bytes": -1, "memKind": -1}, "GRAPH_TRACE": {}}
    tables = {table: export.ints(_CUPTI + table, common | extra[table]) for table in _GPU_TABLES}
    _name_kernels(export, tables["KERNEL"], names)
    _name_copies(tables["MEMCPY"], names)
    memory = tables["MEMSET"].pop("memKind")
    named = {int(one): names[f"Memset ({_MEMORY.get(int(one), 'Unknown')})"] for one in np.unique(memory)}
    tables["MEMSET"]["name"] = look_up(memory, named, -1).astype(np.int64)
    tables["GRAPH_TRACE"]["name"] = np.full(len(tables["GRAPH_TRACE"]["start"]), names[_GRAPH])
    kinds = {"KERNEL": Kind.COMPUTE, "MEMCPY": Kind.MEMCPY, "MEMSET": Kind.MEMCPY, "GRAPH_TRACE": Kind.COMPUTE}
    texts = tuple(names)
    for table, data in tables.items():
        used = {int(one): _kind(table, texts[one], kinds[table]) for one in np.unique(data["name"])}
        data["kind"] = look_up(data["name"], used, kinds[table]).astype(np.int64)
    defaults = common | {"name": 0, "kind": 0, "bytes": -1, "registersPerThread": 0, "smem": 0}
    defaults |= {f"{what}{axis}": 0 for what in ("grid", "block", "cluster") for axis in "XYZ"}
    columns = {
        key: np.concatenate([data.get(key, np.full(len(data["start"]), value)) for data in tables.values()])
        for key, value in defaults.items()
    }
    order = np.argsort(columns["start"], kind="stable")
    return {key: column[order] for key, column in columns.items()}


def _kind(table: str, name: str, otherwise: Kind) -> Kind:
    if table == "KERNEL":
        return kernel_kind(name)
    return memcpy_kind(name) if table == "MEMCPY" else otherwise


def _name_kernels(export: Export, data: dict[str, I64], names: Intern[str]) -> None:
    table = _CUPTI + "KERNEL"
    known = {key: names[name] for key, name in export.names((table, "demangledName"), (table, "shortName"))}
    full, short = look_up(data.pop("demangledName"), known, -1), look_up(data.pop("shortName"), known, -1)
    name = np.where(full >= 0, full, short)
    data["name"] = np.where(name >= 0, name, names["unknown"]).astype(np.int64)
    data["smem"] = data.pop("staticSharedMemory") + data.pop("dynamicSharedMemory")


def _name_copies(data: dict[str, I64], names: Intern[str]) -> None:
    """Name copies as Kineto does, `Memcpy HtoD (Pinned -> Device)`; any copy between two devices is PtoP."""
    kind, source, target = data.pop("copyKind"), data.pop("srcDeviceId"), data.pop("dstDeviceId")
    peer = (kind == 8) & (source >= 0) & (target >= 0) & (source != target)
    fields = np.where(peer, 10, kind), data.pop("srcKind"), data.pop("dstKind")
    key = np.zeros(len(kind), np.int64)
    for column in fields:
        key = key << 4 | np.where((column < 0) | (column > 14), 15, column)
    known = {one: names[_copy_name(one >> 8, one >> 4 & 15, one & 15)] for one in np.unique(key).tolist()}
    data["name"] = look_up(key, known, -1).astype(np.int64)


def _copy_name(kind: int, source: int, target: int) -> str:
    way = _COPY.get(kind)
    if way is None:
        return "Memcpy Unknown (Unknown -> Unknown)"
    if kind in _MIGRATIONS:
        return f"{MIGRATION} {way}"
    return f"Memcpy {way} ({_MEMORY.get(source, _SIDES[way[0]])} -> {_MEMORY.get(target, _SIDES[way[-1]])})"


def _runtime(export: Export, names: Intern[str]) -> _HostTable:
    """Return all CUDA runtime and driver calls in the export, from Nsight's one table for both."""
    table = _CUPTI + "RUNTIME"
    data = export.ints(table, {"start": -1, "end": -1, "globalTid": 0, "correlationId": -1, "nameId": -1})
    version = re.compile(r"_v\d+(_ptsz|_ptds)?$")  # version suffix of a call's name, which Kineto leaves out
    known = {key: names[version.sub("", name)] for key, name in export.names((table, "nameId"))}
    nothing = np.full(len(data["start"]), -1)
    return _HostTable(
        start=data["start"], end=data["end"], name=look_up(data["nameId"], known, names["unknown"]),
        kind=np.full(len(nothing), HostKind.RUNTIME, np.uint8), thread=data["globalTid"],
        correlation=data["correlationId"], stream=nothing, waits_for=nothing, waits_on=nothing,
    )  # fmt: skip


_SYNC_NAMES = {1: "Event Sync", 2: "Stream Wait Event", 3: "Stream Sync", 4: "Context Sync"}  # names as in Kineto


def _syncs(export: Export, names: Intern[str], runtime: _HostTable) -> _HostTable:
    """Return the synchronisations that CUPTI recorded, each on the thread of the host call that requested it."""
    columns = {"start": -1, "end": -1, "streamId": -1, "correlationId": -1, "globalPid": 0, "syncType": 0,
               "eventId": -1, "eventSyncId": -1}  # fmt: skip
    data = export.ints(_CUPTI + "SYNCHRONIZATION", columns)
    events = export.ints(_CUPTI + "CUDA_EVENT", {"globalPid": 0, "eventId": -1, "eventSyncId": -1,
                                                 "correlationId": -1, "streamId": -1})  # fmt: skip
    known = {kind: names[name] for kind, name in _SYNC_NAMES.items()}
    waits = data["syncType"] == 2
    call, process = _launches(data["globalPid"], data["correlationId"], runtime)
    pairs = data["eventId"] << 32 | data["eventSyncId"], events["eventId"] << 32 | events["eventSyncId"]
    recorded = _join(data["globalPid"], pairs[0], events["globalPid"], pairs[1])  # -1 without an eventSyncId
    recorded, nothing = np.where(waits, recorded, -1), np.full(len(waits), -1)
    return _HostTable(
        start=data["start"], end=data["end"], name=look_up(data["syncType"], known, names["unknown"]),
        kind=np.full(len(waits), HostKind.SYNC, np.uint8),
        thread=_take(runtime.thread, call, process), correlation=data["correlationId"],
        stream=np.where(waits, data["streamId"], -1),
        waits_for=_take(events["correlationId"], recorded, nothing),
        waits_on=_take(events["streamId"], recorded, nothing),
    )  # fmt: skip


def _annotations(nvtx: NvtxRanges) -> _HostTable:
    nothing = np.full(len(nvtx.start), -1)
    return _HostTable(start=nvtx.start, end=nvtx.end, name=nvtx.name, kind=nvtx.kind, thread=nvtx.thread,
                 correlation=nothing, stream=nothing, waits_for=nothing, waits_on=nothing)  # fmt: skip


def _merge(*parts: _HostTable) -> _HostTable:
    return _HostTable(**{key: np.concatenate([getattr(part, key) for part in parts]) for key in _HostTable.__slots__})


def _select(host: _HostTable, index: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> _HostTable:
    return _HostTable(**{key: getattr(host, key)[index] for key in _HostTable.__slots__})


def _process(thread: I64) -> I64:
    return thread >> _PID_BITS << _PID_BITS


def _join(process: I64, key: I64, to_process: I64, to_key: I64) -> I64:
    """Return, per element of `process` and `key`, the row with equal `to_process` and `to_key`; -1: none."""
    found = np.full(len(key), -1, np.int64)
    for one in np.unique(process):
        mine, theirs = np.flatnonzero(process == one), np.flatnonzero(to_process == one)
        if not len(theirs):
            continue
        theirs = theirs[np.argsort(to_key[theirs], kind="stable")]
        at = np.minimum(np.searchsorted(to_key[theirs], key[mine]), len(theirs) - 1)
        same = (to_key[theirs[at]] == key[mine]) & (key[mine] > 0)
        found[mine] = np.where(same, theirs[at], -1)
    return found


def _take(values: npt.NDArray[Any], index: I64, otherwise: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return `values[index]` where index >= 0, else `otherwise`."""
    return np.where(index >= 0, values[index], otherwise) if len(values) else otherwise


def _launches(process: I64, correlation: I64, runtime: _HostTable) -> tuple[I64, I64]:
    """Return the row in `runtime` of each GPU operation's launch (-1: unknown), and the operation's process.

    Without a `globalPid` (0), the process of the launch counts, or the only process of the export.
    """
    to_process = _process(runtime.thread)
    unstated = process == 0
    if unstated.any() and len(to_process):
        everywhere = np.zeros_like(to_process)
        call = _join(process[unstated], correlation[unstated], everywhere, runtime.correlation)
        process = process.copy()
        process[unstated] = _take(to_process, call, np.full(len(call), to_process[0]))
    return _join(process, correlation, to_process, runtime.correlation), process


def _operators(nvtx: NvtxRanges, runtime: _HostTable, launch: I64) -> tuple[I64, I64]:
    """Find the operator that launched each GPU operation.

    Returns:
        The input shapes of the innermost range around the launch that has any, and the row of the innermost operator's
        range; -1: there is none.
    """
    shape, call = np.full(len(launch), -1, np.int64), np.full(len(launch), -1, np.int64)
    known = np.flatnonzero(launch >= 0)
    thread, start = runtime.thread[launch[known]], runtime.start[launch[known]]
    nests = nvtx.nests == 1
    shaped, operators = np.flatnonzero((nvtx.shape >= 0) & nests), np.flatnonzero((nvtx.kind == HostKind.OP) & nests)
    if len(shaped) and len(known):
        inner = innermost(nvtx, shaped, thread, start)
        shape[known] = np.where(inner >= 0, nvtx.shape[inner], -1)
    if len(operators) and len(known):
        call[known] = innermost(nvtx, operators, thread, start)
    return shape, call


def _collectives(
    gpu: dict[str, I64], runtime: _HostTable, launch: I64, calls: NcclCalls
) -> tuple[I64, tuple[CollectiveInfo, ...]]:
    """Return each GPU operation's index into the collectives (-1: none), and all collectives, from NCCL's ranges."""
    found, infos = np.full(len(launch), -1, np.int64), list[CollectiveInfo]()
    kernels = np.flatnonzero((gpu["kind"] == Kind.COMM) & (gpu["gridX"] > 0) & (launch >= 0))
    thread, start, end = (np.array(column, np.int64) for column in (calls.thread, calls.start, calls.end))
    for one in np.unique(runtime.thread[launch[kernels]]):
        mine = kernels[runtime.thread[launch[kernels]] == one]
        theirs = np.flatnonzero(thread == one)
        if not len(theirs):
            continue
        at = runtime.start[launch[mine]]
        last = np.searchsorted(start[theirs], at, "right") - 1
        call = theirs[np.maximum(last, 0)]
        inside = (last >= 0) & (at <= end[call])
        mine, call, at = mine[inside], call[inside], at[inside]
        order = np.lexsort((at, call))
        mine, call = mine[order], call[order]
        _, starts = np.unique(call, return_index=True)
        for begin, rows in zip(starts, np.split(mine, starts[1:]), strict=False):
            carried = one_per_kernel(calls.infos[call[begin]], len(rows))
            found[rows] = len(infos) + np.minimum(np.arange(len(rows)), len(carried) - 1)
            infos += carried
    return found, tuple(infos)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Builder:
    """Builds the timeline of one rank from the tables of all ranks in an export."""

    path: Path
    gpu: dict[str, I64]
    runtime: _HostTable
    launch: I64
    host: _HostTable
    first: int
    origin_ns: int
    names: tuple[str, ...]
    shapes: tuple[str, ...]
    collectives: tuple[CollectiveInfo, ...]
    notes: tuple[str, ...]
    streams: dict[str, I64]

    def timeline(self, rank: RankId, device: Device) -> Timeline:
        """Return the timeline of one rank."""
        rows = np.flatnonzero((self.gpu["globalPid"] == rank.process) & (self.gpu["deviceId"] == rank.device))
        host = self._host(rank, rows)
        threads, thread = np.unique(host.thread, return_inverse=True)
        used, collective = np.unique(self.gpu["collective"][rows], return_inverse=True)
        skip = int(len(used) > 0 and used[0] == -1)
        return Timeline(
            rank=rank.number, rank_known=rank.known, world_size=rank.world_size,
            job={} if device.name is None else {"gpu": device.name},
            path=str(self.path), format="nsys", events=len(rows) + len(host.start), origin_ns=self.origin_ns,
            device=device, names=self.names, shapes=self.shapes,
            inputs=tuple(OperatorInputs(shapes, "", "") for shapes in ("", *self.shapes)),
            gpu=self._gpu(rows, threads, (collective - skip).astype(np.int32)),
            host=HostOps(
                start=self._us(host.start), end=self._us(host.end), name=host.name, kind=host.kind,
                thread=thread.astype(np.int32), correlation=host.correlation, stream=host.stream,
                waits_for=host.waits_for, waits_on=host.waits_on,
            ),
            collectives=tuple(self.collectives[one] for one in used[skip:]), notes=self.notes,
            priorities=self._priorities(rank),
        )  # fmt: skip

    def _priorities(self, rank: RankId) -> dict[int, int]:
        """Return the stream priorities of the rank's process, by stream; the default stream may be missing."""
        mine = self.streams["processId"] == rank.process >> _PID_BITS & _MOST_PIDS
        return dict(zip(self.streams["streamId"][mine].tolist(), self.streams["priority"][mine].tolist(), strict=True))

    def _gpu(self, rows: I64, threads: I64, collective: I32) -> GpuOps:
        gpu = {key: column[rows] for key, column in self.gpu.items()}
        launch = self.launch[rows]
        known, call = launch >= 0, self.runtime
        nan = np.full(len(rows), np.nan)
        thread = np.searchsorted(threads, _take(call.thread, launch, np.zeros(len(rows), np.int64)))
        return GpuOps(
            start=self._us(gpu["start"]), end=self._us(gpu["end"]), name=gpu["name"].astype(np.int32),
            kind=gpu["kind"].astype(np.uint8), stream=gpu["streamId"], correlation=gpu["correlationId"],
            launch_start=_take(self._us(call.start), launch, nan), launch_end=_take(self._us(call.end), launch, nan),
            launch_thread=np.where(known, thread, -1).astype(np.int32),
            grid=_xyz(gpu, "grid"), block=_xyz(gpu, "block"),
            regs=gpu["registersPerThread"].astype(np.int32), smem=gpu["smem"], bytes=gpu["bytes"],
            shape=gpu["shape"].astype(np.int32), collective=collective, cluster=self._clusters(gpu),
            operator=gpu["operator"].astype(np.int32), inputs=(gpu["shape"] + 1).astype(np.int32), call=gpu["call"],
        )  # fmt: skip

    def _clusters(self, gpu: dict[str, I64]) -> I32 | None:
        """Return the number of blocks in each kernel's thread block cluster; None if no kernel states it."""
        return _xyz(gpu, "cluster").prod(axis=1, dtype=np.int32) if self.gpu["clusterX"].any() else None

    def _host(self, rank: RankId, rows: I64) -> _HostTable:
        """Return the host ranges of the rank's process, without ranges that belong to its other devices."""
        mine = _process(self.host.thread) == rank.process
        other = (self.gpu["globalPid"] == rank.process) & (self.gpu["deviceId"] != rank.device)
        if other.any():
            here, there = self.launch[rows], self.launch[other]
            kept = np.unique(self.runtime.thread[here[here >= 0]])
            of_others = np.setdiff1d(self.runtime.thread[there[there >= 0]], kept)
            launches = np.isin(self.host.correlation, self.gpu["correlationId"][other]) & (self.host.correlation > 0)
            mine &= ~np.isin(self.host.thread, of_others) & ~launches
        return _select(self.host, mine)

    def _us(self, ns: I64) -> F64:
        return (ns - self.first) / 1e3


def _xyz(gpu: dict[str, I64], what: str) -> I32:
    return np.stack([np.clip(gpu[what + axis], 0, 2**31 - 1) for axis in "XYZ"], axis=1).astype(np.int32)
