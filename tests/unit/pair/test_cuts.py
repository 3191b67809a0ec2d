"""Cuts of a matmul that depends on communication: they are the best there are, and keep what communication needs."""

from collections.abc import Iterator
from itertools import combinations, pairwise

import msgspec
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from counterpoint.machine.profile import Profile, default_profile
from counterpoint.pair import matmul_choice
from counterpoint.pair.arrivals import ShardedMatmul, Slab, TensorOperation, segments_of
from counterpoint.pair.curves import RowCurve, estimated_curve
from counterpoint.pair.matmul_choice import (
    MAX_CELLS,
    WORTH,
    MatmulMechanism,
    MatmulPlan,
    Piece,
    RowAxis,
    choose_matmul,
    cut,
    with_best_chunks,
)

H200 = default_profile()
OPERATIONS: tuple[TensorOperation, ...] = ("all_gather_matmul", "matmul_reduce_scatter")
KEPT = H200.mechanisms["zero_sm"].compute_kept


def curve_of(times: list[float], *, n: int = 4096, k: int = 4096, grid: int = 128) -> RowCurve:
    """A curve with a point every `grid` rows."""
    return RowCurve(n=n, k=k, dtype="bfloat16", points=tuple((grid * (i + 1), us) for i, us in enumerate(times)))


def later(start_us: float, work_us: float, busy_us: float) -> float:
    """The end of work: slower until `busy_us`."""
    slow_us = min(work_us / KEPT, max(0.0, busy_us - start_us))
    return start_us + slow_us + max(0.0, work_us - slow_us * KEPT)


def forward_us(task: ShardedMatmul, rank: int, pieces: tuple[Piece, ...], launch_us: float) -> float:
    """When these pieces end, written without the axis: an all_gather forward, a reduce_scatter backward in time."""
    segments = segments_of(task, rank)
    busy_us, now, seen = max(segment.us for segment in segments), 0.0, len(segments)
    for piece in pieces[::-1] if task.is_scatter else pieces:
        work_us = sum(curve.us(slab.rows) + launch_us for slab in piece.slabs for curve in task.curves)
        need = piece.segment
        if task.is_scatter:  # segments that this piece completes: its rows are the last of them
            before = max((other.segment for other in pieces[: pieces.index(piece)]), default=-1)
            done = [each.us for each in segments[before + 1 : piece.segment + 1] if each.slabs]
            now = max([now, *done])
        else:
            assert need < seen
            now = max(now, max(each.us for each in segments[: need + 1]))
        now = later(now, work_us, busy_us)
    return now


def ways(axis: RowAxis) -> Iterator[list[int]]:
    """Every way to cut the cells."""
    size = len(axis.cells)
    for count in range(size):
        for inner in combinations(range(1, size), count):
            yield [0, *inner, size]


def launching(profile: Profile, us: float) -> Profile:
    """A profile in which a matmul costs `us` beyond what its curve says."""
    return msgspec.structs.replace(profile, efficiency=msgspec.structs.replace(profile.efficiency, launch_us=us))


small = st.builds(
    ShardedMatmul,
    operation=st.sampled_from(OPERATIONS),
    curves=st.lists(st.floats(1.0, 80.0), min_size=10, max_size=10).map(lambda times: (curve_of(times),)),
    shard_rows=st.lists(st.integers(0, 300), min_size=2, max_size=4).filter(any).map(tuple),
    batch=st.integers(1, 2),
    chunk_rows=st.sampled_from([None, 100, 256, 512]),
)


@example(  # a piece whose work, divided by KEPT and multiplied again, is not the same number
    task=ShardedMatmul(
        operation="all_gather_matmul",
        curves=(curve_of([4.481614275162408, 27.71875, *[1.0] * 8]),),
        shard_rows=(0, 1, 201, 142),
        chunk_rows=100,
    ),
    rank=0,
    launch_us=2.0,
)
@given(task=small, rank=st.integers(0, 3), launch_us=st.sampled_from([0.0, 2.0, 20.0]))
def test_no_other_cuts_are_better(task: ShardedMatmul, rank: int, launch_us: float) -> None:
    """All cuts of small matmuls, timed by other code than that which chooses them; but for what is not worth a cut."""
    rank %= task.world_size
    profile = launching(H200, launch_us)
    axis = RowAxis(task, rank, profile)
    assume(len(axis.cells) <= 9)
    found = cut(task, rank, profile)
    every = [forward_us(task, rank, axis.pieces(bounds), launch_us) for bounds in ways(axis)]
    assert min(every) * (1 - 1e-6) <= found.us <= min(every) * (1 + WORTH + 1e-6)
    assert forward_us(task, rank, found.pieces, launch_us) == pytest.approx(found.us)


