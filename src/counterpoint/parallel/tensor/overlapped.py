"""Run matmuls beside the communication that they depend on: the pieces of a plan, on a communicator.

An all_gather pushes this rank's rows to the peers while its own are multiplied; a piece begins when its rows are there.
Own rows are read where they are. A reduce_scatter pushes each part of the product as soon as it is computed, those for
peers first; sums of own rows are made last, in the order of ranks, and rounded once. `gather_flagged` and
`scatter_flagged` do the same by matmuls that poll (`flagged.py`), on GPUs only.

Rows are counted as in `pair/sharded_rows.py`, whose layout says in which chunks they leave; ranks have equally many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from counterpoint.collectives.communicator import Communicator
from counterpoint.collectives.cuda.call import CudaWork
from counterpoint.pair.cuts import Piece
from counterpoint.pair.sharded_rows import Part, ShardedRows
from counterpoint.parallel.group import CHANNELS
from counterpoint.parallel.sums import add_up
from counterpoint.parallel.tensor.flagged import (
    bind_all_gather_matmul,
    bind_matmul_reduce_scatter,
    stored_tiles,
)
from counterpoint.parallel.tensor.matmul import Weight

GATHER, SCATTER = CHANNELS["matmuls"]  # both may be under way at once


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnSum:
    """Holds own rows of a scatter that are added up together.

    Args:
        rows: which.
        needed: partitions that have to be there, which are those of these rows and of all before them, of all peers.
        complete: own rows from the first on whose sums are there then; 0: others are still missing.
    """

    rows: Part
    needed: int
    complete: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """Holds the pieces of a plan in the form in which every call runs them.

    Args:
        layout: of the rows.
        pieces: the `segment` of each piece, and its rows.
        sums: own rows in the order in which a scatter multiplies them.
    """

    layout: ShardedRows
    pieces: tuple[tuple[int, tuple[Part, ...]], ...]
    sums: tuple[OwnSum, ...]

    @classmethod
    def of(cls, pieces: Sequence[Piece], layout: ShardedRows) -> Steps:
        """Return the steps of pieces."""
        made = tuple((piece.segment, layout.parts(piece.slabs)) for piece in pieces)
        chunks, complete, sums = len(layout.chunks(layout.rank)), 0, []
        for part in (part for _, parts in made for part in parts):
            if part.own is not None:
                follows = part.own.start == complete
                complete = part.own.stop if follows else complete
                last = -(-part.own.stop // layout.most_sent)  # chunks of the last peer, whose partitions come last
                needed = (layout.world_size - 2) * chunks + last
                sums.append(OwnSum(rows=part, needed=needed, complete=complete if follows else 0))
        return cls(layout=layout, pieces=made, sums=tuple(sums))


def gather_and_multiply(
    communicator: Communicator,
    shard: Tensor,
    gathered: Tensor,
    steps: Steps,
    multiply: Callable[[slice, Tensor], None],
    *,
    rows_to: Tensor | None,
) -> None:
    """Gather rows, and multiply each piece when it is there.

    Args:
        communicator: of the ranks; its channel `GATHER` is used.
        shard: this rank's rows, `[batch, rows, k]`, contiguous.
        gathered: `[batch, world_size * rows, k]`, of the communicator's `empty`.
        steps: of a plan; the `segment` of a piece is the number of partitions that have to be there.
        multiply: multiplies these of the rows, which it is given.
        rows_to: where all rows are copied, `[batch, world_size * rows, k]`; `gathered` itself: own ones; None: nowhere.
    """
    layout = steps.layout
    work = communicator.partitioned_all_gather(gathered, shard, dim=1, chunk_rows=layout.most_sent, channel=GATHER)
    flat, own = gathered.view(-1, gathered.shape[-1]), shard.view(-1, shard.shape[-1])
    try:
        for segment, parts in steps.pieces:
            work.arrived(segment)
            for part in parts:
                multiply(part.whole, flat[part.whole] if part.own is None else own[part.own])
        if rows_to is not None:
            copy_blocks(rows_to, gathered, shard, layout)
    finally:
        work.finish()


def multiply_and_scatter(
    communicator: Communicator,
    staging: Tensor,
    out: Tensor,
    steps: Steps,
    reduce_op: str,
    multiply: Callable[[slice, Tensor], None],
    *,
    between: Callable[[], None] = lambda: None,
    summed: Callable[[int], None] = lambda rows: None,
) -> None:
    """Multiply pieces, push each to its rank when it is computed, and add up what arrives for this one.

    Args:
        communicator: of the ranks; its channel `SCATTER` is used.
        staging: where the ranks' products for this rank arrive, `[world_size, batch, rows, n]`, of its `empty`.
        out: this rank's sums, `[batch, rows, n]`.
        steps: of a plan; the `segment` of a piece is the last partition that may leave after it.
        reduce_op: sum or avg.
        multiply: writes the product of these rows.
        between: called when all parts for peers have left, and sums are still to be made: what it computes hides them.
        summed: called with the number of own rows, from the first on, whose sums are there.
    """
    layout, columns = steps.layout, out.shape[-1]
    product = torch.empty(layout.batch, sum(layout.rows), columns, dtype=out.dtype, device=out.device)
    blocks, whole = staging.view(layout.world_size, -1, columns), product.view(-1, columns)
    mine, sums = blocks[layout.rank], out.view(-1, columns)  # its place among the blocks, which no peer writes
    work = communicator.partitioned_all_to_all(staging, product, dim=1, chunk_rows=layout.most_sent, channel=SCATTER)

    def sum_up(one: OwnSum) -> None:
        work.arrived(one.needed)
        add_up(blocks[:, one.rows.own], sums[one.rows.own], reduce_op)
        if one.complete:
            summed(one.complete)

    try:
        for segment, parts in steps.pieces:
            for part in parts:
                if part.own is None:
                    multiply(part.whole, whole[part.whole])
            work.ready(min(segment + 1, len(work.sent)))
        between()
        for index, one in enumerate(steps.sums):
            multiply(one.rows.whole, mine[one.rows.own])
            if index:  # one behind: the GPU is busy until the peers' blocks have come
                sum_up(steps.sums[index - 1])
        sum_up(steps.sums[-1])
    finally:
        work.finish()


def gather_flagged(
    communicator: Communicator,
    shard: Tensor,
    gathered: Tensor,
    layout: ShardedRows,
    weights: Sequence[Weight],
    products: Sequence[Tensor],
    *,
    rows_to: Tensor | None,
    error: Tensor,
) -> None:
    """Gather rows while one matmul for each weight takes its tiles in the order in which they arrive.

    Args:
        communicator: of the ranks; its channel `GATHER` is used.
        shard: this rank's rows, `[batch, rows, k]`, contiguous.
        gathered: `[batch, world_size * rows, k]`, of the communicator's `empty`.
        layout: of the rows.
        weights: by which all rows are multiplied.
        products: of each weight, `[batch * world_size * rows, n]`.
        rows_to: as of `gather_and_multiply`.
        error: int32, 0, where a matmul says for what it has polled in vain.
    """
    work = communicator.partitioned_all_gather(gathered, shard, dim=1, chunk_rows=layout.most_sent, channel=GATHER)
    assert isinstance(work, CudaWork)
    own, whole = shard.view(-1, shard.shape[-1]), gathered.view(-1, gathered.shape[-1])
    try:
        for weight, out in zip(weights, products, strict=True):
            bind_all_gather_matmul(
                own, whole, weight.matrix, out, layout,
                words=work.arrival_words, error=error.data_ptr(), bias=weight.bias,
            )()  # fmt: skip
        work.arrived(len(work.received))
        if rows_to is not None:
            copy_blocks(rows_to, gathered, shard, layout)
    finally:
        work.finish()


def scatter_flagged(
    communicator: Communicator,
    a: Tensor,
    weight: Weight,
    staging: Tensor,
    out: Tensor,
    layout: ShardedRows,
    reduce_op: str,
    *,
    stored: Tensor,
    error: Tensor,
) -> None:
    """Let one matmul make peers' rows first, each partition of which leaves when its last tile is stored, and add up.

    Args:
        communicator: of the ranks; its channel `SCATTER` is used.
        a: `[batch * world_size * rows, k]`.
        weight: without bias.
        staging: as of `multiply_and_scatter`.
        out: this rank's sums, `[batch, rows, n]`.
        layout: of the rows.
        reduce_op: sum or avg.
        stored: int32, zeros, kept from call to call: a count for each partition, set back here.
        error: as of `gather_flagged`.
    """
    n, columns = layout.world_size, out.shape[-1]
    product = torch.empty(layout.batch, sum(layout.rows), columns, dtype=out.dtype, device=out.device)
    work = communicator.partitioned_all_to_all(staging, product, dim=1, chunk_rows=layout.most_sent, channel=SCATTER)
    assert isinstance(work, CudaWork)
    try:
        bind_matmul_reduce_scatter(
            a, weight.matrix, product.view(-1, columns), staging.view(n, -1, columns), out.view(-1, columns), layout,
            stored=stored.data_ptr(), words=work.arrival_words, error=error.data_ptr(), average=reduce_op == "avg",
        )()  # fmt: skip
        counts = stored_tiles(layout, columns)
        for one in work.sent:
            word = stored.data_ptr() + stored.itemsize * layout.word(one.peer, one.chunk)
            work.ready_when(word, counts[one.peer, one.chunk])
    finally:
        work.finish()


def copy_blocks(target: Tensor, gathered: Tensor, own: Tensor, layout: ShardedRows) -> None:
    """Copy all rows to `target`: this rank's from `own`, the peers' from `gathered`, unless they are there."""
    shape = layout.batch, layout.world_size, layout.rows[layout.rank], target.shape[-1]
    blocks, there = target.view(shape), gathered.view(shape)
    if own.data_ptr() != blocks[:, layout.rank].data_ptr():
        blocks[:, layout.rank].copy_(own.view(layout.batch, layout.rows[layout.rank], -1))
    if target is not gathered:
        for part in (slice(0, layout.rank), slice(layout.rank + 1, layout.world_size)):
            blocks[:, part].copy_(there[:, part])
