"""Kineto JSON (torch.profiler's `export_chrome_trace`, 2020 to today) into one `Timeline`.

Events are decoded by type, a block at a time, and fall into columns at once: what is kept grows with the columns, not
with the text. Old and new spellings are read alike (`Kernel`/`kernel`, `external id`/`External id`, stream in the tid).
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from counterpoint.errors import BadTrace
from counterpoint.trace import classify
from counterpoint.trace.chunks import EventRuns
from counterpoint.trace.columns import Intern, join_launches, sorted_gpu, sorted_host
from counterpoint.trace.host_only import device_ops_of_host
from counterpoint.trace.source import Limits, TraceFile, open_bytes, rank_from_name
from counterpoint.trace.timeline import CollectiveInfo, Device, HostKind, Kind, Timeline

__all__ = ["read_kineto"]

_ON_GPU, _IGNORED = -1, -2
_GPU = {"kernel", "concurrent_kernel", "gpu_memcpy", "memcpy", "gpu_memset", "memset"}
_HOST = {
    "cpu_op": HostKind.OP,
    "operator": HostKind.OP,
    "cuda_runtime": HostKind.RUNTIME,
    "cuda_driver": HostKind.RUNTIME,
    "hip_runtime": HostKind.RUNTIME,
    "runtime": HostKind.RUNTIME,
    "driver": HostKind.RUNTIME,
    "overhead": HostKind.RUNTIME,
    "user_annotation": HostKind.ANNOTATION,
    "python_function": HostKind.PYTHON,
    "cuda_sync": HostKind.SYNC,
}
_PARAM_COMMS = "record_param_comms"
_RAW = msgspec.Raw(b"")


class Args(msgspec.Struct, gc=False):
    """The arguments of an event that any account needs; all others are skipped by the decoder."""

    external: int | None = msgspec.field(default=None, name="External id")
    old_external: int | None = msgspec.field(default=None, name="external id")
    correlation: int | None = None
    device: int | None = None
    in_device: int | None = msgspec.field(default=None, name="inDevice")  # peer copies: who carried it out
    stream: int | None = None
    grid: msgspec.Raw = _RAW
    block: msgspec.Raw = _RAW
    regs: int | None = msgspec.field(default=None, name="registers per thread")
    smem: int | None = msgspec.field(default=None, name="shared memory")
    bytes: int | None = None
    dims: msgspec.Raw = msgspec.field(default=_RAW, name="Input Dims")
    waits_for: int | None = msgspec.field(default=None, name="wait_on_cuda_event_record_corr_id")
    waits_on: int | None = msgspec.field(default=None, name="wait_on_stream")
    collective: str | None = msgspec.field(default=None, name="Collective name")
    in_nelems: int | None = msgspec.field(default=None, name="In msg nelems")
    out_nelems: int | None = msgspec.field(default=None, name="Out msg nelems")
    group_size: int | None = msgspec.field(default=None, name="Group size")
    dtype: str | None = None
    group: str | None = msgspec.field(default=None, name="Process Group Name")
    group_desc: str | None = msgspec.field(default=None, name="Process Group Description")
    group_ranks: msgspec.Raw = msgspec.field(default=_RAW, name="Process Group Ranks")
    seq: int | None = msgspec.field(default=None, name="Seq")
    comms_id: msgspec.Raw = msgspec.field(default=_RAW, name="Comms Id")
    comm_rank: int | None = msgspec.field(default=None, name="Rank")
    src_rank: int | None = msgspec.field(default=None, name="Src Rank")
    dst_rank: int | None = msgspec.field(default=None, name="Dst Rank")


class Event(msgspec.Struct, gc=False):
    """One trace event; only complete events (`ph` X) carry time."""

    ph: str = ""
    cat: str | None = ""
    name: str | None = ""
    pid: Any = 0
    tid: Any = 0
    ts: float | None = 0.0
    dur: float | None = 0.0
    args: Args | None = None


_NO_ARGS = Args()


class _Categories(dict[str | None, int]):
    """HostKind of a category as the file spells it, or _ON_GPU, or _IGNORED."""

    def __missing__(self, category: str | None) -> int:
        name = (category or "").lower()
        self[category] = kind = _ON_GPU if name in _GPU else _HOST.get(name, _IGNORED)
        return kind


@dataclass
class _Columns:
    """What has been read so far: one list of arrays per column, and the tables that the columns point into."""

    categories: _Categories = field(default_factory=_Categories)
    names: Intern[str] = field(default_factory=Intern)
    shapes: Intern[bytes] = field(default_factory=Intern)
    grids: Intern[bytes] = field(default_factory=Intern)
    threads: Intern[tuple[Any, Any]] = field(default_factory=Intern)
    streams: Intern[Any] = field(default_factory=Intern)
    gpu: dict[str, list[Any]] = field(default_factory=dict)
    host: dict[str, list[Any]] = field(default_factory=dict)
    infos: list[CollectiveInfo] = field(default_factory=list)
    info_by_external: dict[int, int] = field(default_factory=dict)
    count: int = 0
    comm_rank: int | None = None

    def info_of(self, args: Args) -> int:
        self.infos.append(
            CollectiveInfo(
                op=classify.normal_op(args.collective or ""),
                group=args.group,
                group_desc=args.group_desc,
                group_ranks=_text(args.group_ranks),
                group_size=args.group_size,
                seq=args.seq,
                comms_id=_text(args.comms_id),
                in_nelems=args.in_nelems,
                out_nelems=args.out_nelems,
                dtype=args.dtype,
                src_rank=args.src_rank,
                dst_rank=args.dst_rank,
            )
        )
        if self.comm_rank is None and args.comm_rank is not None and (args.group_desc or "default_pg") == "default_pg":
            self.comm_rank = args.comm_rank
        return len(self.infos) - 1


def read_kineto(
    file: TraceFile, limits: Limits | None = None, *, progress: Callable[[int], None] | None = None
) -> Timeline:
    """Read one rank.

    Args:
        file: where it is.
        limits: caps on what it may expand to.
        progress: called with the number of events read so far, a few times a second.

    Raises:
        BadTrace: with file and byte offset.
    """
    columns = _Columns()
    collecting = gc.isenabled()
    gc.disable()  # millions of short-lived structs that cannot form cycles
    try:
        with open_bytes(file, limits or Limits()) as stream:
            runs = EventRuns(stream, file.label, Event)
            for run, events in runs:
                _absorb(columns, runs, run, events)
                if progress:
                    progress(columns.count)
    finally:
        if collecting:
            gc.enable()
    return _timeline(file, runs.header, columns)


def _absorb(columns: _Columns, runs: EventRuns[Event], run: bytes, events: list[Event]) -> None:
    columns.count += len(events)
    timed = [e for e in events if e.ph == "X"]
    if not timed:
        return
    ts = np.array([e.ts for e in timed], np.float64)
    dur = np.array([e.dur or 0.0 for e in timed], np.float64)
    wrong = ~(np.isfinite(ts) & np.isfinite(dur) & (ts >= 0) & (dur >= 0))
    if wrong.any():
        event = timed[int(np.argmax(wrong))]
        at = runs.offset_of(run, next(i for i, e in enumerate(events) if e is event))
        raise BadTrace(
            f"an event with an impossible time (ts {event.ts}, dur {event.dur}); times are finite and not negative",
            path=runs._label,
            offset=at,
        )
    kinds = columns.categories
    kind = np.array([kinds[e.cat] for e in timed], np.int8)
    for rows, absorb in ((np.flatnonzero(kind == _ON_GPU), _absorb_gpu), (np.flatnonzero(kind >= 0), _absorb_host)):
        if len(rows):
            absorb(columns, [timed[i] for i in rows.tolist()], ts[rows], dur[rows], kind[rows])


def _absorb_gpu(columns: _Columns, events: list[Event], ts: Any, dur: Any, kind: Any) -> None:
    args = [e.args or _NO_ARGS for e in events]
    grids, names = columns.grids, columns.names
    _put(
        columns.gpu,
        start=ts,
        dur=dur,
        name=np.array([names[e.name or ""] for e in events], np.int32),
        device=np.array([_first(a.device, a.in_device) for a in args], np.int32),
        stream=np.array(
            [a.stream if a.stream is not None else _stream_of(e.tid) for a, e in zip(args, events, strict=True)],
            np.int64,
        ),
        correlation=_ints(args, "correlation"),
        external=_externals(args),
        grid=np.array([grids[bytes(a.grid)] for a in args], np.int32),
        block=np.array([grids[bytes(a.block)] for a in args], np.int32),
        regs=np.array([a.regs or 0 for a in args], np.int32),
        smem=np.array([a.smem or 0 for a in args], np.int64),
        bytes=np.array([-1 if a.bytes is None else a.bytes for a in args], np.int64),
        info=np.array([-1 if a.collective is None else columns.info_of(a) for a in args], np.int32),
    )


def _absorb_host(columns: _Columns, events: list[Event], ts: Any, dur: Any, kind: Any) -> None:
    args = [e.args or _NO_ARGS for e in events]
    names, shapes = columns.names, columns.shapes
    is_op = kind == HostKind.OP
    ops = [args[i] for i in np.flatnonzero(is_op).tolist()]
    external = np.full(len(events), -1, np.int64)
    external[is_op] = _externals(ops)
    shape = np.full(len(events), -1, np.int32)
    shape[is_op] = [shapes[bytes(a.dims)] for a in ops]
    called = (kind == HostKind.RUNTIME) | (kind == HostKind.SYNC)
    correlation = np.full(len(events), -1, np.int64)
    correlation[called] = [_first(args[i].correlation) for i in np.flatnonzero(called).tolist()]
    stream, waits_for, waits_on = (np.full(len(events), -1, np.int64) for _ in range(3))
    for i in np.flatnonzero(kind == HostKind.SYNC).tolist():
        a = args[i]
        stream[i], waits_for[i], waits_on[i] = _first(a.stream), _first(a.waits_for), _first(a.waits_on)
    _put(
        columns.host,
        start=ts,
        dur=dur,
        kind=kind.astype(np.uint8),
        name=np.array([names[e.name or ""] for e in events], np.int32),
        thread=_threads(columns, events),
        correlation=correlation,
        external=external,
        stream=stream,
        waits_for=waits_for,
        waits_on=waits_on,
        info=_param_comms(columns, events, external),
        shape=shape,
    )


def _param_comms(columns: _Columns, events: list[Event], external: Any) -> Any:
    """Row of the metadata of each `record_param_comms`; -1 for everything else."""
    infos = np.full(len(events), -1, np.int32)
    for row in [i for i, e in enumerate(events) if e.name == _PARAM_COMMS]:
        args = events[row].args
        if args is not None and args.collective is not None:
            infos[row] = columns.info_of(args)
            if external[row] >= 0:
                columns.info_by_external[int(external[row])] = int(infos[row])
    return infos


def _threads(columns: _Columns, events: list[Event]) -> Any:
    """Dense number of each event's (pid, tid), whatever JSON value those are."""
    threads = columns.threads
    try:
        return np.array([threads[e.pid, e.tid] for e in events], np.int32)
    except TypeError:  # lists and objects cannot be keys
        return np.array([threads[str(e.pid), str(e.tid)] for e in events], np.int32)


