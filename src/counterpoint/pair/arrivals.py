"""Describe a matmul that depends on communication: when its rows arrive or are sent, and whether that time can hide.

`ShardedMatmul`    an all_gather whose output is multiplied, or a matmul whose output is reduced and scattered
`segments_of`      its rows in the order of communication, each with the time of its arrival
`hiding`           whether so much communication can hide behind so much arithmetic at all
`ShardedRows`      which rows of a shared matrix belong to which rank, and in which chunks they are sent

Rank r of w pushes to r + 1, r + 2, ..., so it receives from r - 1, r - 2, ...: every link carries one copy at a time.
docs/design/tensor.md has the equations and what they leave out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple, TypeAlias

from counterpoint.errors import Misconfigured
from counterpoint.machine.profile import Profile, default_profile
from counterpoint.pair.curves import DTYPES, RowCurve
from counterpoint.pair.together import disturbance


class Slab(NamedTuple):
    """Names `rows` consecutive rows of the flattened matrix of all ranks' rows, from row `start` on."""

    start: int
    rows: int


Slabs: TypeAlias = tuple[Slab, ...]


class Part(NamedTuple):
    """Names consecutive rows by slices of the flattened matrix and of this rank's shard (None: other ranks' rows)."""

    whole: slice
    own: slice | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedRows:
    """Says which rows of a matrix, `[batch, rows of all ranks]` flattened, belong to which rank.

    Row i of a peer's rows in batch element b is row `b * sum(rows) + sum(rows[:peer]) + i`. The peer's *shard* has
    only its rows, batch element after batch element. It is sent in chunks of `chunk_rows` of its rows (the last may
    have less; None: all), counted through the batch, each with a word of its own; a multiple of a tile's rows wastes
    none.

    Raises:
        Misconfigured: a number is out of its range.
    """

    rows: tuple[int, ...]  # of each rank in each batch element
    rank: int = 0  # this rank
    batch: int = 1  # number of batch elements
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
        """Return the most rows of any chunk: `chunk_rows`, or if that is None the rows of the largest shard."""
        return self.chunk_rows or max(self.batch * max(self.rows), 1)

    def shard(self, peer: int) -> int:
        """Return how many rows the peer's shard has, over all batch elements."""
        return self.batch * self.rows[peer]

    def chunks(self, peer: int) -> tuple[range, ...]:
        """Return for each chunk of the peer's shard the range of its rows within the shard."""
        rows = self.shard(peer)
        return tuple(range(start, min(start + self.most_sent, rows)) for start in range(0, rows, self.most_sent))

    def slabs(self, peer: int, rows: range) -> Slabs:
        """Return where `rows` of the peer's shard lie in the flattened matrix: one slab per batch element touched."""
        height, first = self.rows[peer], sum(self.rows[:peer])
        bounds = [rows.start, *range((rows.start // max(height, 1) + 1) * height, rows.stop, max(height, 1)), rows.stop]
        return tuple(
            Slab(low // height * sum(self.rows) + first + low % height, high - low)
            for low, high in pairwise(bounds)
            if high > low
        )

    def own(self, slab: Slab) -> int | None:
        """Return the row of this rank's shard at which a slab begins, or None if the slab is another rank's."""
        batch, row = divmod(slab.start, sum(self.rows))
        row -= sum(self.rows[: self.rank])
        return batch * self.rows[self.rank] + row if 0 <= row < self.rows[self.rank] else None

    def parts(self, slabs: Iterable[Slab]) -> tuple[Part, ...]:
        """Split slabs into parts, each with only rows of this rank or only rows of other ranks."""
        own = self.slabs(self.rank, range(self.shard(self.rank)))
        bounds = [bound for start, rows in own for bound in (start, start + rows)]
        found = []
        for start, rows in slabs:
            end = start + rows
            for low, high in pairwise([start, *(bound for bound in bounds if start < bound < end), end]):
                at = self.own(Slab(low, high - low))
                found.append(Part(slice(low, high), None if at is None else slice(at, at + high - low)))
        return tuple(found)


def merged(slabs: Iterable[Slab]) -> Slabs:
    """Return slabs in ascending order, with adjacent ones joined; slabs may not overlap."""
    found: list[Slab] = []
    for slab in sorted(slabs):
        if found and sum(found[-1]) == slab.start:
            found[-1] = Slab(found[-1].start, found[-1].rows + slab.rows)
        else:
            found.append(slab)
    return tuple(found)


TensorOperation = Literal["all_gather_matmul", "matmul_reduce_scatter"]
COPY_ENGINES = "zero_sm"  # the mechanism of a profile that moves bytes without SMs


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedMatmul:
    """Describes one rank's matmuls of all-gathered input rows, or its matmul whose output rows are reduce-scattered.

    The matrix has [batch, rows of all ranks] rows, flattened; a rank's shard is `shard_rows` of each batch element.
    """

    operation: TensorOperation
    curves: tuple[RowCurve, ...]  # one per matmul that shares the gathered rows, such as q, k and v; one to scatter
    shard_rows: tuple[int, ...]  # rows of each rank's shard in each batch element; ranks may differ
    batch: int = 1
    chunk_rows: int | None = None  # rows that are sent together, counted through the batch; None: all of a shard
    message_bytes: int | None = None  # bytes of an element as sent; None: as the operands, in fp8 rounded up to 2

    def __post_init__(self) -> None:
        if self.world_size < 2 or min(self.shard_rows) < 0 or not sum(self.shard_rows):
            raise Misconfigured(f"shard_rows={self.shard_rows}: give the rows of each rank, of two ranks or more")
        if min(each for each in (self.batch, self.chunk_rows, self.message_bytes) if each is not None) < 1:
            given = f"batch={self.batch}, chunk_rows={self.chunk_rows}, message_bytes={self.message_bytes}"
            raise Misconfigured(f"{given}: give 1 or more of each")
        if len({(curve.k, curve.dtype) for curve in self.curves}) != 1 or (self.is_scatter and len(self.curves) != 1):
            allowed = "one curve" if self.is_scatter else "curves of one k and dtype"
            raise Misconfigured(f"{len(self.curves)} curves of {self.operation}: give {allowed}")

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return len(self.shard_rows)

    @property
    def is_scatter(self) -> bool:
        """Return whether the communication follows the matmul, as in `matmul_reduce_scatter`."""
        return self.operation == "matmul_reduce_scatter"

    @property
    def collective(self) -> Literal["all_gather", "reduce_scatter"]:
        """Return PyTorch's name of the collective."""
        return "reduce_scatter" if self.is_scatter else "all_gather"

    @property
    def rows(self) -> int:
        """Return how many rows all ranks and batch elements have together."""
        return self.batch * sum(self.shard_rows)

    @property
    def row_bytes(self) -> int:
        """Return the size in bytes of one row to send: of the input to gather, or of the output to scatter."""
        curve = self.curves[0]
        return (curve.n if self.is_scatter else curve.k) * self.element_bytes

    @property
    def element_bytes(self) -> int:
        """Return the size in bytes of one element of the rows to send."""
        own = DTYPES[self.curves[0].dtype][1]
        return self.message_bytes or (max(own, 2) if self.is_scatter else own)

    @property
    def alone_us(self) -> float:
        """Return the µs of the matmuls of all rows, without communication."""
        return sum(curve.us(self.rows) for curve in self.curves)

    @property
    def flop(self) -> float:
        """Return the number of floating-point operations of the matmuls on one rank."""
        return 2.0 * self.rows * sum(curve.n * curve.k for curve in self.curves)

    @property
    def sharded(self) -> ShardedRows:
        """Return the `ShardedRows` that say which rows of this task's matrix belong to which rank."""
        return ShardedRows(rows=self.shard_rows, batch=self.batch, chunk_rows=self.chunk_rows)

    def chunks_of(self, rank: int) -> list[Slabs]:
        """Return for each chunk of a rank's rows the slabs of the flattened matrix that make up the chunk."""
        return [self.sharded.slabs(rank, rows) for rows in self.sharded.chunks(rank)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Holds rows that arrive or are sent together: one slab for each batch element that the rows touch.

    `us` of an all_gather: µs from the begin of the call until the rows arrive. Of a reduce_scatter: least µs from
    when the rows are computed until the call ends.
    """

    rank: int  # rank to whose shard the rows belong
    slabs: Slabs
    us: float


def segments_of(task: ShardedMatmul, rank: int, profile: Profile | None = None) -> tuple[Segment, ...]:
    """Return all rows that a rank multiplies, as segments in the order in which the rank multiplies them.

    An all_gather has the own shard first, available at 0 µs, then chunk after chunk of rank - 1, rank - 2, ...
    A reduce_scatter has chunk after chunk for rank + 1, rank + 2, ..., and the own shard last.

    Raises:
        Misconfigured: `rank` is out of range.
    """
    profile = profile or default_profile()
    if not 0 <= rank < task.world_size:
        raise Misconfigured(f"rank {rank} of {task.world_size}: give one of 0 to {task.world_size - 1}")
    step = 1 if task.is_scatter else -1
    peers = [(rank + step * turn) % task.world_size for turn in range(1, task.world_size)]
    chunks = [task.chunks_of(peer) for peer in peers]
    sums = _sums_us(task, rank, profile) if task.is_scatter else []
    times = _tails_us(task, chunks, sums, profile) if task.is_scatter else _arrivals_us(task, chunks, profile)
    parts = [(peer, slabs) for peer, blocks in zip(peers, chunks, strict=True) for slabs in blocks]
    others = [Segment(rank=peer, slabs=slabs, us=us) for (peer, slabs), us in zip(parts, times, strict=True)]
    mine = merged(slab for slabs in task.chunks_of(rank) for slab in slabs)
    own = Segment(rank=rank, slabs=mine, us=sum(sums))
    return (*others, own) if task.is_scatter else (own, *others)


def nccl_us(task: ShardedMatmul, profile: Profile | None = None) -> float:
    """Return the µs of the task's collective by NCCL alone; raise Misconfigured if the profile lacks its bandwidth."""
    rates = (profile or default_profile()).nccl_rates
    if task.collective not in rates.bus_gb_per_s:
        known = ", ".join(rates.bus_gb_per_s) or "none"
        raise Misconfigured(f"the profile has no nccl_rates of {task.collective}, but of {known}; add it")
    shared = task.rows * task.row_bytes * (task.world_size - 1) / task.world_size
    return rates.latency_us + shared / rates.bus_gb_per_s[task.collective] / 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Hiding:
    """Says whether communication can hide behind the matmul that depends on it, whatever kernels are used."""

    hides: bool
    size: int  # columns of the local weights that follow an all_gather; their depth before a reduce_scatter
    least: float  # least size with which communication can hide
    why: str


def hiding(
    operation: TensorOperation,
    size: int,
    world_size: int,
    *,
    flop_per_s: float,
    link_bytes_per_s: float,
    element_bytes: int = 2,
) -> Hiding:
    """Return whether the transfer can hide behind the matmul: whether the arithmetic takes at least as long.

        all_gather + matmul       M K b (w - 1) / w / B <= 2 M N K / R    iff    N >= b R (w - 1) / (2 w B)
        matmul + reduce_scatter   M N b (w - 1) / w / B <= 2 M N K / R    iff    K >= the same

    `size` is N per rank, of all weights that share the gathered rows, or K per rank; w is `world_size`, R
    `flop_per_s`, what such matmuls reach, B `link_bytes_per_s`, into one GPU, and b `element_bytes`, of an element
    that is sent.
    """
    least = element_bytes * flop_per_s * (world_size - 1) / (2 * world_size * link_bytes_per_s)
    scatter = operation == "matmul_reduce_scatter"
    name, collective = ("K", "reduce_scatter") if scatter else ("N", "all_gather")
    hides = size >= least
    what = f"the {collective} {'can' if hides else 'cannot'} hide behind the matmul"
    why = f"{what}: {name} = {size:,} per rank, and at least {math.ceil(least):,} are needed with {world_size} ranks"
    return Hiding(hides=hides, size=size, least=least, why=why)


def hiding_of(task: ShardedMatmul, profile: Profile | None = None) -> Hiding:
    """Return the `Hiding` of a task, by the FLOP/s in the task's curves and the profile's link bandwidth."""
    rates = (profile or default_profile()).rates
    size = task.curves[0].k if task.is_scatter else sum(curve.n for curve in task.curves)
    return hiding(
        task.operation, size, task.world_size,
        flop_per_s=task.flop / task.alone_us * 1e6,
        link_bytes_per_s=min(rates.push_gb_per_s, rates.link_gb_per_s) * 1e9,
        element_bytes=task.element_bytes,
    )  # fmt: skip


def _arrivals_us(task: ShardedMatmul, chunks: Sequence[Sequence[Slabs]], profile: Profile) -> list[float]:
    """Return the µs at which each chunk arrives: after its peer's earlier pushes and this rank's earlier arrivals."""
    rates, then, found = profile.rates, 0.0, []
    for turn, blocks in enumerate(chunks):
        copies = [_copy_us(task, slabs, profile) for slabs in blocks]
        before = turn * sum(copies)  # its pushes to others
        for pushed, copy in zip(accumulate(copies), copies, strict=True):
            then = max(before + pushed, then + copy)
            found.append(rates.launch_us + 2 * rates.signal_us + rates.batch_us + then)
    return found


def _tails_us(
    task: ShardedMatmul, chunks: Sequence[Sequence[Slabs]], sums: Sequence[float], profile: Profile
) -> list[float]:
    """Return for each chunk the µs from its computation to the call's end: the sends from it on, and the sums.

    Ranks are taken to be alike: the partials of an own chunk have come when this rank has sent the same chunk to its
    last peer. Its sum begins when earlier sums have ended.
    """
    sends = [_copy_us(task, slabs, profile) for blocks in chunks for slabs in blocks]
    sent = list(accumulate(sends))
    last = len(chunks[-1])
    there = [len(sends) - last + min(index, last - 1) for index in range(len(sums))]  # by own chunk, the last send
    found = []
    for index, send in enumerate(sends):
        ends = [sent[at] + sum(sums[chunk:]) for chunk, at in enumerate(there) if at >= index]
        left = max([sent[-1], *ends]) - (sent[index] - send)
        found.append(profile.rates.signal_us + profile.rates.batch_us + left)
    return found


def _copy_us(task: ShardedMatmul, slabs: Slabs, profile: Profile) -> float:
    """Return the µs of sending a chunk while matmuls run: a copy for each slab, the chunk's bytes, and a signal."""
    rates, kept = profile.rates, disturbance(COPY_ENGINES, profile).comm_kept
    bytes_per_us = 1000 * min(rates.push_gb_per_s, rates.link_gb_per_s) * kept
    rows = sum(slab.rows for slab in slabs)
    return len(slabs) * rates.copy_us + rows * task.row_bytes / bytes_per_us + rates.batch_us


def _sums_us(task: ShardedMatmul, rank: int, profile: Profile) -> list[float]:
    """Return the µs of adding up each chunk of this rank: reading all ranks' partial sums and writing the result."""
    bytes_per_us = 1000 * profile.sums.memory_gb_per_s
    return [
        profile.rates.kernel_us
        + (task.world_size + 1) * sum(slab.rows for slab in slabs) * task.row_bytes / bytes_per_us
        for slabs in task.chunks_of(rank)
    ]
