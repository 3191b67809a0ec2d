"""Read Kineto JSON (torch.profiler's `export_chrome_trace`, 2020 to today) into one `Timeline` per rank.

Events are decoded by type, a block at a time, and put into columns at once, so memory grows with the columns, not with
the text. Old and new spellings are read alike (`Kernel`/`kernel`, `external id`/`External id`, stream in the tid). For
a rank without a GPU (Gloo), or whose GPU was not recorded, operations of the host take the place of GPU operations.
"""

from __future__ import annotations

import gc
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from counterpoint.errors import BadTrace
from counterpoint.records.diagnosis import counted
from counterpoint.trace import classify
from counterpoint.trace.chunks import EventRuns
from counterpoint.trace.kineto_columns import PARAM_COMMS, Columns, KinetoEvent, absorb
from counterpoint.trace.kineto_processes import find_processes
from counterpoint.trace.source import Limits, TraceFile, open_bytes, rank_from_name
from counterpoint.trace.timeline import (
    DEVICE_BITS,
    CollectiveInfo,
    Device,
    GpuOps,
    HostKind,
    HostOps,
    Intern,
    Kind,
    OperatorInputs,
    Timeline,
    join_launches,
    sorted_gpu,
    sorted_host,
)

_DEVICE_WAITS = ("event_wait", "event_record")  # MTIA: a stream's waiting for events, or recording them, is not work
_COPIES = ("Memcpy", "Memset", "CopyHost", "CopyDevice", "FillBuffer", "dma_request")
_USES_GPU = re.compile(
    r"^(cuda|hip|cu(?=[A-Z]))\w*(Launch|Memcpy|Memset)|^(nccl|rccl|hccl|xccl):|^aten::_?(cudnn|miopen)_|^runFunction\b"
)
_OTHER_DEVICE = re.compile(
    r"\b(ascend|npu|hpu|gaudi|tpu|neuron)\b|^/device:|\bxla\b", re.IGNORECASE
)  # name of a process
_OF_DEVICE = re.compile(r"hpu|npu|privateuse1|xla|tpu|neuron", re.IGNORECASE)  # category of a device's events
_UNREADABLE = (
    "what this device ran cannot be read, only GPUs, XPU and MTIA recorded by torch.profiler, and Nsight Systems' "
    "exports; use the tools of its vendor"
)
_NOT_RECORDED = ("GPU activity was not recorded: operations of the host stand for it in the accounts",)


def read_kineto(
    file: TraceFile,
    limits: Limits | None = None,
    *,
    progress: Callable[[int], None] | None = None,
) -> list[Timeline]:
    """Return the file's timelines: one, or one per process if a tool merged several processes into the file.

    A file that cannot be read raises `BadTrace` with the byte offset.

    Args:
        file: the file to read.
        limits: caps on what it may expand to.
        progress: called with the number of events read so far, a few times a second.
    """
    columns, header = _read_events(file, limits or Limits(), progress)
    return _timelines(file, header, columns)


def _read_events(
    file: TraceFile, limits: Limits, progress: Callable[[int], None] | None
) -> tuple[Columns, dict[str, Any]]:
    """Return the events of a file as columns, and the file's other top-level keys."""
    columns = Columns()
    collecting = gc.isenabled()
    gc.disable()  # millions of short-lived structs, which cannot form cycles, are decoded
    try:
        with open_bytes(file, limits) as stream:
            runs = EventRuns(stream, file.label, KinetoEvent, lenient=columns.decode_loosely)
            for run, events in runs:
                absorb(columns, runs, run, events)
                if progress:
                    progress(columns.count)
    finally:
        if collecting:
            gc.enable()
    return columns, runs.header


