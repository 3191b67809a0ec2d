"""Separate the processes in a trace file that a tool merged from the traces of several processes.

Each process numbers its launches from 1 on, so one table of all launches would join operations wrongly.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from counterpoint.trace.timeline import Bools, HostKind

_FEW = 0.01  # share of the busiest process's launches: a process with fewer does not count
_SURE = 0.95  # a process owns a GPU if it could have launched this share of the GPU's operations ...
_UNSURE = 0.8  # ... and no other process could have launched more than this part of that share
_MOST = 64  # processes, and GPUs that they use


@dataclass(frozen=True, kw_only=True, slots=True)
class MergedProcesses:
    """Holds, for each process, masks of its GPU operations and host ranges; none if processes cannot be separated."""

    count: int = 1
    owners: tuple[tuple[Bools, Bools], ...] = ()
    notes: tuple[str, ...] = ()  # notes, one per process, or one on all processes


def find_processes(
    gpu: dict[str, Any],
    host: dict[str, Any],
    lanes: Iterable[tuple[Any, ...]],
    threads: Iterable[tuple[Any, ...]],
) -> MergedProcesses:
    """Return the processes that launched GPU work, in the order of their GPUs.

    Args:
        gpu: columns of GPU operations.
        host: columns of host ranges.
        lanes: (pid, tid) under which the file shows GPU operations; a merging tool may have changed the pid.
        threads: (pid, tid) of each thread.
    """
    if not gpu or not host:
        return MergedProcesses()
    pids: dict[str, int] = {}
    pid_of = np.array([pids.setdefault(str(pid), len(pids)) for pid, _ in threads], np.int64)
    lane_of = np.array([pids.setdefault(str(pid), len(pids)) for pid, _ in lanes], np.int64)
    calls = np.flatnonzero((host["kind"] == HostKind.RUNTIME) & (host["correlation"] >= 0))
    caller = pid_of[host["thread"][calls]]
    if not len(calls) or (caller == caller[0]).all():
        return MergedProcesses()
    launched = np.isin(host["correlation"][calls], gpu["correlation"])
    calls, caller = calls[launched], caller[launched]
    launches = np.bincount(caller, minlength=len(pids))
    processes = np.flatnonzero(launches > _FEW * launches.max(initial=0))
    if len(processes) < 2:
        return MergedProcesses()
    names = [pid[:40] for pid in pids]
    places, place = np.unique(np.stack([gpu["device"], lane_of[gpu["lane"]]]), axis=1, return_inverse=True)
    place = place.ravel()
    owner = np.full(places.shape[1], -1, np.int64)
    if max(len(processes), len(owner)) <= _MOST:
        could = np.stack([_launched(gpu, host, calls[caller == p], place, len(owner)) for p in processes.tolist()])
        owner = _owners(could)
    if (owner < 0).any() or len(np.unique(owner)) < len(processes):
        shown = ", ".join(names[p] for p in processes[:4].tolist()) + (" …" if len(processes) > 4 else "")
        said = f"the file holds {len(processes)} processes (pid {shown}) that cannot be told apart: they are read as "
        return MergedProcesses(count=len(processes), notes=(f"{said}one rank, so give one trace per process",))
    order = list(dict.fromkeys(owner.tolist()))  # by device
    of_host = pid_of[host["thread"]]
    other = ~np.isin(of_host, processes)  # such as a process of its own for spans of the profiler
    return MergedProcesses(
        count=len(order),
        owners=tuple((owner[place] == p, other | (of_host == processes[p])) for p in order),
        notes=tuple(
            f"it is pid {names[processes[p]]}, one of {len(order)} processes of one file, each with its own GPU"
            for p in order
        ),
    )


def _owners(could: Any) -> Any:
    """Return, per GPU (column of `could`), the process (row) that surely launched its operations; -1: unclear."""
    owner = np.full(could.shape[1], -1, np.int64)
    for _ in range(len(could)):
        most = could.max(axis=0)
        second = np.sort(could, axis=0)[-2]
        sure = (owner < 0) & (most >= _SURE) & (second <= _UNSURE * most)
        if not sure.any():
            break
        owner[sure] = could.argmax(axis=0)[sure]
        could[np.unique(owner[sure])] = 0.0  # this process has its GPUs: the other GPUs belong to other processes
    return owner


def _launched(gpu: dict[str, Any], host: dict[str, Any], calls: Any, place: Any, count: int) -> Any:
    """Return, per GPU, the share of operations that one of the earlier host calls `calls` may have launched."""
    calls = calls[np.lexsort((host["start"][calls], host["correlation"][calls]))]
    keys = host["correlation"][calls]
    at = np.searchsorted(keys, gpu["correlation"], side="right") - 1
    same = (at >= 0) & (gpu["correlation"] >= 0)
    same[same] = keys[at[same]] == gpu["correlation"][same]
    same[same] = host["start"][calls[at[same]]] <= gpu["start"][same]
    known = np.bincount(place, gpu["correlation"] >= 0, count)
    return np.bincount(place, same, count) / np.maximum(known, 1)
