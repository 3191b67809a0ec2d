"""What a trace says: launches, collectives and their metadata, shapes, devices; on NVIDIA, AMD and without a GPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from counterpoint.trace.kineto import read_kineto
from counterpoint.trace.source import TraceFile
from counterpoint.trace.timeline import CollectiveInfo, Device, HostKind, Kind, Timeline
from tests.support import kineto_trace as kt

NCCL = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


@pytest.fixture
def read_all(tmp_path: Path) -> Any:
    """All ranks of a file of these events."""

    def through_a_file(events: list[kt.Event], head: dict[str, Any] | None = None) -> list[Timeline]:
        path = kt.write(tmp_path / "trace.json", events, head)
        return read_kineto(TraceFile(path=path, label=path.name, format="kineto"))

    return through_a_file


@pytest.fixture
def read(read_all: Any) -> Any:
    return lambda *given: read_all(*given)[0]


def info_of(timeline: Timeline, row: int = 0) -> CollectiveInfo | None:
    at = int(timeline.gpu.collective[row])
    return timeline.collectives[at] if at >= 0 else None


@pytest.mark.parametrize("correlation", [7, 0])
def test_an_operation_is_joined_with_the_call_that_launched_it(read: Any, correlation: int) -> None:
    """Some profilers count from 0."""
    gpu = read(kt.launched("k", 100.0, 50.0, correlation=correlation, delay=20.0)).gpu
    assert (gpu.launch_start[0], gpu.launch_end[0], gpu.launch_thread[0]) == (0.0, 3.0, 0)


def test_a_graph_launches_many(read: Any) -> None:
    """Every kernel of a CUDA graph shares the correlation of its one call."""
    call = kt.runtime("cudaGraphLaunch", 90.0, 5.0, correlation=7)
    kernels = [kt.kernel("k", 100.0 + n, 1.0, correlation=7) for n in range(3)]
    assert read([call, *kernels]).gpu.launch_start.tolist() == [0.0] * 3


def test_a_kernel_without_its_call_has_no_launch(read: Any) -> None:
    """NaN, not 0: the call came before the recording."""
    gpu = read([kt.kernel("k", 1.0, 1.0, correlation=3), kt.runtime("cudaLaunchKernel", 1.0, 1.0, correlation=4)]).gpu
    assert (gpu.launch_start[0] != gpu.launch_start[0], gpu.launch_thread[0]) == (True, -1)


def test_metadata_of_a_kernel(read: Any) -> None:
    """The args of the kernel itself: operation, group, counts, dtype."""
    facts = kt.metadata("_allgather_base", ranks=(0, 1, 2, 3), nelems=(256, 1024))
    assert info_of(read([kt.kernel(NCCL, 1.0, 1.0, more=facts)])) == CollectiveInfo(
        op="all_gather", group="0", group_desc="default_pg", group_ranks="[0, 1, 2, 3]", group_size=4,
        in_nelems=256, out_nelems=1024, dtype="BFloat16",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("listed", "found"),
    [
        ([{"pg_name": "0", "pg_desc": "dp_shard"}], "dp_shard"), ([{"pg_name": 0, "pg_desc": "tp"}], "tp"),
        ([{"pg_name": "0", "pg_desc": "undefined"}], None), ([{"pg_name": "1", "pg_desc": "tp"}], None),
        ([{"pg_name": "0", "pg_desc": 5}], None), ([7, {}], None), ("x", None), (None, None),
    ],
)  # fmt: skip
def test_the_header_describes_groups(read: Any, listed: Any, found: str | None) -> None:
    """Where a kernel only names its group, the header's list says what the program calls it."""
    facts = kt.metadata("allreduce")
    del facts["Process Group Description"]
    head = kt.header()
    head["distributedInfo"]["pg_config"] = listed
    info = info_of(read([kt.kernel(NCCL, 1.0, 1.0, more=facts)], head))
    assert info is not None
    assert info.group_desc == found


