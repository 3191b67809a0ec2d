"""Which rows a matmul that polls takes when, and what it refuses; the matmuls themselves: tests/process/parallel."""

import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.collectives.program.operations import all_gather, all_to_all, plan
from counterpoint.collectives.program.steps import BlockPartition, Flag, Tuning, flag_word, partitions
from counterpoint.errors import Misconfigured, Unsupported
from counterpoint.pair.arrivals import ShardedRows, TensorOperation
from counterpoint.parallel.tensor.flagged import MatmulTiles, bind_flagged, stored_tiles, tile_runs


@st.composite
def layouts(draw: st.DrawFn) -> ShardedRows:
    """Any layout of up to 8 ranks, among them uneven ones and such with empty shards."""
    rows = draw(st.lists(st.integers(0, 40), min_size=1, max_size=8))
    chunk = draw(st.one_of(st.none(), st.integers(1, 50)))
    rank = draw(st.integers(0, len(rows) - 1))
    return ShardedRows(rank=rank, rows=tuple(rows), batch=draw(st.integers(1, 3)), chunk_rows=chunk)


def rows_of(layout: ShardedRows, peer: int) -> list[int]:
    """The rows of the matrix that are the peer's, in the order of its shard."""
    slab, before = sum(layout.rows), sum(layout.rows[:peer])
    return [b * slab + before + i for b in range(layout.batch) for i in range(layout.rows[peer])]


