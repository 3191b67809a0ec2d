"""Define `Call`: a collective, the sizes of its blocks, and where they lie in input and output; equal on all ranks.

Sizes are bytes; ranks count within the group. Blocks lie one after the other by rank, as torch puts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias

from counterpoint.errors import Misconfigured

Buffer = Literal["input", "output", "staging", "mailbox", "scratch", "network"]
Own = Literal["in_place", "copy", "consumer"]
Sizes: TypeAlias = Sequence[Sequence[int]]
"""Types `sizes[s][t]`, the bytes that rank s contributes to the output of rank t (reductions: to shard t)."""
ALIGNMENT = 16  # bytes; no element of any dtype is cut, and reductions load whole vectors


@dataclass(frozen=True, slots=True)
class Span:
    """Names a range of bytes in one of a rank's buffers."""

    buffer: Buffer
    offset: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockLayout:
    """Says how a collective lays out blocks in input and output, and which ranks send to which.

    The input is one `block`, which goes to every receiver, or `blocks`, one for each rank in rank order. The output is
    `blocks`, one from each rank; a `shard`, this rank's combined block; or an `array` of all combined shards.
    """

    name: str  # PyTorch's name of the collective
    input: Literal["block", "blocks"]
    output: Literal["blocks", "shard", "array"]
    own: tuple[Own, ...]  # what may happen to the block that a rank gives to itself, as in `Call`
    all_send: bool = False  # every rank signals every other, even for zero bytes; False: only if there are bytes
    has_data: bool = True  # False: a barrier, which moves nothing

    @property
    def reduces(self) -> bool:
        """Return whether the collective combines blocks, as an all_reduce does."""
        return self.output != "blocks"

    @property
    def writes_outputs(self) -> bool:
        """Return whether peers write into a rank's output."""
        return self.has_data and self.output != "shard"


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """Represents a collective with the sizes of its blocks; equal on all ranks.

    `own` says how a rank's block for itself gets to its output. `in_place`: input is a view of output (or output of
    input), so the block is in output already; `copy`: by a local copy, which needs an SM; `consumer`: it stays in
    input, where the reader of output has to look for it.
    """

    layout: BlockLayout
    sizes: tuple[tuple[int, ...], ...]  # as `Sizes`
    root: int | None = None  # root of a broadcast, scatter or gather
    own: Own = "copy"

    @property
    def operation(self) -> str:
        """Return the name of the collective, a key of `OPERATIONS`."""
        return self.layout.name

    @property
    def world_size(self) -> int:
        """Return the number of ranks that take part."""
        return len(self.sizes)

    @property
    def reduces(self) -> bool:
        """Return whether the collective combines blocks, as an all_reduce does."""
        return self.layout.reduces

    def sends(self, source: int, target: int) -> bool:
        """Return whether rank `source` pushes into memory of rank `target`.

        With `all_send` ranks count as pushing even zero bytes: so every such call has the same `Program.pushers`, and
        the order of `ready` signals shows which call they belong to.
        """
        if source == target or (self.layout.has_data and not any(map(any, self.sizes))):
            return False
        return self.layout.all_send or self.sizes[source][target] > 0

    def input_span(self, rank: int) -> Span:
        """Return the span of the whole input of `rank`; if the call is in place, a span of the output."""
        row = self.sizes[rank]
        if self.layout.input == "block":
            own = self.source_span(rank, rank)
            return Span(own.buffer, own.offset, max(row))
        return Span(self._input_buffer, 0, sum(row))

    def source_span(self, source: int, target: int) -> Span:
        """Return where in the buffers of rank `source` its block for rank `target` lies."""
        size = self.sizes[source][target]
        if self.layout.input == "blocks":
            return Span(self._input_buffer, self.input_offset(source, target), size)
        if self.own == "in_place" and self.sizes[source][source] > 0:
            return Span("output", self._offset_in_output(source, source), size)
        return Span("input", 0, size)

    def target_span(self, source: int, target: int) -> Span:
        """Return the span of the block from `source`, or of the combined shard `target`, in the output of `target`."""
        offset = {"shard": 0, "array": sum(self.sizes[source][:target])}.get(self.layout.output)
        found = self._offset_in_output(source, target) if offset is None else offset
        return Span("output", found, self.sizes[source][target])

    def input_offset(self, source: int, target: int) -> int:
        """Return the offset of the block for `target` in the input of rank `source`."""
        return 0 if self.layout.input == "block" else sum(self.sizes[source][:target])

    def output_contents(self, rank: int) -> list[tuple[Span, tuple[int, ...], int]]:
        """Return the blocks in the output of `rank`, as (span, contributing ranks, offset in these ranks' inputs)."""
        everyone = tuple(range(self.world_size))
        if self.reduces:
            shards = everyone if self.layout.output == "array" else (rank,)
            return [(self.target_span(0, shard), everyone, self.input_offset(0, shard)) for shard in shards]
        return [(self.target_span(s, rank), (s,), self.input_offset(s, rank)) for s in everyone]

    def input_bytes(self, rank: int) -> int:
        """Return the size in bytes of the input of `rank`, whether the call is in place or not."""
        return self.input_span(rank).num_bytes

    def output_bytes(self, rank: int) -> int:
        """Return the size in bytes of the output of `rank`."""
        match self.layout.output:
            case "shard":
                return self.sizes[rank][rank]
            case "array":
                return sum(self.sizes[rank])
        return sum(row[rank] for row in self.sizes)

    @property
    def _input_buffer(self) -> Literal["input", "output"]:
        return "output" if self.own == "in_place" and self.layout.output == "array" else "input"

    def _offset_in_output(self, source: int, target: int) -> int:
        """Return the offset of the block from `source` in the output of `target`, after lower ranks' blocks."""
        return sum(row[target] for row in self.sizes[:source])


def make_call(layout: BlockLayout, sizes: Sizes, *, root: int | None = None, own: Own) -> Call:
    """Return the call in which rank s contributes `sizes[s][t]` bytes to the output of rank t.

    Raises:
        Misconfigured: no ranks, a size below 0, a root outside the group, or an `own` that the collective lacks.
    """
    world_size, name = len(sizes), layout.name
    if world_size < 1 or any(len(row) != world_size for row in sizes):
        raise Misconfigured(f"{name} of {world_size} ranks: needs at least one, and a row of sizes for each")
    if any(size < 0 for row in sizes for size in row):
        raise Misconfigured(f"{name} with a negative size: sizes are bytes, 0 or more; got {sizes}")
    if root is not None and not 0 <= root < world_size:
        raise Misconfigured(f"{name} with root={root}: allowed are 0 to {world_size - 1}")
    if own not in layout.own:
        raise Misconfigured(f"{name} with own={own!r}: allowed are {', '.join(map(repr, layout.own))}")
    return Call(layout=layout, sizes=tuple(tuple(row) for row in sizes), root=root, own=own)


def parts(num_bytes: int, count: int) -> tuple[tuple[int, int], ...]:
    """Return (offset, size) of `count` parts of `num_bytes`, as equal as 16-byte alignment allows, some maybe empty."""
    units = -(-num_bytes // ALIGNMENT)
    cuts = [min(num_bytes, units * index // count * ALIGNMENT) for index in range(count)] + [num_bytes]
    return tuple((low, high - low) for low, high in pairwise(cuts))