@given(
    operation=st.sampled_from(OPERATIONS), rank=st.integers(0, 7), batch=st.integers(1, 3),
    chunk_rows=st.sampled_from([None, 100, 512]),
    shards=st.one_of(
        st.sampled_from([(1024,) * 8, (2048,) * 4, (4096,) * 2]),
        st.lists(st.integers(0, 700), min_size=2, max_size=8).filter(any).map(tuple),
    ),
)  # fmt: skip
def test_pieces_are_a_schedule(
    operation: TensorOperation, rank: int, batch: int, chunk_rows: int | None, shards: tuple[int, ...]
) -> None:
    """Every row once, in merged slabs; rows that have arrived, or segments that are complete; never worse than one."""
    curve = estimated_curve(4096, 4096, "bfloat16", 32768, step=512)
    task = ShardedMatmul(operation=operation, curves=(curve,), shard_rows=shards, batch=batch, chunk_rows=chunk_rows)
    rank %= task.world_size
    segments, found = segments_of(task, rank), cut(task, rank)
    owner = {row: i for i, each in enumerate(segments) for slab in each.slabs for row in range(slab.start, sum(slab))}
    order = [[row for slab in piece.slabs for row in range(slab.start, sum(slab))] for piece in found.pieces]
    assert sorted(row for rows in order for row in rows) == list(range(task.rows))
    for piece in found.pieces:
        assert all(sum(one) < two.start for one, two in pairwise(piece.slabs))
    if task.is_scatter:
        left = set(owner)
        for piece, rows in zip(found.pieces, order, strict=True):
            left -= set(rows)
            first_open = min((owner[row] for row in left), default=len(segments))
            assert all(not each.slabs for each in segments[piece.segment + 1 : first_open])
            assert piece.segment < first_open
    else:
        assert [piece.segment for piece in found.pieces] == [max(owner[row] for row in rows) for rows in order]
    assert [piece.segment for piece in found.pieces] == sorted(piece.segment for piece in found.pieces)
    one = RowAxis(task, rank, H200)
    assert found.us <= one.end_us([0, len(one.cells)]) * (1 + 1e-9)


def test_slabs_and_several_weights_take_a_matmul_each() -> None:
    """Rank 0's neighbour holds the last rows: own rows and those are two slabs, and cost two launches."""
    task = ShardedMatmul(operation="all_gather_matmul", curves=(curve_of([50.0] * 64),), shard_rows=(128, 128, 128))
    axis = RowAxis(task, 0, launching(H200, 5.0))
    assert axis.pieces([0, 3]) == (Piece(segment=2, slabs=(Slab(0, 384),)),)
    assert axis.pieces([0, 2]) == (Piece(segment=1, slabs=(Slab(0, 128), Slab(256, 128))),)
    assert [us for _, us in axis.ends(0)] == [55.0, 110.0, 55.0]
    # q, k and v share the gathered rows: their times add up, launches too
    one = curve_of([10.0 * (i + 1) for i in range(8)])
    task = ShardedMatmul(operation="all_gather_matmul", curves=(one, one), shard_rows=(512, 512))
    assert RowAxis(task, 0, launching(H200, 3.0)).cost_us(512) == pytest.approx(86.0)


