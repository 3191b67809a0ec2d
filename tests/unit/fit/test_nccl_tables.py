"""What NCCL prints of its own model, of several versions."""

from collections.abc import Callable
from contextlib import suppress

import pytest
from fit.nccl_tables import MAX_TEXT, tuning_pick, tuning_picks, tuning_rows, tuning_table
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.errors import Misconfigured
from counterpoint.plan.network.nccl_tests import Measured

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


def test_a_table_is_read_over_all_its_parts() -> None:
    """Algorithms of both halves, without ways of bandwidth 0."""
    cells = {(cell.operation, cell.algorithm, cell.protocol): cell.gb_per_s for cell in tuning_table(TABLE)}
    assert cells == {
        ("broadcast", "Ring", "LL"): 40.0, ("broadcast", "Ring", "Simple"): 120.0, ("all_reduce", "Tree", "LL"): 20.5,
        ("all_reduce", "Tree", "Simple"): 81.9, ("all_reduce", "Ring", "LL"): 30.2,
        ("all_reduce", "Ring", "Simple"): 92.4, ("all_reduce", "NVLS", "Simple"): 250.0,
    }  # fmt: skip


def test_the_table_of_older_versions_is_read() -> None:
    found = [(cell.algorithm, cell.protocol, cell.latency_us) for cell in tuning_table(OLD_TABLE)]
    assert found == [("Ring", "LL", 6.3), ("Ring", "Simple", 18.0)]


@pytest.mark.parametrize(("num_bytes", "way"), [(1 << 10, ("Tree", "LL")), (1 << 30, ("NVLS", "Simple"))])
def test_the_pick_is_the_least_time(num_bytes: int, way: tuple[str, str]) -> None:
    """Few bytes by the least latency, many by the most bandwidth."""
    cell = tuning_pick(tuning_table(TABLE), "all_reduce", num_bytes)
    assert (cell.algorithm, cell.protocol) == way


def test_a_table_is_rows_to_fit() -> None:
    """1 KiB to 1 GiB of each operation, at NCCL's own time."""
    rows = tuning_rows(tuning_table(TABLE), ranks=16)
    last = Measured(operation="all_reduce", ranks=16, num_bytes=1 << 30, us=25.0 + (1 << 30) / 250e3)
    assert (len(rows), rows[-1]) == (42, last)


def test_picks_are_read_by_name_and_by_number() -> None:
    """Newer lines say RING and SIMPLE, older ones 1 and 2."""
    log = (
        "NCCL INFO AllGather: 37756928 Bytes -> Algo 1 proto 2 time 2860.208008\n"
        "NCCL INFO AllReduce: 4096 Bytes -> Algo TREE proto LL channel{Lo..Hi}={0..1}\n" * 2
    )
    found = [(pick.operation, pick.num_bytes, pick.algorithm, pick.protocol) for pick in tuning_picks(log)]
    assert found == [("all_gather", 37756928, "Ring", "Simple"), ("all_reduce", 4096, "Tree", "LL")]


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda: tuning_pick(tuning_table(TABLE), "all_to_all", 1),
         "'all_to_all' is not in the table; it has: all_reduce, broadcast"),
        (lambda: tuning_table("NCCL INFO Bootstrap : Using eth0"), "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=TUNING"),
        (lambda: tuning_table(" " * (MAX_TEXT + 1)), "give at most"),
    ],
)  # fmt: skip
def test_what_holds_no_answer_is_refused(ask: Callable[[], object], said: str) -> None:
    with pytest.raises(Misconfigured, match=said):
        ask()


@given(text=st.text(st.sampled_from(list("AllReduce |/0123456789.\nNCCL INFO float sum-Tree")), max_size=400))
def test_no_text_breaks_the_readers(text: str) -> None:
    readers: tuple[Callable[[str], tuple[object, ...]], ...] = (tuning_table, tuning_picks)
    for read in readers:
        with suppress(Misconfigured):
            assert isinstance(read(text), tuple)
