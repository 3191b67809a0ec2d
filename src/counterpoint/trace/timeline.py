"""Define the columns of one rank's trace, which every reader produces and every analysis uses.

Columns of one table have one length and are numpy arrays. Times are float64 µs since `origin_ns`, so that
differences keep nanoseconds even where the file counts from 1970.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

K = TypeVar("K")

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
I32 = npt.NDArray[np.int32]
U8 = npt.NDArray[np.uint8]
Bools = npt.NDArray[np.bool_]

MIGRATION = "Unified Memory memcpy"  # prefix of the names of copies that move pages of unified memory
DEVICE_BITS = 32  # bits of `stream` below the number of the GPU, where one process drives several
ROUNDED_US = 1.0  # old traces have whole µs: an operation may seem to begin this much before the end of the one before


class Kind(IntEnum):
    """Names the kinds of GPU operations (see classify.py)."""

    COMPUTE = 0
    COMM = 1
    MEMCPY = 2  # copies and memsets that stay on one device or go to the host


class HostKind(IntEnum):
    """Names the kinds of host ranges."""

    OP = 0  # aten:: and other dispatcher operations
    RUNTIME = 1  # CUDA/HIP runtime and driver calls
    ANNOTATION = 2  # record_function, ProfilerStep, NVTX
    PYTHON = 3  # python_function frames
    SYNC = 4  # cuda_sync: stream wait event, event/stream/context synchronise as the driver recorded it


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """Holds the properties of the rank's GPU, as the trace states them; None: not stated."""

    name: str | None = None
    num_sms: int | None = None
    regs_per_sm: int | None = None
    smem_per_sm: int | None = None
    threads_per_sm: int | None = None
    index: int | None = None  # its index among the GPUs of its host, ...
    host_gpus: int | None = None  # ... and their number, if the trace lists at least two
    recorded: bool = True  # False: the program used the GPU, but the trace has none of its operations

    @property
    def from_host(self) -> bool:
        """Return whether host operations stand in for GPU operations: in CPU jobs, or if no GPU was recorded."""
        return self.name == "cpu" or not self.recorded


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveInfo:
    """Holds the metadata of one collective, as c10d recorded it (`record_param_comms`); None: not recorded."""

    op: str | None = None  # normalised: all_gather, reduce_scatter, ...
    group: str | None = None  # process group name
    group_desc: str | None = None  # the program's name for it: default_pg, "dp_shard", "TENSOR_MODEL_PARALLEL_GROUP"
    group_ranks: str | None = None  # as printed, "[0, 1, 2, 3]"; may be cut by the profiler
    group_size: int | None = None
    seq: int | None = None
    comms_id: str | None = None
    in_nelems: int | None = None
    out_nelems: int | None = None
    dtype: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuOps:
    """Holds the columns of a rank's GPU operations, sorted by start."""

    start: F64
    end: F64
    name: I32  # into Timeline.names
    kind: U8  # Kind
    stream: I64
    correlation: I64  # -1: none
    launch_start: F64  # start of the host call that launched it; NaN: unknown
    launch_end: F64
    launch_thread: I32  # as HostOps.thread; -1: unknown
    grid: I32  # [n, 3]
    block: I32  # [n, 3]
    regs: I32  # registers per thread; 0: unknown
    smem: I64  # shared memory per block, static + dynamic
    bytes: I64  # of a copy; -1: unknown
    shape: I32  # into Timeline.shapes (input shapes of the launching operation); -1: unknown
    collective: I32  # into Timeline.collectives; -1: none
    cluster: I32 | None = None  # blocks of a cluster, 0: launched without; None: the trace does not hold them
    operator: I32 | None = None  # into Timeline.names: the host operation that launched it; -1: unknown
    inputs: I32 | None = None  # into RankFacts.inputs: that operation's inputs; -1: unknown
    call: I64 | None = None  # equal for all GPU operations of one call of that operation; -1: unknown

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True, slots=True)
class OperatorInputs:
    """Holds the inputs of a host operation as the trace states them: lists in JSON; "": not stated."""

    shapes: str  # "[[4096,1024],[1024,512],[]]"
    dtypes: str  # "[\"c10::BFloat16\",\"c10::BFloat16\",\"Scalar\"]"
    values: str  # of scalars and lists of scalars; only for convolutions and attention


