"""Run matmuls beside the communication that they depend on: the pieces of a plan, on a communicator.

An all_gather pushes this rank's rows to the peers while its own are multiplied; a piece begins when its rows are there.
Own rows are read where they are. A reduce_scatter pushes each part of the product as soon as it is computed, those for
peers first; sums of own rows are made last, in the order of ranks, and rounded once. `gather_flagged` and
`scatter_flagged` do the same by matmuls that poll (`flagged.py`), on GPUs only.

Rows are counted as in `pair/sharded_rows.py`, whose layout says in which chunks they leave; ranks have equally many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from counterpoint.collectives.communicator import Communicator
from counterpoint.collectives.cuda.partitioned import PartitionedCudaWork
from counterpoint.collectives.program.partitions import BlockPartition
from counterpoint.pair.cuts import Piece
from counterpoint.pair.sharded_rows import ShardedRows, Slab
from counterpoint.parallel.tensor.flagged import (
    bind_all_gather_matmul,
    bind_matmul_reduce_scatter,
    stored_tiles,
)
from counterpoint.parallel.tensor.matmul import Weight
from counterpoint.parallel.tensor.sums import add_up

GATHER, SCATTER = 0, 1  # channels: both may be under way at once


def gather_and_multiply(
    communicator: Communicator,
    shard: Tensor,
    gathered: Tensor,
    pieces: Sequence[Piece],
    layout: ShardedRows,
    multiply: Callable[[Slab, Tensor], None],
    *,
    rows_to: Tensor | None,
) -> None:
    """Gather rows, and multiply each piece when it is there.

    Args:
        communicator: of the ranks; its channel `GATHER` is used.
        shard: this rank's rows, `[batch, rows, k]`, contiguous.
        gathered: `[batch, world_size * rows, k]`, of the communicator's `empty`.
        pieces: in their order; their `segment` is the number of partitions that have to be there.
        layout: of the rows.
        multiply: multiplies a slab of the rows, which it is given.
        rows_to: where all rows are copied, `[batch, world_size * rows, k]`; `gathered` itself: own ones; None: nowhere.
    """
    work = communicator.partitioned_all_gather(gathered, shard, dim=1, chunk_rows=layout.most_sent, channel=GATHER)
    flat, own = gathered.view(-1, gathered.shape[-1]), shard.view(-1, shard.shape[-1])
    try:
        for piece in pieces:
            work.arrived(piece.segment)
            for slab in layout.apart(piece.slabs):
                at = layout.own(slab)
                rows = flat[slab.start :] if at is None else own[at:]
                multiply(slab, rows[: slab.rows])
        if rows_to is not None:
            copy_blocks(rows_to, gathered, shard, layout)
    finally:
        work.finish()


def multiply_and_scatter(
    communicator: Communicator,
    out: Tensor,
    pieces: Sequence[Piece],
    layout: ShardedRows,
    reduce_op: str,
    multiply: Callable[[Slab, Tensor], None],
    *,
    between: Callable[[], None] = lambda: None,
    summed: Callable[[int], None] = lambda rows: None,
) -> None:
    """Multiply pieces, push each to its rank when it is computed, and add up what arrives for this one.

    Args:
        communicator: of the ranks; its channel `SCATTER` is used.
        out: this rank's sums, `[batch, rows, n]`.
        pieces: in their order; their `segment` is the last partition that may leave after them.
        layout: of the rows.
        reduce_op: sum or avg.
        multiply: writes the product of a slab of rows.
        between: called when all parts for peers have left, and sums are still to be made: what it computes hides them.
        summed: called with the number of own rows, from the first on, whose sums are there.
    """
    n, columns = layout.world_size, out.shape[-1]
    staging = empty_for_op(communicator, n, *out.shape, dtype=out.dtype)
    product = torch.empty(layout.batch, sum(layout.rows), columns, dtype=out.dtype, device=out.device)
    parts, whole, sums = staging.view(n, -1, columns), product.view(-1, columns), out.view(-1, columns)
    work = communicator.partitioned_all_to_all(staging, product, dim=1, chunk_rows=layout.most_sent, channel=SCATTER)
    own: list[tuple[Slab, slice]] = []
    complete = [0]  # own rows from the first on whose sums are there

    def sum_up(mine: slice) -> None:
        work.arrived(_needed(work.received, layout.most_sent, mine.stop))
        add_up(parts[:, mine], sums[mine], reduce_op)
        if mine.start == complete[-1]:
            complete.append(mine.stop)
            summed(mine.stop)

    try:
        for piece in pieces:
            for slab in layout.apart(piece.slabs):
                at = layout.own(slab)
                if at is None:
                    multiply(slab, whole[slab.start : slab.start + slab.rows])
                else:
                    own.append((slab, slice(at, at + slab.rows)))
            work.ready(min(piece.segment + 1, len(work.sent)))
        between()
        for index, (slab, mine) in enumerate(own):
            multiply(slab, parts[layout.rank, mine])  # its place among the parts, which no peer writes
            if index:  # one behind: the GPU is busy until the peers' parts have come
                sum_up(own[index - 1][1])
        sum_up(own[-1][1])
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
    words: Tensor,
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
        words: int32, zeros: the error word is the first.
    """
    work = communicator.partitioned_all_gather(gathered, shard, dim=1, chunk_rows=layout.most_sent, channel=GATHER)
    assert isinstance(work, PartitionedCudaWork)
    own, whole = shard.view(-1, shard.shape[-1]), gathered.view(-1, gathered.shape[-1])
    try:
        for weight, out in zip(weights, products, strict=True):
            bind_all_gather_matmul(
                own, whole, weight.matrix, out, layout,
                words=work.arrival_words, error=words.data_ptr(), bias=weight.bias,
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
    out: Tensor,
    layout: ShardedRows,
    reduce_op: str,
    *,
    words: Tensor,
) -> None:
    """Let one matmul make peers' rows first, each partition of which leaves when its last tile is stored, and add up.

    Args:
        communicator: of the ranks; its channel `SCATTER` is used.
        a: `[batch * world_size * rows, k]`.
        weight: without bias.
        out: this rank's sums, `[batch, rows, n]`.
        layout: of the rows.
        reduce_op: sum or avg.
        words: int32, zeros, kept from call to call: the error word, then a count for each partition, set back here.
    """
    n, columns = layout.world_size, out.shape[-1]
    staging = empty_for_op(communicator, n, *out.shape, dtype=out.dtype)
    product = torch.empty(layout.batch, sum(layout.rows), columns, dtype=out.dtype, device=out.device)
    counts = words[1:]
    work = communicator.partitioned_all_to_all(staging, product, dim=1, chunk_rows=layout.most_sent, channel=SCATTER)
    assert isinstance(work, PartitionedCudaWork)
    try:
        bind_matmul_reduce_scatter(
            a, weight.matrix, product.view(-1, columns), staging.view(n, -1, columns), out.view(-1, columns), layout,
            stored=counts.data_ptr(), words=work.arrival_words, error=words.data_ptr(), average=reduce_op == "avg",
        )()  # fmt: skip
        stored = stored_tiles(layout, columns)
        for one in work.sent:
            word = counts.data_ptr() + counts.itemsize * layout.word(one.peer, one.chunk)
            work.ready_when(word, stored[one.peer, one.chunk])
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


def empty_for_op(communicator: Communicator, *shape: int, dtype: torch.dtype) -> Tensor:
    """Return symmetric memory that lives as long as one operation: peers are told at once when it is free.

    A graph would give it back at every replay, so that a capture gets memory that begins with a handshake.
    """
    captured = communicator.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return communicator.empty(*shape, dtype=dtype, early_release=not captured)


def _needed(received: Sequence[BlockPartition], chunk_rows: int, end: int) -> int:
    """Return how many partitions have to be there for the own rows below `end`, in the blocks of all peers."""
    return max((index + 1 for index, one in enumerate(received) if one.chunk * chunk_rows < end), default=0)
