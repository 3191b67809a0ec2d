"""Programs of few copies, for small messages: ranks pass on what they have received, twice as much in every round.

A copy costs microseconds besides its bytes. Pushing to n - 1 peers takes n - 1 of them one after the other; here they
are ceil(log2 n), each waiting for the one before. An all_gather moves no byte more than the direct program does, a
broadcast log2 n times as much out of the root as a relayed one, an all_reduce n / 2 times as much as the direct one
(it gathers all inputs everywhere and combines them at once): these are for small messages only. A reduce_scatter would
move n times as much, and wins too little to have one.

In an all_gather and an all_reduce all ranks still tell all others that they are ready, as in the direct programs: so
both may follow each other on an output that is released early, and on staging.
"""

from __future__ import annotations

from collections.abc import Iterator

from counterpoint.collectives.calls import output_bytes, source_span, target_span, transfers
from counterpoint.collectives.movement import arrival, exchange, grant, own_block, rotation, take
from counterpoint.collectives.program import (
    ALIGNMENT,
    COPY,
    Batch,
    Call,
    Copy,
    Flag,
    Program,
    Reduce,
    Signal,
    Span,
    Step,
    Tuning,
    Wait,
)

__all__ = ["all_gather", "all_reduce", "broadcast"]


def all_gather(call: Call, rank: int, tuning: Tuning) -> Program:
    """Round d = 1, 2, 4, ...: push the d blocks that are here to one rank, take d others from another.

    A power of two of ranks pairs them off, so that the blocks of a round lie side by side; else rank r pushes to r + d
    (Bruck et al., IEEE TPDS 1997), and what wraps around takes two copies. Out of place the own block lies apart, too.
    """
    peers = [peer for peer in rotation(rank, call.world_size) if transfers(call, rank, peer)]
    steps: list[Step] = [take("output", peers)]
    coming: list[Wait] = []
    for distance in _distances(call.world_size) if peers else ():
        steps.append(Batch(tuple(coming)))
        to, giver = _partners(rank, distance, call.world_size)
        steps += _passed_on(call, rank, to, _held(rank, distance, call.world_size))
        runs = _runs(call, _held(giver, distance, call.world_size))
        coming = [
            Wait(Flag("output", "arrived", giver, at), span if span.num_bytes else None) for at, span in enumerate(runs)
        ]
    return Program(
        call=call,
        tuning=tuning,
        rank=rank,
        release=(grant("output", rank, peers),),
        steps=(*steps, *own_block(call, rank)),
        finish=(Batch(tuple(coming)),),
    )


def _distances(world_size: int) -> list[int]:
    return [1 << power for power in range((world_size - 1).bit_length())]


def _pairs_off(world_size: int) -> bool:
    return world_size & (world_size - 1) == 0


def _partners(rank: int, distance: int, world_size: int) -> tuple[int, int]:
    """Whom `rank` pushes to in this round, and who pushes to it."""
    if _pairs_off(world_size):
        return rank ^ distance, rank ^ distance
    return (rank + distance) % world_size, (rank - distance) % world_size


def _held(rank: int, distance: int, world_size: int) -> list[list[int]]:
    """Whose blocks `rank` passes on in this round, ascending, in one or two runs of neighbours."""
    if _pairs_off(world_size):
        first = rank & -distance
        return [list(range(first, first + distance))]
    first = rank - min(distance, world_size - distance) + 1
    runs = [list(range(max(first, 0), rank + 1)), list(range(first % world_size, world_size))]
    return runs if first < 0 else runs[:1]


def _runs(call: Call, held: list[list[int]]) -> list[Span]:
    """Where in every output these runs lie."""
    spans = [[target_span(call, owner, 0) for owner in run] for run in held]
    return [Span("output", run[0].offset, sum(span.num_bytes for span in run)) for run in spans]


