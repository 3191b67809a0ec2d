"""Move tokens by gathering all of them on every rank: no counts are exchanged and no host waits, so graphs work.

Every rank gets the tokens, ids and weights of all ranks, and copies the rows that its experts need as each rank's
tokens arrive. It adds up the weighted outputs of its experts for each token, and sends each rank its sums as they are
made; every rank then adds up the sums for its tokens in the order of ranks, in float32. Copy engines do all the
sending; the caller's stream runs only the kernels that copy rows and add them up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from counterpoint.collectives.work import PartitionedWork
from counterpoint.parallel.expert.permute import Assignment, assign, bounded, combine, narrowed, permute, weight_grads
from counterpoint.parallel.expert.token_mechanism import ExpertLayout, Halves, OwnCommunication
from counterpoint.parallel.group import CHANNELS, RankGroup
from counterpoint.parallel.options import ExpertOptions
from counterpoint.parallel.report import RoutedPath
from counterpoint.parallel.sums import add_up

_TOKENS, _SUMS, _SMALL = CHANNELS["tokens"][:2], CHANNELS["tokens"][2:4], CHANNELS["tokens"][4]


@dataclass(frozen=True)
class _Gathered:
    """Holds this rank's tokens, all ranks' tokens `[world_size * block, hidden]`, and the gather's work."""

    own: Tensor
    blocks: Tensor
    work: PartitionedWork


@dataclass(frozen=True)
class _Route:
    """Holds where all ranks' tokens go: each rank has room for `block` tokens, of which this rank sends `tokens`."""

    tokens: int
    block: int
    dtype: torch.dtype
    parts: list[Assignment]  # one for each rank's tokens; this rank's also writes the padding
    weights: tuple[Tensor, ...]  # weights of each rank's choices


