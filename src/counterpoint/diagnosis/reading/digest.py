"""Reduce each rank's trace to a digest: all data that the diagnosis needs, small enough to send.

Reading and digesting a rank needs nothing from other ranks, so it can run on the machine that has the rank's file;
everything that joins ranks works on digests. Ranks are read in this process, in parallel processes, or on a Dask
cluster that has the files; each engine calls `digest_file` and gives equal digests in the same order. Digests travel
from host to host as bytes (`pack_digest`), which are checked before they are used.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sized
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np

from counterpoint.diagnosis.reading.comm_rows import MOST_RANKS, CommRows, comm_rows
from counterpoint.diagnosis.reading.gaps import Gaps, find_gaps
from counterpoint.diagnosis.reading.host_categories import CATEGORIES
from counterpoint.diagnosis.reading.modules import PHASES, NamedRanges, Origins, Places
from counterpoint.diagnosis.reading.operator_work import matrix_product
from counterpoint.diagnosis.reading.packing import pack, read_part, unpack
from counterpoint.diagnosis.reading.steps import FOUND_BY, StepWindows, find_steps
from counterpoint.errors import BadTrace, CounterpointError, Misconfigured, Unsupported
from counterpoint.records.diagnosis import RankAccount
from counterpoint.trace.classify import is_matmul
from counterpoint.trace.kineto import read_kineto
from counterpoint.trace.source import Limits, TraceFile
from counterpoint.trace.timeline import F64, I32, I64, U8, GpuOps, HostKind, Intern, Kind, RankFacts, Timeline

_BLOCKING = ("Synchronize", "cudaMemcpy", "hipMemcpy", "cuMemcpyDtoH_v2", "cuMemcpyHtoD_v2")

SUMMARY, DETAILS = 0, 1  # parts of a digest's file
Progress = Callable[[int, int, str], None]  # files done, number of files, text about the current work
_KEPT_BYTES = 16 << 20
_SMALL_BYTES = 4 << 20  # bytes of traces below which starting processes takes longer than reading


@dataclass(frozen=True, kw_only=True, slots=True)
class HostWaits:
    """Holds host calls that block until the GPU is done, and streams' waits for events; both sorted by start."""

    start: F64
    end: F64
    wait_call: F64  # host times of every cudaStreamWaitEvent call
    stream_wait_at: F64  # host time of cudaStreamWaitEvent
    stream_wait_stream: I64  # the stream that waits
    stream_wait_for: I32  # the GPU operation waited for; -1: none before the event


@dataclass(frozen=True, kw_only=True, slots=True)
class RankDigest(RankFacts):
    """Holds the data of one rank's trace that the diagnosis needs; µs since `origin_ns` on the rank's clock."""

    names: tuple[str, ...]
    shapes: tuple[str, ...]
    gpu: GpuOps
    comm: CommRows
    steps: StepWindows
    gaps: Gaps
    waits: HostWaits
    flops: F64  # per GPU operation; NaN: unknown
    gap_places: Places  # phase and module of each row of `gaps`
    op_places: Places  # phase and module of each compute operation
    origins: Origins  # module and Python functions of each compute operation and copy

    @property
    def largest_group(self) -> int:
        """Return the number of ranks of the largest group that a collective states; 0: none is stated."""
        return int(self.comm.size.max(initial=0))


@dataclass(frozen=True, kw_only=True, slots=True)
class CallKind:
    """Names the collectives of a rank that have one operation, group and size; `bytes` -1: not stated."""

    op: str
    group: str
    ranks: tuple[int, ...] | None  # of the group; None: not stated
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSummary(RankFacts):
    """Holds the part of a rank's digest that joins it with thousands of ranks; µs since `origin_ns` on its clock.

    The columns `kind` to `end` have one element for each collective, in the order of their launches.
    """

    largest_group: int
    account: RankAccount  # of the rank alone: waits are not known
    steps: StepWindows
    kinds: tuple[CallKind, ...]
    kind: I32  # into `kinds`
    ident: I64  # equal on all ranks of a collective, as far as they number them; -1: not numbered
    start: F64
    end: F64
    hidden_start: F64  # when both compute and communication run
    hidden_end: F64


