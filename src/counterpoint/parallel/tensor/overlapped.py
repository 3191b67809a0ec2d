"""Run matmuls beside the communication that they depend on: two pipelines on a communicator, as torch has them.

`gather_and_consume` pushes this rank's rows to the peers, while a consumer multiplies what has arrived; own rows are
read where they are. `produce_and_scatter` pushes each part of a product when its producer has computed it, those for
peers first; sums of own rows are made last, in the order of ranks, and rounded once.

Consumer and producer are pieces of a plan (`multiply_arrived`, `multiply_and_add_up`), or one matmul that polls
(`multiply_flagged`, `multiply_and_add_up_flagged`; see `flagged.py`), on GPUs only.

Rows are counted as in `pair/sharded_rows.py`, whose layout says in which chunks they leave; ranks have equally many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from counterpoint.collectives.communicator import Communicator
from counterpoint.collectives.cuda.partitioned import PartitionedCudaWork
from counterpoint.collectives.work import PartitionedWork
from counterpoint.pair.cuts import Piece
from counterpoint.pair.sharded_rows import Part, ShardedRows
from counterpoint.parallel.sums import add_up
from counterpoint.parallel.tensor.flagged import bind_flagged, stored_tiles

GATHER, SCATTER = 0, 1  # channels: both may be under way at once


@dataclass(frozen=True, kw_only=True)
class Weight:
    """Holds the right-hand side of a matmul, which is whole on this rank.

    Args:
        matrix: `[k, n]`, of any strides that `torch.mm` takes.
        bias: `[n]`, added to every row; None: none.
        scale: of a float8 matrix, as `torch._scaled_mm` takes it; None: plain tensors are multiplied.
        result_scale: as `torch._scaled_mm` takes it.
        out_dtype: dtype of the product; None: that of the rows.
        use_fast_accum: as `torch._scaled_mm` takes it.
    """

    matrix: Tensor
    bias: Tensor | None = None
    scale: Tensor | None = None
    result_scale: Tensor | None = None
    out_dtype: torch.dtype | None = None
    use_fast_accum: bool = False

    @property
    def columns(self) -> int:
        """Return the number of columns of the product."""
        return int(self.matrix.shape[1])

    def product_dtype(self, rows: Tensor) -> torch.dtype:
        """Return the dtype of the product with `rows`."""
        return self.out_dtype or rows.dtype

    def multiply(self, rows: Tensor, out: Tensor, row_scale: Tensor | None = None) -> None:
        """Write `rows @ matrix` to `out`.

        Args:
            rows: `[m, k]`.
            out: `[m, n]`.
            row_scale: of float8 rows: one value, or `[m, 1]`.
        """
        if self.scale is None:
            if self.bias is None:
                torch.mm(rows, self.matrix, out=out)
            else:
                torch.addmm(self.bias, rows, self.matrix, out=out)
        else:
            assert row_scale is not None, "float8 rows have a scale"
            scales = row_scale, self.scale, self.bias, self.result_scale
            out.copy_(torch._scaled_mm(rows, self.matrix, *scales, out.dtype, self.use_fast_accum))


def grad_of_weight(rows: Tensor, grad: Tensor, matrix: Tensor) -> Tensor:
    """Return the derivative of a matrix by which `rows` were multiplied, in memory as the matrix is.

    The matrix of a linear layer is a transposed view: so is the derivative, or autograd would copy it.
    """
    rows, grad = rows.reshape(-1, rows.shape[-1]), grad.reshape(-1, grad.shape[-1])
    return (grad.t() @ rows).t() if matrix.stride(0) == 1 else rows.t() @ grad


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


def gather_and_consume(
    communicator: Communicator,
    shard: Tensor,
    gathered: Tensor,
    layout: ShardedRows,
    consume: Callable[[PartitionedWork], None],
    *,
    rows_to: Tensor | None = None,
    chunk_rows: int | None = None,
    supplied: bool = True,
) -> None:
    """Gather rows, beside what consumes them.

    Args:
        communicator: of the ranks; its channel `GATHER` is used.
        shard: this rank's rows, `[batch, rows, k]`, contiguous.
        gathered: `[batch, world_size * rows, k]`, of the communicator's `empty`.
        layout: of the rows.
        consume: is given the work, and has it wait for the partitions that it reads.
        rows_to: where all rows are copied, `[batch, world_size * rows, k]`; `gathered` itself: own ones; None: nowhere.
        chunk_rows: rows of a partition; None: those of the layout.
        supplied: the shard is written; False: `consume` writes it, and lets partitions leave.
    """
    work = communicator.partitioned_all_gather(
        gathered, shard, dim=1, chunk_rows=chunk_rows or layout.most_sent, supplied=supplied, channel=GATHER
    )
    try:
        consume(work)
        if rows_to is not None:
            work.arrived(len(work.received))
            copy_blocks(rows_to, gathered, shard, layout)
    finally:
        work.finish()


def multiply_arrived(
    work: PartitionedWork, shard: Tensor, gathered: Tensor, steps: Steps, multiply: Callable[[slice, Tensor], None]
) -> None:
    """Multiply each piece of gathered rows when it is there.

    Args:
        work: of the gather.
        shard: this rank's rows.
        gathered: where those of peers arrive.
        steps: of a plan; the `segment` of a piece is the number of partitions that have to be there.
        multiply: multiplies the rows of this number, which it is given.
    """
    flat, own = gathered.view(-1, gathered.shape[-1]), shard.view(-1, shard.shape[-1])
    for segment, parts in steps.pieces:
        work.arrived(segment)
        for part in parts:
            multiply(part.whole, flat[part.whole] if part.own is None else own[part.own])


def multiply_flagged(
    work: PartitionedWork,
    shard: Tensor,
    gathered: Tensor,
    layout: ShardedRows,
    weights: Sequence[Weight],
    products: Sequence[Tensor],
    *,
    error: Tensor,
) -> None:
    """Run one matmul for each weight, which takes its tiles in the order in which rows arrive.

    Args:
        work: of the gather.
        shard: this rank's rows.
        gathered: where those of peers arrive.
        layout: of the rows.
        weights: by which all rows are multiplied.
        products: of each weight, `[batch * world_size * rows, n]`.
        error: int32, 0, where a matmul says for what it has polled in vain.
    """
    assert isinstance(work, PartitionedCudaWork)
    rows = {"own": shard.view(-1, shard.shape[-1]), "gathered": gathered.view(-1, gathered.shape[-1])}
    for weight, out in zip(weights, products, strict=True):
        bind_flagged(
            "all_gather_matmul", {**rows, "b": weight.matrix, "out": out}, layout,
            words=work.arrival_words, error=error.data_ptr(), bias=weight.bias,
        )()  # fmt: skip
    work.arrived(len(work.received))


def produce_and_scatter(
    communicator: Communicator,
    staging: Tensor,
    out: Tensor,
    layout: ShardedRows,
    produce: Callable[[PartitionedWork, Tensor], None],
) -> None:
    """Push a product to the ranks, beside what produces it and adds up what arrives for this one.

    Args:
        communicator: of the ranks; its channel `SCATTER` is used.
        staging: where the ranks' products for this rank arrive, `[world_size, batch, rows, n]`, of its `empty`.
        out: this rank's sums, `[batch, rows, n]`.
        layout: of the rows.
        produce: is given the work and the product, `[batch * world_size * rows, n]`, whose peers' rows it writes and
            lets leave.
    """
    product = torch.empty(layout.batch, sum(layout.rows), out.shape[-1], dtype=out.dtype, device=out.device)
    work = communicator.partitioned_all_to_all(staging, product, dim=1, chunk_rows=layout.most_sent, channel=SCATTER)
    try:
        produce(work, product.view(-1, out.shape[-1]))
    finally:
        work.finish()


def multiply_and_add_up(
    work: PartitionedWork,
    product: Tensor,
    staging: Tensor,
    out: Tensor,
    steps: Steps,
    reduce_op: str,
    multiply: Callable[[slice, Tensor], None],
    *,
    between: Callable[[], None] | None = None,
    summed: Callable[[int], None] | None = None,
) -> None:
    """Multiply pieces, push each to its rank when it is computed, and add up what arrives for this one.

    Args:
        work: of the scatter.
        product: of which peers' rows are written.
        staging: where the ranks' products for this rank arrive.
        out: this rank's sums.
        steps: of a plan; the `segment` of a piece is the last partition that may leave after it.
        reduce_op: sum or avg.
        multiply: writes the product of rows, given their number and where to.
        between: called when all parts for peers have left, and sums are still to be made: what it computes hides them.
        summed: called with the number of own rows, from the first on, whose sums are there.
    """
    layout, columns = steps.layout, out.shape[-1]
    blocks, sums = staging.view(layout.world_size, -1, columns), out.view(-1, columns)
    mine = blocks[layout.rank]  # its place among the blocks, which no peer writes

    def sum_up(one: OwnSum) -> None:
        work.arrived(one.needed)
        add_up(blocks[:, one.rows.own], sums[one.rows.own], reduce_op)
        if one.complete and summed is not None:
            summed(one.complete)

    for segment, parts in steps.pieces:
        for part in parts:
            if part.own is None:
                multiply(part.whole, product[part.whole])
        work.ready(min(segment + 1, len(work.sent)))
    if between is not None:
        between()
    for index, one in enumerate(steps.sums):
        multiply(one.rows.whole, mine[one.rows.own])
        if index:  # one behind: the GPU is busy until the peers' blocks have come
            sum_up(steps.sums[index - 1])
    sum_up(steps.sums[-1])


def multiply_and_add_up_flagged(
    work: PartitionedWork,
    product: Tensor,
    staging: Tensor,
    out: Tensor,
    layout: ShardedRows,
    a: Tensor,
    weight: Weight,
    *,
    reduce_op: str,
    stored: Tensor,
    error: Tensor,
) -> None:
    """Let one matmul make peers' rows first, each partition of which leaves when its last tile is stored, and add up.

    Args:
        work: of the scatter.
        product: of which peers' rows are written.
        staging: where the ranks' products for this rank arrive.
        out: this rank's sums.
        layout: of the rows.
        a: `[batch * world_size * rows, k]`.
        weight: without bias.
        reduce_op: sum or avg.
        stored: int32, zeros, kept from call to call: a count for each partition, set back here.
        error: as of `multiply_flagged`.
    """
    assert isinstance(work, PartitionedCudaWork)
    columns, first = out.shape[-1], stored.data_ptr()
    blocks = staging.view(layout.world_size, -1, columns)
    tensors = {"a": a, "b": weight.matrix, "partial": product, "staged": blocks, "out": out.view(-1, columns)}
    bind_flagged(
        "matmul_reduce_scatter", tensors, layout,
        stored=first, words=work.arrival_words, error=error.data_ptr(), average=reduce_op == "avg",
    )()  # fmt: skip
    counts = stored_tiles(layout, columns)
    for one in work.sent:
        work.ready_when(first + stored.itemsize * layout.word(one.peer, one.chunk), counts[one.peer, one.chunk])


def copy_blocks(target: Tensor, gathered: Tensor, own: Tensor, layout: ShardedRows) -> None:
    """Copy all rows to `target`: this rank's from `own`, the peers' from `gathered`, unless they are there."""
    shape = layout.batch, layout.world_size, layout.rows[layout.rank], target.shape[-1]
    blocks, there = target.view(shape), gathered.view(shape)
    if own.data_ptr() != blocks[:, layout.rank].data_ptr():
        blocks[:, layout.rank].copy_(own.view(layout.batch, layout.rows[layout.rank], -1))
    if target is not gathered:
        for part in (slice(0, layout.rank), slice(layout.rank + 1, layout.world_size)):
            blocks[:, part].copy_(there[:, part])