def _ints(args: list[Args], name: str) -> Any:
    values = [getattr(a, name) for a in args]
    return np.array([-1 if v is None else v for v in values], np.int64)


def _externals(args: list[Args]) -> Any:
    return np.array(
        [a.external if a.external is not None else _first(a.old_external) for a in args],
        np.int64,
    )


def _first(*values: int | None) -> int:
    """The first that is stated; -1 if none is."""
    for value in values:
        if value is not None:
            return value
    return -1


def _put(table: dict[str, list[Any]], **columns: Any) -> None:
    for name, values in columns.items():
        table.setdefault(name, []).append(values)


def _stream_of(tid: Any) -> int:
    """The stream in a tid such as 7 or "stream 7" (before 2022)."""
    if isinstance(tid, int):
        return tid
    digits = "".join(c for c in str(tid) if c.isdigit())
    return int(digits[:9]) if digits else 0


def _text(raw: msgspec.Raw) -> str | None:
    """A value that some versions print as a string and others as a list or number."""
    text = bytes(raw).decode("utf-8", "replace").strip().strip('"')
    return text if text and text != "null" else None


def _timeline(file: TraceFile, header: dict[str, Any], columns: _Columns) -> Timeline:
    if not columns.gpu and not columns.host:
        raise BadTrace("no timed events: recorded without activities, or not a PyTorch trace", path=file.label)
    gpu = {name: np.concatenate(parts) for name, parts in columns.gpu.items()}
    host = {name: np.concatenate(parts) for name, parts in columns.host.items()}
    columns.gpu.clear()
    columns.host.clear()
    names = tuple(columns.names)
    shapes = tuple(s.decode("utf-8", "replace") for s in columns.shapes)
    origin = min(float(t["start"].min()) for t in (gpu, host) if t)
    for table in (gpu, host):
        if table:
            table["start"] -= origin
            table["end"] = table["start"] + table.pop("dur")
    device = int(np.bincount(gpu["device"][gpu["device"] >= 0]).argmax()) if _known(gpu, "device") else 0
    if gpu:
        _finish_gpu(gpu, host, columns, names)
        gpu_ops, host_ops = sorted_gpu(gpu), sorted_host(host)
    else:
        host_ops = sorted_host(host)
        order = np.lexsort((-host["end"], host["start"]))
        gpu_ops = device_ops_of_host(host_ops, names, tuple(columns.infos), host["info"][order])
    info = _dict(header.get("distributedInfo"))
    rank, known = _rank(info, columns, file)
    return Timeline(
        rank=rank,
        rank_known=known,
        world_size=_int(info.get("world_size")),
        job=_job(info),
        path=file.label,
        format="kineto",
        events=columns.count,
        origin_ns=(_int(header.get("baseTimeNanoseconds")) or 0) + round(origin * 1000),
        device=_device(header, device) if len(gpu) else Device(name="cpu"),
        names=names,
        shapes=shapes,
        gpu=gpu_ops,
        host=host_ops,
        collectives=tuple(columns.infos),
    )


