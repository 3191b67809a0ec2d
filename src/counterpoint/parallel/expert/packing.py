"""Sort a rank's choices by the rank that has their expert, and tell that rank what comes, for `slabs`.

A choice's place is its number among the choices of this rank for the same other rank, in the order of tokens, then of
choices. Every rank sends every other a table of fixed size before any row: expert, weight and scale by place. So the
receiver knows on its device which rows come, whatever way they take, and no host counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from counterpoint.errors import needs_triton
from counterpoint.parallel.expert.options import ExpertLayout
from counterpoint.parallel.expert.permute import Assignment, assign

HEAD = 2  # numbers at the front of each row of a table
REST, LACKING = 0, 1  # of them: most places beyond `first`, choices without room
CHOICES = 256  # of a program
_NONE = -1


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Says where this rank's choices go: int32, `[tokens, top_k]`, where -1 is nowhere."""

    rank: int  # this one
    world_size: int
    ranks: Tensor  # of each choice's expert; world_size: none
    places: Tensor  # 0 where there is no rank
    others: Tensor  # row in what is sent, of choices for other ranks
    own: Tensor  # row among those for this rank itself
    home: Tensor  # row in what comes back
    lacking: Tensor  # [1]: choices without room
    table: Tensor  # `[world_size, HEAD + parts * room]`, for each rank; -1 where there is no choice

    def in_slabs(self, begin: int, rows: int) -> Tensor:
        """Return the slots of choices whose places begin there, in slabs of `rows` for each rank."""
        at = self.places - begin
        is_here = (self.ranks < self.world_size) & (at >= 0) & (at < rows)
        return torch.where(is_here, self.ranks * rows + at, _NONE)

    def returned(self, values: Tensor) -> Tensor:
        """Return `[tokens, top_k]` of values `[world_size, room]` that came back by place; 0 where there is none."""
        n, room = values.shape
        has_place = (self.ranks < n) & (self.places < room)
        at = torch.where(has_place, self.ranks * room + self.places, 0)
        return torch.where(has_place, values.flatten()[at], 0)