@pytest.mark.parametrize("own", [{}, kt.metadata("allreduce")])
def test_the_hosts_record_is_found_by_external_id(read: Any, own: dict[str, Any]) -> None:
    """Where kernels carry no metadata (before PyTorch 2.4), and where they do: Seq and Comms Id are not among it."""
    facts = kt.metadata("allreduce", seq=12, comms_id=2**60)
    events = [kt.param_comms(0.0, 9.0, external=5, more=facts), kt.kernel(NCCL, 10.0, 1.0, external=5, more=own)]
    info = info_of(read(events))
    assert info is not None
    assert (info.op, info.seq, info.comms_id) == ("all_reduce", 12, str(2**60))


def test_metadata_makes_a_kernel_communication(read: Any) -> None:
    assert read([kt.kernel("_triton_ring", 1.0, 1.0, more=kt.metadata("allreduce"))]).gpu.kind.tolist() == [Kind.COMM]


def test_a_copy_within_the_device_stays_a_copy(read: Any) -> None:
    """NCCL's copy in a group of one rank is no communication, whatever metadata its range has."""
    copy = kt.copy("Memcpy DtoD (Device -> Device)", 1.0, 1.0)
    copy["args"] |= kt.metadata("_allgather_base", ranks=(0,))
    timeline = read([copy])
    assert (timeline.gpu.kind.tolist(), info_of(timeline)) == ([Kind.MEMCPY], None)


def test_the_stream_does_not_matter(read: Any) -> None:
    """NCCL on the compute stream is communication, a matmul on NCCL's stream is compute."""
    gpu = read([kt.kernel(NCCL, 1.0, 1.0, stream=7), kt.kernel("nvjet_tst", 2.0, 1.0, stream=20)]).gpu
    assert gpu.kind.tolist() == [Kind.COMM, Kind.COMPUTE]


def test_shapes_of_the_launching_operation(read: Any) -> None:
    """`Input Dims` by External id, also those of the first operation in the file."""
    launcher = kt.op("aten::mm", 0.0, 9.0, external=1, dims=[[2, 3], [3, 4]])
    timeline = read([launcher, kt.kernel("k", 5.0, 1.0, external=1)])
    assert timeline.shapes[timeline.gpu.shape[0]] == "[[2,3],[3,4]]"


@pytest.mark.parametrize(
    ("grid", "expected"),
    [
        ([264, 2, 1], [264, 2, 1]), ([132], [132, 1, 1]), ([], [0, 0, 0]), (None, [0, 0, 0]), ("(132, 1)", [0, 0, 0]),
        ([-1, 2, 3], [0, 2, 3]), ([2**63, 1, 1], [0, 1, 1]), ([1.5, 1, 1], [0, 0, 0]), ([2**70, 1, 1], [0, 1, 1]),
        ({"x": 1}, [0, 0, 0]), ([[1], 2, 3], [0, 0, 0]),
    ],
)  # fmt: skip
def test_grids(grid: Any, expected: list[int], read: Any) -> None:
    """Three counts; whatever cannot be a grid is unknown, which is 0."""
    assert read([kt.kernel("k", 1.0, 1.0, grid=grid)]).gpu.grid.tolist() == [expected]


def test_the_device_that_ran_the_rank(read: Any) -> None:
    """Properties of the GPU of the kernels, not of the first in the machine."""
    head = kt.header(devices=[{"id": 0, "name": "other"}, kt.H200 | {"id": 3}])
    assert read([kt.kernel("k", 1.0, 1.0, device=3)], head).device == Device(
        name="NVIDIA H200", num_sms=132, regs_per_sm=65536, smem_per_sm=233472, threads_per_sm=2048, index=3,
        host_gpus=2,
    )  # fmt: skip


@pytest.mark.parametrize(
    "devices", [[], ["H200"], [{"id": 0, "numSms": -1, "name": 5}], [{"numSms": 0}], [{"id": [0]}]]
)
def test_properties_that_make_no_sense_are_unknown(devices: Any, read: Any) -> None:
    """Nothing is made of them, above all not 0 SMs."""
    assert read([kt.kernel("k", 1.0, 1.0)], kt.header() | {"deviceProperties": devices}).device == Device()


