"""What really ran on a GPU: kernels, copies and memsets by the profiler; priorities and SMs by the device."""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from counterpoint.controls.captured import CapturedKernel, captured_kernels
from counterpoint.controls.control import Lanes
from counterpoint.controls.driver import call
from counterpoint.errors import Unsupported
from counterpoint.records.evidence import Launched, Seen

__all__ = [
    "Event",
    "Sides",
    "device_of",
    "launched",
    "observe",
    "see",
    "sides",
    "sides_of_all",
    "sm_ids",
    "with_clusters",
]

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


class Event(msgspec.Struct, frozen=True):
    """One entry of the profiler's trace, as far as it matters here."""

    cat: str = ""
    name: str = ""
    ts: float = 0.0  # µs
    dur: float = 0.0
    args: dict[str, Any] = {}


class _Trace(msgspec.Struct):
    events: list[Event] = msgspec.field(name="traceEvents")


def observe(
    launch: Callable[[], None], *, device: Any, streams: Sequence[Any] = (), clusters: bool = False
) -> tuple[Launched, ...]:
    """Calls `launch` once to warm up and once under torch's profiler; what the second call ran, sorted by start.

        for one in observe(lambda: torch.mm(x, w), device=device): print(one.name, one.num_blocks)

    If `launch` runs a collective, all ranks call `observe`. Synchronizes the device.

    Args:
        launch: queues work on streams of `device`.
        device: torch.device.
        streams: torch streams of which priorities are wanted; what ran elsewhere has `priority` None.
        clusters: also captures `launch` into a graph, which never runs, to read cluster sizes.

    Raises:
        Unsupported: the profiler saw nothing.
    """
    found, _ = _observed(launch, device, streams)
    return with_clusters(found, captured_kernels(launch, device=device)) if clusters else found


def _observed(
    launch: Callable[[], None], device: Any, streams: Sequence[Any]
) -> tuple[tuple[Launched, ...], list[int | None]]:
    """What ran, and the profiler's number of each of `streams`."""
    import torch

    with torch.cuda.device(device):
        launch()
        torch.cuda.synchronize(device)
        events = _profiled(launch, device, streams)
    numbers = [mark.args.get("stream") for mark in events[: len(streams)]]
    priorities = {number: stream.priority for number, stream in zip(numbers, streams, strict=True)}
    return tuple(launched(event, priorities) for event in events[len(streams) :]), numbers


def _profiled(launch: Callable[[], None], device: Any, streams: Sequence[Any]) -> list[Event]:
    """GPU events of `device`: first one memset for each of `streams`, in their order, then those of `launch`."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    mark = torch.zeros(1, dtype=torch.int32, device=device)
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for stream in streams:  # the profiler numbers streams as CUPTI does: a mark on each tells which is which
            call("cuMemsetD32Async", mark.data_ptr(), 0, 1, stream.cuda_stream)
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


def device_of(event: Event) -> int | None:
    """The GPU that ran it; copies to a peer name only their two ends, and the one that pushes is `inDevice`."""
    device: int | None = event.args.get("device", event.args.get("inDevice"))
    return device


def launched(event: Event, priorities: dict[int | None, int]) -> Launched:
    """The record of one event, with the priority of its stream if that is known."""
    args = event.args
    stream = args.get("stream")
    return Launched(
        kind=_KIND[event.cat],
        name=event.name,
        stream=stream,
        priority=priorities.get(stream),
        grid=_three(args.get("grid")),
        block=_three(args.get("block")),
        regs_per_thread=args.get("registers per thread"),
        smem_bytes=args.get("shared memory"),
        bytes=args.get("bytes"),
        start_us=event.ts,
        duration_us=event.dur,
    )


def _three(numbers: Sequence[int] | None) -> tuple[int, int, int] | None:
    return None if numbers is None else (numbers[0], numbers[1], numbers[2])


def with_clusters(found: tuple[Launched, ...], captured: tuple[CapturedKernel, ...]) -> tuple[Launched, ...]:
    """`found` with the cluster of the first unused captured kernel of the same grid whose name fits; else unknown."""
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


def see(lanes: Lanes, *, without: Lanes, device: Any, clusters: bool = False) -> Seen:
    """The pair watched with a control and without it: what `Control.verify` needs. All ranks call it.

    Args:
        lanes: as the control gave them, while it is applied.
        without: the same pair with the control off.
        device: torch.device.
        clusters: also look at cluster sizes of the collective (it is captured alone).

    Raises:
        Unsupported: the profiler saw nothing.
    """
    compute, comm = sides(lanes, device, clusters)
    compute_without, comm_without = sides(without, device, clusters)
    return Seen(
        compute=compute,
        comm=comm,
        compute_without=compute_without,
        comm_without=comm_without,
        compute_sms=sm_ids(lanes.compute_stream),
        comm_sms=sm_ids(lanes.comm_stream),
    )


def sides(lanes: Lanes, device: Any, clusters: bool = False) -> Sides:
    """What ran of compute and of the collective; see `sides_of_all`."""
    ((compute, comm),) = sides_of_all([lanes], device)
    return compute, with_clusters(comm, captured_kernels(lanes.comm, device=device)) if clusters else comm


def sides_of_all(pairs: Sequence[Lanes], device: Any) -> list[Sides]:
    """What ran of compute and of the collective of each pair, under one profiler: starting one costs a second.

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


def sm_ids(stream: Any) -> tuple[int, ...]:
    """Ids of the SMs on which a probe launched on `stream` ran; on an idle device that is all that the stream may use.

    Every block takes the whole shared memory of an SM for 20 µs, and there is one for every SM of the device.

    Args:
        stream: a torch stream. It is synchronized.

    Raises:
        Unsupported: the driver refused the probe.
    """
    import torch
    from cuda.bindings import driver

    device = stream.device
    properties = torch.cuda.get_device_properties(device)
    smem = call(
        "cuDeviceGetAttribute",
        driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
        device.index,
    )
    with torch.cuda.device(device):
        out = torch.full((properties.multi_processor_count,), -1, dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)
        library = call("cuLibraryLoadData", _PROBE.encode(), None, None, 0, None, None, 0)
        try:
            kernel = call("cuLibraryGetKernel", library, b"sm_of_block")
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            call("cuKernelSetAttribute", attribute, smem, kernel, device.index)
            parameters = ((out.data_ptr(), _PROBE_US * 1000), (ctypes.c_void_p, ctypes.c_uint32))
            call(  # a CUkernel passes for a CUfunction: then it runs in the context of the stream
                "cuLaunchKernel", driver.CUfunction(int(kernel)), out.numel(), 1, 1, 32, 1, 1, smem,
                stream.cuda_stream, parameters, 0,
            )  # fmt: skip
            stream.synchronize()
        finally:
            call("cuLibraryUnload", library)
    return tuple(sorted(set(out.tolist())))
