"""What NCCL and nccl-tests print, with launchers' prefixes, of several versions."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

import pytest
from fit.measured import Measured
from fit.nccl_tables import (
    MAX_TEXT,
    nccl_test_rows,
    tuning_pick,
    tuning_picks,
    tuning_rows,
    tuning_table,
)
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.errors import Misconfigured

TEST = """\
# Collective test starting: {program}
# nThread 1 nGpus 1 minBytes 1048576 maxBytes 4194304 step: 2(factor) warmup iters: 5 iters: 20
#  Rank  0 Group  0 Pid  13919 on       host device  0 [0000:04:00] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid  13920 on       host device  1 [0000:05:00] NVIDIA H100 80GB HBM3
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
{rows}
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 7.4
"""
NEW = "  1048576  262144  float  sum  -1  354.9  2.95  5.76  0  345.7  3.03  5.92  0"
OLD = "  1048576  262144  float  sum  354.9  2.95  5.76  N/A  345.7  3.03  5.92  N/A"
GATHER = "  1048576  131072  float  none  -1  354.9  2.95  5.76  0  345.7  3.03  5.92  0"
NO_REDOP = "  1048576  131072  float  354.9  2.95  5.76  0e+00  345.7  3.03  5.92  0e+00"
LONG = "  8589934592  2147483648  float  sum  -1  158070  54.34  95.10  0  158561  54.17  94.80  0"

TABLE = """\
host:1:1 [0] NCCL INFO Algorithm | Tree | Ring |
host:1:1 [0] NCCL INFO Protocol | LL | LL128 | Simple | LL | LL128 | Simple |
host:1:1 [0] NCCL INFO Max NThreads | 512 | 640 | 512 | 512 | 640 | 512 |
host:1:1 [0] NCCL INFO Broadcast | 0.0/ 0.0 | 0.0/ 0.0 | 0.0/ 0.0 | 9.3/ 40.0 | 18.0/ 0.0 | 22.4/ 120.0 |
host:1:1 [0] NCCL INFO Reduce | 0.0/ 0.0 | 0.0/ 0.0 | 0.0/ 0.0 | 9.3/ 40.0 | 18.0/ 0.0 | 22.4/ 120.0 |
host:1:1 [0] NCCL INFO AllReduce | 16.8/ 20.5 | 31.0/ 0.0 | 36.4/ 81.9 | 26.6/ 30.2 | 51.0/ 0.0 | 66.4/ 92.4 |
host:1:1 [0] NCCL INFO Algorithm | CollNetChain | NVLS |
host:1:1 [0] NCCL INFO AllReduce | 5.0/ 0.0 | 8.5/ 0.0 | 14.0/ 0.0 | 0.0/ 0.0 | 0.0/ 0.0 | 25.0/ 250.0 |
"""
OLD_TABLE = """\
host:1:1 [0] NCCL INFO Latency/AlgBw | Tree/ LL | Tree/ LL128 | Tree/Simple | Ring/ LL | Ring/ LL128 | Ring/Simple |
host:1:1 [0] NCCL INFO AllGather | 0.0/ 0.0 | 0.0/ 0.0 | 0.0/ 0.0 | 6.3/ 10.0 | 14.0/ 0.0 | 18.0/ 9.0 |
"""


@pytest.mark.parametrize("row", [NEW, OLD, GATHER, NO_REDOP])
def test_the_row_of_every_version_is_read(row: str) -> None:
    """With and without redop and root, the time out of place is the same."""
    (found,) = nccl_test_rows(TEST.format(program="all_reduce_perf", rows=row))
    assert found == Measured(operation="all_reduce", ranks=2, num_bytes=1048576, us=354.9)


def test_the_right_half_is_in_place() -> None:
    """`in_place` takes the second time."""
    (found,) = nccl_test_rows(TEST.format(program="all_reduce_perf", rows=NEW), in_place=True)
    assert found.us == 345.7


def test_long_times_have_no_fraction() -> None:
    """158070 µs is a time, not a root."""
    (found,) = nccl_test_rows(TEST.format(program="all_reduce_perf", rows=LONG))
    assert found.us == 158070.0


def test_a_launchers_prefix_does_not_matter() -> None:
    """mpirun's [1,0]<stdout>: before every line."""
    text = "\n".join(
        f"[1,0]<stdout>:{line}" for line in TEST.format(program="all_gather_perf", rows=GATHER).splitlines()
    )
    assert nccl_test_rows(text) == (Measured(operation="all_gather", ranks=2, num_bytes=1048576, us=354.9),)


@pytest.mark.parametrize(
    ("program", "operation"),
    [("alltoall_perf", "all_to_all"), ("sendrecv_perf", "send_recv"), ("broadcast_perf", "broadcast")],
)
def test_programs_are_operations(program: str, operation: str) -> None:
    """The name of the program says what was measured."""
    (found,) = nccl_test_rows(TEST.format(program=program, rows=NEW))
    assert found.operation == operation