def _passed_on(call: Call, rank: int, to: int, held: list[list[int]]) -> Iterator[Step]:
    """Push each run to its place, in pieces where the own block lies apart, and say so."""
    for at, (run, whole) in enumerate(zip(held, _runs(call, held), strict=True)):
        pieces = [run]
        if call.own != "in_place" and rank in run:
            index = run.index(rank)
            pieces = [piece for piece in (run[:index], [rank], run[index + 1 :]) if piece]
        for piece, target in zip(pieces, _runs(call, pieces), strict=True):
            source = source_span(call, rank, rank) if piece == [rank] else target
            if target.num_bytes:
                yield Copy(to, source, target)
        yield Batch((arrival(to, whole, rank, at),))


def broadcast(call: Call, rank: int, tuning: Tuning) -> Program:
    """A tree: in round d = 1, 2, 4, ... every one of the d ranks that have it pushes it to one that has not."""
    whole = Span("output", 0, output_bytes(call, rank))
    if whole.num_bytes == 0:
        return exchange(call, rank, tuning)
    root, world_size = call.root or 0, call.world_size
    place = (rank - root) % world_size  # in the order in which ranks get it
    later = [place + distance for distance in _distances(world_size) if distance > place]
    children = [(root + child) % world_size for child in later if child < world_size]
    giver = (root + place - (1 << place.bit_length() >> 1)) % world_size
    wait = Batch((Wait(Flag("output", "arrived", giver), whole),) if place else ())
    pushed = [step for peer in children for step in (Copy(peer, whole, whole), Batch((arrival(peer, whole, rank, 0),)))]
    return Program(
        call=call,
        tuning=tuning,
        rank=rank,
        release=(grant("output", rank, [giver] if place else []),),
        steps=(take("output", children), *((wait, *pushed) if children else ())),
        finish=() if children else (wait,),
    )


def all_reduce(call: Call, rank: int, tuning: Tuning) -> Program:
    """Gather all inputs in staging, then combine them, ranks ascending: one reduction of everything on every rank.

    The input of rank r - j lies in slot j of rank r, so what is passed on is neighbouring slots, and own input.
    """
    whole = Span("output", 0, output_bytes(call, rank))
    own = Span(source_span(call, rank, 0).buffer, 0, whole.num_bytes)
    world_size, peers = call.world_size, rotation(rank, call.world_size)
    if not peers or not whole.num_bytes:
        alone: tuple[Step, ...] = (Reduce((own,), whole, COPY),) if whole.num_bytes else ()
        return Program(call=call, tuning=tuning, rank=rank, steps=alone)
    sources = [own if owner == rank else _slot(call, (rank - owner) % world_size) for owner in range(world_size)]
    return Program(
        call=call,
        tuning=tuning,
        rank=rank,
        steps=(
            take("staging", peers),
            *_gathered(call, rank, own),
            Reduce(tuple(sources), whole, COPY),
            grant("staging", rank, peers),
        ),
    )


def _gathered(call: Call, rank: int, own: Span) -> Iterator[Step]:
    """Every rank's input into staging; round d fills the slots from d on."""
    for distance in _distances(call.world_size):
        to, giver = (rank + distance) % call.world_size, (rank - distance) % call.world_size
        count = min(distance, call.world_size - distance)
        yield Copy(to, own, _slot(call, distance))
        if count > 1:
            yield Copy(to, _slot(call, 1, count - 1), _slot(call, distance + 1, count - 1))
        brought = _slot(call, distance, count)
        yield Batch((Signal(to, Flag("staging", "arrived", rank)), Wait(Flag("staging", "arrived", giver), brought)))


def _slot(call: Call, first: int, count: int = 1) -> Span:
    """Where in staging `count` slots lie, all but the first padded to whole vectors. There is no slot 0."""
    num_bytes = output_bytes(call, 0)
    padded = -(-num_bytes // ALIGNMENT) * ALIGNMENT
    return Span("staging", (first - 1) * padded, (count - 1) * padded + num_bytes)
