"""Matmuls that depend on communication: their times by rows, the order and time in which rows come, and the rule."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.collectives.program.clock import simulate
from counterpoint.collectives.program.operations import all_gather, all_to_all, plan_all
from counterpoint.collectives.program.steps import Tuning, partitions
from counterpoint.errors import Misconfigured, Unsupported
from counterpoint.machine.profile import default_profile
from counterpoint.pair.arrivals import ShardedMatmul, Slab, TensorOperation, hiding, hiding_of, nccl_us, segments_of
from counterpoint.pair.curves import RowCurve, estimated_curve
from counterpoint.plan.compute.operations import MatmulOp
from counterpoint.plan.compute.roofline import GpuRates, cost
from counterpoint.plan.job.cluster import find_gpu

H200 = default_profile()
FLAT = RowCurve(n=7168, k=8192, dtype="bfloat16", points=((128, 30.0), (256, 50.0), (8192, 1200.0)))
GATHER = ShardedMatmul(operation="all_gather_matmul", curves=(FLAT,), shard_rows=(1024,) * 8)
SCATTER = replace(GATHER, operation="matmul_reduce_scatter")


@pytest.mark.parametrize(
    ("rows", "us"), [(0, 0.0), (1, 30.0), (128, 30.0), (192, 40.0), (256, 50.0), (8192, 1200.0), (16384, 2400.0)]
)
def test_times_are_interpolated(rows: int, us: float) -> None:
    """Nothing for no rows, at least the first point's time, lines in between, in proportion beyond the last."""
    assert FLAT.us(rows) == pytest.approx(us)


@pytest.mark.parametrize("rows", [128, 1024, 4096, 8192])
def test_an_estimate_is_what_the_planner_says(rows: int) -> None:
    """Data sheet and profile give one time for a matmul, whoever asks; it is marked."""
    gpu = find_gpu("H200")
    known = msgspec.structs.replace(H200.efficiency, memory=3900 / gpu.memory_gb_per_s)
    rates = GpuRates.of(gpu, efficiency=known, burst=True)
    curve = estimated_curve(7168, 8192, "bfloat16", 8192)
    planned = cost(MatmulOp(name="", m=rows, n=7168, k=8192), rates).us
    assert curve.us(rows) == pytest.approx(planned)
    assert curve.estimated


def test_what_has_no_peak_is_not_estimated() -> None:
    unknown = msgspec.structs.replace(H200, gpu="R900")
    old = msgspec.structs.replace(H200, gpu="V100")
    for profile, dtype in ((unknown, "bfloat16"), (old, "float8_e4m3fn")):
        with pytest.raises(Unsupported, match=r"measure the matmul by its rows"):
            estimated_curve(8, 8, dtype, 128, profile)


@pytest.mark.parametrize(("ranks", "least"), [(8, 1571), (4, 1346), (2, 897)])
@pytest.mark.parametrize("operation", ["all_gather_matmul", "matmul_reduce_scatter"])
def test_the_least_size_that_hides(operation: TensorOperation, ranks: int, least: int) -> None:
    """H200 at 700 TFLOP/s and 390 GB/s, in bf16: both sides of each border."""
    below, above = (hiding(operation, least + by, ranks, flop_per_s=700e12, link_bytes_per_s=390e9) for by in (-2, 2))
    assert below.least == pytest.approx(least, abs=0.6)
    assert (below.hides, above.hides) == (False, True)


@pytest.mark.parametrize(("size", "hides"), [(7168, True), (3584, True), (1280, False), (1024, False)])
def test_layers_of_llama_70b_on_8_ranks(size: int, hides: bool) -> None:
    """Gate and up hide, down hides; q, k, v and o do not, and the sentence says what is missing."""
    found = hiding("all_gather_matmul", size, 8, flop_per_s=700e12, link_bytes_per_s=390e9)
    verb = "can" if hides else "cannot"
    said = f"the all_gather {verb} hide behind the matmul: N = {size:,} per rank, and at least 1,571 are needed with 8"
    assert (found.hides, found.why) == (hides, f"{said} ranks")


