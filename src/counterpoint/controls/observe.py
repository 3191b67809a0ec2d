"""Observe what ran on a GPU: kernels, copies and memsets by the profiler, priorities by stream, SMs by a probe.

The profiler does not report the clusters of kernels: `captured_kernels` reads them from a captured graph.
"""

from __future__ import annotations

import ctypes
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from counterpoint.controls.control import Control, Lanes, applied, call_driver
from counterpoint.errors import NoEffect, Unsupported
from counterpoint.records.measurement import Evidence, Launched, Observation
from counterpoint.trace.classify import is_gemm_kernel, is_nccl, kernel_kind
from counterpoint.trace.timeline import Kind

Sides = tuple[tuple[Launched, ...], tuple[Launched, ...]]  # what ran of compute and of the collective

_KIND: dict[str, Literal["kernel", "copy", "memset"]] = {
    "kernel": "kernel",
    "gpu_memcpy": "copy",
    "gpu_memset": "memset",
}
_GATE = "spin_kernel"  # of torch.cuda._sleep: it holds both sides back until both are queued
_PROBE_US = 20  # how long a block of the probe keeps its SM
_PROBE = """
.version 7.0
.target sm_70
.address_size 64
.visible .entry sm_of_block(.param .u64 out, .param .u32 nanoseconds)
{
    .reg .pred %done;
    .reg .b32 %sm, %block, %hold;
    .reg .b64 %to, %offset, %begin, %now, %limit;
    ld.param.u64 %to, [out];
    ld.param.u32 %hold, [nanoseconds];
    cvta.to.global.u64 %to, %to;
    mov.u32 %sm, %smid;
    mov.u32 %block, %ctaid.x;
    mul.wide.u32 %offset, %block, 4;
    add.s64 %to, %to, %offset;
    st.global.u32 [%to], %sm;
    cvt.u64.u32 %limit, %hold;
    mov.u64 %begin, %globaltimer;
HOLD:
    mov.u64 %now, %globaltimer;
    sub.u64 %now, %now, %begin;
    setp.lt.u64 %done, %now, %limit;
    @%done bra HOLD;
    ret;
}
"""
_SYMMETRIC = re.compile(r"ncclSym", re.IGNORECASE)  # ncclSymDevKernel_* in NCCL 2.27, ncclSymkDevKernel_* since 2.28


class ProfilerEvent(msgspec.Struct, frozen=True):
    """Holds the fields of one event in the profiler's trace that this module uses."""

    cat: str = ""
    name: str = ""
    ts: float = 0.0  # µs
    dur: float = 0.0
    args: dict[str, Any] = {}


class _Trace(msgspec.Struct):
    events: list[ProfilerEvent] = msgspec.field(name="traceEvents")


def observe(launch: Callable[[], None], *, device: Any) -> tuple[Launched, ...]:
    """Return the GPU work that `launch` starts, sorted by start; `launch` is called twice: to warm up, then profiled.

        for one in observe(lambda: torch.mm(x, w), device=device): print(one.name, one.num_blocks)

    `launch` queues work on streams of the torch.device. If it runs a collective, all ranks call `observe`. Synchronizes
    the device. `Unsupported` is raised if the profiler saw nothing.
    """
    return _observed(launch, device)[0]


def _observed(
    launch: Callable[[], None], device: Any, streams: Sequence[Any] = ()
) -> tuple[tuple[Launched, ...], list[int | None]]:
    """Return the GPU work of `launch`, with the priorities of `streams`, and the profiler's number of each stream."""
    import torch

    with torch.cuda.device(device):
        launch()
        torch.cuda.synchronize(device)
        events = _profiled(launch, device, streams)
    numbers = [mark.args.get("stream") for mark in events[: len(streams)]]
    priorities = {number: stream.priority for number, stream in zip(numbers, streams, strict=True)}
    return tuple(launched(event, priorities) for event in events[len(streams) :]), numbers


