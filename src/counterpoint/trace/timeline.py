"""One rank's trace as columns: what every reader produces and every analysis consumes.

Columns of one table have one length and are numpy arrays. Times are float64 µs since `origin_ns`, so that
differences keep nanoseconds even where the file counts from 1970.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["CollectiveInfo", "Device", "GpuOps", "HostKind", "HostOps", "Kind", "Timeline"]

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
I32 = npt.NDArray[np.int32]
U8 = npt.NDArray[np.uint8]


class Kind(IntEnum):
    """What a GPU operation is, told by what it is and never by its stream."""

    COMPUTE = 0
    COMM = 1
    MEMCPY = 2  # copies and memsets that stay on one device or go to the host


class HostKind(IntEnum):
    """What a host range is."""

    OP = 0  # aten:: and other dispatcher operations
    RUNTIME = 1  # CUDA/HIP runtime and driver calls
    ANNOTATION = 2  # record_function, ProfilerStep, NVTX
    PYTHON = 3  # python_function frames
    SYNC = 4  # cuda_sync: stream wait event, event/stream/context synchronise as the driver saw it


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """Properties of the GPU that ran the rank, as the trace states them; None where it does not."""

    name: str | None = None
    num_sms: int | None = None
    regs_per_sm: int | None = None
    smem_per_sm: int | None = None
    threads_per_sm: int | None = None
    compute_capability: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveInfo:
    """What the framework said about one collective (c10d's `record_param_comms`); None where it did not say."""

    op: str | None = None  # normalised: all_gather, reduce_scatter, ...
    group: str | None = None  # process group name
    group_desc: str | None = None
    group_ranks: str | None = None  # as printed, "[0, 1, 2, 3]"; may be cut by the profiler
    group_size: int | None = None
    seq: int | None = None
    comms_id: str | None = None
    in_nelems: int | None = None
    out_nelems: int | None = None
    dtype: str | None = None
    src_rank: int | None = None
    dst_rank: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuOps:
    """GPU operations, sorted by start."""

    start: F64
    end: F64
    name: I32  # into Timeline.names
    kind: U8  # Kind
    stream: I64
    correlation: I64  # -1: none
    launch_start: F64  # of the host call that launched it; NaN: unknown
    launch_end: F64
    launch_thread: I32  # as HostOps.thread; -1: unknown
    grid: I32  # [n, 3]
    block: I32  # [n, 3]
    regs: I32  # registers per thread; 0: unknown
    smem: I64  # shared memory per block, static + dynamic
    bytes: I64  # of a copy; -1: unknown
    shape: I32  # into Timeline.shapes (input shapes of the launching operation); -1: unknown
    collective: I32  # into Timeline.collectives; -1: none

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostOps:
    """Host ranges, sorted by start."""

    start: F64
    end: F64
    name: I32
    kind: U8  # HostKind
    thread: I32  # dense index of (pid, tid)
    correlation: I64  # runtime calls and syncs; -1: none
    stream: I64  # SYNC: the stream that waits; -1: none
    waits_for: I64  # SYNC: correlation of the cudaEventRecord waited for; -1: not stated
    waits_on: I64  # SYNC: the stream that event was recorded on; -1: not stated

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """One rank."""

    rank: int
    rank_known: bool  # False: guessed from the file name or order
    world_size: int | None
    job: dict[str, Any]  # what must agree between ranks of one job: backend, nccl version, group sizes, GPU
    path: str
    format: str
    events: int
    origin_ns: int
    device: Device
    names: tuple[str, ...]
    shapes: tuple[str, ...]
    gpu: GpuOps
    host: HostOps
    collectives: tuple[CollectiveInfo, ...]