class GatherAll(OwnCommunication):
    """Moves tokens by all_gathers, and the sums of experts' outputs by all_to_alls of equal blocks."""

    name: RoutedPath = "gather"

    def __init__(self, ranks: RankGroup, layout: ExpertLayout, options: ExpertOptions) -> None:
        super().__init__(ranks, layout, options)
        self._may_lack_room = options.capacity_factor is not None and options.overflow != "second_round"

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor) -> Halves[tuple[Tensor, Tensor, _Route]]:
        """Gather tokens, ids and weights of all ranks; copy the rows that this rank's experts need."""
        self._admit(len(x))
        options, layout, tokens, dtype = self._options, self._layout, len(x), x.dtype
        if self._may_lack_room and not self._memory.is_capturing():
            self._overflow.check()
        block, top_k, scales = layout.block(tokens, options), layout.top_k, None
        if options.wire_dtype is not None:
            x, scales = narrowed(x, options.wire_dtype)
        table = self._memory.empty(layout.world_size, block, 2 * top_k + (scales is not None), dtype=torch.int32)
        own = table[layout.rank]
        mine = own[:tokens] if tokens < block else own
        mine[:, :top_k].copy_(bounded(ids, layout.experts))
        mine[:, top_k : 2 * top_k].view(torch.float32).copy_(weights)
        if scales is not None:
            mine[:, -1:].view(torch.float32).copy_(scales)
        if tokens < block:
            own[tokens:].fill_(-1)
        table_work: Any = self._communicator.all_gather(table, own, channel=_SMALL, async_op=True)
        arriving = self._gather(x, block)
        yield
        table_work.wait()
        choices = table.clone()  # kept until derivatives are made, which is too long for shared memory
        self._memory.give_back(table)
        all_ids = choices.view(-1, choices.shape[2])[:, :top_k]
        assignment = assign(
            all_ids,
            first_expert=layout.first_expert,
            num_experts=layout.local_experts,
            capacity=layout.capacity(block, options),
            pad_multiple=options.pad_multiple,
        )
        if self._may_lack_room:
            self._note_room(all_ids, assignment)
        starts = range(0, layout.world_size * block, block)
        parts = [assignment.of_tokens(at, at + block, pads=at == layout.rank * block) for at in starts]
        values = choices.view(torch.float32)
        route = _Route(tokens, block, dtype, parts, values[:, :, top_k : 2 * top_k].unbind())
        factors = None if scales is None else values[:, :, -1:].expand(-1, -1, top_k).unbind()
        return self._permuted(arriving, route, factors), assignment.offsets, route

    def combine(self, rows: Tensor, route: _Route, *, weighted: bool) -> Halves[tuple[Tensor, Tensor | None]]:
        """Sum the outputs of this rank's experts for each token, send sums to the tokens' ranks, and add them up."""
        layout, block, n, saved = self._layout, route.block, self._layout.world_size, rows if weighted else None
        arriving = self._memory.empty(n, block, layout.hidden, dtype=rows.dtype)
        leaving = rows.new_empty(n * block, layout.hidden)
        channel = self._ranks.partitioned.channel(_SUMS)
        call = self._communicator.partitioned_all_to_all(arriving, leaving, chunk_rows=block, channel=channel)
        work = self._ranks.partitioned.begin(channel, call)
        sums = [*leaving.view(n, block, layout.hidden).unbind()]
        sums[layout.rank] = arriving[layout.rank]  # no peer writes this rank's own part
        for index, rank in enumerate([one.peer for one in work.sent] + [layout.rank]):
            combine(rows, route.parts[rank], weights=route.weights[rank] if weighted else None, out=sums[rank])
            if rank != layout.rank:
                work.ready(index + 1)
        del rows
        yield
        out = leaving.new_empty(route.tokens, layout.hidden)
        work.arrived(len(work.received))
        if route.tokens:
            add_up(arriving[:, : route.tokens], out, "sum")
        self._ranks.partitioned.finish(work)
        self._memory.give_back(arriving)
        return out, saved

    def spread(
        self, grads: Tensor, route: _Route, saved: Tensor | None
    ) -> Halves[tuple[Tensor, Halves[Tensor] | None]]:
        """Gather the gradients of all tokens' sums, and copy the rows that this rank's experts need."""
        arriving = self._gather(grads, route.block)
        yield
        if saved is None:
            return self._permuted(arriving, route, route.weights), None
        dots = saved.new_empty(self._layout.world_size * route.block, self._layout.top_k, dtype=torch.float32)
        rows = self._permuted(arriving, route, route.weights, saved, dots)
        weights = self._weights_grad(dots, route)
        next(weights)
        return rows, weights

    def _weights_grad(self, dots: Tensor, route: _Route) -> Halves[Tensor]:
        """Reduce-scatter the weights' derivatives, 0 on all ranks but the expert's, to the ranks of their tokens."""
        out = dots.new_empty(route.block, dots.shape[1])
        work: Any = self._communicator.reduce_scatter(out, dots, channel=_SMALL, async_op=True)
        yield
        work.wait()
        return out[: route.tokens]

    def _gather(self, tokens: Tensor, block: int) -> _Gathered:
        """Start to gather a block of tokens of each rank; if a rank has fewer, nobody reads the rest of its block."""
        layout = self._layout
        blocks = self._memory.empty(layout.world_size * block, layout.hidden, dtype=tokens.dtype)
        own = tokens
        if len(tokens) < block:
            own = blocks[layout.rank * block : (layout.rank + 1) * block]
            own[: len(tokens)].copy_(tokens)
        channel = self._ranks.partitioned.channel(_TOKENS)
        work = self._communicator.partitioned_all_gather(blocks, own, chunk_rows=block, channel=channel)
        return _Gathered(own, blocks, self._ranks.partitioned.begin(channel, work))

    def _permuted(
        self,
        arriving: _Gathered,
        route: _Route,
        weights: Sequence[Tensor] | None,
        saved: Tensor | None = None,
        dots: Tensor | None = None,
    ) -> Tensor:
        """Return the rows of this rank's experts, copied as each rank's tokens arrive, and finish the gather.

        Args:
            arriving: the tokens.
            route: where the tokens go.
            weights: for each rank, the weights by which its rows are multiplied.
            saved: rows whose products with the tokens are written to `dots`.
            dots: `[world_size * block, top_k]`.
        """
        me, parts = self._layout.rank, route.parts
        rows = arriving.blocks.new_empty(parts[0].sources.shape[0], self._layout.hidden, dtype=route.dtype)
        blocks = [*arriving.blocks.view(-1, route.block, rows.shape[1]).unbind()]
        blocks[me] = arriving.own
        products = None if dots is None else dots.view(-1, route.block, dots.shape[1]).unbind()
        for index, rank in enumerate([me] + [one.peer for one in arriving.work.received]):
            if index:
                arriving.work.arrived(index)
            scale = None if weights is None else weights[rank]
            zero_tail = self._options.zero_tail and rank == me
            permute(blocks[rank], parts[rank], weights=scale, out=rows, zero_tail=zero_tail)
            if saved is not None and products is not None:
                weight_grads(saved, blocks[rank], parts[rank], out=products[rank])
        self._ranks.partitioned.finish(arriving.work)
        self._memory.give_back(arriving.blocks)
        return rows

    def _note_room(self, ids: Tensor, assignment: Assignment) -> None:
        """Count the rows that exceed each rank's capacity; every rank can, since it has all ranks' expert ids."""
        options, layout = self._options, self._layout
        self._overflow.add(assignment.missing)
        if options.overflow == "drop":
            return
        counts = ids.new_zeros(layout.experts + 1)
        valid = (ids >= 0) & (ids < layout.experts)
        counts.index_add_(0, torch.where(valid, ids, layout.experts).flatten(), ids.new_ones(ids.numel()))
        rows = (counts[:-1] + options.pad_multiple - 1) // options.pad_multiple * options.pad_multiple
        self._overflow.note((rows.view(layout.world_size, -1).sum(1) - assignment.capacity).clamp(min=0))