def test_the_rule_of_a_task_goes_by_its_curves() -> None:
    """Weights that share the gathered rows count together; the rate is that of the curve, the link the profile's."""
    three = replace(GATHER, curves=tuple(replace(FLAT, n=n) for n in (1024, 128, 128)))
    found = hiding_of(three)
    rate = 2 * 8192 * 1280 * 8192 / 3600e-6
    assert found.size == 1280
    assert found.least == pytest.approx(rate * 7 / 8 / 384e9)


def test_bytes_are_those_of_what_is_sent() -> None:
    """An input in fp8 travels as it is, and the partial sums of fp8 operands in two bytes unless told otherwise."""
    fp8 = replace(FLAT, dtype="float8_e4m3fn")
    tasks = (GATHER, SCATTER, replace(GATHER, curves=(fp8,)), replace(SCATTER, curves=(fp8,)))
    assert [task.row_bytes for task in tasks] == [16384, 14336, 8192, 14336]
    assert replace(SCATTER, message_bytes=4).row_bytes == 28672


@pytest.mark.parametrize(
    ("of", "wrong"),
    [
        *((FLAT, {"points": points}) for points in ((), ((128, 30.0), (128, 31.0)), ((0, 30.0),))),
        *((FLAT, wrong) for wrong in ({"points": ((128, math.nan),)}, {"points": ((128, 0.0),)}, {"n": 0})),
        (FLAT, {"dtype": "bf16"}),
        *((GATHER, {"shard_rows": rows}) for rows in ((8192,), (0, 0), (-1, 9))),
        *((GATHER, wrong) for wrong in ({"batch": 0}, {"chunk_rows": 0}, {"message_bytes": 0}, {"curves": ()})),
        (GATHER, {"curves": (FLAT, replace(FLAT, k=64))}),
        (GATHER, {"operation": "matmul_reduce_scatter", "curves": (FLAT, FLAT)}),
    ],
)
def test_impossible_curves_and_tasks_are_refused(of: Any, wrong: dict[str, object]) -> None:
    with pytest.raises(Misconfigured, match=r"give"):
        replace(of, **wrong)


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        # twice as many rows as were measured are the most
        (lambda: FLAT.us(16385), "bfloat16 rows x 7168 x 8192 was measured up to 8192 rows; 16385 are too"),
        (lambda: segments_of(GATHER, 8), "rank 8 of 8: give one of 0 to 7"),
    ],
)
def test_what_is_out_of_reach_is_refused(ask: Callable[[], object], said: str) -> None:
    with pytest.raises(Misconfigured, match=said):
        ask()


def test_rows_come_from_the_rank_before_first_and_leave_for_the_rank_behind_first() -> None:
    """The own shard is there; then the ranks come in falling order, in chunks that ascend through the batch."""
    found = segments_of(replace(GATHER, shard_rows=(4, 5, 6), chunk_rows=5, batch=2), 1)
    assert [(each.rank, each.slabs) for each in found] == [
        (1, (Slab(4, 5), Slab(19, 5))),
        (0, (Slab(0, 4), Slab(15, 1))),
        (0, (Slab(16, 3),)),
        (2, (Slab(9, 5),)),
        (2, (Slab(14, 1), Slab(24, 4))),
        (2, (Slab(28, 2),)),
    ]
    assert found[0].us == 0.0
    assert all(one.us < two.us for one, two in pairwise(found))
    # ranks in rising order, the own shard last; what is left to do falls
    found = segments_of(replace(SCATTER, shard_rows=(4, 5, 6)), 1)
    assert [each.rank for each in found] == [2, 0, 1]
    assert found[-1].slabs == (Slab(4, 5),)
    assert all(one.us > two.us > 0 for one, two in pairwise(found))