def _timelines(file: TraceFile, header: dict[str, Any], columns: Columns) -> list[Timeline]:
    columns.gpu = columns.gpu or columns.streamed
    _check_devices(columns, file.label)
    if not columns.gpu and not columns.host:
        raise BadTrace(_no_events(columns), path=file.label)
    notes = _unknown_categories(columns)
    # free each column's parts at once: all columns twice would double the memory
    gpu = {name: np.concatenate(columns.gpu.pop(name)) for name in list(columns.gpu)}
    if gpu and any(name in columns.names for name in _DEVICE_WAITS):
        works = ~np.isin(gpu["name"], [columns.names[n] for n in _DEVICE_WAITS if n in columns.names])
        gpu = {name: column[works] for name, column in gpu.items()} if works.any() else {}
    host = {name: np.concatenate(columns.host.pop(name)) for name in list(columns.host)}
    origin = min(float(t["start"].min()) for t in (gpu, host) if t)  # µs since base_us
    for table in (gpu, host):
        if table:
            table["start"] -= origin
            table["end"] = table["start"] + table.pop("dur")
    found = find_processes(gpu, host, columns.lanes, columns.threads)
    if not found.owners:
        whole = _timeline(file, header, columns, gpu, host, origin)
        return [replace(whole, processes=found.count, notes=(*whole.notes, *notes, *found.notes))]
    parts = []
    for number, ((of_gpu, of_host), note) in enumerate(zip(found.owners, found.notes, strict=True)):
        mine, theirs = ({n: c[rows] for n, c in t.items()} for t, rows in ((gpu, of_gpu), (host, of_host)))
        part = _timeline(file, header, columns, mine, theirs, origin)
        events = len(part.gpu) + len(part.host)
        parts.append(replace(part, rank=number, rank_known=False, events=events, notes=(*part.notes, *notes, note)))
    return parts


def _check_devices(columns: Columns, label: str) -> None:
    """Raise `BadTrace` if a device whose events this reader cannot interpret ran operations."""
    for pid, name in columns.processes.items():
        if _OTHER_DEVICE.search(name) and columns.bare[pid]:
            raise BadTrace(
                f"{counted(columns.bare[pid], 'event')} of process {name!r}: {_UNREADABLE}",
                path=label,
            )
    if not columns.gpu and (ran := [c for c in columns.left_out if _OF_DEVICE.match(c)]):
        raise BadTrace(
            f"{counted(columns.left_out[ran[0]], 'event')} of category {ran[0]!r} without a stream: {_UNREADABLE}",
            path=label,
        )


def _no_events(columns: Columns) -> str:
    """Return why no event of a file can be read: there are none, or another program than PyTorch wrote them."""
    if columns.left_out:
        return f"no events of PyTorch: their categories are {_listed(columns.left_out)}, as in traces of other programs"
    if not columns.bare:
        return "no timed events: recorded without activities, or not a PyTorch trace"
    shown = ", ".join(f"{count} of {columns.processes.get(pid, pid)!r}" for pid, count in columns.bare.most_common(3))
    return f"no events of PyTorch: their categories (cat) are missing ({shown}), as in traces of other programs"


def _matmul_dtypes(columns: Columns, host: dict[str, Any], shape: Any) -> dict[int, str]:
    """Return the dtype of the first input of matmuls by the index of their shapes; omit unknown and several dtypes.

    `shape` has the index of the shapes for each entry of `columns.inputs`.
    """
    if not host:
        return {}
    matmul = np.array([classify.is_host_matmul(name) for name in columns.names], bool)
    used = np.unique(host["inputs"][matmul[host["name"]] & (host["inputs"] > 0)]).tolist()
    stated = tuple(columns.inputs)
    found: dict[int, set[str | None]] = {}
    for at in used:
        if shape[at] > 0:
            found.setdefault(int(shape[at]), set()).add(_first_dtype(stated[at][1]))
    return {at: dtype for at, dtypes in found.items() if len(dtypes) == 1 and (dtype := next(iter(dtypes))) is not None}


def _first_dtype(types: bytes) -> str | None:
    """Return torch's name of the first of the dtypes in a JSON list; None if it is unknown."""
    try:
        listed = msgspec.json.decode(types, type=list[Any]) if types else []
    except msgspec.DecodeError:
        return None
    return classify.torch_dtype(listed[0]) if listed and isinstance(listed[0], str) else None


