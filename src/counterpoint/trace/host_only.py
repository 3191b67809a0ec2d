"""Ranks without a GPU (Gloo): operations of the host take the place of GPU operations."""

from __future__ import annotations

from typing import Any

import numpy as np

from counterpoint.trace import classify
from counterpoint.trace.timeline import CollectiveInfo, GpuOps, HostKind, HostOps, Kind

__all__ = ["device_ops_of_host"]


def device_ops_of_host(
    host: HostOps, names: tuple[str, ...], infos: tuple[CollectiveInfo, ...], info_of_row: Any
) -> GpuOps:
    """Compute and communication of a rank that has no GPU.

    Communication is what the backend's threads report (`gloo:all_reduce`) or, failing that, c10d's
    `record_param_comms`; compute is every outermost `aten::` operation (what encloses these may wait inside).

    Args:
        host: sorted host ranges.
        names: string table.
        infos: collective metadata.
        info_of_row: [len(host)] index into `infos`, -1 where a range has none.
    """
    backend = np.array([n.startswith(("gloo:", "mpi:", "ucc:")) for n in names], bool)[host.name]
    params = np.array([n == "record_param_comms" for n in names], bool)[host.name]
    aten = np.array([n.startswith("aten::") for n in names], bool)[host.name]
    comm = np.flatnonzero(backend if backend.any() else params)
    outermost = _outermost(host, np.flatnonzero((host.kind == HostKind.OP) & aten))
    rows = np.concatenate((comm, outermost))
    rows = rows[np.argsort(host.start[rows], kind="stable")]
    is_comm = np.isin(rows, comm)
    info = _nearest_info(host, names, infos, info_of_row, rows, is_comm)
    count = len(rows)
    return GpuOps(
        start=host.start[rows], end=host.end[rows], name=host.name[rows],
        kind=np.where(is_comm, Kind.COMM, Kind.COMPUTE).astype(np.uint8),
        stream=host.thread[rows].astype(np.int64), correlation=np.full(count, -1, np.int64),
        launch_start=np.full(count, np.nan), launch_end=np.full(count, np.nan),
        launch_thread=host.thread[rows], grid=np.zeros((count, 3), np.int32), block=np.zeros((count, 3), np.int32),
        regs=np.zeros(count, np.int32), smem=np.zeros(count, np.int64), bytes=np.full(count, -1, np.int64),
        shape=np.full(count, -1, np.int32), collective=info,
    )  # fmt: skip


def _outermost(host: HostOps, rows: Any) -> Any:
    """Those of `rows` that no other row of the same thread encloses."""
    kept = []
    for thread in np.unique(host.thread[rows]):
        own = rows[host.thread[rows] == thread]
        reach = np.concatenate(([-np.inf], np.maximum.accumulate(host.end[own])[:-1]))
        kept.append(own[host.start[own] >= reach])
    return np.concatenate(kept) if kept else rows


def _nearest_info(
    host: HostOps, names: tuple[str, ...], infos: tuple[CollectiveInfo, ...], info_of_row: Any, rows: Any, is_comm: Any
) -> Any:
    """Metadata for each communication range: its own, or the n-th of the same operation for its n-th range."""
    info = np.full(len(rows), -1, np.int32)
    info[is_comm] = info_of_row[rows[is_comm]]
    queues: dict[str, list[int]] = {}
    for row in np.flatnonzero(info_of_row >= 0).tolist():
        at = int(info_of_row[row])
        queues.setdefault(infos[at].op or "", []).append(at)
    for position in np.flatnonzero(is_comm & (info < 0)).tolist():
        waiting = queues.get(classify.normal_op(names[host.name[rows[position]]]))
        if waiting:
            info[position] = waiting.pop(0)
    return info