@given(layouts(), st.sampled_from(["all_gather_matmul", "matmul_reduce_scatter"]), st.sampled_from([1, 7, 16]))
def test_every_row_is_once_in_the_tiles_of_its_rank_and_chunk(
    layout: ShardedRows, operation: TensorOperation, tile_rows: int
) -> None:
    """The runs are the whole matrix; tiles are counted without gaps; a run is of one peer, slab and chunk."""
    shards = {peer: rows_of(layout, peer) for peer in range(layout.world_size)}
    found = tile_runs(layout, operation, tile_rows)
    seen, next_tile = [], 0
    for part in found:
        assert (part.begin, part.end) == (next_tile, next_tile + -(-part.rows // tile_rows))
        assert part.rows > 0
        next_tile = part.end
        shard, own = shards[part.peer], part.peer == layout.rank
        gathers = operation == "all_gather_matmul"
        in_matrix, other = (part.target, part.source) if gathers else (part.source, part.target)
        in_shard = other if own else shard.index(in_matrix)
        assert own or other == in_matrix
        rows = list(range(in_matrix, in_matrix + part.rows))
        assert shard[in_shard : in_shard + part.rows] == rows
        if not (own and gathers):
            assert set(range(in_shard, in_shard + part.rows)) <= set(layout.chunks(part.peer)[part.chunk])
        seen += rows
    assert sorted(seen) == list(range(layout.total))


@given(layouts())
def test_ranks_come_in_their_order_and_chunks_ascend(layout: ShardedRows) -> None:
    """all_gather: own, rank - 1, rank - 2, ...; reduce_scatter: rank + 1, rank + 2, ..., own; chunks one by one."""
    world, rank = layout.world_size, layout.rank
    taken = [((rank - part.peer) % world, part.chunk) for part in tile_runs(layout, "all_gather_matmul", 16)]
    assert taken == sorted(taken)
    taken = [((part.peer - rank - 1) % world, part.chunk) for part in tile_runs(layout, "matmul_reduce_scatter", 16)]
    assert taken == sorted(taken)


@pytest.mark.parametrize(("world", "rank"), [(2, 1), (3, 0), (8, 5)])
def test_the_order_is_that_of_partitioned_calls(world: int, rank: int) -> None:
    """Chunks are taken as a partitioned all_gather brings them, and given as a partitioned all_to_all sends them."""
    layout, row = ShardedRows(rank=rank, rows=(20,) * world, batch=2, chunk_rows=16), 16
    tuning = Tuning(chunk_bytes=16 * row, peers_first=True)
    gather = partitions(plan(all_gather(world, 40 * row, own="consumer"), rank, tuning))
    scatter = partitions(plan(all_to_all(((40 * row,) * world,) * world, own="consumer"), rank, tuning))
    orders: tuple[tuple[TensorOperation, tuple[BlockPartition, ...]], ...] = (
        ("all_gather_matmul", gather.received),
        ("matmul_reduce_scatter", scatter.sent),
    )
    for operation, expected in orders:
        runs = [(run.peer, run.chunk) for run in tile_runs(layout, operation, 16) if run.peer != rank]
        assert list(dict.fromkeys(runs)) == [(one.peer, one.chunk) for one in expected]
        assert len(expected) == 3 * (world - 1)
    assert list(stored_tiles(layout, 64)) == [(one.peer, one.chunk) for one in scatter.sent]


def test_the_order_in_full() -> None:
    """Rank 1 of 3 with two slabs of 4, 6 and 2 rows, chunks of 5 rows, tiles of 4: every number by hand."""
    layout = ShardedRows(rank=1, rows=(4, 6, 2), batch=2, chunk_rows=5)
    assert [tuple(part) for part in tile_runs(layout, "all_gather_matmul", 4)] == [
        (0, 2, 0, 4, 6, 1, 0),
        (2, 4, 6, 16, 6, 1, 0),
        (4, 5, 0, 0, 4, 0, 0),
        (5, 6, 12, 12, 1, 0, 0),
        (6, 7, 13, 13, 3, 0, 1),
        (7, 8, 10, 10, 2, 2, 0),
        (8, 9, 22, 22, 2, 2, 0),
    ]
    assert [tuple(part) for part in tile_runs(layout, "matmul_reduce_scatter", 4)] == [
        (0, 1, 10, 10, 2, 2, 0),
        (1, 2, 22, 22, 2, 2, 0),
        (2, 3, 0, 0, 4, 0, 0),
        (3, 4, 12, 12, 1, 0, 0),
        (4, 5, 13, 13, 3, 0, 1),
        (5, 7, 4, 0, 5, 1, 0),
        (7, 8, 9, 5, 1, 1, 1),
        (8, 9, 16, 6, 4, 1, 1),
        (9, 10, 20, 10, 2, 1, 2),
    ]
    tiles = MatmulTiles(rows=4, columns=8)
    assert stored_tiles(layout, 20, tiles) == {(2, 0): 6, (0, 0): 6, (0, 1): 3}


@given(layouts())
def test_words_are_those_of_arrival(layout: ShardedRows) -> None:
    """As far from the first as `flag_word` puts them; the error word names the one that it was written for."""
    world = layout.world_size
    for peer in range(world):
        for chunk in range(len(layout.chunks(peer))):
            word = layout.word(peer, chunk)
            first = flag_word(Flag("output", "arrived", 0, 0), world)
            assert word == flag_word(Flag("output", "arrived", peer, chunk), world) - first
            assert layout.missing(word + 1) == (peer, chunk)
    assert layout.missing(0) is None


@pytest.mark.parametrize(
    "what", [{"rank": 2}, {"rank": -1}, {"rows": ()}, {"rows": (3, -1)}, {"batch": 0}, {"chunk_rows": 0}]
)
def test_layouts_that_cannot_be(what: dict[str, Any]) -> None:
    with pytest.raises(Misconfigured, match="give"):
        ShardedRows(**{"rank": 0, "rows": (3, 4), **what})


@pytest.mark.parametrize("what", [{"rows": 96}, {"depth": 0}, {"columns": -16}, {"stages": 0}])
def test_tiles_that_cannot_be(what: dict[str, int]) -> None:
    with pytest.raises(Misconfigured, match="powers of two"):
        MatmulTiles(**what)


LAYOUT = ShardedRows(rank=0, rows=(3, 5))


def gather(**changed: torch.Tensor) -> None:
    tensors: dict[str, Any] = {
        "own": torch.zeros(3, 16), "gathered": torch.zeros(8, 16), "b": torch.zeros(16, 4), "out": torch.zeros(8, 4),
    } | changed  # fmt: skip
    bind_flagged("all_gather_matmul", tensors, LAYOUT, words=0, error=0)


def scatter(**changed: torch.Tensor) -> None:
    tensors: dict[str, Any] = {
        "a": torch.zeros(8, 16), "b": torch.zeros(16, 4), "partial": torch.zeros(8, 4), "staged": torch.zeros(2, 3, 4),
        "out": torch.zeros(3, 4),
    } | changed  # fmt: skip
    bind_flagged("matmul_reduce_scatter", tensors, LAYOUT, words=0, error=0)


@pytest.mark.parametrize(
    ("bind", "name", "tensor"),
    [
        (gather, "own", torch.zeros(4, 16)),
        (gather, "own", torch.zeros(3, 16, dtype=torch.float16)),
        (gather, "gathered", torch.zeros(8, 17)),
        (gather, "gathered", torch.zeros(16, 8).t()),
        (gather, "out", torch.zeros(8, 5)),
        (gather, "b", torch.zeros(16, 4)),
        (scatter, "a", torch.zeros(3, 16)),
        (scatter, "partial", torch.zeros(3, 4)),
        (scatter, "staged", torch.zeros(1, 3, 4)),
        (scatter, "staged", torch.zeros(2, 4, 3).transpose(1, 2)),
        (scatter, "out", torch.zeros(8, 4)),
    ],
)
def test_tensors_that_do_not_fit(bind: Any, name: str, tensor: torch.Tensor) -> None:
    with pytest.raises(Misconfigured, match=rf"^{name} of \({tensor.shape[0]}, .*give"):
        bind(**{name: tensor})


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    half = {"own": torch.zeros(3, 16), "gathered": torch.zeros(8, 16), "b": torch.zeros(16, 4)}
    with pytest.raises(Unsupported, match="install triton"):
        gather(**{name: tensor.half() for name, tensor in half.items()})
