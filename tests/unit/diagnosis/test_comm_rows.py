"""What a collective is: by its metadata, its kernel, and the host operation that launched it."""

import pytest

from counterpoint.diagnosis.analysis.stragglers import _STRUCTURAL
from counterpoint.diagnosis.reading.comm_rows import comm_rows
from counterpoint.diagnosis.reading.modules import NamedRanges
from counterpoint.errors import BadTrace
from counterpoint.trace.timeline import CollectiveInfo, HostKind, Kind
from tests.support.job_builder import host, op, rank, timeline

SEND_RECV = "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)"
GENERIC = "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)"


def operation(
    kernel: str, around: str | None, *, info: CollectiveInfo | None = None, thread: int = 0, until: float = 15.0
) -> str:
    """The operation of a kernel that is launched at 10, with a host range of `thread` from 5 to `until`."""
    ranges = [] if around is None else [host(around, 5.0, until, HostKind.ANNOTATION, thread=thread)]
    read = timeline(rank(op(kernel, 20, 40, kind=Kind.COMM, launch=10.0, info=info), *ranges))
    rows = comm_rows(read, NamedRanges.of(read))
    (found,) = rows.op
    return found


@pytest.mark.parametrize(
    "around", ["nccl:all_to_all", "c10d::alltoall_base_", "c10d::alltoall_", "_c10d_functional::all_to_all_single"]
)
def test_send_recv_inside_an_all_to_all_is_one(around: str) -> None:
    """NCCL sends an all-to-all by the kernel of a pipeline's sends; it counts for late ranks, those do not."""
    found = operation(SEND_RECV, around)
    assert found == "all_to_all"
    assert found not in _STRUCTURAL


def test_the_one_kernel_is_what_the_host_says() -> None:
    """RCCL runs everything by one kernel."""
    assert operation(GENERIC, "nccl:all_reduce") == "all_reduce"


@pytest.mark.parametrize("around", [None, "nccl:send", "c10d::recv_", "nccl:coalesced", "aten::add"])
def test_sends_of_a_pipeline_stay_sends(around: str | None) -> None:
    """Without such a word from the host, the kernel says what it is."""
    assert operation(SEND_RECV, around) == "send_recv"


def test_a_range_of_another_thread_or_time_says_nothing() -> None:
    assert operation(SEND_RECV, "nccl:all_to_all", thread=3) == "send_recv"
    assert operation(SEND_RECV, "nccl:all_to_all", until=9.0) == "send_recv"


def test_metadata_outweigh_the_host() -> None:
    """What the profiler printed on the kernel is the operation; `coalesced` is none."""
    assert operation(SEND_RECV, "nccl:all_to_all", info=CollectiveInfo(op="broadcast")) == "broadcast"
    assert operation(SEND_RECV, "nccl:all_to_all", info=CollectiveInfo(op="coalesced")) == "all_to_all"
    assert operation(SEND_RECV, None, info=CollectiveInfo(op="all_to_all")) == "all_to_all"


def test_a_group_of_impossible_size_is_a_bad_trace() -> None:
    """Of more ranks than 32 bits count, which a file may say."""
    read = timeline(rank(op("ncclDevKernel_AllGather", 0, 10, kind=Kind.COMM)), 0, 99_999_999_999)
    with pytest.raises(BadTrace, match="a group of 99999999999 ranks"):
        comm_rows(read, NamedRanges.of(read))