@pytest.mark.parametrize("device", [1, 2**31 - 1])
def test_streams_of_two_devices_are_two(read: Any, device: int) -> None:
    streams = read([kt.kernel("a", 1.0, 1.0), kt.kernel("b", 1.0, 1.0, device=device)]).gpu.stream
    assert streams[0] != streams[1]


def test_streams_known_by_their_thread_only(read: Any) -> None:
    """Where args name no stream, the tid does: 20 or "stream 20"."""
    events = [kt.kernel("k", float(n), 1.0) | {"tid": tid, "args": {}} for n, tid in enumerate((20, "stream 20"))]
    assert read(events).gpu.stream.tolist() == [20, 20]


def test_threads_are_what_pid_and_tid_say(read: Any) -> None:
    """Any JSON value may stand there; equal ones are one thread."""
    tids = (1, "1", [1], {"a": 1}, [1], None, 1.5, True and 7, 7)
    timeline = read([kt.op("aten::mm", float(n), 1.0, tid=tid) for n, tid in enumerate(tids)])
    assert timeline.host.thread.tolist() == [0, 1, 2, 3, 2, 4, 5, 6, 6]


def test_waits_of_streams(read: Any) -> None:
    """cuda_sync events: which stream waits for what on which other."""
    wait = kt.stream_wait(1.0, stream=20, waits_on=7, waits_for=5)
    host = read([wait, kt.kernel("k", 1.0, 1.0)]).host
    assert (host.kind[0], host.stream[0], host.waits_for[0], host.waits_on[0]) == (HostKind.SYNC, 20, 5, 7)


def test_rocm(read: Any) -> None:
    """HIP launches, RCCL's generic kernel and its metadata are what their CUDA kin are."""
    rccl = "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)"
    call = kt.event("hip_runtime", "hipExtLaunchKernel", 0.0, 2.0, correlation=1)
    facts = kt.metadata("_reduce_scatter_base")
    timeline = read([call, kt.kernel(rccl, 5.0, 9.0, correlation=1, more=facts), kt.copy("CopyHostToDevice", 6.0, 1.0)])
    found = timeline.gpu.kind.tolist(), timeline.gpu.launch_start[0], timeline.collectives[0].op
    assert found == ([Kind.COMM, Kind.MEMCPY], 0.0, "reduce_scatter")


def test_gloo(read: Any) -> None:
    """Without a GPU, the backend's ranges are communication and outermost aten operations compute."""
    events = [
        kt.op("aten::linear", 0.0, 10.0), kt.op("aten::addmm", 1.0, 8.0), kt.op("c10d::allreduce_", 10.0, 1.0),
        kt.annotation("gloo:all_reduce", 11.0, 20.0, tid=99), kt.annotation("ProfilerStep#1", 0.0, 40.0),
    ]  # fmt: skip
    timeline = read(events, kt.header(devices=()))
    names = [timeline.names[n] for n in timeline.gpu.name]
    found = list(zip(names, timeline.gpu.kind.tolist(), strict=True))
    assert found == [("aten::linear", Kind.COMPUTE), ("gloo:all_reduce", Kind.COMM)]


def test_gloo_metadata_is_matched_in_order(read: Any) -> None:
    """The n-th range of an operation has the n-th record of that operation."""
    events = [
        *(kt.param_comms(10.0 * n, 1.0, external=n, more=kt.metadata(op, seq=n))
          for n, op in enumerate(("allreduce", "broadcast", "allreduce"))),
        *(kt.annotation(f"gloo:{op}", 10.0 * n + 2, 5.0, tid=99)
          for n, op in enumerate(("all_reduce", "broadcast", "all_reduce"))),
    ]  # fmt: skip
    timeline = read(events, kt.header(devices=()))
    assert [timeline.collectives[at].seq for at in timeline.gpu.collective] == [0, 1, 2]


