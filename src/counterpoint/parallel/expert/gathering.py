"""Move tokens by gathering them on all ranks: nobody counts, the host waits for nothing, a graph can be captured.

Every rank gets the tokens, ids and weights of all ranks, and takes the rows of its experts as each rank's tokens come.
It adds up what these made for each token, weighted, and sends each rank its sums as they are made; every rank adds up
what came for its tokens in the order of ranks, in float32. All this is copied by copy engines; on the caller's stream
are only the kernels that take rows and add them up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from counterpoint.collectives.work import PartitionedWork
from counterpoint.parallel.expert.mechanism import OwnCommunication
from counterpoint.parallel.expert.options import ExpertLayout
from counterpoint.parallel.expert.permute import Assignment, assign, bounded, combine, permute, weight_grads
from counterpoint.parallel.expert.wire import narrowed
from counterpoint.parallel.group import CHANNELS, RankGroup
from counterpoint.parallel.options import ExpertOptions
from counterpoint.parallel.report import RoutedPath
from counterpoint.parallel.sums import add_up

_TOKENS, _SUMS, _SMALL = CHANNELS["tokens"][:2], CHANNELS["tokens"][2:4], CHANNELS["tokens"][4]


@dataclass
class _Gathering:
    """Holds this rank's block, those of all, `[world_size * block, ...]`, and the call that brings them."""

    own: Tensor
    blocks: Tensor
    work: PartitionedWork


@dataclass
class _Route:
    """Holds what the tokens of all ranks chose, `block` of each rank, of which this rank has `tokens`."""

    tokens: int
    block: int
    dtype: torch.dtype
    x: _Gathering | None
    choices: Tensor | None
    choices_work: Any
    assignment: Assignment | None = None  # of the tokens of all ranks, once their choices are there
    parts: tuple[Assignment, ...] = ()  # the same of each rank's tokens
    weights: tuple[Tensor, ...] = ()  # of each rank's choices

    def assigned(self) -> Assignment:
        assert self.assignment is not None, "a dispatch that was not finished"
        return self.assignment


@dataclass
class _Summing:
    """Holds the sums for this rank's tokens that come from each rank, and those that leave."""

    staging: Tensor
    leaving: Tensor
    work: PartitionedWork
    tokens: int
    rows: Tensor | None


@dataclass
class _Scattering:
    out: Tensor
    work: Any