def test_steps_of_the_curve_are_where_cuts_are() -> None:
    """A wave is 512 rows: no piece begins or ends within one, once the first has started."""
    waves = [100.0 * -(-(i + 1) // 4) for i in range(64)]
    task = ShardedMatmul(operation="all_gather_matmul", curves=(curve_of(waves, k=1024),), shard_rows=(4096, 4096))
    assert all(piece.rows % 512 == 0 for piece in cut(task, 0).pieces)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_large_calls_have_a_coarse_grid(operation: TensorOperation) -> None:
    """About 64 cells, whatever the rows; a batch with too many slabs is not cut within segments."""
    curve = estimated_curve(7168, 8192, "bfloat16", 65536, step=1024)
    for rows, batch in ((1024, 1), (4096, 1), (1000, 8), (16, 64)):
        task = ShardedMatmul(operation=operation, curves=(curve,), shard_rows=(rows,) * 8, batch=batch)
        cells = RowAxis(task, 3, H200).cells
        assert len(cells) <= 2 * MAX_CELLS


def task_of(operation: TensorOperation, m: int, n: int, k: int, ranks: int = 8) -> ShardedMatmul:
    curve = estimated_curve(n, k, "bfloat16", m)
    return ShardedMatmul(operation=operation, curves=(curve,), shard_rows=(m // ranks,) * ranks)


@pytest.mark.parametrize(
    ("operation", "m", "n", "k", "alone_us", "serial_us"),
    [
        ("all_gather_matmul", 8192, 7168, 8192, 1133, 1584),
        ("all_gather_matmul", 8192, 6144, 12288, 1630, 2095),
        ("all_gather_matmul", 8192, 3584, 4096, 311, 516),
        ("matmul_reduce_scatter", 8192, 8192, 7168, 1243, 1619),
        ("matmul_reduce_scatter", 8192, 4096, 3584, 312, 512),
    ],
)
def test_torchs_way_is_predicted_as_measured(
    operation: TensorOperation, m: int, n: int, k: int, alone_us: float, serial_us: float
) -> None:
    """8 x H200, 2026-11-20: NCCL and the matmul, one after the other, by estimates within a tenth."""
    found = choose_matmul(task_of(operation, m, n, k), 0)
    assert found.predicted_us["torch"] == pytest.approx(serial_us, rel=0.1)
    assert found.alone_us == pytest.approx(alone_us, rel=0.1)
    assert found.predicted_us["cuts"] < found.predicted_us["torch"]


def test_all_ranks_choose_alike() -> None:
    """By rank 0's predictions; the pieces differ."""
    plans = [choose_matmul(task_of("all_gather_matmul", 8192, 7168, 8192), rank) for rank in range(8)]
    assert len({(plan.mechanism, plan.why, *plan.predicted_us.values()) for plan in plans}) == 1
    assert len({plan.pieces for plan in plans}) == 8


def chosen(monkeypatch: pytest.MonkeyPatch, task: ShardedMatmul, margin: float, rank: int = 0) -> MatmulPlan:
    """What is chosen with another margin."""
    monkeypatch.setattr(matmul_choice, "MARGIN", margin)
    return choose_matmul(task, rank)


def test_the_simplest_of_equals_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the margin: torch before serial before cuts."""
    task = task_of("all_gather_matmul", 8192, 7168, 8192)
    by_margin = [chosen(monkeypatch, task, margin).mechanism for margin in (0.0, 0.03, 0.5)]
    assert by_margin == ["cuts", "cuts", "torch"]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_cut_has_to_be_worth_it(operation: TensorOperation, monkeypatch: pytest.MonkeyPatch) -> None:
    """A millisecond is not cut once more for a microsecond."""
    task = task_of(operation, 8192, 8192, 7168, ranks=2)
    found = cut(task, 0)
    monkeypatch.setattr(matmul_choice, "WORTH", 0.0)
    best = cut(task, 0)
    assert (len(found.pieces), len(best.pieces)) == (2, 3)
    assert best.us < found.us < 1.005 * best.us


def test_no_call_is_shorter_than_the_host_needs() -> None:
    """What is issued more slowly than torch's way ends is left to torch; a long matmul hides the host's time."""
    host_us: dict[MatmulMechanism, float] = {"torch": 200.0, "serial": 390.0, "cuts": 400.0}
    short = choose_matmul(task_of("all_gather_matmul", 2048, 3072, 4096), 0, host_us=host_us)
    assert (short.mechanism, short.predicted_us["cuts"]) == ("torch", 400.0)
    assert ", as long as the host needs or longer" in short.why
    task = task_of("all_gather_matmul", 8192, 7168, 8192)
    long = [choose_matmul(task, 0, host_us=given) for given in (None, host_us)]
    assert [plan.mechanism for plan in long] == ["cuts", "cuts"]
    assert long[0] == long[1]


def test_what_is_not_cut_is_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all segments to wait for; before a reduce_scatter own rows are apart, and last."""
    plans = [chosen(monkeypatch, task_of(operation, 8192, 7168, 8192), 0.9, rank=3) for operation in OPERATIONS]
    assert [plan.mechanism for plan in plans] == ["torch"] * 2
    assert plans[0].pieces == (Piece(segment=7, slabs=(Slab(0, 8192),)),)
    peers = Piece(segment=6, slabs=(Slab(0, 3072), Slab(4096, 4096)))
    assert plans[1].pieces == (peers, Piece(segment=7, slabs=(Slab(3072, 1024),)))


def test_a_faster_nccl_is_left_alone() -> None:
    """The profile's time of the collective counts."""
    task = task_of("all_gather_matmul", 8192, 7168, 8192)

    def with_nccl(us: float) -> MatmulPlan:
        rates = msgspec.structs.replace(H200.nccl_rates, latency_us=us, bus_gb_per_s={"all_gather": 1e9})
        return choose_matmul(task, 0, msgspec.structs.replace(H200, nccl_rates=rates))

    assert with_nccl(10.0).mechanism == "torch"
    slow = with_nccl(2000.0)
    assert slow.comm_us == pytest.approx(2000.0)
    assert slow.predicted_us["torch"] == pytest.approx(2000.0 + slow.alone_us + H200.efficiency.launch_us)


def test_the_plan_says_why() -> None:
    plan = choose_matmul(task_of("all_gather_matmul", 8192, 1280, 8192), 0)
    assert plan.why.startswith("cuts is the simplest within 3% of the best of torch ")
    assert "; the all_gather cannot hide behind the matmul: N = 1,280 per rank" in plan.why
    assert plan.estimated


@pytest.mark.parametrize(("ranks", "n", "chunks"), [(2, 1280, 2), (2, 7168, 1), (8, 1280, 1), (8, 7168, 1)])
def test_shards_are_sent_in_chunks_where_that_helps(ranks: int, n: int, chunks: int) -> None:
    """One peer's long copy is worth cutting; a matmul that covers it, or the fixed cost of many copies, is not."""
    task = task_of("all_gather_matmul", 8192, n, 8192, ranks)
    assert with_best_chunks(task).chunk_rows == 8192 // ranks // chunks
