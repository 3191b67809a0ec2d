"""Programs of the operations that only move data: every block is pushed once, straight to its place.

Rank r pushes to r + 1, r + 2, ...: at every moment the links carry a permutation, so no two copies meet at a receiver.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

from counterpoint.collectives.calls import output_bytes, parts, source_span, target_span, transfers
from counterpoint.collectives.program import (
    ALIGNMENT,
    COPY,
    Batch,
    Call,
    Copy,
    Flag,
    LocalCopy,
    Program,
    Signal,
    Span,
    Step,
    Symmetric,
    Tuning,
    Wait,
)
from counterpoint.collectives.turns import Turns

__all__ = [
    "arrival",
    "arrivals",
    "barrier",
    "broadcast",
    "chunked",
    "exchange",
    "grant",
    "own_block",
    "pushes",
    "rotation",
    "take",
]


MIN_RELAYS = 3  # two would meet the root at every moment: slower than a direct broadcast


def exchange(call: Call, rank: int, tuning: Tuning) -> Program:
    """all_gather, all_to_all, gather, scatter, send_recv: wait until the peers are ready, push, say so."""
    to = [peer for peer in rotation(rank, call.world_size) if transfers(call, rank, peer)]
    senders = [peer for peer in rotation(rank, call.world_size) if transfers(call, peer, rank)]
    moves = {peer: (source_span(call, rank, peer), target_span(call, rank, peer)) for peer in to}
    coming = {peer: target_span(call, peer, rank) for peer in reversed(senders)}  # rank - 1 pushes here first
    return Program(
        call=call,
        tuning=tuning,
        rank=rank,
        release=(grant("output", rank, senders),),
        steps=(take("output", to), *pushes(call, rank, moves, tuning), *own_block(call, rank)),
        finish=(arrivals(coming, tuning),),
    )


def own_block(call: Call, rank: int) -> tuple[Step, ...]:
    """After the pushes: a local copy may have to wait for a GEMM, and no peer should wait with it."""
    if call.own != "copy" or call.sizes[rank][rank] == 0:
        return ()
    return (LocalCopy(source_span(call, rank, rank), target_span(call, rank, rank)),)


def broadcast(call: Call, rank: int, tuning: Tuning) -> Program:
    """Small: the root pushes everything to everyone. Large: it pushes one part to each rank, which passes it on.

    The root's link carries the message once instead of world_size - 1 times, and each chunk goes on while the next
    comes. What the waits of `finish` do not bring, the rank's own part, is there before them.
    """
    others, num_bytes = rotation(call.root or 0, call.world_size), output_bytes(call, rank)
    if len(others) < MIN_RELAYS or num_bytes < max(tuning.relay_bytes, 1):
        return exchange(call, rank, tuning)
    part = {
        peer: Span("output", *where)
        for peer, where in zip(others, parts(num_bytes, len(others)), strict=True)
        if where[1]
    }
    if rank == call.root:
        moves = {peer: (span, span) for peer, span in part.items()}
        return Program(
            call=call, tuning=tuning, rank=rank, steps=(take("output", list(moves)), *pushes(call, rank, moves, tuning))
        )
    return _relay(call, rank, tuning, part)


def _relay(call: Call, rank: int, tuning: Tuning, part: Mapping[int, Span]) -> Program:
    """What a rank that is not the root does: pass its part on, chunk by chunk, and receive the others' parts."""
    assert call.root is not None
    others = _relay_order(rank, call.root, call.world_size)
    senders = [peer for peer in others if peer in part]
    mine = part.get(rank, Span("output", 0, 0))
    steps: list[Step] = [take("output", others if mine.num_bytes else [])]
    for chunk, span in enumerate(chunked(mine, tuning) if mine.num_bytes else ()):
        steps.append(Batch((Wait(Flag("output", "arrived", call.root, chunk), span),)))
        for peer in others:
            steps += [Copy(peer, span, span), Batch((arrival(peer, span, rank, chunk),))]
    from_root = [call.root] if mine.num_bytes else []
    return Program(
        call=call,
        tuning=tuning,
        rank=rank,
        release=(grant("output", rank, from_root + senders),),
        steps=tuple(steps),
        finish=(arrivals({peer: part[peer] for peer in reversed(senders)}, tuning),),
    )


