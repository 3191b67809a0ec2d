"""What nccl-tests prints, with launchers' prefixes, of several versions; and text that contradicts itself."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.errors import Misconfigured
from counterpoint.plan.network.nccl_tests import MAX_BYTES, Measured, NcclTestsRun, nccl_tests_runs, read_nccl_tests

HEAD = """\
# Collective test starting: {program}
# nThread 1 nGpus {gpus} minBytes 1048576 maxBytes 4194304 step: 2(factor) warmup iters: 5 iters: 20
"""
DEVICE = "#  Rank {rank:2} Group  0 Pid  13919 on {host} device  {rank} [0000:04:00] {gpu}"
AGAIN = "#  Rank  3 Group  0 Pid  7 on host9 device  3 [0x07] NVIDIA H100"
NEW = "  1048576  262144  float  sum  -1  354.9  2.95  5.72  0  345.7  3.03  5.88  0"
OLD = "  1048576  262144  float  sum  354.9  2.95  5.72  N/A  345.7  3.03  5.88  N/A"
NO_REDOP = "  1048576  131072  float  354.9  2.95  5.72  0e+00  345.7  3.03  5.88  0e+00"
LONG = "  8589934592  2147483648  float  sum  -1  158070  54.34  105.29  0  158561  54.17  104.96  0"
ROW = Measured(operation="all_reduce", ranks=32, num_bytes=1048576, us=354.9)


def text(*rows: str, program: str = "all_reduce_perf", ranks: int = 32, hosts: int = 4, gpus: int = 1) -> str:
    """A run of 32 ranks on 4 hosts."""
    devices = [
        DEVICE.format(rank=rank, host=f"host{rank * hosts // ranks}", gpu="NVIDIA H100 80GB HBM3")
        for rank in range(ranks)
    ]
    return "\n".join([HEAD.format(program=program, gpus=gpus).rstrip(), *devices, *rows, "# Avg bus bandwidth    : 7"])


def only(found: tuple[NcclTestsRun, ...]) -> Measured:
    """The one row of the one run."""
    ((row,),) = (run.rows for run in found)
    return row


@pytest.mark.parametrize("row", [NEW, OLD, NO_REDOP])
def test_the_row_of_every_version_is_read(row: str) -> None:
    """With and without redop and root, the time out of place is the same."""
    assert only(nccl_tests_runs(text(row))) == ROW


def test_long_times_and_prefixes_of_launchers_are_read() -> None:
    """158070 µs is a time, not a root."""
    assert only(nccl_tests_runs(text(LONG))).us == 158070.0
    prefixed = "\n".join(f"[1,0]<stdout>:{line}" for line in text(NEW).splitlines())
    assert only(nccl_tests_runs(prefixed)) == ROW


@pytest.mark.parametrize(
    ("program", "operation", "bus"),
    [
        ("alltoall_perf", "all_to_all", 2.86),
        ("sendrecv_perf", "send_recv", 2.95),
        ("broadcast_perf", "broadcast", 2.95),
        ("all_gather_perf", "all_gather", 2.86),
        ("reduce_scatter_perf", "reduce_scatter", 2.86),
    ],
)
def test_programs_are_operations(program: str, operation: str, bus: float) -> None:
    row = NEW.replace("5.72", str(bus))
    assert only(nccl_tests_runs(text(row, program=program))).operation == operation


def test_runs_know_their_hosts_gpu_and_operation() -> None:
    """Ranks on each host, and the driver's name of the GPU."""
    (run,) = nccl_tests_runs(text(NEW))
    assert (run.ranks_per_host, run.gpu, run.host_bound) == (8, "NVIDIA H100 80GB HBM3", 0)
    other = NEW.replace("5.72", "2.58")
    runs = nccl_tests_runs(text(NEW) + "\n" + text(other, program="all_gather_perf", ranks=8, hosts=1))
    assert [(run.rows[0].operation, run.rows[0].ranks) for run in runs] == [("all_reduce", 32), ("all_gather", 8)]


