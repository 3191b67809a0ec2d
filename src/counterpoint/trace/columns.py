"""Bulk operations on columns that the readers share: interning, sorting, joining launches to what they launched."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np

from counterpoint.trace.timeline import I64, GpuOps, HostKind, HostOps

__all__ = ["Intern", "join_launches", "previous_on_stream", "sorted_gpu", "sorted_host"]

K = TypeVar("K")


class Intern(dict[K, int]):
    """A dict that numbers its keys in order of first sight: `table[key]` is the number, `tuple(table)` the keys."""

    def __missing__(self, key: K) -> int:
        self[key] = number = len(self)
        return number


def join_launches(gpu: dict[str, Any], host: dict[str, Any]) -> None:
    """Add launch_start, launch_end and launch_thread to `gpu`: the host call with the same correlation.

    Several operations may share one call (a CUDA graph). Where two calls share a correlation, the later one launched.
    """
    count = len(gpu["correlation"])
    gpu["launch_start"] = np.full(count, np.nan)
    gpu["launch_end"] = np.full(count, np.nan)
    gpu["launch_thread"] = np.full(count, -1, np.int32)
    if not host:
        return
    calls = np.flatnonzero((host["kind"] == HostKind.RUNTIME) & (host["correlation"] >= 0))
    if not len(calls):
        return
    calls = calls[np.lexsort((host["start"][calls], host["correlation"][calls]))]
    keys = host["correlation"][calls]
    at = np.searchsorted(keys, gpu["correlation"], side="right") - 1
    found = (at >= 0) & (gpu["correlation"] >= 0)
    found[found] = keys[at[found]] == gpu["correlation"][found]
    source = calls[at[found]]
    gpu["launch_start"][found] = host["start"][source]
    gpu["launch_end"][found] = host["end"][source]
    gpu["launch_thread"][found] = host["thread"][source]


def previous_on_stream(stream: I64) -> I64:
    """For operations in order of start, the one before each on its stream; -1: none."""
    order = np.argsort(stream, kind="stable")
    previous = np.full(len(stream), -1, np.int64)
    same = stream[order[1:]] == stream[order[:-1]]
    previous[order[1:][same]] = order[:-1][same]
    return previous


def sorted_gpu(columns: dict[str, Any]) -> GpuOps:
    """`GpuOps` sorted by start (then stream)."""
    order = np.lexsort((columns["stream"], columns["start"]))
    return GpuOps(**{name: columns[name][order] for name in GpuOps.__dataclass_fields__})


def sorted_host(columns: dict[str, Any]) -> HostOps:
    """`HostOps` sorted by start, an enclosing range before what it encloses; empty columns give an empty table."""
    types = {"start": np.float64, "end": np.float64, "name": np.int32, "kind": np.uint8, "thread": np.int32,
             "correlation": np.int64, "stream": np.int64, "waits_for": np.int64, "waits_on": np.int64}  # fmt: skip
    if not columns:
        return HostOps(**{name: np.empty(0, kind) for name, kind in types.items()})
    order = np.lexsort((-columns["end"], columns["start"]))
    return HostOps(**{name: columns[name][order].astype(kind, copy=False) for name, kind in types.items()})
