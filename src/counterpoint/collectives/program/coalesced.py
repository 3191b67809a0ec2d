"""A program for one buffer, carried out on several tensors: where their blocks lie apart, each step becomes several.

A call of several tensors (`all_gather_coalesced`) is planned, proved and timed as a call of one: a rank's block is its
share of the first tensor, then its share of the second, and so on. `Parts` says where the shares really lie, and
`place_on_tensors` puts these places into a finished program: no byte goes to another rank, at another moment or to
another place of the sum; it only lies elsewhere. So nothing is copied together before, or apart afterwards.
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
    """Describes tensors of which every rank has an equal share, one rank's after the other's; all in bytes."""

    starts: tuple[int, ...]  # from the beginning of the buffer
    shares: tuple[int, ...]  # what one rank has
    sizes: tuple[int, ...]  # shares are cut there, and nobody reads or writes the rest
    width: int = 1  # bytes here for each of a block: 2 where sums are in a dtype twice as wide as what is sent

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """The end of each tensor's share within a block."""
        return tuple(accumulate(self.shares))

    def places(self, offset: int, num_bytes: int) -> Iterator[tuple[int, int, int]]:
        """Yield, for these bytes of the one buffer, (offset in them, place, bytes) of each piece, ascending."""
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
"""Which buffers of a call are several tensors, and which tensors; a key, as calls are."""


@dataclass(frozen=True, slots=True)
class TensorAddresses:
    """Maps offsets in a buffer to the tensors that stand for it, which may lie anywhere in the memory of this rank.

    So a program of such tensors is planned once, and need not be placed again when they lie elsewhere.
    """

    starts: tuple[int, ...]  # where each tensor begins in the buffer, as in `Parts`, ascending
    addresses: tuple[int, ...]  # where each tensor lies

    def at(self, offset: int) -> int:
        """Return the address of what is at `offset` of the buffer."""
        index = bisect_right(self.starts, offset) - 1
        return self.addresses[index] + offset - self.starts[index]


def place_on_tensors(program: Program, layout: TensorLayout) -> Program:
    """Return `program`, which was planned for blocks in one piece, with the places of `layout`.

    The `num_bytes` of a sum's target stay what one source has, whatever the target's width.
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
        case Batch():  # what a wait brings lies apart, too, and no single span says where
            operations = (replace(one, brings=None) if isinstance(one, Wait) else one for one in step.operations)
            yield replace(step, operations=tuple(operations))
        case _:
            yield step


def _pieces(spans: tuple[Span, ...], layout: Mapping[Buffer, Parts]) -> Iterator[tuple[Span, ...]]:
    """Yield spans of equal size, cut wherever one of them has to be; bytes that one of them lacks are left out."""
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
