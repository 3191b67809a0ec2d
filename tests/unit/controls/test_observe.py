"""From the profiler's entries to records of what ran."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from counterpoint.controls import observe
from counterpoint.controls.observe import (
    CapturedKernel,
    ProfilerEvent,
    copies,
    device_of,
    launched,
    matmul_kernels,
    nccl_kernels,
    symmetric_kernels,
    with_clusters,
)
from counterpoint.records.measurement import Launched

KERNEL = """{"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
  "pid": 0, "tid": 129, "ts": 4363814337968.158, "dur": 549.5, "args": {"External id": 7, "queued": 0, "device": 0,
  "context": 1, "stream": 129, "correlation": 112135, "registers per thread": 96, "shared memory": 84232,
  "blocks per SM": 0.18, "grid": [24, 1, 1], "block": [544, 1, 1], "est. achieved occupancy %": 0}}"""
COPY = """{"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy PtoP (Device -> Device)", "ts": 5, "dur": 3,
  "args": {"device": 0, "context": 1, "stream": 7, "correlation": 9, "bytes": 1048576}}"""


def record(entry: str, priorities: dict[int | None, int] | None = None) -> Launched:
    return launched(msgspec.json.decode(entry, type=ProfilerEvent), priorities or {})


def test_a_kernel_keeps_its_launch_configuration() -> None:
    assert record(KERNEL, {129: -3}) == Launched(
        kind="kernel",
        name="ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        stream=129,
        priority=-3,
        grid=(24, 1, 1),
        block=(544, 1, 1),
        regs_per_thread=96,
        smem_bytes=84232,
        start_us=4363814337968.158,
        duration_us=549.5,
    )


def test_a_copy_keeps_its_bytes() -> None:
    one = record(COPY)
    assert (one.kind, one.bytes, one.grid) == ("copy", 1048576, None)


@pytest.mark.parametrize(
    ("entry", "device"),
    [
        (KERNEL, 0),
        ('{"cat": "gpu_memcpy", "args": {"inDevice": 1, "outDevice": 0, "stream": 7, "bytes": 64}}', 1),
        ('{"cat": "gpu_memcpy", "args": {}}', None),
    ],
    ids=["a kernel", "a copy to a peer", "nothing said"],
)
def test_what_ran_belongs_to_a_device(entry: str, device: int | None) -> None:
    """Copies to a peer name the GPU that carries them out otherwise than kernels do."""
    assert device_of(msgspec.json.decode(entry, type=ProfilerEvent)) == device


def test_the_priority_of_an_unknown_stream_is_unknown() -> None:
    assert record(KERNEL, {7: 0}).priority is None


@pytest.mark.parametrize(
    ("node", "cluster"),
    [
        (CapturedKernel(name="_Z31ncclDevKernel_AllGather_RING_LL24x", grid=(24, 1, 1), cluster=(4, 1, 1)), (4, 1, 1)),
        (CapturedKernel(name="_Z31ncclDevKernel_AllGather_RING_LL24x", grid=(32, 1, 1), cluster=(4, 1, 1)), None),
        (CapturedKernel(name="_Z5other", grid=(24, 1, 1), cluster=(4, 1, 1)), None),
    ],
    ids=["the same launch", "another grid", "another kernel"],
)
def test_clusters_come_from_the_same_launch_only(node: CapturedKernel, cluster: tuple[int, int, int] | None) -> None:
    (one,) = with_clusters((record(KERNEL),), (node,))
    assert one.cluster == cluster


def test_each_captured_kernel_is_used_once() -> None:
    node = CapturedKernel(name="ncclDevKernel_AllGather_RING_LL", grid=(24, 1, 1), cluster=(2, 1, 1))
    assert [one.cluster for one in with_clusters((record(KERNEL),) * 2, (node,))] == [(2, 1, 1), None]


def test_each_pair_has_the_clusters_of_its_own_communication(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is captured alone, with and without controls."""

    def captured(launch: Callable[[], Any], *, device: object) -> tuple[CapturedKernel, ...]:
        return (CapturedKernel(name="ncclDevKernel_AllGather_RING_LL", grid=(24, 1, 1), cluster=launch()),)

    pairs: list[Any] = [SimpleNamespace(comm=lambda n=n: (n, 1, 1), compute_stream=0, comm_stream=0) for n in (1, 2, 4)]
    monkeypatch.setattr(observe, "sides_of_all", lambda every, device: [((), (record(KERNEL),)) for _ in every])
    monkeypatch.setattr(observe, "captured_kernels", captured)
    monkeypatch.setattr(observe, "sm_ids", lambda stream: ())
    found = observe.see_all(pairs[1:], without=pairs[0], device=None, clusters=True)
    clusters = [(seen.comm[0].cluster, seen.comm_without[0].cluster) for seen in found]
    assert clusters == [((2, 1, 1), (1, 1, 1)), ((4, 1, 1), (1, 1, 1))]


def kernel(name: str, duration_us: float = 1.0) -> Launched:
    return Launched(kind="kernel", name=name, duration_us=duration_us)


MIXED = (
    kernel("nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_TNT"),
    kernel("void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nn_align1>(...)"),
    kernel("void cublasLt::splitKreduce_kernel<32, 16>(...)", 90.0),
    kernel("void at::native::reduce_kernel<512, 1>(...)", 99.0),
    kernel("ncclSymkDevKernel_AllGather_ST(...)", 500.0),
    kernel("ncclDevKernel_SendRecv(...)", 500.0),
    Launched(kind="copy", name="Memcpy DtoD (Device -> Device)"),
)


def test_gemm_kernels_are_told_by_name() -> None:
    assert matmul_kernels(MIXED) == MIXED[:2]


def test_without_a_known_name_the_longest_kernel_is_the_gemm() -> None:
    """An unknown compute kernel counts if it is the longest."""
    assert matmul_kernels((kernel("mine", 5.0), kernel("yours", 9.0))) == (kernel("yours", 9.0),)


def test_nccl_kernels_are_told_by_name() -> None:
    assert (nccl_kernels(MIXED), symmetric_kernels(MIXED)) == (MIXED[4:6], MIXED[4:5])


def test_copies_are_told_by_kind() -> None:
    assert copies(MIXED) == MIXED[6:]