def _known(table: dict[str, Any], column: str) -> bool:
    return bool(table) and bool((table[column] >= 0).any())


def _finish_gpu(gpu: dict[str, Any], host: dict[str, Any], columns: _Columns, names: tuple[str, ...]) -> None:
    """Kinds, grids, launches, shapes and collective metadata of GPU operations, from the tables and the host side."""
    dims = np.array([_dims(text) for text in columns.grids], np.int32).reshape(-1, 3)
    gpu["grid"], gpu["block"] = dims[gpu["grid"]], dims[gpu["block"]]
    if host:
        by_external = columns.info_by_external  # the host's record is the fuller one (Seq, Comms Id)
        if by_external:
            pairs = zip(gpu["external"].tolist(), gpu["info"].tolist(), strict=True)
            gpu["info"] = np.array([by_external.get(external, info) for external, info in pairs], np.int32)
    copies = np.array([n.startswith(("Memcpy", "Memset", "CopyHost", "CopyDevice", "FillBuffer")) for n in names])
    by_name = np.array([classify.memcpy_kind(n) if c else classify.kernel_kind(n)
                        for n, c in zip(names, copies, strict=True)], np.uint8)  # fmt: skip
    gpu["kind"] = by_name[gpu["name"]]
    with_info = (gpu["info"] >= 0) & ~copies[gpu["name"]]
    gpu["kind"][with_info] = Kind.COMM
    gpu["info"][gpu["kind"] != Kind.COMM] = -1
    gpu["collective"] = gpu.pop("info")
    devices = gpu.pop("device")
    if len(np.unique(devices[devices >= 0])) > 1:  # stream numbers repeat on the devices of one process
        gpu["stream"] = gpu["stream"] + (devices.astype(np.int64) << 32)
    external = gpu.pop("external")
    gpu["shape"] = np.full(len(external), -1, np.int32)
    join_launches(gpu, host)
    if host:
        ops = np.flatnonzero((host["kind"] == HostKind.OP) & (host["external"] >= 0) & (host["shape"] > 0))
        order = ops[np.argsort(host["external"][ops], kind="stable")]
        if len(order):
            keys = host["external"][order]
            at = np.clip(np.searchsorted(keys, external), 0, len(keys) - 1)
            gpu["shape"] = np.where(keys[at] == external, host["shape"][order[at]], -1).astype(np.int32)