def test_what_is_given_or_a_files_name_counts_where_the_text_is_silent(tmp_path: Path) -> None:
    row = only(nccl_tests_runs(NEW.replace("5.72", "2.77"), operation="reduce_scatter", ranks=16))
    assert (row.operation, row.ranks) == ("reduce_scatter", 16)
    path = tmp_path / "all_reduce_perf_32.log"
    path.write_text(text(NEW).partition("\n")[2])
    assert only(read_nccl_tests(path)) == ROW


def test_times_of_one_process_that_launches_on_many_gpus_are_left_out() -> None:
    """34 µs of 8 launches, whatever the size, are none of the network's."""
    rows = [f"  {size}  1  float  sum  -1  {us}  {size / us / 1e3:.2f}  {size / us / 1e3 * 62 / 32:.2f}  0"
            for size, us in ((1024, 34.0), (2048, 34.9), (1 << 20, 75.0))]  # fmt: skip
    (shared,), (own,) = nccl_tests_runs(text(*rows, gpus=8)), nccl_tests_runs(text(*rows))
    assert ([row.us for row in shared.rows], shared.host_bound, len(own.rows)) == ([75.0], 2, 3)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (NEW, "which collective it is does not stand there"),
        (f"all_reduce_perf\n{NEW}", "give the number of ranks"),
        (text(), "no row of nccl-tests"),
        ("", "no row of nccl-tests"),
        (text(NEW, NEW.replace("354.9", "nan")), "line 36, .* is no row of nccl-tests"),
        (text(NEW.replace("354.9", "inf")), "is no row of nccl-tests"),
        (text(NEW.replace("354.9", "-354.9")), "give bytes and a time above 0"),
        (text(NEW.replace("354.9", "0.00")), "give bytes and a time above 0"),
        (text(NEW.replace("  0  345.7", "  17  345.7")), "17 results were wrong"),
        (text(NEW.replace("2.95", "9.95")), "algbw is 9.95 GB/s, but 2.95 follows"),
        (text(NEW, ranks=8), "busbw of all_reduce over 8 ranks is 5.72 GB/s, but 5.17 follows"),
        (text(NEW, program="all_gather_perf"), "busbw of all_gather over 32 ranks"),
        (text(NEW) + "\n# all_gather_perf was meant\n" + NEW, "which collective|give the number of ranks"),
        (text(NEW).replace("# Avg", AGAIN + "\n# Avg"), "twice"),
        (text(NEW, hosts=5), "ranks on its hosts: give equal ones"),
        (text(NEW).replace("NVIDIA H100", "NVIDIA A100", 1), "one kind of GPU"),
        (text(NEW).replace("#  Rank 17", "#  Brank 17"), "lists 31 ranks up to 31"),
        (text(NEW).replace("Group  0", "Group  1", 1), "several groups"),
        (text(NEW, ranks=1, hosts=1), "one rank communicates nothing"),
    ],
)  # fmt: skip
def test_text_that_cannot_be_is_refused(given: str, match: str) -> None:
    with pytest.raises(Misconfigured, match=match):
        nccl_tests_runs(given)


@pytest.mark.parametrize(("ranks", "match"), [(16, "lists 32 ranks up to 31, not 16"), (64, "busbw of all_reduce")])
def test_ranks_that_contradict_the_text_are_refused(ranks: int, match: str) -> None:
    with pytest.raises(Misconfigured, match=match):
        nccl_tests_runs(
            text(NEW.replace("2.95", "200.00").replace("354.9", "5.2429").replace("5.72", "387.5")), ranks=ranks
        )


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(b" " * (MAX_BYTES + 1))
    (tmp_path / "noise").write_bytes(bytes(range(256)) * 64)
    for name in ("none", ".", "large", "noise", "\0"):
        with pytest.raises(Misconfigured):
            read_nccl_tests(tmp_path / name)


@given(
    given=st.text(
        st.sampled_from(list("#  Rank Pid on device []0123456789.\nfloat sum -1 all_reduce_perf")), max_size=400
    )
)
def test_no_text_breaks_the_reader(given: str) -> None:
    with suppress(Misconfigured):
        assert isinstance(nccl_tests_runs(given, operation="all_gather", ranks=2), tuple)
