"""Move tokens in slabs: room for equally many rows for each rank, so that nobody counts before they travel.

Each rank packs its rows by the rank that has their expert, and sends every other one a slab of `capacity_factor` times
what an even routing has, by an all_to_all of even blocks. Sizes are fixed, so that a graph can be captured. What an
expert made goes back to the same place of the same slab, and is weighed and added up at home, in the order of choices.

What is beyond a slab goes by `overflow`. `raise` and `drop` count it on the device; with `raise` the next dispatch,
`check` or `close` waits until the calls before have told how many of any rank had no room, and raises on all ranks; a
call in a capture does not look. A `second_round` loses nothing: the tables say how many rows the fullest slab lacks,
and if it lacks some, a second all_to_all of that size follows when the dispatch is finished. For that the host waits in
each dispatch until the tables have come; what was queued after its start goes on. A capture has no host: there one
round has room for all rows, `world_size` times those of an even routing. `raise` and `drop` send `capacity_factor`
times as many.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from counterpoint.collectives.work import Work
from counterpoint.parallel.expert.mechanism import OwnCommunication
from counterpoint.parallel.expert.options import ExpertLayout
from counterpoint.parallel.expert.packing import (
    HEAD,
    LACKING,
    REST,
    Incoming,
    Packing,
    arriving_parts,
    moved,
    pack,
)
from counterpoint.parallel.expert.permute import Assignment, bounded, combine, permute, weight_grads
from counterpoint.parallel.expert.wire import narrowed
from counterpoint.parallel.group import CHANNELS, RankGroup
from counterpoint.parallel.options import ExpertOptions
from counterpoint.parallel.report import RoutedPath

OUT, BACK, SMALL = CHANNELS["tokens"][:2], CHANNELS["tokens"][2:4], CHANNELS["tokens"][4]
DEFAULT_FACTOR = 1.25  # room in a first round, if a second one takes the rest
_STEP = 64  # rows: second rounds have a multiple, so that memory is used again


@dataclass(frozen=True)
class SlabRound:
    """Names the places that travel together."""

    begin: int
    rows: int  # for each rank


@dataclass
class Sending:
    """Holds what is under way from all ranks, by place; this rank's own is there already."""

    received: Tensor
    work: Any


@dataclass(frozen=True)
class Leaving:
    """Says where the choices of a round go: in what is sent, and those for this rank's own experts."""

    others: Assignment
    own: Assignment


@dataclass
class TokenRoute:
    """Holds where the rows of one dispatch go."""

    packing: Packing
    weights: Tensor
    dtype: torch.dtype
    block: int  # most tokens of a rank
    room: int  # places for each rank
    rounds: list[SlabRound]
    table: Sending | None
    leaving: dict[SlabRound, Leaving] = field(default_factory=dict)  # made once
    home: Assignment | None = None  # made once
    incoming: Incoming | None = None
    values: Tensor | None = None  # tokens as they travel, as long as a second round may send some
    heads: tuple[Tensor, Any] | None = None  # of the tables, for the host, and the event after which they are there
    sending: list[Sending] = field(default_factory=list)

    def known(self) -> Incoming:
        """Return what comes; the dispatch has been finished."""
        assert self.incoming is not None, "finish_dispatch comes first"
        return self.incoming


@dataclass
class Returning:
    """Holds what experts made, on its way home: one part for each round."""

    route: TokenRoute
    parts: list[tuple[Tensor, Work, Tensor]]  # what comes, its call, and what was sent
    rows: Tensor | None


