"""Programs of the operations that combine: slices are pushed into staging, and added up there as they arrive.

A chunk is reduced as soon as it has come from every rank, on a lane of its own, while the next chunk is on the links.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from counterpoint.collectives.calls import source_span, target_span
from counterpoint.collectives.movement import arrival, arrivals, chunked, grant, pushes, rotation, take
from counterpoint.collectives.program import (
    ALIGNMENT,
    COPY,
    REDUCE,
    Await,
    Batch,
    Call,
    Copy,
    Flag,
    Program,
    Record,
    Reduce,
    Span,
    Step,
    Tuning,
    Wait,
)
from counterpoint.collectives.turns import Turns

__all__ = ["all_reduce", "reduce_scatter", "slice_bytes"]

_BEGUN = 0  # event: the call has begun; event 1 + chunk: that chunk is reduced


def reduce_scatter(call: Call, rank: int, tuning: Tuning) -> Program:
    """Push slice t of the input to rank t's staging, chunk by chunk; add up what arrives.

    With less staging than that needs, shards are cut, and each cut is done as if it were a call of its own: nobody
    pushes the next one before everyone has added up the last. The list has to stay in this order: two lanes may be
    behind each other in one queue of the hardware.
    """
    if _trivial(call):
        return _alone(call, rank, tuning)
    cuts, peers = _cuts(call, tuning), rotation(rank, call.world_size)
    lane = REDUCE if len(cuts) > 1 or len(_chunks(call, rank, tuning, cuts[0])) > 1 else COPY
    steps = _fork(lane)
    for cut in cuts:
        steps += [take("staging", peers), *_scatter(call, rank, tuning, cut)]
        for chunk in range(len(_chunks(call, rank, tuning, cut))):
            steps += _reduced(call, rank, tuning, chunk, lane, cut)
        steps.append(grant("staging", rank, peers, lane))
    return Program(call=call, tuning=tuning, rank=rank, steps=tuple(steps), finish=tuple(_after(1, lane)))


def all_reduce(call: Call, rank: int, tuning: Tuning) -> Program:
    """reduce_scatter, then each combined chunk is pushed to every rank's output as soon as it is ready.

    All slices go out first: by the time the last is sent, the first chunks are combined, so the links never wait.
    Nobody has to say that output is free: a rank that pushed its slices is inside this call, and all slices of a
    chunk arrive before any of the chunk is pushed back. For the same reason it may be in place.
    """
    if _trivial(call):
        return _alone(call, rank, tuning)
    chunks, peers = _chunks(call, rank, tuning), rotation(rank, call.world_size)
    lane = REDUCE if len(chunks) > 1 else COPY
    turns = Turns.of(call, rank, tuning, buffer="output", chunks=chunks)
    steps = [*_fork(lane), take("staging", peers), *_scatter(call, rank, tuning)]
    for chunk, span in enumerate(chunks):
        steps += _reduced(call, rank, tuning, chunk, lane)
        if chunk == len(chunks) - 1:
            steps.append(grant("staging", rank, peers, lane))
        steps += _after(1 + chunk, lane)
        for peer in peers:
            steps.append(turns.before(peer, chunk))
            steps += [Copy(peer, span, span)] if span.num_bytes else []
            steps.append(turns.after(peer, chunk))
        steps.append(Batch(tuple(arrival(peer, span, rank, chunk) for peer in peers)))
    coming = {peer: target_span(call, peer, peer) for peer in reversed(peers)}
    return Program(call=call, tuning=tuning, rank=rank, steps=tuple(steps), finish=(arrivals(coming, tuning),))


def _trivial(call: Call) -> bool:
    return call.world_size == 1 or not any(call.sizes[0])


def _alone(call: Call, rank: int, tuning: Tuning) -> Program:
    """One rank, or nothing to add: its input still goes through the reduction, which may scale it."""
    source, target = source_span(call, rank, rank), target_span(call, rank, rank)
    steps = (Reduce((source,), target, COPY),) if target.num_bytes else ()
    return Program(call=call, tuning=tuning, rank=rank, steps=steps)


@dataclass(frozen=True, slots=True)
class _Cut:
    """Bytes of every shard; shards that end before have fewer, or none."""

    offset: int = 0
    num_bytes: int | None = None

    def of(self, shard: Span) -> Span:
        low = min(self.offset, shard.num_bytes)
        high = shard.num_bytes if self.num_bytes is None else min(low + self.num_bytes, shard.num_bytes)
        return Span(shard.buffer, shard.offset + low, high - low)


_WHOLE = _Cut()


def _cuts(call: Call, tuning: Tuning) -> list[_Cut]:
    """Those that staging has room for, one after the other."""
    if tuning.staging_bytes is None:
        return [_WHOLE]
    size = slice_bytes(call.world_size, tuning.staging_bytes)
    return [_Cut(offset, size) for offset in range(0, max(map(max, call.sizes)), size)]


def slice_bytes(world_size: int, staging_bytes: int) -> int:
    """Of every shard, what a slice has, so that it needs no more staging than that; a multiple of 16, which is the
    least."""
    return max(1, staging_bytes // (world_size - 1) // ALIGNMENT) * ALIGNMENT


def _chunks(call: Call, rank: int, tuning: Tuning, cut: _Cut = _WHOLE) -> list[Span]:
    """Where the chunks of the own shard go."""
    return chunked(cut.of(target_span(call, rank, rank)), tuning)


def _staged(call: Call, source: int, target: int, cut: _Cut = _WHOLE) -> Span:
    """Where in the staging of `target` the slice of `source` lies. Its own slice stays in input."""
    size = cut.of(source_span(call, source, target)).num_bytes
    slot = -(-size // ALIGNMENT) * ALIGNMENT
    return Span("staging", slot * (source - (source > target)), size)


def _scatter(call: Call, rank: int, tuning: Tuning, cut: _Cut = _WHOLE) -> Iterator[Step]:
    moves = {
        peer: (cut.of(source_span(call, rank, peer)), _staged(call, rank, peer, cut))
        for peer in rotation(rank, call.world_size)
    }
    return pushes(call, rank, moves, replace(tuning, arrivals="together"))


def _reduced(call: Call, rank: int, tuning: Tuning, chunk: int, lane: int, cut: _Cut = _WHOLE) -> list[Step]:
    """Wait until `chunk` of the own shard is here from every rank, and combine it, ranks ascending."""
    ranks = range(call.world_size)
    spans = {peer: _staged(call, peer, rank, cut) for peer in ranks} | {rank: cut.of(source_span(call, rank, rank))}
    sources = tuple(chunked(spans[peer], tuning)[chunk] for peer in ranks)
    waits = tuple(Wait(Flag("staging", "arrived", peer, chunk)) for peer in ranks if peer != rank)
    target = _chunks(call, rank, tuning, cut)[chunk]
    return [Batch(waits, lane), *([Reduce(sources, target, lane)] if target.num_bytes else [])]


def _fork(lane: int) -> list[Step]:
    """`lane` begins after what the caller's stream did before the call."""
    return [] if lane == COPY else [Record(_BEGUN, COPY), Await(_BEGUN, lane)]


def _after(event: int, lane: int) -> list[Step]:
    """`COPY` goes on when `lane` is here."""
    return [] if lane == COPY else [Record(event, lane), Await(event, COPY)]