def pack(
    ids: Tensor,
    weights: Tensor,
    scales: Tensor | None,
    layout: ExpertLayout,
    *,
    first: int,
    room: int,
) -> Packing:
    """Return where choices go, given their experts; nothing here waits for the device.

    Args:
        ids: int32 `[tokens, top_k]`; -1 is none.
        weights: float32 `[tokens, top_k]`.
        scales: float32 `[tokens, 1]`, if tokens travel in another dtype.
        layout: which experts are where.
        first: places of each rank that travel at once.
        room: places of each rank that its table has.

    Returns:
        The packing, with the tables.
    """
    n, parts = layout.world_size, 2 if scales is None else 3
    compact = assign(ids // layout.local_experts, first_expert=0, num_experts=n, capacity=ids.numel())
    table = torch.full((n, HEAD + parts * room), _NONE, dtype=torch.int32, device=ids.device)
    function = _triton_pack if _on_gpu(ids) else _torch_pack
    return function(ids, compact, weights, scales, table, layout, first, room)


def _on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _torch_pack(
    ids: Tensor,
    compact: Assignment,
    weights: Tensor,
    scales: Tensor | None,
    table: Tensor,
    layout: ExpertLayout,
    first: int,
    room: int,
) -> Packing:
    n, me, ends = layout.world_size, layout.rank, compact.offsets
    counts = ends.diff(prepend=ends.new_zeros(1))
    starts = ends - counts
    has_rank = compact.slots >= 0
    ranks = torch.where(has_rank, ids // layout.local_experts, n)
    places = torch.where(has_rank, compact.slots - starts[ranks.clamp(max=n - 1)], 0)
    travels = has_rank & (places < first)
    slots = ranks * first + places
    table[:, REST] = (counts.max() - first).clamp(0, room - first)
    lacking = (counts - room).clamp(min=0).sum(dtype=torch.int32)
    table[:, LACKING] = lacking
    has_place = has_rank & (places < room)
    for index, part in enumerate([ids, weights] if scales is None else [ids, weights, scales.expand(ids.shape)]):
        at = HEAD + index * room + places[has_place]
        table[ranks[has_place], at] = part.contiguous().view(torch.int32)[has_place]
    return Packing(
        rank=me,
        world_size=n,
        ranks=ranks,
        places=places,
        others=torch.where(travels & (ranks != me), slots, _NONE),
        own=torch.where(travels & (ranks == me), places, _NONE),
        home=torch.where(travels, slots, _NONE),
        lacking=lacking[None],
        table=table,
    )


def _triton_pack(
    ids: Tensor,
    compact: Assignment,
    weights: Tensor,
    scales: Tensor | None,
    table: Tensor,
    layout: ExpertLayout,
    first: int,
    room: int,
) -> Packing:
    with needs_triton("rows of experts on a GPU"):
        from counterpoint.parallel.expert import packing_kernels
    n, choices = layout.world_size, ids.numel()
    ranks, places, others, own, home = ids.new_empty(5, *ids.shape)
    lacking = ids.new_empty(1)
    packing_kernels.pack[(max(1, -(-choices // CHOICES)),)](
        ids, compact.slots, compact.offsets, weights, scales, choices, layout.rank, first, room, table.shape[1],
        layout.local_experts, ranks, places, others, own, home, lacking, table,
        N=n, BINS=max(2, 1 << (n - 1).bit_length()), TOP_K=max(1, ids.shape[1]), HEAD=HEAD, REST=REST, LACKING=LACKING,
        BLOCK=CHOICES,
    )  # fmt: skip
    return Packing(
        rank=layout.rank,
        world_size=n,
        ranks=ranks,
        places=places,
        others=others,
        own=own,
        home=home,
        lacking=lacking,
        table=table,
    )


def moved(slots: Tensor, rows: int) -> Assignment:
    """Return the assignment of choices to slots, int32 `[tokens, top_k]` (-1: none), among so many rows.

    Rows without a choice are left as they are, whatever `sources` holds: nobody reads them.
    """
    none = slots.new_zeros(1)
    return Assignment(offsets=none, slots=slots, sources=slots.new_empty(rows), missing=none)


@dataclass(frozen=True, kw_only=True)
class Incoming:
    """Says what comes from all ranks, by place: of rank s at `[s, place]`."""

    weights: Tensor  # float32 [world_size, room]
    scales: Tensor | None  # float32 [world_size, room], as long as the tokens are under way
    head: Tensor  # int32 [world_size, HEAD]
    there: Assignment  # [world_size * room] rows that come, each for one expert of this rank

    @classmethod
    def of(cls, table: Tensor, layout: ExpertLayout, room: int, capacity: int, pad_multiple: int) -> Incoming:
        """Return what the tables of all ranks for this one say."""
        ids, weights, *scales = (part.contiguous() for part in table[:, HEAD:].split(room, dim=1))
        there = assign(
            ids.view(-1, 1),
            first_expert=layout.first_expert,
            num_experts=layout.local_experts,
            capacity=capacity,
            pad_multiple=pad_multiple,
        )
        return cls(
            weights=weights.view(torch.float32),
            scales=scales[0].view(torch.float32) if scales else None,
            head=table[:, :HEAD].clone(),
            there=there,
        )

    def slots(self, ranks: slice, places: slice) -> Tensor:
        """Return the rows that choices of some ranks have here, int32 `[choices, 1]`."""
        return self.there.slots.view(self.weights.shape)[ranks, places].reshape(-1, 1)


def arriving_parts(rank: int, world_size: int) -> list[slice]:
    """Return the ranks before and after this one, as far as there are any."""
    parts = slice(0, rank), slice(rank + 1, world_size)
    return [part for part in parts if part.start < part.stop]
