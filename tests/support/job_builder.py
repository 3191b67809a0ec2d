"""Small jobs written out as literals, read by the same code as real traces.

    job(rank(op("matmul", 0, 100), comm("all_reduce", 100, 150)),
        rank(op("matmul", 0, 120), comm("all_reduce", 120, 150)))

All times in µs on one clock. An operation is launched `latency` before it begins unless `launch` says when; host calls
are given in any order.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from counterpoint.diagnosis.api import diagnose_digests
from counterpoint.diagnosis.reading.digest import RankDigest, digest
from counterpoint.diagnosis.reading.traced_job import TracedJob, assemble
from counterpoint.records.diagnosis import Diagnosis
from counterpoint.trace.timeline import CollectiveInfo, Device, GpuOps, HostKind, HostOps, Kind, Timeline

COMPUTE_STREAM, COMM_STREAM = 7, 20
LATENCY_US = 10.0
H200 = Device(
    name="NVIDIA H200", num_sms=132, regs_per_sm=65536, smem_per_sm=233472, threads_per_sm=2048,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Op:
    name: str
    start: float
    end: float
    kind: Kind = Kind.COMPUTE
    stream: int = COMPUTE_STREAM
    launch: float | None = None  # NaN: unknown; None: LATENCY_US before the start
    call_us: float = 5.0
    thread: int = 0
    grid: tuple[int, int, int] = (132, 1, 1)
    block: tuple[int, int, int] = (384, 1, 1)
    regs: int = 168
    smem: int = 0
    bytes: int = -1
    shape: str | None = None
    info: CollectiveInfo | None = None


@dataclass(frozen=True, kw_only=True)
class Host:
    name: str
    start: float
    end: float
    kind: HostKind = HostKind.RUNTIME
    thread: int = 0


@dataclass(frozen=True, kw_only=True)
class Rank:
    ops: tuple[Op, ...]
    hosts: tuple[Host, ...] = ()
    steps: tuple[tuple[float, float], ...] = ()  # ProfilerStep ranges on the host
    origin_us: int = 0  # what its clock reads at time 0 of its columns
    device: Device = field(default_factory=lambda: H200)


def op(name: str, start: float, end: float, **more: Any) -> Op:
    return Op(name=name, start=start, end=end, **more)


def comm(name: str, start: float, end: float, *, seq: int | None = None, ctas: int = 24, **more: Any) -> Op:
    """A collective's kernel on the communication stream; `seq` numbers it, else its place among the rank's own does."""
    info = CollectiveInfo(op=name, group="0", seq=seq, in_nelems=1 << 20, out_nelems=1 << 20, dtype="Float")
    return Op(**{"name": f"ncclDevKernel_{name}", "start": start, "end": end, "kind": Kind.COMM, "stream": COMM_STREAM,
                 "grid": (ctas, 1, 1), "info": info, **more})  # fmt: skip


def host(name: str, start: float, end: float, kind: HostKind = HostKind.RUNTIME, *, thread: int = 0) -> Host:
    """A host range: `cudaStreamSynchronize`, `cudaStreamWaitEvent`, an operation, ..."""
    return Host(name=name, start=start, end=end, kind=kind, thread=thread)


def rank(*parts: Op | Host, steps: Iterable[tuple[float, float]] = ((0.0, 1.0),), **more: Any) -> Rank:
    """A rank of operations and host ranges; by default one step, which ends with the last operation."""
    ops = tuple(p for p in parts if isinstance(p, Op))
    hosts = tuple(p for p in parts if isinstance(p, Host))
    steps = tuple(steps)
    if steps == ((0.0, 1.0),):
        launches = [launched(o) for o in ops if np.isfinite(launched(o))]
        steps = ((0.0, max([1.0, *(at + 1.0 for at in launches)])),)
    return Rank(ops=ops, hosts=hosts, steps=steps, **more)


def launched(o: Op) -> float:
    return o.start - LATENCY_US if o.launch is None else o.launch


def job(*ranks: Rank) -> TracedJob:
    return assemble([digested(r, number, len(ranks)) for number, r in enumerate(ranks)])


def diagnosed(*ranks: Rank, world_size: int | None = None) -> Diagnosis:
    """The diagnosis of these ranks, the first ones of a job of `world_size` (None: there are no others)."""
    digests = [digested(r, number, world_size or len(ranks)) for number, r in enumerate(ranks)]
    return diagnose_digests(digests, [d.path for d in digests]).diagnosis


def digested(r: Rank, number: int = 0, world_size: int = 1) -> RankDigest:
    return digest(timeline(r, number, world_size))


def timeline(r: Rank, number: int = 0, world_size: int = 1) -> Timeline:
    ops = sorted(r.ops, key=lambda o: (o.start, o.end))
    steps = [Host(name=f"ProfilerStep#{i}", start=a, end=b, kind=HostKind.ANNOTATION)
             for i, (a, b) in enumerate(r.steps)]  # fmt: skip
    hosts = sorted([*r.hosts, *steps], key=lambda h: h.start)
    names = {n: i for i, n in enumerate(dict.fromkeys([o.name for o in ops] + [h.name for h in hosts]))}
    shapes = {s: i for i, s in enumerate(dict.fromkeys(o.shape for o in ops if o.shape is not None))}
    infos = _numbered(ops)
    return Timeline(
        rank=number, rank_known=True, world_size=world_size, job={}, path=f"rank{number}.json", format="kineto",
        events=len(ops) + len(hosts), origin_ns=r.origin_us * 1000, device=r.device, names=tuple(names),
        shapes=tuple(shapes), gpu=_gpu(ops, names, shapes, infos), host=_host(hosts, names),
        collectives=tuple(info for info in infos if info is not None),
    )  # fmt: skip


def _numbered(ops: list[Op]) -> list[CollectiveInfo | None]:
    """Each operation's collective, with its order as `seq` where it states none."""
    infos: list[CollectiveInfo | None] = []
    count = 0
    for o in ops:
        if o.info is not None and o.info.seq is None:
            fields = {n: getattr(o.info, n) for n in CollectiveInfo.__dataclass_fields__}
            infos.append(CollectiveInfo(**{**fields, "seq": count}))
        else:
            infos.append(o.info)
        count += o.info is not None
    return infos


