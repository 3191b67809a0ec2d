"""Rewrite a program planned for one buffer to use several tensors: a step whose data spans tensors becomes several.

A call of several tensors (`all_gather_coalesced`) is planned, proved and timed as a call of one: a rank's block is its
share of the first tensor, then its share of the second, and so on. `Parts` says where the shares really lie, and
`place_on_tensors` replaces the addresses in a finished program. Peers, order and operands of a sum stay the same, so
tensors need not be copied together before the call, or apart after it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TypeAlias

from counterpoint.collectives.program.calls import Buffer, Span
from counterpoint.collectives.program.steps import Batch, Copy, LocalCopy, Program, Reduce, Step, Wait, merge_batches


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Describes tensors that are cut evenly among the ranks, in the order of ranks; all values are bytes."""

    starts: tuple[int, ...]  # offset of each tensor in the buffer
    shares: tuple[int, ...]  # one rank's share of each tensor
    sizes: tuple[int, ...]  # size of each tensor: bytes of shares beyond it are neither read nor written
    width: int = 1  # bytes in these tensors for a byte of a block: 2 if sums have a dtype twice as wide as inputs

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Return the offset in a rank's block, in bytes, at which the share of each tensor ends."""
        return tuple(accumulate(self.shares))

    def places(self, offset: int, num_bytes: int) -> Iterator[tuple[int, int, int]]:
        """Yield (offset in range, offset in tensors, size) of each piece of the range of `num_bytes` at `offset`."""
        at, block_bytes = offset, self.ends[-1]
        while at < offset + num_bytes:
            rank, within = divmod(at, block_bytes)
            part = bisect_right(self.ends, within)
            share = within - (self.ends[part] - self.shares[part])
            length = min(self.ends[part] - within, offset + num_bytes - at)
            place = rank * self.shares[part] + share
            real = min(length, self.sizes[part] - place)
            if real > 0:
                yield at - offset, self.starts[part] + self.width * place, real
            at += length


TensorLayout: TypeAlias = tuple[tuple[Buffer, Parts], ...]
"""Types the buffers of a call that are several tensors, each with its `Parts`; hashable, to be part of a key."""


@dataclass(frozen=True, slots=True)
class TensorAddresses:
    """Maps an offset in a buffer to an address in one of the tensors that together form the buffer on this rank.

    So a program, which uses offsets, stays valid when the tensors' addresses change.
    """

    starts: tuple[int, ...]  # offset of each tensor in the buffer, as in `Parts`, ascending
    addresses: tuple[int, ...]  # address of each tensor

    def at(self, offset: int) -> int:
        """Return the address of the joined tensors' byte `offset`."""
        index = bisect_right(self.starts, offset) - 1
        return self.addresses[index] + offset - self.starts[index]


def place_on_tensors(program: Program, layout: TensorLayout) -> Program:
    """Return `program`, planned for contiguous blocks, with its spans moved to the tensors of `layout`.

    A sum's target keeps the `num_bytes` of one source, even if the target's dtype is wider.
    """
    parts = dict(layout)
    placed = [
        merge_batches(tuple(one for step in steps for one in _placed(step, parts)))
        for steps in (program.release, program.steps, program.finish)
    ]
    return replace(program, release=placed[0], steps=placed[1], finish=placed[2])


def _placed(step: Step, layout: Mapping[Buffer, Parts]) -> Iterator[Step]:
    match step:
        case Copy() | LocalCopy():
            for source, target in _pieces((step.source, step.target), layout):
                yield replace(step, source=source, target=target)
        case Reduce():
            for *sources, target in _pieces((*step.sources, step.target), layout):
                yield replace(step, sources=tuple(sources), target=target)
        case Batch():  # the data that a wait brings is spread over tensors, too: no single span names it
            operations = (replace(one, brings=None) if isinstance(one, Wait) else one for one in step.operations)
            yield replace(step, operations=tuple(operations))
        case _:
            yield step


def _pieces(spans: tuple[Span, ...], layout: Mapping[Buffer, Parts]) -> Iterator[tuple[Span, ...]]:
    """Yield pieces of `spans`, cut at common offsets and moved to the tensors, without bytes that a tensor lacks."""
    found = [_places(span, layout) for span in spans]
    cuts = sorted({cut for places in found for start, _, size in places for cut in (start, start + size)})
    for low, high in pairwise(cuts):
        at = [_place_of(low, places) for places in found]
        if all(place is not None for place in at):
            yield tuple(
                Span(span.buffer, place[1] + (low - place[0]) * _width(span, layout), high - low)
                for span, place in zip(spans, at, strict=True)
                if place is not None
            )


def _places(span: Span, layout: Mapping[Buffer, Parts]) -> list[tuple[int, int, int]]:
    parts = layout.get(span.buffer)
    if parts is None:
        return [(0, span.offset, span.num_bytes)] if span.num_bytes else []
    return list(parts.places(span.offset, span.num_bytes))


def _place_of(at: int, places: list[tuple[int, int, int]]) -> tuple[int, int, int] | None:
    return next((place for place in places if place[0] <= at < place[0] + place[2]), None)


def _width(span: Span, layout: Mapping[Buffer, Parts]) -> int:
    parts = layout.get(span.buffer)
    return 1 if parts is None else parts.width