@pytest.mark.parametrize(("ranks", "chunks"), [(2, 1), (2, 4), (4, 1), (8, 1), (8, 2)])
def test_the_last_arrival_is_that_of_the_clock(ranks: int, chunks: int) -> None:
    """Beside nothing, shards that are alike arrive when the simulated program of the collective ends."""
    calm = msgspec.structs.replace(H200.mechanisms["zero_sm"], comm_kept=1.0)
    alone = msgspec.structs.replace(H200, mechanisms={"zero_sm": calm})
    task = replace(GATHER, shard_rows=(8192 // ranks,) * ranks, chunk_rows=8192 // ranks // chunks)
    shard_bytes = 8192 // ranks * task.row_bytes
    call = all_gather(ranks, shard_bytes, own="consumer")
    simulated = simulate(plan_all(call, Tuning(chunk_bytes=shard_bytes // chunks)), H200.rates)
    assert segments_of(task, ranks - 1, alone)[-1].us == pytest.approx(simulated.us, abs=0.1)


def test_the_last_tail_is_a_send_and_a_sum() -> None:
    """One chunk to the last rank, which then adds up its shard; own rows need the sum alone."""
    last, own = segments_of(SCATTER, 0)[-2:]
    rates, kept = H200.rates, H200.mechanisms["zero_sm"].comm_kept
    shard_bytes = 1024 * 7168 * 2
    sum_us = rates.kernel_us + 9 * shard_bytes / H200.sums.memory_gb_per_s / 1000
    send_us = rates.copy_us + rates.batch_us + shard_bytes / rates.push_gb_per_s / kept / 1000
    assert own.us == pytest.approx(sum_us)
    assert last.us == pytest.approx(send_us + rates.signal_us + rates.batch_us + sum_us)


@given(
    shards=st.lists(st.integers(0, 40), min_size=2, max_size=6).filter(any),
    batch=st.integers(1, 3), chunk_rows=st.integers(1, 70), scatter=st.booleans(), rank=st.integers(0, 5),
)  # fmt: skip
def test_segments_hold_every_row_once(shards: list[int], batch: int, chunk_rows: int, scatter: bool, rank: int) -> None:
    """Whatever the shards: no row is missing, none is there twice, and the times of others' rows are monotonous."""
    task = replace(SCATTER if scatter else GATHER, shard_rows=tuple(shards), batch=batch, chunk_rows=chunk_rows)
    rank %= len(shards)
    found = segments_of(task, rank)
    rows = sorted(row for each in found for start, count in each.slabs for row in range(start, start + count))
    assert rows == list(range(task.rows))
    blocks = [batch * shard for other, shard in enumerate(shards) if other != rank]
    assert len(found) == 1 + sum(-(-block // chunk_rows) for block in blocks)
    times = [each.us for each in (found[:-1] if scatter else found)]
    assert times == sorted(times, reverse=scatter)


@pytest.mark.parametrize(("batch", "chunk_rows"), [(1, 1024), (1, 300), (3, 100)])
def test_segments_are_the_partitions_of_the_collective(batch: int, chunk_rows: int) -> None:
    """In the order in which they come and leave; an all_gather has the own rows before them, a scatter behind."""
    task = replace(GATHER, shard_rows=(1024 // batch,) * 4, batch=batch, chunk_rows=chunk_rows)
    share, size = batch * (1024 // batch) * 16, chunk_rows * 16
    tuning = Tuning(chunk_bytes=None if size >= share else size, peers_first=True)
    gather = partitions(plan_all(all_gather(4, share, own="consumer"), tuning)[1]).received
    exchange = partitions(plan_all(all_to_all(((share,) * 4,) * 4, own="consumer"), tuning)[1]).sent
    assert [each.rank for each in segments_of(task, 1)[1:]] == [each.peer for each in gather]
    scatter = replace(task, operation="matmul_reduce_scatter")
    assert [each.rank for each in segments_of(scatter, 1)[:-1]] == [each.peer for each in exchange]


def test_the_time_by_nccl_is_that_measured() -> None:
    """64 MiB gathered by 4 ranks took 184.5 µs (results/collectives-alone-4xh200.md); a profile without it says so."""
    task = replace(GATHER, shard_rows=(1024,) * 4, curves=(replace(FLAT, k=8192),))
    assert nccl_us(task) == pytest.approx(184.5, rel=0.03)
    rates = msgspec.structs.replace(H200.nccl_rates, bus_gb_per_s={"all_reduce": 300.0})
    with pytest.raises(Misconfigured, match=r"no nccl_rates of all_gather, but of all_reduce; add it"):
        nccl_us(task, msgspec.structs.replace(H200, nccl_rates=rates))