def _timeline(
    file: TraceFile,
    header: dict[str, Any],
    columns: Columns,
    gpu: dict[str, Any],
    host: dict[str, Any],
    origin: float,
) -> Timeline:
    """Return the timeline of one process's events; empty `host` on the way, to save memory."""
    names = tuple(columns.names)
    shapes = Intern({b"": 0})
    shape = np.array([shapes[dims] for dims, *_ in columns.inputs], np.int32)  # of each entry of `inputs`
    device = _commonest(gpu["device"]) if gpu else 0
    dtypes = _matmul_dtypes(columns, host, shape)
    if gpu:
        _finish_gpu(gpu, host, columns, names, shape)
        gpu_ops, host_ops = sorted_gpu(gpu), sorted_host(host)
    else:
        order = np.lexsort((-host["end"], host["start"]))
        described, given = host["info"][order], host["inputs"][order]
        host_ops = sorted_host(host)
        gpu_ops = _device_ops_of_host(host_ops, names, columns.infos, described, given, shape)
    stated = header.get("distributedInfo")  # rank, world_size, backend, nccl_version, ... as c10d states them
    info = stated if isinstance(stated, dict) else {}
    base_ns = _whole(header.get("baseTimeNanoseconds")) or 0  # what `ts` counts from, since 1970; 0 before 2024
    rank, known = _rank(info, columns, file)
    recorded = bool(gpu)
    used = recorded or any(map(_USES_GPU.search, names))
    return Timeline(
        rank=rank,
        rank_known=known,
        world_size=_whole(info.get("world_size")),
        job=_job_of(info),
        path=file.label,
        format="kineto",
        events=columns.count,
        origin_ns=base_ns + (columns.base_us or 0) * 1000 + round(origin * 1000),
        device=_device_of(header, device)
        if recorded
        else replace(_device_of(header, device), recorded=False)
        if used
        else Device(name="cpu"),
        names=names,
        shapes=tuple(map(_compact, shapes)),
        inputs=tuple(OperatorInputs(*map(_compact, stated)) for stated in columns.inputs),
        matmul_dtypes=dtypes,
        gpu=gpu_ops,
        host=host_ops,
        collectives=_described(tuple(columns.infos), info),
        notes=(*(_NOT_RECORDED if used and not recorded else ()), *_odd_arguments(columns), *_without_times(gpu_ops)),
    )


def _without_times(gpu: GpuOps) -> tuple[str, ...]:
    none = int((gpu.end <= gpu.start).sum())
    return (f"{none} of {len(gpu)} operations have no duration: their work is unknown",) if none > len(gpu) / 2 else ()


def _compact(stated: bytes) -> str:
    """Return JSON text without white space between values, so that equal inputs compare as equal."""
    return "".join(stated.decode("utf-8", "replace").split())


def _odd_arguments(columns: Columns) -> tuple[str, ...]:
    if not columns.odd:
        return ()
    most = _listed(columns.odd)
    more = f" and {len(columns.odd) - 3} more" if len(columns.odd) > 3 else ""
    return (f"{columns.odd.total()} arguments of events are of an unexpected type and count as absent: {most}{more}",)


def _unknown_categories(columns: Columns) -> tuple[str, ...]:
    """Return notes on events of unknown category; with a stream they count as GPU operations if there are no others."""
    taken = "are taken for what the device ran" if columns.gpu is columns.streamed else "are left out"
    notes = ((f"that state a stream {taken}", columns.unknown), ("are left out", columns.left_out))
    return tuple(f"events of unknown categories {what}: {_listed(counts)}" for what, counts in notes if counts)


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in counts.most_common(3))


def _described(infos: tuple[CollectiveInfo, ...], stated: dict[str, Any]) -> tuple[CollectiveInfo, ...]:
    """Return the metadata of collectives, with missing group descriptions added from the file header (`pg_config`)."""
    listed = stated.get("pg_config")
    found = [group for group in listed if isinstance(group, dict)] if isinstance(listed, list) else []
    known = {str(group.get("pg_name")): group.get("pg_desc") for group in found}
    known = {name: text for name, text in known.items() if isinstance(text, str) and text not in ("", "undefined")}
    if not known:
        return infos
    lacking = (i.group is not None and i.group_desc is None and i.group in known for i in infos)
    return tuple(
        replace(i, group_desc=known[i.group or ""]) if lacks else i for i, lacks in zip(infos, lacking, strict=True)
    )


def _commonest(devices: Any) -> int:
    """Return the number of the device that ran most operations; 0 if the trace states no device."""
    numbers, counts = np.unique(devices[devices >= 0], return_counts=True)
    return int(numbers[counts.argmax()]) if len(numbers) else 0


