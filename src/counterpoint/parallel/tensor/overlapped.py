"""Overlap matmuls with the all-gather before or the reduce-scatter after them, in pieces.

`RowGather` pushes this rank's rows to the peers while it multiplies rows that have arrived; it reads its own rows in
place. `RowScatter` pushes each part of a product as soon as it is computed, the parts for peers first; the sums of its
own rows are made last, in the order of ranks, and rounded once. Both multiply in the pieces of a plan (`multiply`).

Rows are numbered as in `pair/arrivals.py`, whose layout says in which chunks rows leave; ranks have equally many rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from counterpoint.collectives.communicator import Communicator
from counterpoint.pair.arrivals import Part, ShardedRows
from counterpoint.pair.matmul_choice import Piece
from counterpoint.parallel.group import CHANNELS
from counterpoint.parallel.sums import add_up

GATHER, SCATTER = CHANNELS["matmuls"]  # one channel each, so that both can be under way at once


@dataclass(frozen=True, kw_only=True)
class Weight:
    """Holds the right-hand matrix of this rank's matmul, with its bias and its scales.

    Args:
        matrix: `[k, n]`, of any strides that `torch.mm` takes.
        bias: `[n]`, added to every row; None: none.
        scale: scale of a float8 matrix, as `torch._scaled_mm` takes it; None: the matrix is not float8.
        result_scale: scale of the result, as `torch._scaled_mm` takes it.
        out_dtype: dtype of the product; None: the dtype of the rows.
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
        """Return the number of columns of the matrix, and so of the product."""
        return int(self.matrix.shape[1])

    def product_dtype(self, rows: Tensor) -> torch.dtype:
        """Return the dtype of the product with `rows`."""
        return self.out_dtype or rows.dtype

    def multiply(self, rows: Tensor, out: Tensor, row_scale: Tensor | None = None) -> None:
        """Write `rows @ matrix` to `out`.

        Args:
            rows: `[m, k]`.
            out: `[m, n]`.
            row_scale: scale of float8 rows: one value, or `[m, 1]`.
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
    """Return the derivative of a matrix by which `rows` were multiplied, in the matrix's memory layout.

    The matrix of a linear layer is a transposed view: so is the derivative, or autograd would copy it.
    """
    rows, grad = rows.reshape(-1, rows.shape[-1]), grad.reshape(-1, grad.shape[-1])
    return (grad.t() @ rows).t() if matrix.stride(0) == 1 else rows.t() @ grad


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnSum:
    """Describes a range of this rank's own rows that a scatter sums up over ranks in one step.

    Args:
        rows: the rows of this range.
        needed: number of partitions that must have arrived: from all peers, the partitions of these rows and of all
            earlier rows.
        complete: number of own rows, from the first on, whose sums exist then; 0: earlier rows are still missing.
    """

    rows: Part
    needed: int
    complete: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """Holds a plan's pieces with their rows, and the order of this rank's own sums, for all calls of one shape.

    Args:
        layout: layout of the rows over ranks.
        pieces: the `segment` of each piece, and its rows.
        sums: own rows in the order in which a scatter multiplies them.
    """

    layout: ShardedRows
    pieces: tuple[tuple[int, tuple[Part, ...]], ...]
    sums: tuple[OwnSum, ...]

    @classmethod
    def of(cls, pieces: Sequence[Piece], layout: ShardedRows) -> Steps:
        """Return `Steps` made of a plan's pieces."""
        made = tuple((piece.segment, layout.parts(piece.slabs)) for piece in pieces)
        chunks, complete, sums = len(layout.chunks(layout.rank)), 0, []
        for part in (part for _, parts in made for part in parts):
            if part.own is not None:
                follows = part.own.start == complete
                complete = part.own.stop if follows else complete
                last = -(-part.own.stop // layout.most_sent)  # chunks of the last peer: its partitions come last
                needed = (layout.world_size - 2) * chunks + last
                sums.append(OwnSum(rows=part, needed=needed, complete=complete if follows else 0))
        return cls(layout=layout, pieces=made, sums=tuple(sums))


class RowGather:
    """Gathers rows in a `with` block that multiplies them as they arrive, in pieces of a plan.

    Args:
        communicator: communicator of the ranks, of which channel `GATHER` is used.
        shard: this rank's rows, `[batch, rows, k]`, contiguous.
        gathered: `[batch, world_size * rows, k]`, of the communicator's `empty`.
        layout: layout of the rows over ranks.
        chunk_rows: rows of a partition; None: the layout's rows of a chunk.
        supplied: the shard is written; False: the block writes it, and lets partitions of `work` leave.
    """

    def __init__(
        self,
        communicator: Communicator,
        shard: Tensor,
        gathered: Tensor,
        layout: ShardedRows,
        *,
        chunk_rows: int | None = None,
        supplied: bool = True,
    ) -> None:
        self.shard, self.gathered, self.layout = shard, gathered, layout
        self.own, self.whole = shard.view(-1, shard.shape[-1]), gathered.view(-1, gathered.shape[-1])
        self.work = communicator.partitioned_all_gather(
            gathered, shard, dim=1, chunk_rows=chunk_rows or layout.most_sent, supplied=supplied, channel=GATHER
        )

    def __enter__(self) -> RowGather:
        return self

    def __exit__(self, *_: object) -> None:
        self.work.finish()

    def multiply(self, steps: Steps, multiply: Callable[[slice, Tensor], None]) -> None:
        """Call `multiply` with each piece's row numbers and rows, when these rows have arrived.

        The `segment` of a piece is the number of partitions that must have arrived.
        """
        for segment, parts in steps.pieces:
            self.work.arrived(segment)
            for part in parts:
                multiply(part.whole, self.whole[part.whole] if part.own is None else self.own[part.own])

    def copy_to(self, target: Tensor) -> None:
        """Copy all rows to `target`, `[batch, world_size * rows, k]`; to `gathered` itself, only own rows."""
        self.work.arrived(len(self.work.received))
        rank, world_size = self.layout.rank, self.layout.world_size
        shape = self.layout.batch, world_size, self.layout.rows[rank], target.shape[-1]
        blocks, there, own = target.view(shape), self.gathered.view(shape), self.shard.view(shape[0], *shape[2:])
        if own.data_ptr() != blocks[:, rank].data_ptr():
            blocks[:, rank].copy_(own)
        if target is not self.gathered:
            for part in (slice(0, rank), slice(rank + 1, world_size)):
                blocks[:, part].copy_(there[:, part])


class RowScatter:
    """Scatters the rows of a product in a `with` block that multiplies, and sums up this rank's rows as they arrive.

    Args:
        communicator: communicator of the ranks, of which channel `SCATTER` is used.
        staging: where the ranks' products for this rank arrive, `[world_size, batch, rows, n]`, of the communicator's
            `empty`.
        out: this rank's sums, `[batch, rows, n]`.
        layout: layout of the rows over ranks.
        reduce_op: sum or avg.
    """

    def __init__(
        self, communicator: Communicator, staging: Tensor, out: Tensor, layout: ShardedRows, reduce_op: str
    ) -> None:
        columns = out.shape[-1]
        product = torch.empty(layout.batch, sum(layout.rows), columns, dtype=out.dtype, device=out.device)
        self.layout, self.reduce_op, self.product = layout, reduce_op, product.view(-1, columns)
        self.blocks, self.sums = staging.view(layout.world_size, -1, columns), out.view(-1, columns)
        self.work = communicator.partitioned_all_to_all(
            staging, product, dim=1, chunk_rows=layout.most_sent, channel=SCATTER
        )

    def __enter__(self) -> RowScatter:
        return self

    def __exit__(self, *_: object) -> None:
        self.work.finish()

    def multiply(
        self,
        steps: Steps,
        multiply: Callable[[slice, Tensor], None],
        *,
        between: Callable[[], None] | None = None,
        summed: Callable[[int], None] | None = None,
    ) -> None:
        """Multiply the pieces of a plan, send each piece when it is computed, and sum up own rows.

        Args:
            steps: steps of a plan; the `segment` of a piece is the last partition that may leave after it.
            multiply: writes the product of rows, given their number and where to.
            between: called when all parts for peers have left, and sums are still to be made: what it computes hides
                these sums.
            summed: called with the number of own rows, from the first on, whose sums are complete.
        """
        work, mine = self.work, self.blocks[self.layout.rank]  # this rank's block, which no peer writes

        def sum_up(one: OwnSum) -> None:
            work.arrived(one.needed)
            add_up(self.blocks[:, one.rows.own], self.sums[one.rows.own], self.reduce_op)
            if one.complete and summed is not None:
                summed(one.complete)

        for segment, parts in steps.pieces:
            for part in parts:
                if part.own is None:
                    multiply(part.whole, self.product[part.whole])
            work.ready(min(segment + 1, len(work.sent)))
        if between is not None:
            between()
        for index, one in enumerate(steps.sums):
            multiply(one.rows.whole, mine[one.rows.own])
            if index:  # one piece behind, so that the GPU is busy until peers' blocks come
                sum_up(steps.sums[index - 1])
        sum_up(steps.sums[-1])