def digest(timeline: Timeline) -> RankDigest:
    """Return the digest of one rank: its steps, collectives, gaps, host waits and FLOPs."""
    gpu, steps = timeline.gpu, find_steps(timeline)
    gaps = find_gaps(timeline, steps)
    ranges = NamedRanges.of(timeline)
    in_gaps, of_ops, origins = ranges.gaps(gaps), ranges.compute(), ranges.origins()
    named = (origins.module, gaps.operations.name, gaps.functions.name, in_gaps.module, of_ops.module)
    operator = np.full(len(gpu), -1, np.int32) if gpu.operator is None else gpu.operator
    used = np.unique(np.concatenate((gpu.name, operator, gaps.operation, gaps.inside, gaps.pauses.operation, *named)))
    used = used[used >= 0]
    renumber = np.full(len(timeline.names) + 1, -1, np.int32)  # the last entry, index -1, stands for no name
    facts = {name: getattr(timeline, name) for name in RankFacts.__dataclass_fields__}
    renumber[used] = np.arange(len(used), dtype=np.int32)
    return RankDigest(
        **facts | {"notes": (*timeline.notes, *steps.notes)},
        names=tuple(timeline.names[i] for i in used.tolist()),
        shapes=timeline.shapes,
        gpu=replace(gpu, name=renumber[gpu.name], operator=renumber[operator]),
        comm=comm_rows(timeline, ranges),
        steps=steps,
        gaps=replace(
            gaps,
            operation=renumber[gaps.operation],
            inside=renumber[gaps.inside],
            operations=replace(gaps.operations, name=renumber[gaps.operations.name]),
            functions=replace(gaps.functions, name=renumber[gaps.functions.name]),
            pauses=replace(gaps.pauses, operation=renumber[gaps.pauses.operation]),
        ),
        waits=_waits(timeline),
        flops=_matmul_flops(timeline),
        gap_places=replace(in_gaps, module=renumber[in_gaps.module]),
        op_places=replace(of_ops, module=renumber[of_ops.module]),
        origins=replace(origins, module=renumber[origins.module]),
    )


def _waits(timeline: Timeline) -> HostWaits:
    host, names = timeline.host, timeline.names
    blocking = np.array([n.endswith(_BLOCKING[:1]) or n in _BLOCKING for n in names], bool)
    rows = np.flatnonzero((host.kind == HostKind.RUNTIME) & blocking[host.name])
    at, stream, waited = _stream_waits(timeline)
    waits = np.array([n.endswith("StreamWaitEvent") for n in names], bool)
    calls = np.flatnonzero((host.kind == HostKind.RUNTIME) & waits[host.name])
    return HostWaits(
        start=host.start[rows], end=host.end[rows], wait_call=host.start[calls],
        stream_wait_at=at, stream_wait_stream=stream, stream_wait_for=waited,
    )  # fmt: skip


def _stream_waits(timeline: Timeline) -> tuple[F64, I64, I32]:
    """Return host time, waiting stream and awaited GPU operation of each stream wait with a recorded event.

    The awaited operation is the last one launched on the event's stream before the event was recorded.
    """
    host, gpu = timeline.host, timeline.gpu
    rows = np.flatnonzero((host.kind == HostKind.SYNC) & (host.waits_for >= 0) & (host.waits_on >= 0))
    records = np.flatnonzero((host.kind == HostKind.RUNTIME) & (host.correlation >= 0))
    records = records[np.argsort(host.correlation[records], kind="stable")]
    waited = np.full(len(rows), -1, np.int32)
    keys, wanted = host.correlation[records], host.waits_for[rows]
    at = np.searchsorted(keys, wanted)
    known = at < len(keys)
    known[known] = keys[at[known]] == wanted[known]
    for stream in np.unique(host.waits_on[rows[known]]).tolist():
        launched = np.flatnonzero((gpu.stream == stream) & np.isfinite(gpu.launch_start))
        launched = launched[np.argsort(gpu.launch_start[launched], kind="stable")]
        here = np.flatnonzero(known & (host.waits_on[rows] == stream))
        last = np.searchsorted(gpu.launch_start[launched], host.start[records[at[here]]]) - 1
        waited[here[last >= 0]] = launched[last[last >= 0]]
    return host.start[rows], host.stream[rows], waited


