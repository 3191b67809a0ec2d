"""Kineto JSON (torch.profiler's `export_chrome_trace`, 2020 to today) into one `Timeline`.

Events are decoded by type, a block at a time, and fall into columns at once: what is kept grows with the columns, not
with the text. Old and new spellings are read alike (`Kernel`/`kernel`, `external id`/`External id`, stream in the tid).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from counterpoint.errors import BadTrace
from counterpoint.trace import classify
from counterpoint.trace.columns import join_launches, sorted_gpu, sorted_host
from counterpoint.trace.host_only import device_ops_of_host
from counterpoint.trace.kineto_columns import Columns
from counterpoint.trace.kineto_halves import read_events, read_halves
from counterpoint.trace.kineto_header import base_ns, device_of, distributed_info, job_of, whole
from counterpoint.trace.source import Limits, TraceFile, rank_from_name
from counterpoint.trace.timeline import Device, HostKind, Kind, Timeline

__all__ = ["read_kineto"]


def read_kineto(
    file: TraceFile,
    limits: Limits | None = None,
    *,
    progress: Callable[[int], None] | None = None,
    processes: int = 1,
) -> Timeline:
    """Read one rank.

    Args:
        file: where it is.
        limits: caps on what it may expand to.
        progress: called with the number of events read so far, a few times a second.
        processes: 2: a large file that is not compressed is decoded by two processes, half each.

    Raises:
        BadTrace: with file and byte offset.
    """
    limits = limits or Limits()
    halves = read_halves(file, limits, progress) if processes > 1 else None
    columns, header = halves or read_events(file, limits, progress=progress)
    return _timeline(file, header, columns)


def _timeline(file: TraceFile, header: dict[str, Any], columns: Columns) -> Timeline:
    if not columns.gpu and not columns.host:
        raise BadTrace("no timed events: recorded without activities, or not a PyTorch trace", path=file.label)
    gpu = {name: np.concatenate(parts) for name, parts in columns.gpu.items()}
    host = {name: np.concatenate(parts) for name, parts in columns.host.items()}
    columns.gpu.clear()
    columns.host.clear()
    names = tuple(columns.names)
    shapes = tuple("".join(s.decode("utf-8", "replace").split()) for s in columns.shapes)
    origin = min(float(t["start"].min()) for t in (gpu, host) if t)  # after base_us
    for table in (gpu, host):
        if table:
            table["start"] -= origin
            table["end"] = table["start"] + table.pop("dur")
    device = _commonest(gpu["device"]) if gpu else 0
    if gpu:
        _finish_gpu(gpu, host, columns, names)
        gpu_ops, host_ops = sorted_gpu(gpu), sorted_host(host)
    else:
        host_ops = sorted_host(host)
        order = np.lexsort((-host["end"], host["start"]))
        gpu_ops = device_ops_of_host(host_ops, names, tuple(columns.infos), host["info"][order])
    info = distributed_info(header)
    rank, known = _rank(info, columns, file)
    return Timeline(
        rank=rank,
        rank_known=known,
        world_size=whole(info.get("world_size")),
        job=job_of(info),
        path=file.label,
        format="kineto",
        events=columns.count,
        origin_ns=base_ns(header) + (columns.base_us or 0) * 1000 + round(origin * 1000),
        device=device_of(header, device) if len(gpu) else Device(name="cpu"),
        names=names,
        shapes=shapes,
        gpu=gpu_ops,
        host=host_ops,
        collectives=tuple(columns.infos),
    )


def _commonest(devices: Any) -> int:
    """The device that ran most operations; 0 where none is stated."""
    numbers, counts = np.unique(devices[devices >= 0], return_counts=True)
    return int(numbers[counts.argmax()]) if len(numbers) else 0


def _finish_gpu(gpu: dict[str, Any], host: dict[str, Any], columns: Columns, names: tuple[str, ...]) -> None:
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


def _rank(info: dict[str, Any], columns: Columns, file: TraceFile) -> tuple[int, bool]:
    for candidate in (whole(info.get("rank")), columns.comm_rank, rank_from_name(file.label)):
        if candidate is not None and candidate >= 0:
            return candidate, True
    return 0, False