def _dims(text: bytes) -> tuple[int, int, int]:
    """Grid or block of a kernel, `[128, 4, 1]`; zeros where it is missing."""
    try:
        found = msgspec.json.decode(text, type=list[int]) if text else []
    except msgspec.DecodeError:
        found = []
    padded = [*found, 1, 1, 1][:3] if found else [0, 0, 0]
    x, y, z = (value if 0 <= value < 1 << 31 else 0 for value in padded)
    return x, y, z


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _int(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _rank(info: dict[str, Any], columns: _Columns, file: TraceFile) -> tuple[int, bool]:
    for candidate in (_int(info.get("rank")), columns.comm_rank, rank_from_name(file.label)):
        if candidate is not None and candidate >= 0:
            return candidate, True
    return 0, False


def _job(info: dict[str, Any]) -> dict[str, Any]:
    """What every rank of a job states alike."""
    return {
        key: info[key] for key in ("backend", "nccl_version", "world_size") if isinstance(info.get(key), (str, int))
    }


def _device(header: dict[str, Any], device: int) -> Device:
    listed = header.get("deviceProperties")
    found = [d for d in listed if isinstance(d, dict)] if isinstance(listed, list) else []
    props = next((d for d in found if d.get("id") == device), found[0] if found else {})
    name, major, minor = props.get("name"), _int(props.get("computeMajor")), _int(props.get("computeMinor"))
    return Device(
        name=name if isinstance(name, str) else None,
        num_sms=_int(props.get("numSms")),
        regs_per_sm=_int(props.get("regsPerMultiprocessor")),
        smem_per_sm=_int(props.get("sharedMemPerMultiprocessor") or props.get("maxSharedMemoryPerMultiProcessor")),
        threads_per_sm=_int(props.get("maxThreadsPerMultiprocessor")),
        compute_capability=None if major is None or minor is None else (major, minor),
    )