def _profiled(launch: Callable[[], None], device: Any, streams: Sequence[Any]) -> list[ProfilerEvent]:
    """Return GPU events of `device`: one memset on each of `streams`, in order, then the events of `launch`."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    mark = torch.zeros(1, dtype=torch.int32, device=device)
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for stream in streams:  # the profiler numbers streams as CUPTI does: a mark on each tells which is which
            call_driver("cuMemsetD32Async", mark.data_ptr(), 0, 1, stream.cuda_stream)
            stream.synchronize()
        launch()
        torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace = msgspec.json.decode(path.read_bytes(), type=_Trace)
    events = [event for event in trace.events if event.cat in _KIND and device_of(event) == mark.device.index]
    if not events:
        raise Unsupported(
            "the profiler saw nothing on the GPU: CUPTI is missing or in use by another tool (ncu, nsys, DCGM "
            "profiling), or its counters are reserved; stop that tool, or run outside of it"
        )
    return sorted(events, key=lambda event: event.ts)


def device_of(event: ProfilerEvent) -> int | None:
    """Return the index of the GPU that ran an event; for a peer-to-peer copy, of the GPU that pushes (`inDevice`)."""
    device: int | None = event.args.get("device", event.args.get("inDevice"))
    return device


def launched(event: ProfilerEvent, priorities: dict[int | None, int]) -> Launched:
    """Return a trace event as `Launched`, with the priority of its stream if that is known."""
    args = event.args
    stream = args.get("stream")
    return Launched(
        kind=_KIND[event.cat], name=event.name, stream=stream, priority=priorities.get(stream),
        grid=_three(args.get("grid")), block=_three(args.get("block")),
        regs_per_thread=args.get("registers per thread"), smem_bytes=args.get("shared memory"), bytes=args.get("bytes"),
        start_us=event.ts, duration_us=event.dur,
    )  # fmt: skip


def _three(numbers: Sequence[int] | None) -> tuple[int, int, int] | None:
    return None if numbers is None else (numbers[0], numbers[1], numbers[2])


def with_clusters(found: tuple[Launched, ...], captured: tuple[CapturedKernel, ...]) -> tuple[Launched, ...]:
    """Return `found` with cluster sizes, each from the first unused captured kernel of equal grid and name."""
    left = list(captured)
    result = []
    for one in found:
        plain = one.name.partition("(")[0].partition("<")[0].split(" ")[-1].split("::")[-1]
        match = next((node for node in left if node.grid == one.grid and plain and plain in node.name), None)
        if match is not None:
            left.remove(match)
            one = msgspec.structs.replace(one, cluster=match.cluster)
        result.append(one)
    return tuple(result)


def see(lanes: Lanes, *, without: Lanes, device: Any, clusters: bool = False) -> Observation:
    """Return the kernels and copies of one pair, with and without controls, for `Control.verify`; see `see_all`."""
    return see_all([lanes], without=without, device=device, clusters=clusters)[0]


def see_all(pairs: Sequence[Lanes], *, without: Lanes, device: Any, clusters: bool = False) -> list[Observation]:
    """Return the kernels and copies of each pair, with and without controls, in one profile; all ranks call it.

    `pairs` are the lanes that controls yield, while these are applied, and `without` the same pair with the controls
    off. With `clusters` the collective is also captured alone, to see cluster sizes. `Unsupported`: the profiler saw
    nothing.
    """
    every = [without, *pairs]
    ran = sides_of_all(every, device)
    if clusters:
        ran = [
            (compute, with_clusters(comm, captured_kernels(lanes.comm, device=device)))
            for lanes, (compute, comm) in zip(every, ran, strict=True)
        ]
    (compute_without, comm_without), *found = ran
    return [
        Observation(
            compute=compute, comm=comm, compute_without=compute_without, comm_without=comm_without,
            compute_sms=sm_ids(lanes.compute_stream), comm_sms=sm_ids(lanes.comm_stream),
        )
        for lanes, (compute, comm) in zip(pairs, found, strict=True)
    ]  # fmt: skip


@contextmanager
def verified(
    controls: Sequence[Control], lanes: Lanes, *, device: Any, without: Lanes | None = None, group: Any = None
) -> Iterator[Lanes]:
    """Yield `lanes` with all `controls` applied, after checking that every control takes effect.

        with verified([GemmSmLimit(num_sms=108)], lanes, device=device) as lanes:
            ...  # launch lanes.comm on lanes.comm_stream, lanes.compute on lanes.compute_stream

    Runs the pair twice with the controls and twice without; the profiler takes a second or two. Several controls work
    together (streams first, `parse_mechanism` sorts them), and each has to show its own effect.

    Args:
        controls: in the order in which to apply them.
        lanes: the pair; its collective in a process group that the controls have `configure`d.
        device: torch.device.
        without: the same pair with a plain process group and plain buffers, for controls of NCCL; None: `lanes`.
        group: process group whose ranks all call this; if any rank sees nothing, all of them raise. None: this process
            is alone.

    Yields:
        The lanes; on exit and on errors everything is as it was.

    Raises:
        NoEffect: a control did nothing, on any rank; says what was asked, what ran and what to do.
        Unsupported: a control cannot work here, or the profiler saw nothing.
    """
    for control in controls:
        reason = control.available()
        if reason is not None:
            raise Unsupported(f"{control.name} cannot work here: {reason}")
    with applied(controls, lanes) as shaped:
        clusters = any(control.by_cluster for control in controls)
        seen = see(shaped, without=without or lanes, device=device, clusters=clusters)
        of_ranks = _of_ranks([control.verify(seen) for control in controls], group)
        for control, proofs in zip(controls, zip(*of_ranks, strict=True), strict=True):
            for proof in proofs:
                if not proof.took_effect:
                    raise NoEffect(proof.control, asked=proof.asked, seen=proof.seen, fix=control.remedy)
        yield shaped


def _of_ranks(mine: list[Evidence], group: Any) -> list[list[Evidence]]:
    """Return the evidence of every rank, so that all ranks come to the same verdict."""
    if group is None:
        return [mine]
    import torch.distributed as dist

    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def sides_of_all(pairs: Sequence[Lanes], device: Any) -> list[Sides]:
    """Return the compute and collective kernels of each pair, from one profile, as the profiler starts slowly.

    Both sides of a pair are released at the same moment, the collective queued first; one pair after the other. What
    ran on the compute stream is compute, everything else is the collective's. All ranks call it.

    Raises:
        Unsupported: the profiler saw nothing, or another number of pairs than was launched.
    """
    import torch

    gate = torch.cuda.Stream(device)

    def all_pairs() -> None:
        for lanes in pairs:
            with torch.cuda.stream(gate):
                torch.cuda._sleep(4_000_000)  # about 2 ms: both sides are queued before it ends
            for stream, launch in ((lanes.comm_stream, lanes.comm), (lanes.compute_stream, lanes.compute)):
                with torch.cuda.stream(stream):
                    stream.wait_stream(gate)
                    launch()
            torch.cuda.synchronize(device)

    streams = [stream for lanes in pairs for stream in (lanes.compute_stream, lanes.comm_stream)]
    ran, numbers = _observed(all_pairs, device, streams)
    gates = [index for index, one in enumerate(ran) if _GATE in one.name]
    if len(gates) != len(pairs):
        raise Unsupported(f"the profiler saw {len(gates)} of {len(pairs)} pairs: its buffers overflowed")
    found: list[Sides] = []
    for start, end, number in zip(gates, [*gates[1:], len(ran)], numbers[::2], strict=True):
        members = ran[start + 1 : end]
        compute = tuple(one for one in members if one.stream == number)
        found.append((compute, tuple(one for one in members if one.stream != number)))
    return found


def communicates(one: Launched) -> bool:
    """Return whether `one` is, by its name, a communication kernel, which takes SMs."""
    return one.kind == "kernel" and kernel_kind(one.name) == Kind.COMM


def sm_ids(stream: Any) -> tuple[int, ...]:
    """Return the SMs on which a probe launched on `stream` ran; on an idle device these are all that `stream` may use.

    Every block takes the whole shared memory of an SM for 20 µs, and there is one for every SM of the device. The
    stream is synchronized. `Unsupported` is raised if the driver refuses the probe.
    """
    import torch
    from cuda.bindings import driver

    device = stream.device
    properties = torch.cuda.get_device_properties(device)
    smem = call_driver(
        "cuDeviceGetAttribute",
        driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
        device.index,
    )
    with torch.cuda.device(device):
        out = torch.full((properties.multi_processor_count,), -1, dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)
        library = call_driver("cuLibraryLoadData", _PROBE.encode(), None, None, 0, None, None, 0)
        try:
            kernel = call_driver("cuLibraryGetKernel", library, b"sm_of_block")
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            call_driver("cuKernelSetAttribute", attribute, smem, kernel, device.index)
            parameters = ((out.data_ptr(), _PROBE_US * 1000), (ctypes.c_void_p, ctypes.c_uint32))
            call_driver(  # a CUkernel passes for a CUfunction: then it runs in the context of the stream
                "cuLaunchKernel", driver.CUfunction(int(kernel)), out.numel(), 1, 1, 32, 1, 1, smem,
                stream.cuda_stream, parameters, 0,
            )  # fmt: skip
            stream.synchronize()
        finally:
            call_driver("cuLibraryUnload", library)
    return tuple(sorted(set(out.tolist())))


@dataclass(frozen=True, kw_only=True, slots=True)
class CapturedKernel:
    """Describes a kernel node of a captured graph, with the grid and cluster that its library asked for."""

    name: str
    grid: tuple[int, int, int]
    cluster: tuple[int, int, int]  # (1, 1, 1): no cluster


def captured_kernels(launch: Callable[[], None], *, device: Any) -> tuple[CapturedKernel, ...]:
    """Return the kernels that `launch` queues on the current stream, in the order of graph nodes; nothing runs.

    If `launch` runs a collective, all ranks call it. `launch` has run before, so that it initialises nothing. If it
    cannot be captured, RuntimeError is raised, and `Unsupported` if the driver refuses.
    """
    import torch
    from cuda.bindings import driver

    graph = torch.cuda.CUDAGraph(keep_graph=True)
    stream = torch.cuda.Stream(device)  # torch's own capture stream is of the device that captured first
    with torch.cuda.device(device), torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        launch()
    handle = driver.CUgraph(int(graph.raw_cuda_graph()))
    _, count = call_driver("cuGraphGetNodes", handle, 0)
    nodes, _ = call_driver("cuGraphGetNodes", handle, count)
    kernel = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
    found = tuple(_kernel(node) for node in nodes if call_driver("cuGraphNodeGetType", node) == kernel)
    torch.cuda.synchronize(device)
    return found


def _kernel(node: Any) -> CapturedKernel:
    from cuda.bindings import driver

    parameters = call_driver("cuGraphKernelNodeGetParams", node)
    cluster = call_driver(
        "cuGraphKernelNodeGetAttribute", node, driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    ).clusterDim
    name = (
        call_driver("cuFuncGetName", parameters.func)
        if int(parameters.func)
        else call_driver("cuKernelGetName", parameters.kern)
    )
    return CapturedKernel(
        name=name.decode(),
        grid=(parameters.gridDimX, parameters.gridDimY, parameters.gridDimZ),
        cluster=(max(cluster.x, 1), max(cluster.y, 1), max(cluster.z, 1)),
    )


def nccl_kernels(launched: Iterable[Launched]) -> tuple[Launched, ...]:
    """Return NCCL's own kernels among the `launched` work."""
    return tuple(one for one in launched if one.kind == "kernel" and is_nccl(one.name))


