"""Accounts, waits and transfers against numbers worked out by hand."""

from typing import Any

import pytest

from counterpoint.diagnosis.analysis.accounts import steps, totals
from counterpoint.diagnosis.analysis.analysis import Analysis
from counterpoint.diagnosis.reading.traced_job import TracedJob
from counterpoint.records.diagnosis import Collective, RankAccount
from counterpoint.trace.timeline import CollectiveInfo, HostKind, Kind
from tests.support.job_builder import Rank, comm, host, job, op, rank


def accounts(j: TracedJob) -> tuple[RankAccount, ...]:
    return Analysis(j).per_rank


def joined(j: TracedJob) -> tuple[Collective, ...]:
    return Analysis(j).collectives


# compute 0-100 and 150-250, communication 50-180, a copy 260-300: 250-260 is idle
ONE = rank(
    op("matmul", 0, 100, launch=0.0),
    comm("all_gather", 50, 180),
    op("matmul", 150, 250),
    op("Memcpy HtoD", 260, 300, kind=Kind.MEMCPY, stream=9),
)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("duration_us", 300.0),
        ("compute_us", 200.0),
        ("comm_us", 130.0),
        ("overlapped_us", 80.0),  # 50-100 and 150-180
        ("exposed_comm_us", 50.0),  # 100-150
        ("memcpy_us", 40.0),
        ("idle_us", 10.0),
        ("hidden", 80 / 130),
        ("comm_to_compute", 130 / 200),
    ],
)
def test_account_of_one_rank(key: str, expected: float) -> None:
    assert getattr(accounts(job(ONE))[0], key) == pytest.approx(expected)


def test_operations_of_two_streams_count_once() -> None:
    """Kernels 0-100 and 50-150 on two streams are 150 µs of compute."""
    assert accounts(job(rank(op("a", 0, 100, launch=0.0), op("b", 50, 150, stream=8))))[0].compute_us == 150.0


def test_what_a_job_without_communication_hides_is_not_known() -> None:
    assert accounts(job(rank(op("a", 0, 100, launch=0.0))))[0].hidden is None


# arrivals at 100, 120, 160; ends at 260, 261, 262
THREE = tuple(
    rank(op("matmul", 0, at, launch=0.0), comm("all_reduce", at, end))
    for at, end in ((100, 260), (120, 261), (160, 262))
)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("wait_us", {"0": 60.0, "1": 40.0, "2": 0.0}),  # last start minus own
        ("transfer_us", 262 - 160),  # last end minus last start
        ("last_rank", 2),
        ("exposed_us", pytest.approx((160 + 141 + 102) / 3)),  # the mean over ranks: no compute beside it
    ],
)
def test_collective_of_three_ranks(key: str, expected: Any) -> None:
    assert getattr(joined(job(*THREE))[0], key) == expected


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("wait_us", 100 / 3),
        ("transfer_us", (100 + 101 + 102) / 3),  # of each rank's own end
        ("comm_to_compute", 403 / 380),  # of the means: compute 100, 120, 160; communication 160, 141, 102
    ],
)
def test_totals_are_means_over_ranks(key: str, expected: float) -> None:
    assert getattr(totals(accounts(job(*THREE))), key) == pytest.approx(expected)


def test_collectives_between_steps_are_in_none() -> None:
    """Two steps 9 ms apart, and a collective of an evaluation between them."""
    ranges = [host(f"step {n}", at, at + 100, HostKind.ANNOTATION) for n, at in enumerate((0, 9_000))]
    ops = [comm("all_reduce", at + 20, at + 80) for at in (0, 4_000, 9_000)]
    assert [c.step for c in joined(job(rank(*ops, *ranges, steps=())))] == ["step 0", None, "step 1"]


def wide(name: str, into: int, out: int, ranks: int = 4) -> TracedJob:
    """A collective of 4 ranks, 100 µs of transfer, with the element counts of one rank (float)."""
    info = CollectiveInfo(op=name, group="0", group_size=ranks, in_nelems=into, out_nelems=out, dtype="Float", seq=0)
    one = rank(op("matmul", 0, 10, launch=0.0), comm(name, 10, 110, info=info))
    return job(*[one] * ranks)


@pytest.mark.parametrize(
    ("name", "into", "out", "bus"),
    [
        ("all_gather", 250_000, 1_000_000, 30.0),  # 4 MB / 100 µs = 40 GB/s; x 3/4
        ("reduce_scatter", 1_000_000, 250_000, 30.0),
        ("all_reduce", 1_000_000, 1_000_000, 60.0),  # x 6/4
        ("all_to_all", 1_000_000, 1_000_000, 30.0),
        ("broadcast", 1_000_000, 1_000_000, 40.0),
    ],
)
def test_bus_bandwidth(name: str, into: int, out: int, bus: float) -> None:
    """The full array over the transfer, times the factor."""
    assert joined(wide(name, into, out))[0].bus_gb_per_s == pytest.approx(bus)


def test_mfu() -> None:
    """2 x 4096^3 FLOP in a step of 1000 µs on 989.4 TFLOP/s."""
    shapes = "[[4096, 4096], [4096, 4096]]"
    one = rank(op("nvjet_tst_128x256", 0, 400, launch=0.0, shape=shapes), op("other", 900, 1000))
    assert accounts(job(one))[0].mfu == pytest.approx(2 * 4096**3 / 1e-3 / 989.4e12)


def test_mfu_without_shapes_is_not_known() -> None:
    """None, not 0."""
    assert accounts(job(rank(op("nvjet_tst_128x256", 0, 400, launch=0.0))))[0].mfu is None


def test_account_is_cut_at_the_steps() -> None:
    """Two steps hold all; what runs across their border is counted once."""
    two: Rank = rank(
        op("a", 0, 60, launch=0.0), op("b", 60, 200, launch=40.0), op("c", 200, 300, launch=120.0),
        steps=((0.0, 100.0), (100.0, 200.0)),
    )  # fmt: skip
    j = job(two)
    assert ([s.duration_us for s in steps(j)], accounts(j)[0].compute_us) == ([200.0, 100.0], 300.0)
