"""Which collective of one rank is which of another: by Seq, by Comms Id, by order, and where one is missing."""

import numpy as np
import pytest

from counterpoint.diagnosis.reading.join import align
from counterpoint.diagnosis.reading.traced_job import TracedJob
from counterpoint.trace.timeline import CollectiveInfo, Kind
from tests.support.job_builder import Rank, comm, job, op, rank

OLD = "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)"


def rows(j: TracedJob) -> list[list[int]]:
    """Per collective, the row of each rank, -1: not there."""
    return [list(map(int, r)) for r in j.joined.row]


def plain(*ends: float, width: float = 10.0, late: float = 0.0) -> Rank:
    """Equal collectives of an old trace without metadata: nothing but their times tells them apart."""
    ops = [op(OLD, end - width + late, end, kind=Kind.COMM, grid=(2, 1, 1)) for end in ends]
    return rank(op("matmul", 0, 1, launch=0.0), *ops)


def stated(name: str, at: float, **facts: object) -> object:
    info = CollectiveInfo(**{"op": name, "group": "0", "in_nelems": 8, "out_nelems": 8, "dtype": "Float", **facts})  # type: ignore[arg-type]
    return comm(name, at, at + 10, info=info)


def test_by_seq() -> None:
    """Rank 1 lacks Seq 2: what follows keeps its partner."""
    first = rank(*[comm("all_reduce", at, at + 10, seq=n) for n, at in ((1, 10), (2, 110), (3, 210))])
    second = rank(*[comm("all_reduce", at, at + 10, seq=n) for n, at in ((1, 10), (3, 210))])
    assert (rows(job(first, second)), job(first, second).joined.by[0]) == ([[0, 0], [1, -1], [2, 1]], "seq")


def test_by_comms_id() -> None:
    """An id of the operation goes before Seq."""
    first, second = (
        rank(*[stated("all_reduce", at, comms_id=f"id{n}", seq=7) for n, at in which])  # type: ignore[arg-type]
        for which in (((1, 10), (2, 110), (3, 210)), ((2, 110), (3, 210)))
    )
    j = job(first, second)
    assert (rows(j), j.joined.by[1]) == ([[0, -1], [1, 0], [2, 1]], "comms_id")


def test_id_that_never_changes_is_the_communicators() -> None:
    """Three collectives with one Comms Id are joined by their Seq."""
    both = rank(*[stated("all_reduce", 100.0 * n, comms_id="comm", seq=n) for n in (1, 2, 3)])  # type: ignore[arg-type]
    assert job(both, both).joined.by == ("seq", "seq", "seq")


@pytest.mark.parametrize("ends", [(100, 250, 330, 500, 640, 700), (100, 200, 300, 400, 500, 600)])
@pytest.mark.parametrize("lost", range(6))
def test_one_of_equal_collectives_is_missing(lost: int, ends: tuple[float, ...]) -> None:
    """At every place of a run of identical ones with uneven pauses, or equal ones, the ends tell which."""
    j = job(plain(*ends), plain(*[e for i, e in enumerate(ends) if i != lost]), plain(*ends))
    assert rows(j) == [[i, -1 if i == lost else i - (i > lost), i] for i in range(6)]


@pytest.mark.parametrize("lost", [(2, 5), (2, 4, 6)])
def test_each_rank_lacks_another_collective(lost: tuple[int, ...]) -> None:
    """What a rank lacks is shared by the others; of two ranks it stays alone, though both have equally many."""
    ends = [100, 250, 330, 500, 640, 700, 880, 990]
    j = job(*[plain(*[e for i, e in enumerate(ends) if i != missing]) for missing in lost])
    assert [r.count(-1) for r in rows(j)] == [int(i in lost) for i in range(8)]


def test_other_operation_is_never_a_partner() -> None:
    """An all_gather in place of the all_reduce stays alone."""
    token, ends = [("a", 1), ("b", 1), ("a", 1)], np.array([10.0, 20.0, 30.0])
    assert align(token, ends, [("a", 1), ("c", 1), ("a", 1)], ends).tolist()[1] == -1


def test_late_rank_is_no_missing_collective() -> None:
    """A rank that starts late ends with the others: joined one to one."""
    ends = [100.0, 200.0, 300.0, 400.0]
    assert rows(job(plain(*ends, width=60), plain(*ends, width=60, late=50))) == [[i, i] for i in range(4)]


def test_a_busy_machine_loses_no_partner() -> None:
    """Equal sequences whose ends differ by much more than the usual pause, at many places, match one to one."""
    rng = np.random.default_rng(7)
    ends = np.cumsum(rng.uniform(20, 100, 43))
    token = [("all_gather", 8)] * 43
    for _ in range(20):
        noisy = ends + np.where(rng.random(43) < 0.4, rng.uniform(0, 4000, 43), 0.0)
        assert align(token, ends, token, np.maximum.accumulate(noisy)).tolist() == list(range(43))


def test_groups_of_equal_name_and_other_ranks_are_apart() -> None:
    """Two tensor-parallel groups "1" of two ranks each: two collectives, not one of four."""
    ranks = [
        rank(stated("all_reduce", 10, group="1", group_ranks=members, group_size=2))  # type: ignore[arg-type]
        for members in ("[0, 1]", "[0, 1]", "[2, 3]", "[2, 3]")
    ]
    assert rows(job(*ranks)) == [[0, 0, -1, -1], [-1, -1, 0, 0]]


def test_two_axes_of_a_mesh() -> None:
    """2 x 2: each rank is in one group of each axis, in the order of their starts."""
    tp, dp = ("[0, 1]", "[0, 1]", "[2, 3]", "[2, 3]"), ("[0, 2]", "[1, 3]", "[0, 2]", "[1, 3]")
    ranks = [
        rank(
            stated("all_reduce", 10, group="tp", group_ranks=tp[r], group_size=2),  # type: ignore[arg-type]
            stated("all_reduce", 50, group="dp", group_ranks=dp[r], group_size=2),  # type: ignore[arg-type]
        )
        for r in range(4)
    ]
    assert sorted(rows(job(*ranks))) == sorted([[0, 0, -1, -1], [-1, -1, 0, 0], [1, -1, 1, -1], [-1, 1, -1, 1]])


def test_send_meets_recv() -> None:
    """A send on one rank and the receive on the other are one operation."""
    a = rank(stated("send", 10, group="pp", group_ranks="[0, 1]"))  # type: ignore[arg-type]
    b = rank(stated("recv", 10, group="pp", group_ranks="[0, 1]"))  # type: ignore[arg-type]
    assert (rows(job(a, b)), job(a, b).joined.op) == ([[0, 0]], ("send_recv",))