def _matmul_flops(timeline: Timeline) -> F64:
    """Return the FLOPs of each GPU operation; NaN if it is no matrix product or lacks shapes (`record_shapes=True`)."""
    gpu = timeline.gpu
    is_gemm = np.array([is_matmul(n) for n in timeline.names], bool)
    by_shape = np.full(len(timeline.shapes) + 1, np.nan)
    flops = np.full(len(gpu), np.nan)
    if not len(gpu):
        return flops
    rows = np.flatnonzero((gpu.kind == Kind.COMPUTE) & (gpu.shape >= 0) & is_gemm[gpu.name])
    for shape in np.unique(gpu.shape[rows]).tolist():
        if product := matrix_product(timeline.shapes[shape]):
            by_shape[shape] = 2.0 * math.prod(map(float, product))
    flops[rows] = by_shape[gpu.shape[rows]]
    return flops


@dataclass(frozen=True, kw_only=True, slots=True)
class _Packed:
    """Holds a digest as it travels: the ranks of a group, thousands maybe, are written once for all its collectives."""

    digest: RankDigest  # without `comm.group_ranks`
    groups: tuple[tuple[int, ...], ...]
    group: I32  # of each collective, an index into `groups`; -1: its ranks are not known


def pack_digest(digest: RankDigest) -> bytes:
    """Serialize a digest to bytes."""
    groups, members = Intern[tuple[int, ...]](), digest.comm.group_ranks
    group = np.array([-1 if ranks is None else groups[ranks] for ranks in members], np.int32)
    comm = replace(digest.comm, group_ranks=(None,) * len(members))
    return pack(_Packed(digest=replace(digest, comm=comm), groups=tuple(groups), group=group))


def unpack_digest(data: bytes, path: str) -> RankDigest:
    """Return the digest that `pack_digest` serialized to these bytes.

    Raises:
        BadTrace: the bytes are no packed digest, or its columns do not fit together; the error names `path`.
    """
    packed = unpack(data, _Packed, path)
    found, groups = packed.digest, (*packed.groups, None)  # index -1 is the last element
    for problem in _problems(found):
        raise BadTrace(f"not a digest as counterpoint writes it: {problem}", path=path)
    if len(packed.group) != len(found.comm) or not _within(packed.group, -1, len(packed.groups)):
        raise BadTrace("not a digest as counterpoint writes it: groups that do not fit", path=path)
    ranks = tuple(groups[i] for i in packed.group.tolist())
    return replace(found, comm=replace(found.comm, group_ranks=ranks))


def _within(index: I32 | I64 | U8, low: int, count: int) -> bool:
    """Return whether all of these indices lie from `low` to `count` - 1."""
    return not len(index) or bool(index.min() >= low and index.max() < count)


