"""Move tokens in slabs, each with room for a fixed number of rows, so that no rank exchanges counts before rows.

Each rank packs its rows by the rank that has their expert, and sends every other rank a slab, with room for
`capacity_factor` times the rows of an even routing, by an all_to_all of equal blocks. Sizes are fixed, so that a graph
can be captured. Outputs of experts go back to the same place of the same slab, and the rank of the token multiplies
them by their weights and adds them up, in the order of choices.

A choice's place is its number among the choices of this rank for the same other rank, in the order of tokens, then of
choices. Every rank sends every other a table of fixed size before any row: expert, weight and scale by place. So the
receiver knows on its device which rows arrive, in whichever round.

Rows that do not fit a slab are treated as `overflow` says. `raise` and `drop` count them on the device; with `raise`,
the next dispatch, `check` or `close` waits for earlier calls' counts of rows without room on any rank, and
raises on all ranks; a call in a capture does not check. A `second_round` loses no rows: the tables say how many rows
the fullest slab lacks, and if this is not 0, a second all_to_all of that size follows when the dispatch is finished.
For that, the host waits in each dispatch until the tables have arrived, while work that was queued after the start of
the dispatch goes on. In a capture no host can wait: one round then has room for all rows, `world_size` times the
rows of an even routing, while `raise` and `drop` send `capacity_factor` times these rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from counterpoint.parallel.expert.permute import (
    Assignment,
    assign,
    bounded,
    combine,
    narrowed,
    on_gpu,
    permute,
    triton_kernels,
    weight_grads,
)
from counterpoint.parallel.expert.token_mechanism import ExpertLayout, Halves, OwnCommunication
from counterpoint.parallel.group import CHANNELS, RankGroup
from counterpoint.parallel.options import ExpertOptions
from counterpoint.parallel.report import RoutedPath

OUT, BACK, SMALL = CHANNELS["tokens"][::2]
DEFAULT_FACTOR = 1.25  # capacity factor of the first round, if a second round sends the rest
HEAD = 2  # numbers at the front of each table
SECOND, LACKING = 0, 1  # places in the head: rows of a second round, choices without room
CHOICES = 256  # choices that one program of the kernel handles
_STEP = 64  # rows of a second round are a multiple of this, so that memory is reused
_NONE = -1


@dataclass(frozen=True)
class SlabExchange:
    """Holds the blocks that arrive from all ranks; this rank's own block is in place from the start."""

    arriving: Tensor
    work: Any

    def wait(self) -> Tensor:
        """Wait for the blocks of all ranks, and return them."""
        self.work.wait()
        return self.arriving


@dataclass(frozen=True)
class SlabRound:
    """Describes one exchange of rows, in which each rank sends every other rank equally many rows."""

    places: slice
    choices: Assignment  # assigns this rank's choices to the rows that it sends
    arriving: Assignment  # assigns arriving rows to the rows of this rank's experts


@dataclass(frozen=True)
class TokenRoute:
    """Holds where the rows of one dispatch go, and where the experts' outputs for them return to."""

    dtype: torch.dtype
    weights: Tensor  # [tokens, top_k]
    entries: Tensor  # [tokens, top_k], each choice's place in the tables
    arriving_weights: Tensor  # [world_size, room]
    rounds: list[SlabRound]
    returning: Assignment  # assigns choices to the rows that come back, the rounds in order