def _gpu(ops: list[Op], names: dict[str, int], shapes: dict[str, int], infos: list[CollectiveInfo | None]) -> GpuOps:
    launch = np.array([launched(o) for o in ops], np.float64)
    stated = np.cumsum([info is not None for info in infos], dtype=np.int32) - 1
    return GpuOps(
        start=np.array([o.start for o in ops], np.float64), end=np.array([o.end for o in ops], np.float64),
        name=np.array([names[o.name] for o in ops], np.int32), kind=np.array([o.kind for o in ops], np.uint8),
        stream=np.array([o.stream for o in ops], np.int64), correlation=np.arange(len(ops), dtype=np.int64),
        launch_start=launch, launch_end=launch + np.array([o.call_us for o in ops], np.float64),
        launch_thread=np.array([o.thread for o in ops], np.int32),
        grid=np.array([o.grid for o in ops], np.int32).reshape(-1, 3),
        block=np.array([o.block for o in ops], np.int32).reshape(-1, 3), regs=np.array([o.regs for o in ops], np.int32),
        smem=np.array([o.smem for o in ops], np.int64), bytes=np.array([o.bytes for o in ops], np.int64),
        shape=np.array([-1 if o.shape is None else shapes[o.shape] for o in ops], np.int32),
        collective=np.where([info is not None for info in infos], stated, -1).astype(np.int32),
    )  # fmt: skip


def _host(hosts: list[Host], names: dict[str, int]) -> HostOps:
    none = np.full(len(hosts), -1, np.int64)
    return HostOps(
        start=np.array([h.start for h in hosts], np.float64),
        end=np.array([h.end for h in hosts], np.float64),
        name=np.array([names[h.name] for h in hosts], np.int32),
        kind=np.array([h.kind for h in hosts], np.uint8),
        thread=np.array([h.thread for h in hosts], np.int32),
        correlation=none, stream=none, waits_for=none, waits_on=none,
    )  # fmt: skip