def _finish_gpu(
    gpu: dict[str, Any], host: dict[str, Any], columns: Columns, names: tuple[str, ...], shape: Any
) -> None:
    """Add kind, grid, launch, operator, shapes and collective metadata to the GPU operations in `gpu`."""
    dims = np.array([_dims(text) for text in columns.grids], np.int32).reshape(-1, 3)
    gpu["grid"], gpu["block"] = dims[gpu["grid"]], dims[gpu["block"]]
    described = columns.names.get(PARAM_COMMS, -1)
    rows = np.flatnonzero((host["name"] == described) & (host["info"] >= 0) & (host["external"] >= 0)) if host else ()
    if len(rows):  # the host event has metadata that the kernel lacks (Seq, Comms Id)
        by_external = dict(zip(host["external"][rows].tolist(), host["info"][rows].tolist(), strict=True))
        pairs = zip(gpu["external"].tolist(), gpu["info"].tolist(), strict=True)
        gpu["info"] = np.array([by_external.get(external, info) for external, info in pairs], np.int32)
    copies = np.array([n.startswith(_COPIES) for n in names])
    by_name = np.zeros(len(names), np.uint8)
    for row in np.unique(gpu["name"]).tolist():
        by_name[row] = (classify.memcpy_kind if copies[row] else classify.kernel_kind)(names[row])
    gpu["kind"] = by_name[gpu["name"]]
    with_info = (gpu["info"] >= 0) & ~copies[gpu["name"]]
    gpu["kind"][with_info] = Kind.COMM
    gpu["info"][gpu["kind"] != Kind.COMM] = -1
    gpu["collective"] = gpu.pop("info")
    devices = gpu.pop("device")
    if len(np.unique(devices[devices >= 0])) > 1:  # devices of one process use the same stream numbers
        gpu["stream"] = gpu["stream"] + (devices.astype(np.int64) << DEVICE_BITS)
    join_launches(gpu, host)
    external = gpu.pop("external")
    gpu["operator"], gpu["inputs"], gpu["call"] = (np.full(len(external), -1, np.int32) for _ in range(3))
    if host:
        ops = np.flatnonzero((host["kind"] == HostKind.OP) & (host["external"] >= 0))
        order = ops[np.argsort(host["external"][ops], kind="stable")]
        if len(order):
            keys = host["external"][order]
            at = np.clip(np.searchsorted(keys, external), 0, len(keys) - 1)
            row = np.where((keys[at] == external) & (external >= 0), order[at], -1)
            for name, values in (("operator", host["name"]), ("inputs", host["inputs"])):
                gpu[name] = np.where(row >= 0, values[row], -1).astype(np.int32)
            gpu["call"] = row
    gpu["call"] = gpu["call"].astype(np.int64)
    gpu["shape"] = np.where(gpu["inputs"] > 0, shape[gpu["inputs"]], 0)
    gpu["shape"] = np.where(gpu["shape"] > 0, gpu["shape"], -1).astype(np.int32)


def _dims(text: bytes) -> tuple[int, int, int]:
    """Parse the grid or block of a kernel, such as `[128, 4, 1]`; return zeros if `text` is empty or malformed."""
    try:
        found = msgspec.json.decode(text, type=list[int]) if text else []
    except msgspec.DecodeError:
        found = []
    padded = [*found, 1, 1, 1][:3] if found else [0, 0, 0]
    x, y, z = (value if 0 <= value < 1 << 31 else 0 for value in padded)
    return x, y, z


def _rank(info: dict[str, Any], columns: Columns, file: TraceFile) -> tuple[int, bool]:
    for candidate in (_whole(info.get("rank")), columns.comm_rank, rank_from_name(file.label)):
        if candidate is not None and candidate >= 0:
            return candidate, True
    return 0, False