def _problems(d: RankDigest) -> Iterator[str]:
    """Yield what makes a digest unusable: columns of unequal length, or indices beyond the table that they point to."""
    gaps, gpu, comm, waits, at = d.gaps, d.gpu, d.comm, d.waits, d.origins
    tables = (gpu, comm, d.gap_places, d.op_places, gaps.operations, gaps.functions, gaps.pauses)
    lengths = [{len(column) for column in _columns(table)} for table in tables]
    lengths += [{len(gpu), len(d.flops)}, {len(d.steps.names), len(d.steps.start), len(d.steps.end)}]
    lengths += [{len(gaps), len(d.gap_places.phase)} | {len(c) for c in _columns(gaps)}]
    lengths += [{len(waits.start), len(waits.end)}, {len(gpu), *(len(c) for c in (at.phase, at.module, at.stack))}]
    lengths += [{len(waits.stream_wait_at), len(waits.stream_wait_stream), len(waits.stream_wait_for)}]
    flat = all(getattr(c, "ndim", 1) == 1 or c is gpu.grid or c is gpu.block for t in tables for c in _columns(t))
    wide = {(len(gpu), 3)} == {gpu.grid.shape, gpu.block.shape}
    if not (flat and wide) or any(len(each) > 1 for each in lengths):
        yield "columns of unequal length"
        return
    times = np.concatenate((gpu.start, gpu.end, comm.start, comm.end, d.steps.start, d.steps.end))
    if d.steps.found_by not in FOUND_BY or not d.steps.names or not np.isfinite(times).all():
        yield "no step, or a time that is no number"
    of_names: tuple[I32, ...] = (
        gaps.operation,
        gaps.inside,
        gaps.operations.name,
        gaps.functions.name,
        gaps.pauses.operation,
    )
    of_names += (d.gap_places.module, d.op_places.module, at.module)
    of_names += () if gpu.operator is None else (gpu.operator,)
    causes = (gaps.category, gaps.operations.category, gaps.functions.category, gaps.pauses.category)
    fits = [_within(column, -1, len(d.names)) for column in of_names]
    fits += [_within(column, 0, len(CATEGORIES)) for column in causes]
    fits += [_within(column, 0, len(PHASES)) for column in (d.gap_places.phase, d.op_places.phase, at.phase)]
    fits += [_within(at.stack, 0, len(at.stacks)), gpu.inputs is None or _within(gpu.inputs, -1, len(d.inputs))]
    fits += [_within(column, 0, len(gpu)) for column in (comm.first, comm.last)]
    fits += [_within(gpu.kind, 0, len(Kind)), _within(gpu.shape, -1, len(d.shapes)), _within(gpu.name, 0, len(d.names))]
    fits += [_within(comm.size, 0, MOST_RANKS + 1), _within(waits.stream_wait_for, -1, len(gpu))]
    fits += [_within(gaps.pauses.number, 0, len(gaps.pauses.number) + 1)]
    if not all(fits):
        yield "an index beyond its table"