@dataclass(frozen=True, kw_only=True, slots=True)
class HostOps:
    """Holds the columns of a rank's host ranges, sorted by start."""

    start: F64
    end: F64
    name: I32
    kind: U8  # HostKind
    thread: I32  # dense index of (pid, tid)
    correlation: I64  # runtime calls and syncs; -1: none
    stream: I64  # SYNC: the stream that waits; -1: none
    waits_for: I64  # SYNC: correlation of the cudaEventRecord call of the awaited event; -1: not stated
    waits_on: I64  # SYNC: the stream on which that event was recorded; -1: not stated
    sequence: I64 | None = None  # OP: number that autograd gives a forward operation and its gradient; -1: none

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFacts:
    """Holds facts about one rank's trace: rank, job, source file and GPU."""

    rank: int
    rank_known: bool  # False: guessed from the file name or order
    world_size: int | None
    job: dict[str, Any]  # what must agree between ranks of one job: backend, nccl version, group sizes, GPU
    path: str
    format: str
    events: int
    origin_ns: int
    device: Device
    notes: tuple[str, ...] = ()  # remarks on this trace for the reader of the diagnosis
    processes: int = 1  # processes read as this rank: more than 1 if a file holds several that cannot be separated
    priorities: dict[int, int] = field(default_factory=dict)  # of streams: lower goes first; empty: not in the trace
    # torch's name of the dtype of matmuls by their index into `shapes`; unknown or ambiguous dtypes are left out
    matmul_dtypes: dict[int, str] = field(default_factory=dict)
    inputs: tuple[OperatorInputs, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline(RankFacts):
    """Holds the trace of one rank; times are µs since `origin_ns` on the rank's own clock."""

    names: tuple[str, ...]
    shapes: tuple[str, ...]
    gpu: GpuOps
    host: HostOps
    collectives: tuple[CollectiveInfo, ...]


def device_of(stream: I64) -> I64:
    """Return each stream's GPU number; 0 if the process drives one GPU, -1 if the trace states no GPU."""
    return stream >> DEVICE_BITS


class Intern(dict[K, int]):
    """Numbers keys from 0 on in the order of first use: `table[key]` is a key's number, `tuple(table)` the keys."""

    def __missing__(self, key: K) -> int:
        self[key] = number = len(self)
        return number


def join_launches(gpu: dict[str, Any], host: dict[str, Any]) -> None:
    """Add launch_start, launch_end and launch_thread to `gpu`, from the host call with the same correlation.

    Several operations may share one call (a CUDA graph). Of two calls with one correlation, the later
    counts as the launch.
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
    """Return, for each operation, the row of the previous one on the same stream (rows sorted by start); -1: none."""
    order = np.argsort(stream, kind="stable")
    previous = np.full(len(stream), -1, np.int64)
    same = stream[order[1:]] == stream[order[:-1]]
    previous[order[1:][same]] = order[:-1][same]
    return previous


def sorted_gpu(columns: dict[str, Any]) -> GpuOps:
    """Return `columns` as `GpuOps`, sorted by start, then stream."""
    order = np.lexsort((columns["stream"], columns["start"]))
    return GpuOps(**{name: columns[name][order] for name in GpuOps.__dataclass_fields__ if name in columns})


def sorted_host(columns: dict[str, Any]) -> HostOps:
    """Return `columns` as `HostOps`, sorted by start, enclosing ranges first; without columns, an empty table.

    Removes the columns from `columns`, so that a large trace is not in memory twice.
    """
    types = {"start": np.float64, "end": np.float64, "name": np.int32, "kind": np.uint8, "thread": np.int32,
             "correlation": np.int64, "stream": np.int64, "waits_for": np.int64, "waits_on": np.int64,
             "sequence": np.int64}  # fmt: skip
    if not columns:
        return HostOps(**{name: np.empty(0, kind) for name, kind in types.items()})
    order = np.lexsort((-columns["end"], columns["start"]))
    unused = [name for name in ("stream", "waits_for", "waits_on", "sequence") if not (columns[name] >= 0).any()]
    for name in unused:  # one value takes the place of a column in which every row has it
        columns[name] = np.broadcast_to(np.int64(-1), len(order))
    return HostOps(
        **{
            name: values if name in unused else values[order].astype(kind, copy=False)
            for name, kind in types.items()
            for values in [columns.pop(name)]
        }
    )