class Slabs(OwnCommunication):
    """Moves tokens in slabs. See `TokenMechanism`."""

    name: RoutedPath = "slabs"

    def __init__(self, ranks: RankGroup, layout: ExpertLayout, options: ExpertOptions) -> None:
        super().__init__(ranks, layout, options)
        device = self._communicator.device
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None

    def dispatch_start(self, x: Tensor, ids: Tensor, weights: Tensor) -> TokenRoute:
        """Begin to send tables and slabs; raise if an earlier call had no room."""
        self._admit(len(x))
        if not self._memory.is_capturing():
            self._overflow.check()
        ids, weights = bounded(ids, self._layout.experts).int().contiguous(), weights.float().contiguous()
        block = self._layout.block(len(x), self._options)
        first, room = self._sizes(block)
        values, scales = (x, None) if self._options.wire_dtype is None else narrowed(x, self._options.wire_dtype)
        packing = pack(ids, weights, scales, self._layout, first=first, room=room)
        self._overflow.add(packing.lacking)
        table = self._exchange_table(packing.table)
        route = TokenRoute(packing, weights, x.dtype, block, room, [SlabRound(0, first)], table)
        route.sending = [self._send(values, route, route.rounds[0])]
        if room > first:
            route.values, route.heads = values, self._heads(table)
        return route

    def dispatch_finish(self, route: TokenRoute) -> tuple[Tensor, Tensor]:
        """Make the second round, if one is needed, and put what came in the order of experts."""
        rest = 0 if route.heads is None else self._rest(route)
        incoming = route.incoming = self._incoming(route)
        self._overflow.note(incoming.head[:, LACKING])
        values, route.values = route.values, None
        if rest and values is not None:
            first = route.rounds[0].rows
            route.rounds.append(SlabRound(first, min(-(-rest // _STEP) * _STEP, route.room - first)))
            route.sending.append(self._send(values, route, route.rounds[1]))
        sending, route.sending = route.sending, []
        rows = self._unpacked(sending, route, incoming.scales)
        route.incoming = replace(incoming, scales=None)
        route.packing = replace(route.packing, table=rows.new_empty(0))  # it has been sent
        return rows, incoming.there.offsets

    def combine_start(self, rows: Tensor, route: TokenRoute, *, weighted: bool) -> Returning:
        """Put each row in its place of the slabs, and begin to send these back."""
        parts = [self._return(rows, route, one) for one in route.rounds]
        return Returning(route, parts, rows if weighted else None)

    def combine_finish(self, pending: Returning) -> tuple[Tensor, Tensor | None]:
        """Add up the rows of each token."""
        route, weights = pending.route, pending.route.weights if pending.rows is not None else None
        for _, work, _ in pending.parts:
            work.wait()
        back = [rows for rows, _, _ in pending.parts]
        if route.home is None:
            route.home = self._home(route)
        sums = combine(back[0] if len(back) == 1 else torch.cat(back), route.home, weights=weights)
        for rows in back:
            self._memory.give_back(rows)
        pending.parts = []
        return sums, pending.rows

    def spread_start(self, grads: Tensor, route: TokenRoute) -> tuple[list[Sending], TokenRoute]:
        """Begin to send the derivative of each row's sum."""
        return [self._send(grads, route, one) for one in route.rounds], route

    def spread_finish(self, pending: tuple[list[Sending], TokenRoute], kept: Tensor | None) -> tuple[Tensor, Any]:
        """Put what came in the order of experts, times its weight; begin to send home what weights have."""
        sending, route = pending
        weights = route.known().weights
        if kept is None:
            return self._unpacked(sending, route, weights), None
        dots = torch.zeros_like(weights)
        rows = self._unpacked(sending, route, weights, kept, dots)
        sending.clear()
        return rows, (self._exchange_table(dots), route)

    def weight_grads_finish(self, pending: tuple[Sending, TokenRoute]) -> Tensor:
        """Wait for the products of rows and derivatives."""
        returned, route = pending
        returned.work.wait()
        grads = route.packing.returned(returned.received)
        self._memory.give_back(returned.received)
        return grads

    def _sizes(self, block: int) -> tuple[int, int]:
        """Return the places of each rank that travel first, and all that it has."""
        layout, options = self._layout, self._options
        most, even = block * layout.top_k, block * layout.top_k / layout.world_size
        if options.overflow == "second_round" and self._memory.is_capturing():
            return most, most
        if options.capacity_factor is None and options.overflow != "second_round":
            return most, most
        first = min(most, math.ceil((options.capacity_factor or DEFAULT_FACTOR) * even))
        return first, most if options.overflow == "second_round" else first

    def _heads(self, table: Sending) -> tuple[Tensor, Any]:
        """Begin to copy the heads of the tables to the host, when they come; on CPUs they are read where they are."""
        if self._side is None:
            return table.received[:, :HEAD], None
        heads = torch.empty(self._layout.world_size, HEAD, dtype=torch.int32, pin_memory=True)
        there = torch.cuda.Event()
        with torch.cuda.stream(self._side):
            table.work.wait()
            for rank in range(self._layout.world_size):
                heads[rank].copy_(table.received[rank, :HEAD], non_blocking=True)
            there.record()
        return heads, there

    def _rest(self, route: TokenRoute) -> int:
        """Return how many rows the fullest slab of any rank lacks, which is equal on all ranks; the host waits."""
        assert route.heads is not None
        (heads, there), route.heads = route.heads, None
        if there is not None:
            there.synchronize()
        elif route.table is not None:
            route.table.work.wait()
        return int(heads[:, REST].max())

    def _exchange_table(self, table: Tensor) -> Sending:
        """Begin to send a row of a table to each rank."""
        received, me = self._memory.empty(*table.shape, dtype=table.dtype), self._layout.rank
        received[me].copy_(table[me])
        work = self._communicator.all_to_all(received, table, leave_own=True, channel=SMALL, async_op=True)
        return Sending(received, work)

    def _incoming(self, route: TokenRoute) -> Incoming:
        """Wait for the tables of all ranks."""
        table, route.table = route.table, None
        assert table is not None, "a dispatch is finished once"
        table.work.wait()
        capacity = self._layout.padded(self._layout.world_size * route.room, self._options.pad_multiple)
        found = Incoming.of(table.received, self._layout, route.room, capacity, self._options.pad_multiple)
        self._memory.give_back(table.received)
        return found

    def _home(self, route: TokenRoute) -> Assignment:
        """Return where a token's rows are among those that come home, of all rounds one after the other."""
        n, packing = self._layout.world_size, route.packing
        before = n * route.rounds[0].rows
        if len(route.rounds) == 1:
            return moved(packing.home, before)
        second = route.rounds[1]
        later = packing.in_slabs(second.begin, second.rows)
        return moved(torch.where(later >= 0, later + before, packing.home), before + n * second.rows)

    def _leaving(self, route: TokenRoute, one: SlabRound) -> Leaving:
        """Return where the choices of a round go."""
        n, packing = self._layout.world_size, route.packing
        if not one.begin:
            return Leaving(moved(packing.others, n * one.rows), moved(packing.own, one.rows))
        slots, is_own = packing.in_slabs(one.begin, one.rows), packing.ranks == packing.rank
        own = torch.where(is_own & (slots >= 0), packing.places - one.begin, -1)
        return Leaving(moved(torch.where(is_own, -1, slots), n * one.rows), moved(own, one.rows))

    def _send(self, tokens: Tensor, route: TokenRoute, one: SlabRound) -> Sending:
        """Begin to send the rows of a round; this rank's own go where those of others come."""
        leaving = route.leaving.get(one)
        if leaving is None:
            leaving = route.leaving[one] = self._leaving(route, one)
        packed = permute(tokens, leaving.others, zero_tail=False)
        n, me = self._layout.world_size, self._layout.rank
        received = self._memory.empty(n * one.rows, packed.shape[1], dtype=packed.dtype)
        permute(tokens, leaving.own, out=received[me * one.rows : (me + 1) * one.rows], zero_tail=False)
        channel = self._ranks.partitioned.channel(OUT)
        work = self._communicator.all_to_all(received, packed, leave_own=True, channel=channel, async_op=True)
        return Sending(received, work)

    def _unpacked(
        self,
        sending: list[Sending],
        route: TokenRoute,
        weights: Tensor | None,
        kept: Tensor | None = None,
        dots: Tensor | None = None,
    ) -> Tensor:
        """Return the rows of this rank's experts when they are there, each times its weight.

        Args:
            sending: the rows that come, by round.
            route: where they go.
            weights: `[world_size, room]`.
            kept: rows whose products with those that come are written to `dots`.
            dots: `[world_size, room]`.
        """
        there = route.known().there
        shape = there.capacity, self._layout.hidden
        rows = torch.empty(shape, dtype=route.dtype, device=there.slots.device)
        zero_tail = self._options.zero_tail
        for which, one in zip(sending, route.rounds, strict=True):
            which.work.wait()
            places = slice(one.begin, one.begin + one.rows)
            part = replace(there, slots=route.known().slots(slice(None), places))
            scales = None if weights is None else weights[:, places].reshape(-1, 1)
            permute(which.received, part, weights=scales, out=rows, zero_tail=zero_tail)
            zero_tail = False
            if kept is not None and dots is not None:
                dots[:, places] = weight_grads(kept, which.received, part).view(-1, one.rows)
            self._memory.give_back(which.received)
        return rows

    def _return(self, rows: Tensor, route: TokenRoute, one: SlabRound) -> tuple[Tensor, Work, Tensor]:
        """Begin to send the rows of a round home; return what comes from there, its call, and what is sent."""
        incoming, me, n = route.known(), self._layout.rank, self._layout.world_size
        places = slice(one.begin, one.begin + one.rows)
        leaving = rows.new_empty(n * one.rows, rows.shape[1])
        back = self._memory.empty(*leaving.shape, dtype=rows.dtype)
        for ranks, out in (
            (slice(me, me + 1), back),
            *((ranks, leaving) for ranks in arriving_parts(me, n)),
        ):
            part = replace(incoming.there, slots=incoming.slots(ranks, places))
            combine(rows, part, out=out[ranks.start * one.rows : ranks.stop * one.rows])
        channel = self._ranks.partitioned.channel(BACK)
        work = self._communicator.all_to_all(back, leaving, leave_own=True, channel=channel, async_op=True)
        assert work is not None
        return back, work, leaving
