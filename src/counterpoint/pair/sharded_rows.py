"""Say which rows of a shared matrix belong to which rank, and in which chunks they are sent. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from counterpoint.errors import Misconfigured


class Slab(NamedTuple):
    """Names `rows` consecutive rows of the flattened whole, from row `start` on."""

    start: int
    rows: int


Slabs: TypeAlias = tuple[Slab, ...]


class Part(NamedTuple):
    """Names consecutive rows by their place in the flattened whole, and in this rank's shard if it owns them."""

    whole: slice
    own: slice | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedRows:
    """Says which rows of a matrix, `[batch, rows of all ranks]` flattened, belong to which rank.

    Row i of a peer's rows in batch element b is row `b * sum(rows) + sum(rows[:peer]) + i`. The peer's *shard* has only
    its rows, batch element after batch element.

    Args:
        rows: how many rows each rank has in each batch element.
        rank: this rank.
        batch: number of batch elements.
        chunk_rows: a shard is sent in chunks of this many of its rows (the last may have less), counted through the
            batch, each with a word of its own; None: in one. A multiple of the rows of a tile wastes none.

    Raises:
        Misconfigured: a number is out of its range.
    """

    rows: tuple[int, ...]
    rank: int = 0
    batch: int = 1
    chunk_rows: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < len(self.rows):
            raise Misconfigured(
                f"rank={self.rank} with the rows of {len(self.rows)} ranks: give the rows of every rank"
            )
        if min(self.rows) < 0 or self.batch < 1 or (self.chunk_rows is not None and self.chunk_rows < 1):
            raise Misconfigured(
                f"rows={self.rows}, batch={self.batch}, chunk_rows={self.chunk_rows}: give rows of 0 or more, and a "
                f"batch and chunk_rows of 1 or more"
            )

    @property
    def world_size(self) -> int:
        """Return the number of ranks that share the matrix."""
        return len(self.rows)

    @property
    def total(self) -> int:
        """Return how many rows the whole matrix has."""
        return self.batch * sum(self.rows)

    @property
    def most_sent(self) -> int:
        """Return how many rows a chunk has at most: `chunk_rows`, or the rows of the largest shard."""
        return self.chunk_rows or max(self.batch * max(self.rows), 1)

    def shard(self, peer: int) -> int:
        """Return how many rows the peer's shard has, over all batch elements."""
        return self.batch * self.rows[peer]

    def chunks(self, peer: int) -> tuple[range, ...]:
        """Return the rows of each chunk of the peer's shard, counted within the shard."""
        rows = self.shard(peer)
        return tuple(range(start, min(start + self.most_sent, rows)) for start in range(0, rows, self.most_sent))

    def slabs(self, peer: int, rows: range) -> Slabs:
        """Return where rows of the peer's shard are in the matrix: a slab for each batch element that they touch."""
        height, first = self.rows[peer], sum(self.rows[:peer])
        bounds = [rows.start, *range((rows.start // max(height, 1) + 1) * height, rows.stop, max(height, 1)), rows.stop]
        return tuple(
            Slab(low // height * sum(self.rows) + first + low % height, high - low)
            for low, high in pairwise(bounds)
            if high > low
        )

    def own(self, slab: Slab) -> int | None:
        """Return the row of this rank's shard at which a slab begins, or None if its rows are another rank's."""
        batch, row = divmod(slab.start, sum(self.rows))
        row -= sum(self.rows[: self.rank])
        return batch * self.rows[self.rank] + row if 0 <= row < self.rows[self.rank] else None

    def apart(self, slabs: Iterable[Slab]) -> Iterator[Slab]:
        """Yield the slabs, cut where rows of this rank begin or end."""
        own = self.slabs(self.rank, range(self.shard(self.rank)))
        bounds = [bound for start, rows in own for bound in (start, start + rows)]
        for start, rows in slabs:
            end = start + rows
            for low, high in pairwise([start, *(bound for bound in bounds if start < bound < end), end]):
                yield Slab(low, high - low)

    def parts(self, slabs: Iterable[Slab]) -> tuple[Part, ...]:
        """Return the rows of slabs as parts, each of which has only rows of this rank or none."""
        found = []
        for slab in self.apart(slabs):
            at = self.own(slab)
            whole = slice(slab.start, slab.start + slab.rows)
            found.append(Part(whole, None if at is None else slice(at, at + slab.rows)))
        return tuple(found)

    def word(self, peer: int, chunk: int) -> int:
        """Return the index, among the arrival words, of the word of this chunk of the peer's shard."""
        return chunk * self.world_size + peer

    def missing(self, error: int) -> tuple[int, int] | None:
        """Return the (peer, chunk) for which a matmul has waited in vain, from its error word; None if that is 0."""
        if not error:
            return None
        chunk, peer = divmod(error - 1, self.world_size)
        return peer, chunk


def merged(slabs: Iterable[Slab]) -> Slabs:
    """Return slabs in ascending order, with adjacent ones joined; slabs may not overlap."""
    found: list[Slab] = []
    for slab in sorted(slabs):
        if found and sum(found[-1]) == slab.start:
            found[-1] = Slab(found[-1].start, found[-1].rows + slab.rows)
        else:
            found.append(slab)
    return tuple(found)