class GatherAll(OwnCommunication):
    """Moves tokens by all_gathers, and sums by all_to_alls of even blocks. See `TokenMechanism`."""

    name: RoutedPath = "gather"

    def __init__(self, ranks: RankGroup, layout: ExpertLayout, options: ExpertOptions) -> None:
        super().__init__(ranks, layout, options)
        self._may_lack_room = options.capacity_factor is not None and options.overflow != "second_round"

    def dispatch_start(self, x: Tensor, ids: Tensor, weights: Tensor) -> _Route:
        """Begin to gather tokens, ids and weights."""
        self._admit(len(x))
        options = self._options
        if self._may_lack_room and not self._memory.is_capturing():
            self._overflow.check()
        tokens, dtype, layout = len(x), x.dtype, self._layout
        block, scales = layout.block(tokens, options), None
        if options.wire_dtype is not None:
            x, scales = narrowed(x, options.wire_dtype)
        width = 2 * layout.top_k + (scales is not None)
        choices = self._memory.empty(layout.world_size, block, width, dtype=torch.int32)
        own = choices[layout.rank]
        mine = own[:tokens] if tokens < block else own
        mine[:, : layout.top_k].copy_(bounded(ids, layout.experts))
        mine[:, layout.top_k : 2 * layout.top_k].view(torch.float32).copy_(weights)
        if scales is not None:
            mine[:, -1:].view(torch.float32).copy_(scales)
        if tokens < block:
            own[tokens:].fill_(-1)
        work = self._communicator.all_gather(choices, own, channel=_SMALL, async_op=True)
        return _Route(tokens, block, dtype, self._gather(x, block), choices, work)

    def dispatch_finish(self, route: _Route) -> tuple[Tensor, Tensor]:
        """Assign rows by the ids of all ranks, and take those of this rank's experts."""
        arriving, choices, layout, options = route.x, route.choices, self._layout, self._options
        assert arriving is not None, "a dispatch is finished once"
        assert choices is not None
        route.choices_work.wait()
        kept = choices.clone()  # until derivatives are made, which is too long for memory that ranks share
        self._memory.give_back(choices)
        route.x = route.choices = route.choices_work = choices = None
        ids = kept.view(-1, kept.shape[2])[:, : layout.top_k]
        assignment = route.assignment = assign(
            ids,
            first_expert=layout.first_expert,
            num_experts=layout.local_experts,
            capacity=layout.capacity(route.block, options),
            pad_multiple=options.pad_multiple,
        )
        route.parts = tuple(assignment.of_tokens(at, at + route.block) for at in range(0, len(ids), route.block))
        values = kept.view(torch.float32)
        route.weights = values[:, :, layout.top_k : 2 * layout.top_k].unbind()
        scales = None
        if options.wire_dtype is not None:
            scales = values[:, :, -1:].expand(-1, -1, layout.top_k).unbind()
        self._note_room(ids, assignment)
        return self._permuted(arriving, route, scales), assignment.offsets

    def combine_start(self, rows: Tensor, route: _Route, *, weighted: bool) -> _Summing:
        """Add up what this rank's experts made for each token, and send the sums of each rank as they are there."""
        layout, block, weights = self._layout, route.block, route.weights if weighted else None
        staging = self._memory.empty(layout.world_size, block, layout.hidden, dtype=rows.dtype)
        leaving = rows.new_empty(layout.world_size * block, layout.hidden)
        channel = self._ranks.partitioned.channel(_SUMS)
        call = self._communicator.partitioned_all_to_all(staging, leaving, chunk_rows=block, channel=channel)
        work = self._ranks.partitioned.begin(channel, call)

        def add(rank: int, out: Tensor) -> None:
            combine(rows, route.parts[rank], weights=None if weights is None else weights[rank], out=out)

        sums = leaving.view(layout.world_size, block, layout.hidden).unbind()
        for index, one in enumerate(work.sent):
            add(one.peer, sums[one.peer])
            work.ready(index + 1)
        add(layout.rank, staging[layout.rank])  # its place among the parts, which no peer writes
        return _Summing(staging, leaving, work, route.tokens, rows if weighted else None)

    def combine_finish(self, pending: _Summing) -> tuple[Tensor, Tensor | None]:
        """Wait for the ranks' sums, and add them up."""
        sums = pending.leaving.new_empty(pending.tokens, self._layout.hidden)
        pending.work.arrived(len(pending.work.received))
        if pending.tokens:
            add_up(pending.staging[:, : pending.tokens], sums, "sum")
        self._ranks.partitioned.finish(pending.work)
        self._memory.give_back(pending.staging)
        return sums, pending.rows

    def spread_start(self, grads: Tensor, route: _Route) -> tuple[_Gathering, _Route]:
        """Begin to gather the derivatives of the sums."""
        return self._gather(grads, route.block), route

    def spread_finish(self, pending: tuple[_Gathering, _Route], kept: Tensor | None) -> tuple[Tensor, Any]:
        """Take the rows of this rank's experts; begin to send the products that its rows have in them home."""
        arriving, route = pending
        ranks, top_k = self._layout.world_size, self._layout.top_k
        dots = None if kept is None else kept.new_empty(ranks * route.block, top_k, dtype=torch.float32)
        rows = self._permuted(arriving, route, route.weights, kept=kept, dots=dots)
        if dots is None:
            return rows, None
        out = dots.new_empty(route.block, top_k)
        work = self._communicator.reduce_scatter(out, dots, channel=_SMALL, async_op=True)
        return rows, _Scattering(out[: route.tokens], work)

    def weight_grads_finish(self, pending: _Scattering) -> Tensor:
        """Wait for the products, of which each choice has one on one rank."""
        pending.work.wait()
        return pending.out

    def _gather(self, tokens: Tensor, block: int) -> _Gathering:
        """Begin to gather a block of tokens of each rank; what lies past a rank's own nobody reads."""
        layout = self._layout
        blocks = self._memory.empty(layout.world_size * block, layout.hidden, dtype=tokens.dtype)
        own = tokens
        if len(tokens) < block:
            own = blocks[layout.rank * block : (layout.rank + 1) * block]
            own[: len(tokens)].copy_(tokens)
        channel = self._ranks.partitioned.channel(_TOKENS)
        work = self._communicator.partitioned_all_gather(blocks, own, chunk_rows=block, channel=channel)
        return _Gathering(own, blocks, self._ranks.partitioned.begin(channel, work))

    def _permuted(
        self,
        arriving: _Gathering,
        route: _Route,
        weights: Sequence[Tensor] | None,
        *,
        kept: Tensor | None = None,
        dots: Tensor | None = None,
    ) -> Tensor:
        """Return the rows of this rank's experts, taken from each rank's tokens as they come; end the call.

        Args:
            arriving: the tokens.
            route: where they go.
            weights: by which each row is multiplied, of each rank.
            kept: rows whose products with the tokens are written to `dots`.
            dots: `[world_size * block, top_k]`.
        """
        first = self._layout.rank
        products = None if dots is None else dots.view(-1, route.block, dots.shape[1]).unbind()
        rows = arriving.blocks.new_empty(route.assigned().capacity, self._layout.hidden, dtype=route.dtype)
        for rank, tokens in self._come(arriving, route.block):
            there = route.parts[rank]
            if rank != first and there.pad_multiple > 1:  # padding was written with the first part
                there = replace(there, pad_multiple=1)
            scale = None if weights is None else weights[rank]
            permute(tokens, there, weights=scale, out=rows, zero_tail=self._options.zero_tail and rank == first)
            if kept is not None and products is not None:
                weight_grads(kept, tokens, there, out=products[rank])
        self._ranks.partitioned.finish(arriving.work)
        self._memory.give_back(arriving.blocks)
        return rows

    def _come(self, arriving: _Gathering, block: int) -> Iterator[tuple[int, Tensor]]:
        """Yield each rank and its tokens, this rank first, the others when they are there."""
        yield self._layout.rank, arriving.own
        blocks = arriving.blocks.view(-1, block, arriving.blocks.shape[1]).unbind()
        for index, one in enumerate(arriving.work.received):
            arriving.work.arrived(index + 1)
            yield one.peer, blocks[one.peer]

    def _note_room(self, ids: Tensor, assignment: Assignment) -> None:
        """Count the rows for which there is no room; every rank knows the ids of all, and so who has none."""
        options, layout = self._options, self._layout
        if not self._may_lack_room:
            return
        self._overflow.add(assignment.missing)
        if options.overflow == "drop":
            return
        counts = ids.new_zeros(layout.experts + 1)
        valid = (ids >= 0) & (ids < layout.experts)
        counts.index_add_(0, torch.where(valid, ids, layout.experts).flatten(), ids.new_ones(ids.numel()))
        rows = (counts[:-1] + options.pad_multiple - 1) // options.pad_multiple * options.pad_multiple
        self._overflow.note((rows.view(layout.world_size, -1).sum(1) - assignment.capacity).clamp(min=0))
