"""Made-up training jobs with known truth: every rank's Kineto trace, what was planted, and what each transfer took.

A clockwork: a host thread launches, streams run in order, a collective ends `transfer` after its last rank arrived.
Three kinds of jobs: `ddp` on V100 (old kernel names, whole µs, no metadata, no ProfilerStep), `fsdp` on A100
(metadata, ProfilerStep) and `copies` on H200 (gathers by peer copies, scatters by kernels).
"""

import itertools
import json
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.support.kineto_trace import event, metadata

COMPUTE, COMM, COPY = 7, 20, 24
_LATENCY_US = 5.0
_GPU = {"ddp": ("Tesla V100-SXM2-32GB", 80), "fsdp": ("NVIDIA A100-SXM4-80GB", 108), "copies": ("NVIDIA H200", 132)}
_NAMES = {
    "ddp": ("volta_fp16_s884gemm_fp16_128x128_ldg8_f2f_nn", "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", ""),
    "fsdp": (
        "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_64x3_nn",
        "ncclDevKernel_AllGather_RING_LL(ncclDevComm*, unsigned long, ncclWork*)",
        "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevComm*, unsigned long, ncclWork*)",
    ),
    "copies": (
        "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT",
        "Memcpy PtoP (Device -> Device)",
        "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that is wrong with one rank; `steps` empty: in every step.

    kind: stall (`name` or nothing recorded) | sync | allocator | gc | late_input: the host loses `us` once a step;
    slow: kernels take `factor` times as long; work: `factor` times the work in larger grids; work_shapes: the same with
    equal grids and other input shapes.
    """

    kind: str
    rank: int
    us: float = 0.0
    factor: float = 1.0
    steps: tuple[int, ...] = ()
    name: str | None = None


@dataclass(frozen=True, kw_only=True)
class JobPlan:
    """What to generate. shift_us and drift_ppm by rank; `lost` = (rank, n): the n-th collective is not in its trace."""

    style: str = "fsdp"
    ranks: int = 8
    steps: int = 4
    layers: int = 6
    faults: tuple[Fault, ...] = ()
    jitter: float = 0.01
    seed: int = 0
    shift_us: dict[int, float] = field(default_factory=dict)
    drift_ppm: dict[int, float] = field(default_factory=dict)
    lost: tuple[tuple[int, int], ...] = ()
    transfer_us: float = 900.0
    copies_wait: str = "inside"  # the first copy waits for the last rank; or before: all copies begin when it is ready
    loss_item: bool = True  # the host waits for the GPU once a step


@dataclass(frozen=True, kw_only=True)
class Truth:
    """Of every collective in the program's order: transfer, and who was last by how much (after the median rank)."""

    transfer_us: tuple[float, ...]
    last_rank: tuple[int, ...]
    late_us: tuple[float, ...]


class _Rank:
    def __init__(self, rank: int, plan: JobPlan) -> None:
        self.rank, self.plan = rank, plan
        self.random = random.Random(plan.seed * 1009 + rank)
        self.host, self.ids, self.events = 0.0, 0, list[dict[str, Any]]()
        self.stream_end = {COMPUTE: 0.0, COMM: 0.0, COPY: 0.0}
        self.step = 0

    def faults(self, *kinds: str) -> list[Fault]:
        mine = [f for f in self.plan.faults if f.rank == self.rank and f.kind in kinds]
        return [f for f in mine if not f.steps or self.step in f.steps]

    def on_host(self, category: str, name: str, start: float, us: float, **args: Any) -> None:
        self.events.append(event(category, name, start, us, pid=1, tid=1, **args))

    def call(self, name: str, us: float, **args: Any) -> None:
        self.on_host("cuda_runtime", name, self.host, us, **args)
        self.host += us

    def kernel(self, name: str, us: float, *, grid: int = 512, dims: tuple[int, int, int] | None = None) -> None:
        us *= max(0.8, self.random.gauss(1.0, self.plan.jitter))
        for fault in self.faults("slow", "work", "work_shapes"):
            us *= fault.factor
            grid = round(grid * fault.factor) if fault.kind == "work" else grid
            dims = (round(dims[0] * fault.factor), *dims[1:]) if dims and fault.kind != "slow" else dims
        self.ids += 1
        if dims and self.plan.style != "ddp":
            shapes = {"Input Dims": [[dims[0], dims[2]], [dims[2], dims[1]]]}
            self.on_host("cpu_op", "aten::mm", self.host - 2, 10.0, **{"External id": self.ids}, **shapes)
        launched = self.host
        self.call("cudaLaunchKernel", 6.0, correlation=self.ids)
        start = max(launched + _LATENCY_US, self.stream_end[COMPUTE] + 1.0)
        self.stream_end[COMPUTE] = start + us
        self.on_gpu("kernel", name, COMPUTE, start, us, grid=[grid, 1, 1], block=[256, 1, 1],
                    **{"registers per thread": 128, "shared memory": 32768})  # fmt: skip
        self.host += 4.0

    def on_gpu(self, category: str, name: str, stream: int, start: float, us: float, **args: Any) -> None:
        facts = {"device": self.rank, "stream": stream, "correlation": self.ids, "External id": self.ids, **args}
        self.events.append(event(category, name, start, us, pid=self.rank, tid=stream, **facts))

    def lose_time(self, *kinds: str) -> None:
        for fault in self.faults(*kinds):
            if fault.kind == "allocator":
                for _ in range(10):
                    self.call("cudaMalloc", fault.us / 10, correlation=0)
            elif fault.kind == "sync":
                self.call("cudaDeviceSynchronize", fault.us, correlation=0)
            else:
                name = fault.name or {"late_input": "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__",
                                      "gc": "gc.collect"}.get(fault.kind)  # fmt: skip
                if name:
                    self.on_host("user_annotation", name, self.host, fault.us)
                self.host += fault.us


class _Job:
    def __init__(self, plan: JobPlan) -> None:
        self.plan, self.random = plan, random.Random(plan.seed)
        self.ranks = [_Rank(r, plan) for r in range(plan.ranks)]
        self.truth: list[tuple[float, int, float]] = []
        self.gemm, self.gather, self.scatter = _NAMES[plan.style]

    def run(self) -> None:
        for step in range(self.plan.steps):
            begins = [r.host for r in self.ranks]
            for r in self.ranks:
                r.step = step
                r.lose_time("late_input")
            self.forward()
            self.backward()
            for r, begin in zip(self.ranks, begins, strict=True):
                r.stream_end[COMPUTE] = max(r.stream_end.values())
                r.kernel("void at::native::multi_tensor_apply_kernel<FusedAdam>", 500.0, grid=320)
                if self.plan.loss_item:
                    r.call("cudaStreamSynchronize", max(r.stream_end[COMPUTE] - r.host, 0.0) + 8.0, correlation=0)
                if self.plan.style != "ddp":
                    r.on_host("user_annotation", f"ProfilerStep#{step}", begin, r.host - begin)

    def forward(self) -> None:
        for layer in range(self.plan.layers):
            if self.plan.style != "ddp":
                self.collective(self.gather, "_allgather_base", layer)
            for r in self.ranks:
                if layer == 2:
                    r.lose_time("stall", "sync", "allocator", "gc")
                r.stream_end[COMPUTE] = max(r.stream_end[COMPUTE], r.stream_end[COPY])
                self.compute(r, 2)

    def backward(self) -> None:
        for layer in reversed(range(self.plan.layers)):
            for r in self.ranks:
                self.compute(r, 4)
                r.stream_end[COMM] = max(r.stream_end[COMM], r.stream_end[COMPUTE])
            if self.plan.style != "ddp":
                self.collective(self.scatter, "_reduce_scatter_base", layer)
            elif layer % 3 == 0:
                self.collective(self.gather, "allreduce", layer)

    def compute(self, r: _Rank, matmuls: int) -> None:
        for _ in range(matmuls):
            r.kernel(self.gemm, 600.0, grid=432, dims=(4096, 4096, 4096))
            r.kernel("void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add>", 60.0, grid=4096)

    def collective(self, kernel: str, name: str, layer: int) -> None:
        """Every rank launches; all end `transfer` after the last started, peer copies too."""
        copies, number = kernel.startswith("Memcpy"), len(self.truth)
        stream = COPY if "gather" in name else COMM
        starts = []
        for r in self.ranks:
            r.ids += 1
            info = self.metadata(name, r) if not copies else {}
            r.on_host("cpu_op", "record_param_comms", r.host, 20.0, **{"External id": r.ids}, **info)
            r.call("cudaMemcpyBatchAsync" if copies else "cudaLaunchKernel", 8.0, correlation=r.ids)
            starts.append(max(r.host + _LATENCY_US, r.stream_end[stream] + 1.0))
        transfer = self.plan.transfer_us * self.random.uniform(0.9, 1.1) * (1.5 if layer == 0 else 1.0)
        last = max(starts)
        ends = []
        for r, start in zip(self.ranks, starts, strict=True):
            end = last + transfer + self.random.uniform(0.0, 5.0)
            ends.append(end)
            r.stream_end[stream] = end
            if (r.rank, number) not in self.plan.lost:
                self.put(r, kernel, name, stream, start, end, last)
        late = last - sorted(starts)[(len(starts) - 1) // 2]
        self.truth.append((max(ends) - last, self.ranks[starts.index(last)].rank, late))

    def put(self, r: _Rank, kernel: str, name: str, stream: int, start: float, end: float, last: float) -> None:
        if not kernel.startswith("Memcpy"):
            info = self.metadata(name, r)
            r.on_gpu("kernel", kernel, stream, start, end - start, grid=[16, 1, 1], block=[512, 1, 1],
                     **{"registers per thread": 96, "shared memory": 82240}, **info)  # fmt: skip
            return
        peers = self.plan.ranks - 1
        start = last if self.plan.copies_wait == "before" else start
        edges = [start, *(last + (end - last) * (i + 1) / peers for i in range(peers))]
        for begin, finish in itertools.pairwise(edges):  # the first waits for the last rank to be ready
            r.on_gpu("gpu_memcpy", kernel, stream, begin, finish - begin - 1.0 * (finish < end), bytes=32 << 20)

    def metadata(self, name: str, r: _Rank) -> dict[str, Any]:
        if self.plan.style == "ddp":
            return {}
        whole, part = 1 << 27, (1 << 27) // self.plan.ranks
        nelems = (part, whole) if "gather" in name else (whole, part)
        return metadata(name, ranks=range(self.plan.ranks), nelems=nelems, rank=r.rank)


def write_job(plan: JobPlan, folder: Path) -> Truth:
    """Write `folder/rank{r}.json` of every rank, each on its own clock."""
    folder.mkdir(parents=True, exist_ok=True)
    job = _Job(plan)
    job.run()
    name, num_sms = _GPU[plan.style]
    whole = plan.style == "ddp"
    for r in job.ranks:
        device = {"id": r.rank, "name": name, "numSms": num_sms}
        header: dict[str, Any] = {"schemaVersion": 1, "deviceProperties": [device]}
        if not whole:
            header["distributedInfo"] = {"backend": "nccl", "rank": r.rank, "world_size": plan.ranks}
        scale, shift = 1 + 1e-6 * plan.drift_ppm.get(r.rank, 0.0), 1e9 + plan.shift_us.get(r.rank, 0.0)
        for e in r.events:
            begin, end = e["ts"] * scale + shift, (e["ts"] + e["dur"]) * scale + shift
            if whole:
                begin, end = int(begin), int(end)
            e["ts"], e["dur"] = round(begin, 3), round(end - begin, 3)
        r.events.sort(key=lambda e: e["ts"])
        (folder / f"rank{r.rank}.json").write_text(json.dumps({**header, "traceEvents": r.events}))
    transfer, last, late = zip(*job.truth, strict=True)
    return Truth(transfer_us=transfer, last_rank=last, late_us=late)


def varied(plan: JobPlan, **changes: Any) -> JobPlan:
    return replace(plan, **changes)