def _columns(table: object) -> Iterator[Sized]:
    """Yield the columns of a table: its fields that are arrays or tuples."""
    values = (getattr(table, name) for name in table.__dataclass_fields__)  # type: ignore[attr-defined]
    return (value for value in values if isinstance(value, np.ndarray | tuple))


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Describes how traces are read; raises `Misconfigured` if an option has no effect with the chosen engine."""

    name: str = "local"  # "local" (processes of this machine) or "dask"
    workers: int | None = None  # local only: number of processes; None: one per core that this process may use
    scheduler: str | None = None  # dask only, and required there: the scheduler's address, as in `tcp://host:8786`

    def __post_init__(self) -> None:
        if self.name not in ("local", "dask"):
            raise Misconfigured(f"engine {self.name!r}; one of local, dask")
        if self.name == "dask" and not self.scheduler:
            raise Misconfigured("engine dask needs the address of a scheduler: --scheduler tcp://HOST:8786")
        if self.name == "local" and self.scheduler:
            raise Misconfigured("a scheduler is only used by --engine dask; drop it or choose that engine")
        if self.name == "dask" and self.workers is not None:
            raise Misconfigured("the number of workers is the Dask cluster's own; drop --workers")
        if self.workers is not None and self.workers < 1:
            raise Misconfigured(f"{self.workers} workers; at least 1")


def digest_file(file: TraceFile, limits: Limits) -> list[RankDigest]:
    """Return the digests of one file: mostly one rank for Kineto, every rank of the export for Nsight Systems."""
    if file.format == "digest":
        return [replace(unpack_digest(read_part(file, DETAILS, limits), file.label), path=file.label)]
    if file.format == "nsys":
        from counterpoint.trace.nsys import read_nsys

        try:
            return [replace(digest(timeline), path=file.label) for timeline in read_nsys(file.path)]
        except BadTrace as error:  # the reader knows only the path, which may be a temporary one from an archive
            raise BadTrace(error.reason, path=file.label, offset=error.offset) from None
    return [digest(timeline) for timeline in read_kineto(file, limits)]


def digest_all(
    files: list[TraceFile], limits: Limits, engine: Engine, progress: Progress | None = None
) -> list[RankDigest]:
    """Return the digests of all files, in the order of `files`.

    Raises `BadTrace` for the first file (in that order) that cannot be read, `CounterpointError` if a process or worker
    died, and `Unsupported` if dask is not installed or its scheduler does not answer.
    """
    tell = progress or (lambda done, total, what: None)
    if engine.name == "dask":
        return _on_dask(files, limits, engine, tell)
    workers = engine.workers or len(os.sched_getaffinity(0))
    slow = sum(f.path.stat().st_size for f in files if f.format != "digest")
    small = slow < _SMALL_BYTES and engine.workers is None
    if min(workers, len(files)) == 1 or small:
        return _in_turn(files, limits, tell)
    return _in_processes(files, limits, min(workers, len(files)), tell)


def _in_turn(files: list[TraceFile], limits: Limits, tell: Progress) -> list[RankDigest]:
    found: list[RankDigest] = []
    for done, file in enumerate(files):
        tell(done, len(files), f"reading {file.label}")
        if file.format == "kineto":
            timelines = read_kineto(
                file,
                limits,
                progress=lambda events, at=done: tell(at, len(files), f"{events:,} events"),  # type: ignore[misc]
            )
            tell(done, len(files), "digesting")
            found += [digest(timeline) for timeline in timelines]
        else:
            found += digest_file(file, limits)
    return found


def _in_processes(files: list[TraceFile], limits: Limits, workers: int, tell: Progress) -> list[RankDigest]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker) as pool:
        with _main_left_alone():
            futures = [pool.submit(digest_file, file, limits) for file in files]
        pool.submit(int)  # the pool looks for its processes before it starts one: from here on it watches them all
        try:
            return _results(futures, as_completed(futures), tell)
        except BrokenProcessPool:
            raise CounterpointError(
                "a process that read a rank died; if it ran out of memory, ask for fewer at once (--workers 1)"
            ) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _results(futures: list[Any], completed: Iterable[Any], tell: Progress) -> list[RankDigest]:
    """Return the digests in the order of `futures`; once a future fails, raise the error of the first failed one."""
    for done, future in enumerate(completed):
        tell(done + 1, len(futures), "ranks read")
        if future.exception() is not None:
            break
    return [d for future in futures for d in future.result()]


@contextmanager
def _main_left_alone() -> Iterator[None]:
    """Keep spawned processes from importing the caller's script, since they need only functions of this package."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _start_worker() -> None:
    """Make Ctrl-C, which reaches all processes of the terminal, end this worker at once without a traceback.

    Let it keep freed memory, too, since it reads and frees thousands of blocks: glibc returns free memory at the top of
    its heap only beyond twice the largest mapping freed so far, so one large mapping is freed (untouched) first.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    np.empty(_KEPT_BYTES, np.uint8)


def _on_dask(files: list[TraceFile], limits: Limits, engine: Engine, tell: Progress) -> list[RankDigest]:
    try:
        from distributed import CancelledError, Client, KilledWorker
        from distributed import as_completed as dask_completed
        from distributed.comm import CommClosedError
    except ImportError:
        raise Unsupported("engine dask needs the package distributed: pip install 'counterpoint[cluster]'") from None
    try:
        client = Client(engine.scheduler, timeout="10s", set_as_default=False)
    except (OSError, TimeoutError, ValueError) as error:
        raise Unsupported(f"no Dask scheduler answers at {engine.scheduler}: {error}") from None
    with client, client.as_current():
        futures = client.map(digest_file, files, [limits] * len(files), pure=False)
        try:
            return _results(futures, dask_completed(futures), tell)
        except (KilledWorker, CancelledError, CommClosedError) as error:
            raise CounterpointError(f"the Dask cluster at {engine.scheduler} lost a rank's work: {error}") from None