class Slabs(OwnCommunication):
    """Moves tokens by all_to_alls of slabs, blocks of a fixed number of rows for each rank."""

    name: RoutedPath = "slabs"

    def __init__(self, ranks: RankGroup, layout: ExpertLayout, options: ExpertOptions) -> None:
        super().__init__(ranks, layout, options)
        device = self._communicator.device
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor) -> Halves[tuple[Tensor, Tensor, TokenRoute]]:
        """Send tables and slabs, then a second round if rows are left; put arriving rows in the order of experts."""
        self._admit(len(x))
        if not self._memory.is_capturing():
            self._overflow.check()
        layout, options, n, dtype = self._layout, self._options, self._layout.world_size, x.dtype
        ids, weights = bounded(ids, layout.experts).int().contiguous(), weights.float().contiguous()
        first, room = self._sizes(layout.block(len(x), options))
        x, scales = (x, None) if options.wire_dtype is None else narrowed(x, options.wire_dtype)
        packing = pack(ids, weights, scales, layout, first=first, room=room)
        self._overflow.add(packing.table[0, LACKING])
        tables = self._exchange(packing.table, SMALL)
        choices = [as_assignment(packing.slots, n * first)]
        exchanges = [self._send(x, choices[0])]
        heads = self._heads(tables) if room > first else None
        yield
        second = 0 if heads is None else self._second(tables, *heads)
        table = tables.wait()
        self._overflow.note(table[:, LACKING])
        parts = (part.clone(memory_format=torch.contiguous_format) for part in table[:, HEAD:].split(room, dim=1))
        arriving_ids, arriving_weights, *arriving_scales = parts
        self._memory.give_back(table)
        returning = choices[0]
        if second:
            rows = min(-(-second // _STEP) * _STEP, room - first)
            slots = packing.of_places(first, rows)
            choices.append(as_assignment(slots, n * rows))
            exchanges.append(self._send(x, choices[1]))
            both = torch.where(slots >= 0, slots + n * first, packing.slots)
            returning = as_assignment(both, n * (first + rows))
        arriving = assign(
            arriving_ids.view(-1, 1),
            first_expert=layout.first_expert,
            num_experts=layout.local_experts,
            capacity=layout.padded(n * room, options.pad_multiple),
            pad_multiple=options.pad_multiple,
        )
        rounds, begin = [], 0
        for one in choices:
            places = slice(begin, begin + one.capacity // n)
            slots = arriving.slots.view(n, room)[:, places].reshape(-1, 1)
            rounds.append(SlabRound(places, one, replace(arriving, slots=slots)))
            begin = places.stop
        route = TokenRoute(dtype, weights, packing.entries, arriving_weights.view(torch.float32), rounds, returning)
        factors = arriving_scales[0].view(torch.float32) if arriving_scales else None
        return self._unpacked(exchanges, route, factors), arriving.offsets, route

    def combine(self, rows: Tensor, route: TokenRoute, *, weighted: bool) -> Halves[tuple[Tensor, Tensor | None]]:
        """Put each expert's output in its row of the slabs, send the slabs back, and add up the rows of each token."""
        exchanges = [self._exchange(combine(rows, one.arriving), BACK) for one in route.rounds]
        saved = rows if weighted else None
        del rows
        yield
        back = [one.wait() for one in exchanges]
        whole = back[0] if len(back) == 1 else torch.cat(back)
        sums = combine(whole, route.returning, weights=route.weights if weighted else None)
        for one in back:
            self._memory.give_back(one)
        return sums, saved

    def spread(
        self, grads: Tensor, route: TokenRoute, saved: Tensor | None
    ) -> Halves[tuple[Tensor, Halves[Tensor] | None]]:
        """Send each sum's derivative to its experts; return the rows' derivatives, times weights, in expert order."""
        exchanges = [self._send(grads, one.choices) for one in route.rounds]
        yield
        if saved is None:
            return self._unpacked(exchanges, route, route.arriving_weights), None
        dots = torch.zeros_like(route.arriving_weights)
        rows = self._unpacked(exchanges, route, route.arriving_weights, saved, dots)
        weights = self._weights_grad(dots, route)
        next(weights)
        return rows, weights

    def _weights_grad(self, dots: Tensor, route: TokenRoute) -> Halves[Tensor]:
        """Send the derivatives of weights, `[world_size, room]`, to the ranks of their tokens."""
        exchange = self._exchange(dots, SMALL)
        yield
        values = exchange.wait().flatten()[route.entries.clamp(min=0)]
        self._memory.give_back(exchange.arriving)
        return torch.where(route.entries >= 0, values, 0)

    def _sizes(self, block: int) -> tuple[int, int]:
        """Return how many rows the first round sends to each rank, and how many choices each table has room for."""
        layout, options = self._layout, self._options
        most, even = block * layout.top_k, block * layout.top_k / layout.world_size
        if options.overflow == "second_round" and self._memory.is_capturing():
            return most, most
        if options.capacity_factor is None and options.overflow != "second_round":
            return most, most
        first = min(most, math.ceil((options.capacity_factor or DEFAULT_FACTOR) * even))
        return first, most if options.overflow == "second_round" else first

    def _heads(self, tables: SlabExchange) -> tuple[Tensor, torch.cuda.Event | None]:
        """Start to copy each table's first `HEAD` numbers to the host once tables arrive; on CPUs, return a view."""
        if self._side is None:
            return tables.arriving[:, :HEAD], None
        heads = torch.empty(self._layout.world_size, HEAD, dtype=torch.int32, pin_memory=True)
        copied = torch.cuda.Event()
        with torch.cuda.stream(self._side):
            tables.work.wait()
            for rank in range(self._layout.world_size):
                heads[rank].copy_(tables.arriving[rank, :HEAD], non_blocking=True)
            copied.record()
        return heads, copied

    @staticmethod
    def _second(tables: SlabExchange, heads: Tensor, copied: torch.cuda.Event | None) -> int:
        """Return how many rows the second round sends to each rank, equal on all ranks; the host waits."""
        if copied is not None:
            copied.synchronize()
        else:
            tables.work.wait()
        return int(heads[:, SECOND].max())

    def _exchange(self, leaving: Tensor, channel: int) -> SlabExchange:
        """Start to send each rank its block of `leaving`; copy this rank's own block now, by a kernel."""
        arriving = self._memory.empty(*leaving.shape, dtype=leaving.dtype)
        n, me = self._layout.world_size, self._layout.rank
        arriving.view(n, -1)[me].copy_(leaving.view(n, -1)[me])
        work = self._communicator.all_to_all(arriving, leaving, leave_own=True, channel=channel, async_op=True)
        return SlabExchange(arriving, work)

    def _send(self, tokens: Tensor, choices: Assignment) -> SlabExchange:
        """Start to send the rows of one round to the ranks of their experts."""
        return self._exchange(permute(tokens, choices, zero_tail=False), OUT)

    def _unpacked(
        self,
        exchanges: list[SlabExchange],
        route: TokenRoute,
        weights: Tensor | None,
        saved: Tensor | None = None,
        dots: Tensor | None = None,
    ) -> Tensor:
        """Return the rows of this rank's experts in expert order, times `weights` if given, once all rows have arrived.

        Args:
            exchanges: the exchange of each round.
            route: where the rows go.
            weights: `[world_size, room]`.
            saved: rows whose products with the arriving ones are written to `dots`.
            dots: `[world_size, room]`.
        """
        shape, device = (route.rounds[0].arriving.capacity, self._layout.hidden), route.entries.device
        rows = torch.empty(shape, dtype=route.dtype, device=device)
        for exchange, one in zip(exchanges, route.rounds, strict=True):
            arrived = exchange.wait()
            factors = None if weights is None else weights[:, one.places].reshape(-1, 1)
            zero_tail = self._options.zero_tail and not one.places.start
            permute(arrived, one.arriving, weights=factors, out=rows, zero_tail=zero_tail)
            if saved is not None and dots is not None:
                dots[:, one.places] = weight_grads(saved, arrived, one.arriving).view(len(dots), -1)
            self._memory.give_back(arrived)
        return rows


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Says where each of this rank's choices goes: int32 `[tokens, top_k]`, -1 for choices that are not sent."""

    room: int
    entries: Tensor  # of choices in the tables: rank * room + place
    slots: Tensor  # of choices in the first round: rank * first + place
    table: Tensor  # `[world_size, HEAD + parts * room]`, for each rank; -1 where there is no choice

    def of_places(self, begin: int, rows: int) -> Tensor:
        """Return each choice's row in a round that sends every rank places `begin` to `begin + rows`; -1: none."""
        places = self.entries % self.room - begin
        is_here = (self.entries >= 0) & (places >= 0) & (places < rows)
        return torch.where(is_here, self.entries // self.room * rows + places, _NONE)


def pack(
    ids: Tensor, weights: Tensor, scales: Tensor | None, layout: ExpertLayout, *, first: int, room: int
) -> Packing:
    """Sort choices by the rank of their expert, and fill a table for each rank; the host does not wait.

    Args:
        ids: int32 `[tokens, top_k]`; -1 is none.
        weights: float32 `[tokens, top_k]`.
        scales: float32 `[tokens, 1]`, if tokens travel in another dtype.
        layout: which rank has which experts.
        first: places for each rank in the first round.
        room: places in the table for each rank.

    Returns:
        The packing, with the tables.
    """
    n, parts = layout.world_size, 2 if scales is None else 3
    compact = assign(ids // layout.local_experts, first_expert=0, num_experts=n, capacity=ids.numel())
    table = torch.full((n, HEAD + parts * room), _NONE, dtype=torch.int32, device=ids.device)
    function = _triton_pack if on_gpu(ids) else _torch_pack
    entries, slots = function(ids, compact, weights, scales, table, layout.local_experts, first, room)
    return Packing(room=room, entries=entries, slots=slots, table=table)


def _torch_pack(
    ids: Tensor,
    compact: Assignment,
    weights: Tensor,
    scales: Tensor | None,
    table: Tensor,
    local_experts: int,
    first: int,
    room: int,
) -> tuple[Tensor, Tensor]:
    counts = compact.offsets.diff(prepend=compact.offsets.new_zeros(1))
    has_rank = compact.slots >= 0
    ranks = torch.where(has_rank, ids // local_experts, 0)
    places = compact.slots - (compact.offsets - counts)[ranks]
    table[:, SECOND] = (counts.max() - first).clamp(0, room - first)
    table[:, LACKING] = (counts - room).clamp(min=0).sum(dtype=torch.int32)
    has_entry = has_rank & (places < room)
    for index, part in enumerate([ids, weights] if scales is None else [ids, weights, scales.expand(ids.shape)]):
        at = HEAD + index * room + places[has_entry]
        table[ranks[has_entry], at] = part.contiguous().view(torch.int32)[has_entry]
    slots = torch.where(has_rank & (places < first), ranks * first + places, _NONE)
    return torch.where(has_entry, ranks * room + places, _NONE), slots


def _triton_pack(
    ids: Tensor,
    compact: Assignment,
    weights: Tensor,
    scales: Tensor | None,
    table: Tensor,
    local_experts: int,
    first: int,
    room: int,
) -> tuple[Tensor, Tensor]:
    n, choices = len(table), ids.numel()
    entries, slots = ids.new_empty(2, *ids.shape)
    triton_kernels().pack[(max(1, -(-choices // CHOICES)),)](
        ids, compact.slots, compact.offsets, weights, scales, choices, first, room, table.shape[1], local_experts,
        entries, slots, table,
        N=n, BINS=max(2, 1 << (n - 1).bit_length()), TOP_K=max(1, ids.shape[1]), HEAD=HEAD, SECOND=SECOND,
        LACKING=LACKING, BLOCK=CHOICES,
    )  # fmt: skip
    return entries, slots


def as_assignment(slots: Tensor, rows: int) -> Assignment:
    """Return the assignment of choices to `rows` rows, given each choice's row, int32 `[tokens, top_k]` (-1: none).

    Rows without a choice are left as they are, whatever `sources` holds: nobody reads them.
    """
    none = slots.new_zeros(1)
    return Assignment(offsets=none, slots=slots, sources=slots.new_empty(rows), missing=none)