def test_what_is_given_goes_before_what_is_read() -> None:
    """Operation and ranks can be given where the text lacks them."""
    (found,) = nccl_test_rows(NEW, operation="reduce_scatter", ranks=16)
    assert (found.operation, found.ranks) == ("reduce_scatter", 16)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (NEW, "which collective it is does not stand in the text"),
        (f"all_reduce_perf\n{NEW}", "give the number of ranks"),
        (TEST.format(program="all_reduce_perf", rows=""), "no row of nccl-tests"),
    ],
)
def test_text_without_rows_is_refused(text: str, match: str) -> None:
    """The error says what is missing."""
    with pytest.raises(Misconfigured, match=match):
        nccl_test_rows(text)


def test_a_table_is_read_over_all_its_parts() -> None:
    """Algorithms of both halves, without ways of bandwidth 0."""
    cells = {(cell.operation, cell.algorithm, cell.protocol): cell.gb_per_s for cell in tuning_table(TABLE)}
    assert cells == {
        ("broadcast", "Ring", "LL"): 40.0,
        ("broadcast", "Ring", "Simple"): 120.0,
        ("all_reduce", "Tree", "LL"): 20.5,
        ("all_reduce", "Tree", "Simple"): 81.9,
        ("all_reduce", "Ring", "LL"): 30.2,
        ("all_reduce", "Ring", "Simple"): 92.4,
        ("all_reduce", "NVLS", "Simple"): 250.0,
    }


def test_the_table_of_older_versions_is_read() -> None:
    """Algorithm and protocol in one heading."""
    found = [(cell.algorithm, cell.protocol, cell.latency_us) for cell in tuning_table(OLD_TABLE)]
    assert found == [("Ring", "LL", 6.3), ("Ring", "Simple", 18.0)]


@pytest.mark.parametrize(("num_bytes", "way"), [(1 << 10, ("Tree", "LL")), (1 << 30, ("NVLS", "Simple"))])
def test_the_pick_is_the_least_time(num_bytes: int, way: tuple[str, str]) -> None:
    """Few bytes by the least latency, many by the most bandwidth."""
    cell = tuning_pick(tuning_table(TABLE), "all_reduce", num_bytes)
    assert (cell.algorithm, cell.protocol) == way


def test_an_operation_that_is_not_there_is_refused() -> None:
    """The error lists what the table has."""
    with pytest.raises(Misconfigured, match=r"'all_to_all' is not in the table; it has: all_reduce, broadcast"):
        tuning_pick(tuning_table(TABLE), "all_to_all", 1)


def test_a_table_is_rows_to_fit() -> None:
    """1 KiB to 1 GiB of each operation, at NCCL's own time."""
    rows = tuning_rows(tuning_table(TABLE), ranks=16)
    assert (len(rows), rows[-1]) == (
        42,
        Measured(operation="all_reduce", ranks=16, num_bytes=1 << 30, us=25.0 + (1 << 30) / 250e3),
    )


def test_picks_are_read_by_name_and_by_number() -> None:
    """Newer lines say RING and SIMPLE, older ones 1 and 2."""
    log = (
        "NCCL INFO AllGather: 37756928 Bytes -> Algo 1 proto 2 time 2860.208008\n"
        "NCCL INFO AllReduce: 4096 Bytes -> Algo TREE proto LL channel{Lo..Hi}={0..1}\n" * 2
    )
    found = [(pick.operation, pick.num_bytes, pick.algorithm, pick.protocol) for pick in tuning_picks(log)]
    assert found == [("all_gather", 37756928, "Ring", "Simple"), ("all_reduce", 4096, "Tree", "LL")]


def test_a_log_without_a_table_is_refused() -> None:
    """The error says which variables to set."""
    with pytest.raises(Misconfigured, match="NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=TUNING"):
        tuning_table("NCCL INFO Bootstrap : Using eth0")


def test_text_is_capped() -> None:
    """More than 64 MB of log are refused."""
    with pytest.raises(Misconfigured, match="give at most"):
        tuning_table(" " * (MAX_TEXT + 1))


@given(text=st.text(st.sampled_from(list("AllReduce |/0123456789.\nNCCL INFO float sum-Tree")), max_size=400))
def test_no_text_breaks_the_readers(text: str) -> None:
    """Whatever stands there, it is rows or Misconfigured."""
    readers: tuple[Callable[[str], tuple[object, ...]], ...] = (
        tuning_table,
        tuning_picks,
        partial(nccl_test_rows, operation="all_gather", ranks=2),
    )
    for read in readers:
        with suppress(Misconfigured):
            assert isinstance(read(text), tuple)
