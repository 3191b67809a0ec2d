"""The clusters of kernels, which the profiler does not report: read from the nodes of a captured, never run graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from counterpoint.controls.driver import call

__all__ = ["CapturedKernel", "captured_kernels"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CapturedKernel:
    """One kernel node: what the library asked the driver for."""

    name: str
    grid: tuple[int, int, int]
    cluster: tuple[int, int, int]  # (1, 1, 1): no cluster


def captured_kernels(launch: Callable[[], None], *, device: Any) -> tuple[CapturedKernel, ...]:
    """Kernels that `launch` queues on the current stream, in the order of the graph's nodes. Nothing runs.

    In a collective all ranks have to call it. `launch` has run before, so that it does not initialise anything.

    Raises:
        Unsupported: the driver refused.
        RuntimeError: `launch` cannot be captured.
    """
    import torch
    from cuda.bindings import driver

    graph = torch.cuda.CUDAGraph(keep_graph=True)
    stream = torch.cuda.Stream(device)  # torch's own capture stream is of the device that captured first
    with torch.cuda.device(device), torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        launch()
    handle = driver.CUgraph(int(graph.raw_cuda_graph()))
    _, count = call("cuGraphGetNodes", handle, 0)
    nodes, _ = call("cuGraphGetNodes", handle, count)
    kernel = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
    found = tuple(_kernel(node) for node in nodes if call("cuGraphNodeGetType", node) == kernel)
    torch.cuda.synchronize(device)
    return found


def _kernel(node: Any) -> CapturedKernel:
    from cuda.bindings import driver

    parameters = call("cuGraphKernelNodeGetParams", node)
    cluster = call(
        "cuGraphKernelNodeGetAttribute", node, driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    ).clusterDim
    name = call("cuFuncGetName", parameters.func) if int(parameters.func) else call("cuKernelGetName", parameters.kern)
    return CapturedKernel(
        name=name.decode(),
        grid=(parameters.gridDimX, parameters.gridDimY, parameters.gridDimZ),
        cluster=(max(cluster.x, 1), max(cluster.y, 1), max(cluster.z, 1)),
    )