def test_mtia(read: Any) -> None:
    """Device events of Meta's accelerator: work with its launch, copies; not what a stream does about events."""
    events = [
        kt.event("mtia_runtime", "runFunction - job_prep_and_submit_for_execution", 0.0, 2.0, correlation=7),
        kt.event("mtia_ccp_events", "fc-dtype_Float", 5.0, 9.0, pid=9, tid=4, correlation=7, stream=1),
        kt.event("mtia_ccp_events", "dma_request", 15.0, 1.0, pid=9, tid=4),
        kt.event("mtia_ccp_events", "event_wait", 16.0, 500.0, pid=9, tid=4, stream=1),
        kt.op("aten::linear", 0.0, 3.0),
    ]
    timeline = read(events, kt.header(devices=()))
    names = [timeline.names[n] for n in timeline.gpu.name]
    assert list(zip(names, timeline.gpu.kind.tolist(), strict=True)) == [
        ("fc-dtype_Float", Kind.COMPUTE), ("dma_request", Kind.MEMCPY)
    ]  # fmt: skip
    assert timeline.gpu.launch_start[0] == 0.0
    assert not timeline.device.from_host


@pytest.mark.parametrize(
    "used",
    [
        kt.runtime("cudaLaunchKernel", 1.0, 2.0, correlation=1),
        kt.op("aten::cudnn_convolution", 1.0, 2.0),
        kt.annotation("nccl:all_reduce", 1.0, 2.0),
    ],
)
def test_a_gpu_that_was_not_recorded_is_no_cpu(used: kt.Event, read: Any) -> None:
    """The host launched kernels, but none is in the trace."""
    timeline = read([kt.op("aten::linear", 0.0, 10.0), used])
    assert (timeline.device.recorded, timeline.device.from_host, timeline.device.name) == (False, True, "NVIDIA H200")
    assert any("GPU activity was not recorded" in note for note in timeline.notes)
    on_cpu = read([kt.op("aten::linear", 0.0, 10.0)])
    assert (on_cpu.device.recorded, on_cpu.device.name, on_cpu.notes) == (True, "cpu", ())


def merged(read_all: Callable[[list[kt.Event]], list[Timeline]], *devices: int) -> list[Timeline]:
    """Two processes that both number their launches from 0 on; the second launches 500 µs after the first."""
    events = []
    for process, device in enumerate(devices):
        for n in range(5):
            own = kt.launched("k", 1000.0 + 100 * n + 500 * process, 50.0, correlation=n, device=device)
            events += [e | {"pid": 900 + process} if e["cat"] == "cuda_runtime" else e for e in own]
    return read_all(events)


def test_merged_processes_with_gpus_of_their_own_are_ranks(read_all: Any) -> None:
    """Each gets its own launches, though the numbers of these are the same, and both stay on one clock."""
    one, other = merged(read_all, 0, 1)
    found = [(t.rank, t.rank_known, len(t.gpu), len(t.host)) for t in (one, other)]
    assert found == [(0, False, 5, 5), (1, False, 5, 5)]
    assert one.origin_ns == other.origin_ns
    for t, begin in ((one, 0.0), (other, 500.0)):
        assert t.gpu.launch_start.tolist() == [begin + 100 * n for n in range(5)]
    assert "pid 901, one of 2 processes" in str(other.notes)


def test_merged_processes_on_one_gpu_are_said_to_be_several(read_all: Any) -> None:
    """Which of them launched what is not known, so that they stay one rank, with a note."""
    (both,) = merged(read_all, 0, 0)
    assert (both.processes, len(both.gpu)) == (2, 10)
    assert "2 processes (pid 900, 901) that cannot be told apart" in str(both.notes)


def of_gaudi() -> list[kt.Event]:
    """Operations of a device in a category of its own, which state stream and launch."""
    events = [e for n in range(3) for e in kt.launched("mme", 100.0 + 100 * n, 50.0, correlation=n)]
    names = {"kernel": "hpu_op", "cuda_runtime": "hpu_runtime"}
    return [e | {"cat": names[e["cat"]]} for e in events]