def _whole(value: Any) -> int | None:
    """Return `value` if it is a non-negative integer that fits an int64, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63 else None


def _job_of(info: dict[str, Any]) -> dict[str, Any]:
    """Return the facts in the file header that must be equal on all ranks of a job."""
    keys = ("backend", "nccl_version", "world_size")
    return {key: info[key] for key in keys if isinstance(info.get(key), (str, int))}


def _device_of(header: dict[str, Any], device: int) -> Device:
    """Return the properties of GPU `device`, or of the first GPU that the header lists."""
    listed = header.get("deviceProperties")
    found = [d for d in listed if isinstance(d, dict)] if isinstance(listed, list) else []
    props = next((d for d in found if d.get("id") == device), found[0] if found else {})
    name = props.get("name")
    return Device(
        name=name if isinstance(name, str) else None,
        num_sms=_whole(props.get("numSms")) or None,
        regs_per_sm=_whole(props.get("regsPerMultiprocessor")) or None,
        smem_per_sm=_whole(props.get("sharedMemPerMultiprocessor") or props.get("maxSharedMemoryPerMultiProcessor"))
        or None,
        threads_per_sm=_whole(props.get("maxThreadsPerMultiprocessor")) or None,
        index=device if len(found) > 1 else None,
        host_gpus=len(found) if len(found) > 1 else None,
    )


def _device_ops_of_host(
    host: HostOps,
    names: tuple[str, ...],
    infos: list[CollectiveInfo],
    info_of_row: Any,
    inputs_of_row: Any,
    shape_of_inputs: Any,
) -> GpuOps:
    """Return the host's compute and communication in the form of GPU operations, for a rank without a GPU.

    Communication is what the backend's threads report (`gloo:all_reduce`) or, failing that, c10d's
    `record_param_comms`; compute is every outermost `aten::` operation (what encloses these may wait inside).
    `info_of_row` and `inputs_of_row` have an index into `infos` and into the inputs for each host range, -1 or 0 where
    it has none; `shape_of_inputs` has the index of the shapes of each entry of the inputs.
    """
    backend = np.array([n.startswith(("gloo:", "mpi:", "ucc:")) for n in names], bool)[host.name]
    params = np.array([n == PARAM_COMMS for n in names], bool)[host.name]
    if params.any():  # operations inside a described call repeat its metadata
        info_of_row = np.where(params, info_of_row, -1)
    aten = np.array([n.startswith("aten::") for n in names], bool)[host.name]
    comm = np.flatnonzero(backend if backend.any() else params)
    outermost = _outermost(host, np.flatnonzero((host.kind == HostKind.OP) & aten))
    rows = np.concatenate((comm, outermost))
    rows = rows[np.argsort(host.start[rows], kind="stable")]
    is_comm = np.isin(rows, comm)
    info = _nearest_info(host, names, infos, info_of_row, rows, is_comm)
    count = len(rows)
    given = np.where(is_comm, -1, inputs_of_row[rows]).astype(np.int32)
    shape = np.where(given > 0, shape_of_inputs[given], 0)
    return GpuOps(
        start=host.start[rows], end=host.end[rows], name=host.name[rows],
        kind=np.where(is_comm, Kind.COMM, Kind.COMPUTE).astype(np.uint8),
        stream=host.thread[rows].astype(np.int64), correlation=np.full(count, -1, np.int64),
        launch_start=np.full(count, np.nan), launch_end=np.full(count, np.nan),
        launch_thread=host.thread[rows], grid=np.zeros((count, 3), np.int32), block=np.zeros((count, 3), np.int32),
        regs=np.zeros(count, np.int32), smem=np.zeros(count, np.int64), bytes=np.full(count, -1, np.int64),
        shape=np.where(shape > 0, shape, -1).astype(np.int32), collective=info,
        operator=np.where(is_comm, -1, host.name[rows]).astype(np.int32), inputs=given, call=rows.astype(np.int64),
    )  # fmt: skip


def _outermost(host: HostOps, rows: Any) -> Any:
    """Return those host ranges among `rows` that no other range of `rows` on the same thread encloses."""
    kept = []
    for thread in np.unique(host.thread[rows]):
        own = rows[host.thread[rows] == thread]
        reach = np.concatenate(([-np.inf], np.maximum.accumulate(host.end[own])[:-1]))
        kept.append(own[host.start[own] >= reach])
    return np.concatenate(kept) if kept else rows


def _nearest_info(
    host: HostOps, names: tuple[str, ...], infos: list[CollectiveInfo], info_of_row: Any, rows: Any, is_comm: Any
) -> Any:
    """Return each row's index into `infos`: as recorded, else the next unused info of the same operation, else -1.

    Gloo runs a reduce_scatter as an all_reduce, so this function treats both as the same operation. Where the info of
    an operation has no dtype, an info that names no operation supplies it.
    """
    info = np.full(len(rows), -1, np.int32)
    info[is_comm] = info_of_row[rows[is_comm]]
    queues: dict[str, list[int]] = {}
    for row in np.flatnonzero(info_of_row >= 0).tolist():
        at = int(info_of_row[row])
        if (op := infos[at].op) is not None:
            queues.setdefault(_run_as(op), []).append(at)
    for position in np.flatnonzero(is_comm).tolist():
        own = infos[info[position]] if info[position] >= 0 else None
        if own is not None and own.op is not None:
            continue
        waiting = queues.get(_run_as(classify.normal_op(names[host.name[rows[position]]])))
        info[position] = at = waiting.pop(0) if waiting else -1
        if at >= 0 and own is not None and classify.dtype_bytes(infos[at].dtype) is None:
            infos[at] = replace(infos[at], dtype=own.dtype)
    return info


def _run_as(op: str) -> str:
    return "all_reduce" if op == "reduce_scatter" else op