def symmetric_kernels(launched: Iterable[Launched]) -> tuple[Launched, ...]:
    """Return NCCL's kernels among the `launched` work that use window-registered buffers (symmetric memory)."""
    return tuple(one for one in nccl_kernels(launched) if _SYMMETRIC.search(one.name))


def copies(launched: Iterable[Launched]) -> tuple[Launched, ...]:
    """Return the copies among the `launched` work, whether by copy engines or within the device."""
    return tuple(one for one in launched if one.kind == "copy")


def matmul_kernels(launched: Iterable[Launched]) -> tuple[Launched, ...]:
    """Return GEMM kernels of cuBLAS, CUTLASS or Triton, known by name; if there are none, the longest kernel."""
    kernels = [one for one in launched if one.kind == "kernel"]
    found = [one for one in kernels if is_gemm_kernel(one.name)]
    return tuple(found or sorted(kernels, key=lambda one: -one.duration_us)[:1])


def blocks(launched: Iterable[Launched]) -> list[int]:
    """Return the kernels' numbers of thread blocks, sorted, each number once."""
    return sorted({one.num_blocks for one in launched})


def written(numbers: Iterable[int | None], *, nothing: str = "nothing") -> str:
    """Return `numbers` as text for a sentence: "8", "8, 24", "unknown", or `nothing` if there are none."""
    return ", ".join("unknown" if number is None else str(number) for number in numbers) or nothing