def test_unknown_categories_with_a_stream_are_the_device_where_nothing_else_is(read: Any) -> None:
    """The device ran, whatever the profiler calls that: it is not a job of the CPU."""
    timeline = read(of_gaudi())
    assert (timeline.device.recorded, timeline.device.from_host) == (True, False)
    assert timeline.gpu.launch_start.tolist() == [0.0, 100.0, 200.0]
    assert "unknown categories that state a stream are taken for what the device ran: hpu_op (3)" in str(timeline.notes)


def test_unknown_categories_beside_kernels_are_left_out_with_a_note(read: Any) -> None:
    """They may repeat what the kernels say."""
    timeline = read(kt.launched("k", 100.0, 50.0, correlation=9) + of_gaudi())
    assert len(timeline.gpu) == 1
    assert "left out: hpu_op (3)" in str(timeline.notes)


def test_ranges_of_the_gpu_are_no_unknown_category(read: Any) -> None:
    """Annotations are shown on the GPU, too."""
    shown = kt.event("gpu_user_annotation", "step", 100.0, 50.0, stream=7, device=0)
    assert read([*kt.launched("k", 100.0, 50.0, correlation=9), shown]).notes == ()


def c10d(name: str, at: float, dims: Any, types: Any = ("float",)) -> kt.Event:
    """An operation of c10d with the shapes and types of its inputs, output first."""
    made = kt.op(f"c10d::{name}", at, 5.0, external=int(at), dims=dims)
    made["args"]["Input type"] = list(types)
    return made


def gloo(op: str, at: float) -> kt.Event:
    """A range of gloo's thread, which says the type of what it moves."""
    made = kt.annotation(f"gloo:{op}", at, 5.0, tid=99)
    made["args"] |= {"Input Dims": [[50]], "Input type": ["double"]}
    return made


def test_gloo_without_metadata_is_told_by_the_inputs_of_c10d(read: Any) -> None:
    """Output, then input; a reduce_scatter runs as an all_reduce. An aten operation keeps its shapes."""
    timeline = read([
        kt.op("aten::mm", 1.0, 2.0, external=1, dims=[[4, 8], [8, 2]]),
        c10d("_reduce_scatter_base_", 10.0, [[50], [100], [], []]),
        c10d("_allgather_base_", 20.0, [[100], [50], []]),
        c10d("allreduce_", 30.0, [[[7], [8]], [], []], types=["TensorList", "", ""]),
        *(gloo(op, at + 2) for op, at in (("all_reduce", 10.0), ("all_gather", 20.0), ("all_reduce", 30.0))),
    ])  # fmt: skip
    infos = [info_of(timeline, row) for row in range(4)]
    assert [info and (info.op, info.in_nelems, info.out_nelems, info.dtype) for info in infos] == [
        None,
        ("reduce_scatter", 100, 50, "float"),
        ("all_gather", 50, 100, "float"),
        ("all_reduce", 15, 15, "double"),  # a list of two tensors, whose type gloo says
    ]
    assert timeline.shapes[timeline.gpu.shape[0]] == "[[4,8],[8,2]]"
    assert timeline.gpu.shape[1:].tolist() == [-1, -1, -1]


@pytest.mark.parametrize("dims", ["nonsense", [], [[-1], [2]], [[1 << 60], [2]], {"a": 1}, [[1.5]]])
def test_inputs_that_make_no_sense_tell_nothing(read: Any, dims: Any) -> None:
    """The collective stays, without sizes."""
    timeline = read([c10d("_allgather_base_", 10.0, dims), kt.annotation("gloo:all_gather", 12.0, 5.0, tid=99)])
    info = info_of(timeline)
    assert info is None or info.out_nelems is None


def test_what_a_c10d_operation_launches_by_itself_is_no_collective(read: Any) -> None:
    """On a GPU only `record_param_comms` describes kernels: a fill inside the operation stays compute."""
    timeline = read(
        [c10d("_allgather_base_", 10.0, [[100], [50]]), *kt.launched("fill", 11.0, 5.0, correlation=1, external=10)]
    )
    assert (timeline.gpu.kind.tolist(), timeline.gpu.collective.tolist()) == ([Kind.COMPUTE], [-1])