def _relay_order(rank: int, root: int, world_size: int) -> list[int]:
    """Whom to pass a part on to, first to last: the second next of the relays, the fourth next, ...

    The root serves relay t at moment t, so relay k begins after moment k. With an odd number of relays 2t - k are
    different targets for all k at any moment t, none of them the root's: nobody meets at a receiver. With an even
    number steps of two do not reach everyone; backwards they meet less often than forwards (a third to a half of the
    time, on the clock), but they do meet.
    """
    relays = rotation(root, world_size)
    count, at = len(relays), relays.index(rank)
    step = 2 if count % 2 else -1
    return [relays[(at + step * moment) % count] for moment in range(1, count)]


def barrier(call: Call, rank: int, tuning: Tuning) -> Program:
    """Two rounds of signals, in one batch. One round is not enough: a fast rank's next signal could meet its last one
    before that was reset, and be lost."""
    return exchange(call, rank, Tuning(arrivals="together"))


def rotation(rank: int, world_size: int) -> list[int]:
    """The other ranks, the next one first."""
    return [(rank + distance) % world_size for distance in range(1, world_size)]


def chunked(span: Span, tuning: Tuning) -> list[Span]:
    """`span` in chunks, the last one of at most `last_bytes`; an empty span is one empty chunk."""
    size, last = span.num_bytes, tuning.last_bytes
    rest = size if last is None or last >= size else -(-(size - last) // ALIGNMENT) * ALIGNMENT
    cuts = [*range(0, max(1, rest), tuning.chunk_bytes or max(1, rest)), *([rest] if rest < size else []), size]
    return [Span(span.buffer, span.offset + low, high - low) for low, high in pairwise(cuts)]


def grant(buffer: Symmetric, rank: int, peers: list[int], lane: int = COPY) -> Batch:
    """Tell `peers` that they may push into `buffer` of `rank`."""
    return Batch(tuple(Signal(peer, Flag(buffer, "ready", rank)) for peer in peers), lane)


def take(buffer: Symmetric, peers: list[int], lane: int = COPY) -> Batch:
    """Wait until `buffer` of each of `peers` may be written."""
    return Batch(tuple(Wait(Flag(buffer, "ready", peer)) for peer in peers), lane)


def arrivals(coming: Mapping[int, Span], tuning: Tuning) -> Batch:
    """Wait for every chunk of what each rank pushes into output."""
    return Batch(
        tuple(
            Wait(Flag("output", "arrived", peer, chunk), span if span.num_bytes else None)
            for peer, whole in coming.items()
            for chunk, span in enumerate(chunked(whole, tuning))
        )
    )


def pushes(call: Call, rank: int, moves: Mapping[int, tuple[Span, Span]], tuning: Tuning) -> Iterator[Step]:
    """Push every (source, target) to its peer, chunk by chunk in the order of `moves`; signal and take turns."""
    cut = {
        peer: list(zip(chunked(source, tuning), chunked(target, tuning), strict=True))
        for peer, (source, target) in moves.items()
    }
    rounds = max(map(len, cut.values()), default=0)
    buffer: Symmetric = "staging" if call.reduces else "output"
    first = next(iter(cut.values()), [])
    turns = Turns.of(call, rank, tuning, buffer=buffer, chunks=[source for source, _ in first])
    for chunk in range(rounds):
        signals: list[Signal] = []
        for peer, spans in cut.items():
            if chunk < len(spans):
                source, target = spans[chunk]
                yield turns.before(peer, chunk)
                if source.num_bytes:
                    yield Copy(peer, source, target)
                signals.append(arrival(peer, target, rank, chunk))
            if tuning.arrivals == "each" or turns.taken(chunk):
                yield Batch(tuple(signals))
                signals = []
            yield turns.after(peer, chunk)
        yield Batch(tuple(signals))


def arrival(peer: int, target: Span, rank: int, chunk: int) -> Signal:
    """Tell `peer` that `chunk` is in its `target`."""
    assert target.buffer in ("output", "staging"), "a copy pushes where its receiver has flags"
    return Signal(peer, Flag(target.buffer, "arrived", rank, chunk))
