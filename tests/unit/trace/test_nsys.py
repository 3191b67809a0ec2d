"""Nsight exports: numbers worked out by hand on small synthetic ones, and hostile files."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from counterpoint.diagnosis.api import diagnose_digests
from counterpoint.diagnosis.reading.digest import digest, pack_digest, unpack_digest
from counterpoint.errors import BadTrace
from counterpoint.trace.nsys import read_nsys
from counterpoint.trace.timeline import Device, HostKind, Kind, Timeline
from tests.support.nsys_export import (
    ANALYSIS,
    CAPTURE,
    CUDA_DEVICES,
    EVENT,
    GPUS,
    GRAPH,
    KERNEL,
    MEMCPY,
    MEMSET,
    NVTX,
    RUNTIME,
    SESSION,
    STREAMS,
    SYNC,
    NsysExport,
    edited_export,
    pid,
)

GEMM, ALL_GATHER = "nvjet_tst_128x256", "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


@pytest.fixture
def two_ranks(tmp_path: Path) -> list[Timeline]:
    """Two processes with a GPU each: a step with a GEMM on stream 7, an all-gather on stream 20 and a peer copy."""
    export = NsysExport()
    for process, late in ((11, 0), (12, 500)):
        export.range("ProfilerStep#3", 1_000, 90_000, process=process)
        export.range("aten::mm, seq = 4, op_id = 12, sizes = [[2, 3], [3, 4]], input_op_ids = [(1, 0)]", 2_000, 6_000,
                     process=process)  # fmt: skip
        export.kernel(GEMM, 10_000, 30_000, process=process, launch=(3_000, 4_500), gridX=132, gridY=2, blockX=384,
                      registersPerThread=168, staticSharedMemory=1_024, dynamicSharedMemory=200_000)  # fmt: skip
        export.kernel(ALL_GATHER, 12_000 + late, 40_000, process=process, launch=(7_500, 8_500), streamId=20, gridX=24)
        export.nccl("ncclAllGather", 7_000, 9_000, size=4_096, process=process)
        export.nccl_init(rank=12 - process, num_ranks=2, process=process)
        export.add(MEMCPY, start=45_000, end=50_000, globalPid=pid(process), streamId=30, bytes=1 << 20, copyKind=8,
                   srcDeviceId=0, dstDeviceId=1)  # fmt: skip
    export.payload_schemas()
    return read_nsys(export.write(tmp_path / "report.sqlite"))


def _names(timeline: Timeline) -> list[str]:
    return [timeline.names[i] for i in timeline.gpu.name]


def _host(timeline: Timeline, kind: HostKind) -> list[str]:
    return [timeline.names[i] for i, k in zip(timeline.host.name, timeline.host.kind, strict=True) if k == kind]


def _one(tmp_path: Path, export: NsysExport, name: str = "report.sqlite") -> Timeline:
    (timeline,) = read_nsys(export.write(tmp_path / name))
    return timeline


@pytest.fixture
def export() -> NsysExport:
    """An export with one plain kernel, to which a test adds."""
    made = NsysExport()
    made.kernel(GEMM, 50, 90)
    return made


def test_processes_with_gpus_are_the_ranks_that_nccl_said(two_ranks: list[Timeline]) -> None:
    # Process 12 joined as rank 0, process 11 as rank 1; only process 12's all-gather starts 500 ns late. Times are µs
    # since the first event of the file, which is the range of ncclCommInitRank at 1 ns.
    assert [(t.rank, t.rank_known, t.world_size, t.origin_ns) for t in two_ranks] == [(0, True, 2, 1), (1, True, 2, 1)]
    assert [(t.gpu.start[1], t.gpu.end[0]) for t in two_ranks] == [(12.499, 29.999), (11.999, 29.999)]


def test_operations_are_sorted_and_told_by_what_they_are(two_ranks: list[Timeline]) -> None:
    timeline, gpu = two_ranks[0], two_ranks[0].gpu
    assert (_names(timeline), gpu.kind.tolist()) == (
        [GEMM, ALL_GATHER, "Memcpy PtoP (Device -> Device)"], [Kind.COMPUTE, Kind.COMM, Kind.COMM])  # fmt: skip
    came = (*gpu.grid[0].tolist(), *gpu.block[0].tolist(), int(gpu.regs[0]), int(gpu.smem[0]), int(gpu.stream[0]))
    assert came == (132, 2, 1, 384, 1, 1, 168, 201_024, 7)
    assert (gpu.bytes.tolist(), gpu.grid[2].tolist()) == ([-1, -1, 1 << 20], [0, 0, 0])


def test_clusters_of_kernels_are_read(tmp_path: Path) -> None:
    """A kernel that is launched without clusters has none; an older export does not say."""
    export = NsysExport()
    export.kernel(GEMM, 0, 9, clusterX=2, clusterY=2, clusterZ=1)
    export.kernel(ALL_GATHER, 10, 19)
    cluster = _one(tmp_path, export).gpu.cluster
    assert cluster is not None
    assert cluster.tolist() == [4, 0]
    (older,) = read_nsys(
        export.write(tmp_path / "older.sqlite", without=[(KERNEL, f"cluster{axis}") for axis in "XYZ"])
    )
    assert older.gpu.cluster is None


def test_priorities_are_those_of_the_streams_of_the_process(tmp_path: Path) -> None:
    """An export without the table holds none."""
    export = NsysExport()
    for process in (1, 2):
        export.kernel(GEMM, 0, 9, process=process)
        export.add(STREAMS, processId=process, streamId=7, priority=-process)
    assert [one.priorities for one in read_nsys(export.write(tmp_path / "report.sqlite"))] == [{7: -1}, {7: -2}]
    export.rows.pop(STREAMS)
    assert [one.priorities for one in read_nsys(export.write(tmp_path / "older.sqlite"))] == [{}, {}]


def test_clusters_and_priorities_reach_another_host(tmp_path: Path) -> None:
    """A digest keeps them when it is packed, and keeps that they are not known."""
    export = NsysExport()
    export.kernel(GEMM, 0, 9, clusterX=2, clusterY=1, clusterZ=1)
    export.add(STREAMS, streamId=7, priority=-5)
    known = digest(_one(tmp_path, export))
    again = unpack_digest(pack_digest(known), "rank0")
    assert again.gpu.cluster is not None
    assert (again.gpu.cluster.tolist(), again.priorities) == ([2], {7: -5})
    unknown = replace(known, gpu=replace(known.gpu, cluster=None), priorities={})
    assert unpack_digest(pack_digest(unknown), "rank0").gpu.cluster is None


def test_kernels_are_joined_with_the_call_of_their_own_process(two_ranks: list[Timeline]) -> None:
    launches = [t.gpu.launch_start.tolist() + t.gpu.launch_end.tolist() for t in two_ranks]
    assert launches == [pytest.approx([2.999, 7.499, np.nan, 4.499, 8.499, np.nan], nan_ok=True)] * 2


def test_launch_thread_is_the_threads_index_and_minus_one_where_unknown(two_ranks: list[Timeline]) -> None:
    assert [(t.gpu.launch_thread.tolist(), set(t.host.thread.tolist())) for t in two_ranks] == [([0, 0, -1], {0})] * 2


def test_host_ranges_lose_numbers_and_suffixes_and_steps_keep_their_names(two_ranks: list[Timeline]) -> None:
    first, second = two_ranks
    assert (_host(first, HostKind.OP), first.shapes[first.gpu.shape[0]], first.gpu.shape[1]) == (
        ["aten::mm"], "[[2, 3], [3, 4]]", -1)  # fmt: skip
    assert _host(second, HostKind.ANNOTATION) == ["ncclCommInitRank", "ProfilerStep#3", "ncclAllGather"]
    assert _host(first, HostKind.RUNTIME) == ["cudaLaunchKernel", "cudaLaunchKernel"]


def test_an_all_gathers_message_is_one_ranks_part(two_ranks: list[Timeline]) -> None:
    timeline = two_ranks[0]
    assert timeline.gpu.collective.tolist() == [-1, 0, -1]
    info = timeline.collectives[0]
    assert (info.op, info.group, info.group_size, info.in_nelems, info.out_nelems, info.dtype) == (
        "all_gather", "0xabc", 2, 4_096, 8_192, "uint8")  # fmt: skip


def test_a_reduce_scatters_message_is_the_part_received(tmp_path: Path) -> None:
    export = NsysExport()
    export.kernel("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL()", 50, 90, launch=(20, 30))
    export.nccl("ncclReduceScatter", 10, 40, size=100)
    export.nccl_init(rank=0, num_ranks=4)
    export.payload_schemas()
    (info,) = _one(tmp_path, export).collectives
    assert (info.in_nelems, info.out_nelems) == (400, 100)


def test_a_group_launched_as_one_kernel_adds_up(tmp_path: Path) -> None:
    export = NsysExport()
    export.kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL()", 50, 90, launch=(34, 36))
    export.range("ncclGroupStart", 10, 11)
    export.nccl("ncclAllReduce", 12, 14, size=100)
    export.nccl("ncclAllReduce", 15, 17, size=28)
    export.range("ncclGroupEnd", 30, 40)
    export.payload_schemas()
    (info,) = _one(tmp_path, export).collectives
    assert (info.op, info.in_nelems, info.out_nelems) == ("all_reduce", 128, 128)


def test_a_group_launched_as_one_kernel_per_call_keeps_them_apart(tmp_path: Path) -> None:
    export = NsysExport()
    for at in (34, 37):
        export.kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL()", at + 20, at + 22, launch=(at, at + 1))
    export.range("ncclGroupStart", 10, 11)
    export.range("ncclGroupStart", 12, 13)
    export.nccl("ncclAllReduce", 14, 15, size=100)
    export.range("ncclGroupEnd", 16, 17)
    export.nccl("ncclAllReduce", 18, 19, size=28)
    export.range("ncclGroupEnd", 30, 40)
    export.payload_schemas()
    timeline = _one(tmp_path, export)
    assert [timeline.collectives[i].in_nelems for i in timeline.gpu.collective] == [100, 28]


@pytest.mark.parametrize(("ends", "found"), [(40, [("all_gather", None, None)]), (19, [])])
def test_without_blobs_the_call_around_the_launch_tells_the_operation(
    tmp_path: Path, ends: int, found: list[tuple[str, None, None]]
) -> None:
    """Its bytes are not known; a call that ended before the launch says nothing."""
    export = NsysExport()
    export.kernel(ALL_GATHER, 50, 90, launch=(20, 30))
    export.range("ncclAllGather", 10, ends)
    infos = _one(tmp_path, export).collectives
    assert [(info.op, info.in_nelems, info.dtype) for info in infos] == found


def test_shapes_are_those_of_the_innermost_open_operation(tmp_path: Path) -> None:
    export = NsysExport()
    export.range("aten::linear, op_id = 1, sizes = [[1]]", 10, 100)
    export.range("aten::t, op_id = 2, sizes = [[2]]", 20, 30)
    export.range("aten::addmm, op_id = 3, sizes = [[3]]", 40, 60)
    for at in (25, 35, 50, 70):  # in t; between, so in linear; in addmm; after it, so in linear
        export.kernel(GEMM, at + 1_000, at + 1_001, launch=(at, at + 1))
    timeline = _one(tmp_path, export)
    assert [timeline.shapes[i] for i in timeline.gpu.shape] == ["[[2]]", "[[1]]", "[[3]]", "[[1]]"]


def test_names_of_ranges_may_come_from_string_ids(export: NsysExport, tmp_path: Path) -> None:
    export.range(None, 10, 40, textId=export.text("aten::relu, op_id = 9, sizes = [[7]]"))
    assert _host(_one(tmp_path, export), HostKind.OP) == ["aten::relu"]


@pytest.mark.parametrize("event_type", [60, 70, 71])
def test_other_kinds_of_closed_ranges_are_read(export: NsysExport, tmp_path: Path, event_type: int) -> None:
    export.range("epoch 1, part 2", 10, 40, eventType=event_type)
    assert _host(_one(tmp_path, export), HostKind.ANNOTATION) == ["epoch 1, part 2"]


def test_marks_and_ranges_left_open_are_dropped(export: NsysExport, tmp_path: Path) -> None:
    export.range("mark", 10, None, eventType=34)
    export.range("never popped", 10, None)
    assert len(_one(tmp_path, export).host) == 0


def test_a_wait_names_the_stream_that_waits_and_the_record_it_waits_for(export: NsysExport, tmp_path: Path) -> None:
    export.add(EVENT, streamId=20, correlationId=77, globalPid=pid(1), eventId=5, eventSyncId=900)
    export.add(EVENT, streamId=21, correlationId=78, globalPid=pid(1), eventId=5, eventSyncId=901)
    export.add(SYNC, start=60, end=61, streamId=7, correlationId=80, globalPid=pid(1), eventId=5, eventSyncId=900)
    host = _one(tmp_path, export).host
    assert [(HostKind(host.kind[0]), int(c[0])) for c in (host.stream, host.waits_for, host.waits_on)] == [
        (HostKind.SYNC, 7), (HostKind.SYNC, 77), (HostKind.SYNC, 20)]  # fmt: skip


def test_a_synchronisation_is_on_the_thread_that_called_it(export: NsysExport, tmp_path: Path) -> None:
    export.add(
        RUNTIME, start=95, end=99, globalTid=pid(1) | 5, correlationId=80, nameId=export.text("cudaStreamSynchronize")
    )
    export.add(SYNC, start=96, end=98, globalPid=pid(1), correlationId=80, syncType=3)
    host = _one(tmp_path, export).host
    assert host.thread.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("table", "values", "kind", "name"),
    [
        (MEMCPY, {"copyKind": 1, "srcKind": 1, "dstKind": 2}, Kind.MEMCPY, "Memcpy HtoD (Pinned -> Device)"),
        (MEMCPY, {"copyKind": 2, "srcKind": 2, "dstKind": 0}, Kind.MEMCPY, "Memcpy DtoH (Device -> Pageable)"),
        (MEMCPY, {"copyKind": 8}, Kind.MEMCPY, "Memcpy DtoD (Device -> Device)"),
        (MEMCPY, {"copyKind": 8, "srcDeviceId": 1, "dstDeviceId": 1}, Kind.MEMCPY, "Memcpy DtoD (Device -> Device)"),
        (MEMCPY, {"copyKind": 8, "srcDeviceId": 1, "dstDeviceId": 0}, Kind.COMM, "Memcpy PtoP (Device -> Device)"),
        (MEMCPY, {"copyKind": 10, "srcKind": None, "dstKind": None}, Kind.COMM, "Memcpy PtoP (Device -> Device)"),
        (MEMCPY, {"copyKind": 99}, Kind.MEMCPY, "Memcpy Unknown (Unknown -> Unknown)"),
        (MEMSET, {"bytes": 64}, Kind.MEMCPY, "Memset (Device)"),
        (GRAPH, {"correlationId": 3}, Kind.COMPUTE, "CUDA graph"),  # captured as one span
        (KERNEL, {"demangledName": 77}, Kind.COMPUTE, "unknown"),  # which is not in StringIds
    ],
)
def test_operations_are_named_as_kineto_names_them(
    tmp_path: Path, table: str, values: dict[str, int], kind: Kind, name: str
) -> None:
    export = NsysExport()
    export.add(table, start=10, end=20, globalPid=pid(1), **values)
    timeline = _one(tmp_path, export)
    assert (_names(timeline), timeline.gpu.kind.tolist()) == ([name], [kind])
    assert timeline.gpu.bytes[0] == values.get("bytes", timeline.gpu.bytes[0])


def test_kernels_of_a_graph_share_the_launch_of_the_graph(tmp_path: Path) -> None:
    export = NsysExport()
    graph = export.kernel(GEMM, 50, 90, launch=(20, 30), call="cudaGraphLaunch_v10000", graphNodeId=1)
    export.kernel(GEMM, 91, 95, correlationId=graph, graphNodeId=2)
    assert _one(tmp_path, export).gpu.launch_start.tolist() == [0.0, 0.0]


def test_device_properties_are_those_of_the_gpu_behind_the_ordinal(tmp_path: Path) -> None:
    export = NsysExport()
    export.kernel(GEMM, 50, 90, process=8)
    export.add(GPUS, id=0, name="other", smCount=1)
    export.add(GPUS, id=3)
    export.add(CUDA_DEVICES, gpuId=0, cudaId=0, pid=7)
    export.add(CUDA_DEVICES, gpuId=3, cudaId=0, pid=8)
    assert _one(tmp_path, export).device == Device(
        name="NVIDIA H200", num_sms=132, regs_per_sm=65536, smem_per_sm=233472, threads_per_sm=2048, index=3,
        host_gpus=2,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("clock", "starts", "utc"),
    [
        (7_000_000, 0, 10**18 + 5_000),  # times count from the start of the session
        (2_000, 2_000, 10**18 + 3_000),  # times are the system clock's
    ],
)
def test_files_of_one_job_share_utc_as_time_base(tmp_path: Path, clock: int, starts: int, utc: int) -> None:
    export = NsysExport()
    export.kernel(GEMM, 5_000, 9_000)
    export.add(SESSION, utcEpochNs=10**18, systemClockNs=clock)
    export.add(ANALYSIS, startTime=starts)
    assert _one(tmp_path, export).origin_ns == utc


@pytest.mark.parametrize(
    ("variables", "rank", "known", "world_size"),
    [
        (('RANK="5"', 'WORLD_SIZE="16"', 'SLURM_PROCID="1"'), 5, True, 16),
        (('OMPI_COMM_WORLD_RANK="2"', 'OMPI_COMM_WORLD_SIZE="4"'), 2, True, 4),
        (('SLURM_PROCID="3"',), 3, True, None),
        (('RANK="none"',), 9, False, None),  # then the file name decides
    ],
)
def test_the_launchers_environment_says_the_rank_of_a_lone_process(
    export: NsysExport, tmp_path: Path, variables: tuple[str, ...], rank: int, known: bool, world_size: int | None
) -> None:
    for text in variables:
        export.add(CAPTURE, name="PROCESS_0:ENVIRONMENT_VARIABLE", value=text)
    timeline = _one(tmp_path, export, "trace_rank9.sqlite")
    assert (timeline.rank, timeline.rank_known, timeline.world_size) == (rank, known, world_size)


def test_ranks_that_nobody_names_are_in_order_of_process_then_device(tmp_path: Path) -> None:
    export = NsysExport()
    for at, (process, device) in enumerate(((9, 1), (4, 1), (9, 0), (4, 0))):
        export.kernel(GEMM, 50 + at, 90, process=process, deviceId=device)
    timelines = read_nsys(export.write(tmp_path / "report.sqlite"))
    # Process 4's devices 0 and 1 started at 53 and 51, process 9's at 52 and 50; 50 is the origin.
    assert [(t.rank, t.rank_known, round(t.gpu.start[0] * 1e3)) for t in timelines] == [
        (0, False, 3), (1, False, 1), (2, False, 2), (3, False, 0)]  # fmt: skip


def test_ranks_of_a_later_node_come_after_those_of_earlier_ones(tmp_path: Path) -> None:
    export = NsysExport()
    export.add(CAPTURE, name="PROCESS_0:ENVIRONMENT_VARIABLE", value='SLURM_NODEID="2"')
    for process in (1, 2):
        export.kernel(GEMM, 50, 90, process=process)
    assert [t.rank for t in read_nsys(export.write(tmp_path / "report.sqlite"))] == [4, 5]


def test_subgroup_communicators_do_not_pass_for_ranks(tmp_path: Path) -> None:
    export = NsysExport()
    for process, rank in ((1, 0), (2, 1), (3, 0), (4, 1)):
        export.kernel(GEMM, 50, 90, process=process)
        export.nccl_init(rank=rank, num_ranks=2, process=process)
    export.payload_schemas()
    timelines = read_nsys(export.write(tmp_path / "report.sqlite"))
    assert [(t.rank, t.rank_known) for t in timelines] == [(0, False), (1, False), (2, False), (3, False)]


def test_one_process_with_two_devices_keeps_their_launches_apart(tmp_path: Path) -> None:
    export = NsysExport()
    export.kernel(GEMM, 50, 90, launch=(20, 22), deviceId=0)
    export.kernel(GEMM, 51, 90, launch=(24, 26), deviceId=1)
    timelines = read_nsys(export.write(tmp_path / "report.sqlite"))
    assert [t.host.start.tolist() for t in timelines] == [[0.0], [0.004]]


def test_an_old_schema_without_optional_columns_is_read_with_what_it_has(tmp_path: Path) -> None:
    export = NsysExport()
    export.kernel(GEMM, 5_000, 9_000, process=3, launch=(2_000, 3_000))
    export.add(MEMCPY, start=9_500, end=9_900, globalPid=pid(3), bytes=64, copyKind=1)
    export.range("step", 1_000, 10_000, process=3)
    optional = [(KERNEL, c) for c in ("globalPid", "demangledName", "registersPerThread", "gridZ", "graphNodeId")]
    optional += [(KERNEL, c) for c in ("staticSharedMemory", "dynamicSharedMemory")]
    optional += [(MEMCPY, c) for c in ("srcKind", "dstKind", "srcDeviceId", "dstDeviceId")]
    optional += [(NVTX, c) for c in ("textId", "domainId", "binaryData")]
    (timeline,) = read_nsys(export.write(tmp_path / "old.sqlite", without=[*optional, (MEMCPY, "globalPid")]))
    assert (_names(timeline), timeline.gpu.launch_start[0], _host(timeline, HostKind.ANNOTATION)) == (
        ["short", "Memcpy HtoD (Unknown -> Device)"], 1.0, ["step"])  # fmt: skip


def test_a_long_name_is_cut(tmp_path: Path) -> None:
    export = NsysExport()
    export.kernel("x" * 100_000, 50, 90)
    assert len(_names(_one(tmp_path, export))[0]) == 4096


def test_the_path_is_quoted(export: NsysExport, tmp_path: Path) -> None:
    assert len(_one(tmp_path, export, "a?mode=rwc&b#c%20d.sqlite").gpu) == 1


def test_migrations_of_unified_memory_are_the_cause_and_no_torch_is_advised(tmp_path: Path) -> None:
    """After a kernel, the host touches pages: no launch, but the trace holds why, and the program is none of torch."""
    export = NsysExport()
    export.kernel("stencil(float*)", 50_000, 90_000, launch=(20_000, 30_000))
    for n in range(50):
        at = 100_000 + 300_000 * n
        export.add(MEMCPY, start=at, end=at + 20_000, copyKind=12, correlationId=0, globalPid=pid(1), bytes=4096)
    d = diagnose_digests([digest(_one(tmp_path, export))], ["x"]).diagnosis
    assert d.idle is not None
    assert d.idle.causes[0].category == "page_migration"
    assert d.idle.causes[0].us == pytest.approx(49 * 280, rel=0.01)
    assert d.idle.explained_us == pytest.approx(d.idle.idle_us)
    assert "cudaMemPrefetchAsync" in d.findings[0].advice
    assert "torch" not in str([f.advice for f in d.findings])


@pytest.mark.parametrize(("kernel", "torch"), [("stencil(float*)", False), ("void at::native::fill<4>", True)])
def test_advice_fits_programs_without_torch(tmp_path: Path, kernel: str, torch: bool) -> None:
    """The host does something for 100 ms that was not recorded."""
    export = NsysExport()
    export.kernel(kernel, 50_000, 90_000, launch=(20_000, 30_000))
    export.kernel(kernel, 100_050_000, 100_090_000, launch=(100_020_000, 100_030_000))
    d = diagnose_digests([digest(_one(tmp_path, export))], ["x"]).diagnosis
    assert d.findings[0].kind == "host_stall"
    assert ("torch.profiler" in d.findings[0].advice) == torch
    assert ("nsys profile" in d.findings[0].advice) != torch


@pytest.mark.parametrize("table", [KERNEL, RUNTIME, NVTX])
def test_an_odd_row_costs_only_itself(tmp_path: Path, table: str) -> None:
    """One of five rows begins before 0: it is left out, a note says so, and the others are read."""
    export = NsysExport()
    for n in range(5):
        export.kernel(GEMM, 50 + 100 * n, 90 + 100 * n, launch=(20 + 100 * n, 30 + 100 * n))
        export.range("step", 10 + 100 * n, 40 + 100 * n)
    export.rows[table][1]["start"] = -3000
    timeline = _one(tmp_path, export)
    assert (len(timeline.gpu), len(timeline.host)) == ((4, 10) if table == KERNEL else (5, 9))
    assert f"1 of 5 rows of {table} left out for impossible times (row 2" in str(timeline.notes)


def test_rows_that_are_no_ranges_need_no_times(tmp_path: Path) -> None:
    """Names of NVTX domains (type 75) have any `start`."""
    export = NsysExport()
    export.kernel(GEMM, 50, 90, launch=(20, 30))
    export.range("TensorRT", -1878291120, None, eventType=75)
    timeline = _one(tmp_path, export)
    assert (len(timeline.gpu), timeline.notes) == (1, ())


@pytest.mark.parametrize("table", [KERNEL, RUNTIME, NVTX])
@pytest.mark.parametrize(
    "change",
    ["start = -5", "start = 50.5", "start = NULL", "start = 'x'", "start = x'00'", '"end" = 5', '"end" = 1e300'],
)
def test_impossible_times_are_refused(tmp_path: Path, table: str, change: str) -> None:
    path = edited_export(tmp_path / "report.sqlite", f"UPDATE {table} SET {change}")
    with pytest.raises(BadTrace, match=f"{table} row 1 has impossible times"):
        read_nsys(path)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE StringIds SET value = x'ff00'",
        "UPDATE StringIds SET value = ''",
        f"UPDATE {KERNEL} SET demangledName = 'text', shortName = x'00'",
        f"UPDATE {KERNEL} SET gridX = 'many', registersPerThread = 1e300, streamId = NULL",
        f"UPDATE {NVTX} SET text = x'ff00ff'",
        f"UPDATE {NVTX} SET text = cast(x'61ff62' AS TEXT)",
        f"UPDATE {NVTX} SET globalTid = 'main', eventType = 59",
        f"UPDATE {NVTX} SET binaryData = x'0102'",
        f"UPDATE {RUNTIME} SET correlationId = x'01'",
        "DROP TABLE StringIds",
        f"DROP TABLE {NVTX}",
        f"DROP TABLE {RUNTIME}",
    ],
)
def test_values_of_the_wrong_type_cost_only_themselves(tmp_path: Path, statement: str) -> None:
    (timeline,) = read_nsys(edited_export(tmp_path / "report.sqlite", statement))
    assert len(timeline.gpu) == 1


@pytest.mark.parametrize(
    ("statements", "text"),
    [
        ((f"DROP TABLE {KERNEL}",), "no GPU activity"),
        ((f"DELETE FROM {KERNEL}",), "no GPU activity"),
        ((f"ALTER TABLE {KERNEL} RENAME TO t", f"CREATE VIEW {KERNEL} AS SELECT * FROM t"), "is a view"),
        ((f"DROP TABLE {NVTX}", f"CREATE VIRTUAL TABLE {NVTX} USING fts5(start)"), "is a view or a virtual table"),
        ((f'ALTER TABLE {KERNEL} RENAME COLUMN "end" TO stop',), "has no column 'end'"),
        (
            (f"CREATE TABLE t AS SELECT * FROM {KERNEL}", *[f"INSERT INTO {KERNEL} SELECT * FROM t"] * 5),
            "more than 5 rows",
        ),
        ((f"ALTER TABLE {NVTX} ADD COLUMN rowid INTEGER",), "has a column 'rowid'"),  # it hides the rows' numbers
    ],
)
def test_a_table_that_cannot_be_trusted_is_refused(tmp_path: Path, statements: tuple[str, ...], text: str) -> None:
    path = edited_export(tmp_path / "report.sqlite", *statements)
    with pytest.raises(BadTrace, match=text):
        read_nsys(path, max_rows=5)


def _spoilt(path: Path, keep: int | None = None) -> None:
    """Write half of a long export, or all of its length of which only `keep` bytes are right."""
    export = NsysExport()
    for at in range(2_000):
        export.kernel(GEMM, at, at + 1)
    data = export.write(path).read_bytes()
    path.write_bytes(data[: len(data) // 2] if keep is None else data[:keep].ljust(len(data), b"\xa5"))


@pytest.mark.parametrize(
    ("name", "write", "text"),
    [
        ("report.nsys-rep", lambda path: path.write_bytes(b"\x1f\x8bxx"), "nsys export --type sqlite"),
        ("report.sqlite", lambda path: path.write_bytes(b"{}"), "is not an SQLite database"),
        ("report.sqlite", lambda path: path.write_bytes(b""), "is not an SQLite database"),
        ("report.sqlite", lambda path: path.write_bytes(b"SQLite format 3\0" + b"\xff" * 500), "SQLite cannot read it"),
        ("report.sqlite", _spoilt, "SQLite cannot read it"),
        ("report.sqlite", lambda path: _spoilt(path, 8_192), "SQLite cannot read it"),
        ("report.sqlite", lambda path: path.mkdir(), "cannot be read"),
        ("report.sqlite", lambda path: None, "cannot be read"),
    ],
)
def test_a_file_that_is_no_export_is_refused(
    tmp_path: Path, name: str, write: Callable[[Path], None], text: str
) -> None:
    write(tmp_path / name)
    with pytest.raises(BadTrace, match=text) as caught:
        read_nsys(tmp_path / name)
    assert caught.value.path == str(tmp_path / name)
