"""Build programs of collectives that only move data: every block is pushed once, straight to its place.

Rank r pushes to r + 1, r + 2, ...: while all ranks are in step, the links carry a permutation at every moment, so no
two copies go to one receiver. Ranks that do not begin at the same time take turns on the links (`LinkTurns`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from counterpoint.collectives.program.calls import ALIGNMENT, Call, Span, parts
from counterpoint.collectives.program.steps import (
    COPY,
    Batch,
    Copy,
    Flag,
    LocalCopy,
    Program,
    Signal,
    Step,
    Symmetric,
    Tuning,
    Wait,
)

MIN_RELAYS = 3  # two relays always push to the rank that the root pushes to: slower than a direct broadcast


def exchange(call: Call, rank: int, tuning: Tuning) -> Program:
    """Build the program of an all_gather, all_to_all, gather, scatter or send_recv: wait for peers, push, signal."""
    to = [peer for peer in rotation(rank, call.world_size) if call.sends(rank, peer)]
    senders = [peer for peer in rotation(rank, call.world_size) if call.sends(peer, rank)]
    moves = {peer: (call.source_span(rank, peer), call.target_span(rank, peer)) for peer in to}
    coming = {peer: call.target_span(peer, rank) for peer in reversed(senders)}  # rank - 1 pushes here first
    return Program(
        call=call,
        tuning=tuning,
        rank=rank,
        release=(signal_ready("output", rank, senders),),
        steps=(wait_ready("output", to), *pushes(call, rank, moves, tuning), *own_block(call, rank)),
        finish=(arrivals(coming, tuning),),
    )


def own_block(call: Call, rank: int) -> tuple[Step, ...]:
    """Return the step that copies the rank's block for itself, if needed; run it last, as it may wait for a GEMM."""
    if call.own != "copy" or call.sizes[rank][rank] == 0:
        return ()
    return (LocalCopy(call.source_span(rank, rank), call.target_span(rank, rank)),)


def broadcast(call: Call, rank: int, tuning: Tuning) -> Program:
    """Return a broadcast's program: the root pushes all of a small array to each rank, or one part of a large array.

    Each rank relays its part to the others: the root's link carries the array once instead of world_size - 1 times, and
    each chunk is relayed while the next arrives. `finish` does not wait for the rank's own part, which arrived before.
    """
    others, num_bytes = rotation(call.root or 0, call.world_size), call.output_bytes(rank)
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
            call=call,
            tuning=tuning,
            rank=rank,
            steps=(wait_ready("output", list(moves)), *pushes(call, rank, moves, tuning)),
        )
    return _relay(call, rank, tuning, part)


def _relay(call: Call, rank: int, tuning: Tuning, part: Mapping[int, Span]) -> Program:
    """Build the program of a rank other than the root: relay one part chunk by chunk, and receive the other parts."""
    assert call.root is not None
    others = _relay_order(rank, call.root, call.world_size)
    senders = [peer for peer in others if peer in part]
    mine = part.get(rank, Span("output", 0, 0))
    steps: list[Step] = [wait_ready("output", others if mine.num_bytes else [])]
    for chunk, span in enumerate(chunked(mine, tuning) if mine.num_bytes else ()):
        steps.append(Batch((Wait(Flag("output", "arrived", call.root, chunk), span),)))
        for peer in others:
            steps += [Copy(peer, span, span), Batch((arrival(peer, span, rank, chunk),))]
    from_root = [call.root] if mine.num_bytes else []
    return Program(
        call=call,
        tuning=tuning,
        rank=rank,
        release=(signal_ready("output", rank, from_root + senders),),
        steps=tuple(steps),
        finish=(arrivals({peer: part[peer] for peer in reversed(senders)}, tuning),),
    )


def _relay_order(rank: int, root: int, world_size: int) -> list[int]:
    """Return the ranks that a relay passes its part on to, in order: the second next relay, the fourth next, ...

    The root pushes to relay t at moment t, so relay k begins after moment k. With an odd number of relays the targets
    2t - k differ for all k at any moment t, and from the root's: no two copies go to one receiver. With an even number
    steps of two do not reach every relay, so relays go backwards by one. Then some copies share a receiver, but fewer
    than forwards (a third to a half of the time, in simulation).
    """
    relays = rotation(root, world_size)
    count, at = len(relays), relays.index(rank)
    step = 2 if count % 2 else -1
    return [relays[(at + step * moment) % count] for moment in range(1, count)]


def barrier(call: Call, rank: int, tuning: Tuning) -> Program:
    """Return the program of a barrier: two rounds of signals, in one batch.

    With one round, a fast rank's next signal could be lost: its flag might still be set by the last one.
    """
    return exchange(call, rank, Tuning(arrivals="together"))


def rotation(rank: int, world_size: int) -> list[int]:
    """Return the other ranks in the order rank + 1, rank + 2, ... modulo world_size."""
    return [(rank + distance) % world_size for distance in range(1, world_size)]


def chunked(span: Span, tuning: Tuning) -> list[Span]:
    """Cut `span` into chunks of `chunk_bytes`, the last of at most `last_bytes`; an empty span is one empty chunk."""
    size, last = span.num_bytes, tuning.last_bytes
    rest = size if last is None or last >= size else -(-(size - last) // ALIGNMENT) * ALIGNMENT
    cuts = [*range(0, max(1, rest), tuning.chunk_bytes or max(1, rest)), *([rest] if rest < size else []), size]
    return [Span(span.buffer, span.offset + low, high - low) for low, high in pairwise(cuts)]


def signal_ready(buffer: Symmetric, rank: int, peers: list[int], lane: int = COPY) -> Batch:
    """Return the signals that tell `peers` that they may push into `buffer` of `rank`."""
    return Batch(tuple(Signal(peer, Flag(buffer, "ready", rank)) for peer in peers), lane)


def wait_ready(buffer: Symmetric, peers: list[int], lane: int = COPY) -> Batch:
    """Return the waits for the signals that `buffer` of each of `peers` may be written."""
    return Batch(tuple(Wait(Flag(buffer, "ready", peer)) for peer in peers), lane)


def arrivals(coming: Mapping[int, Span], tuning: Tuning) -> Batch:
    """Return the waits for every chunk that peers push into the output; `coming` maps peers to spans of the output."""
    return Batch(
        tuple(
            Wait(Flag("output", "arrived", peer, chunk), span if span.num_bytes else None)
            for peer, whole in coming.items()
            for chunk, span in enumerate(chunked(whole, tuning))
        )
    )


def pushes(call: Call, rank: int, moves: Mapping[int, tuple[Span, Span]], tuning: Tuning) -> Iterator[Step]:
    """Yield the steps that push to each peer the source span in `moves`, with arrival signals and link turns."""
    cut = {
        peer: list(zip(chunked(source, tuning), chunked(target, tuning), strict=True))
        for peer, (source, target) in moves.items()
    }
    if tuning.peers_first:
        for peer, spans in cut.items():
            for chunk, (source, target) in enumerate(spans):
                if source.num_bytes:
                    yield Copy(peer, source, target)
                yield Batch((arrival(peer, target, rank, chunk),))
        return
    rounds = max(map(len, cut.values()), default=0)
    buffer: Symmetric = "staging" if call.reduces else "output"
    first = next(iter(cut.values()), [])
    turns = LinkTurns.of(call, rank, tuning, buffer=buffer, chunks=[source for source, _ in first])
    for chunk in range(rounds):
        signals: list[Signal] = []
        for peer, spans in cut.items():
            if chunk < len(spans):
                source, target = spans[chunk]
                yield turns.before(peer, chunk)
                if source.num_bytes:
                    yield Copy(peer, source, target)
                signals.append(arrival(peer, target, rank, chunk))
            if tuning.arrivals == "each" or turns.taken_in(chunk):
                yield Batch(tuple(signals))
                signals = []
            yield turns.after(peer, chunk)
        yield Batch(tuple(signals))


def arrival(peer: int, target: Span, rank: int, chunk: int) -> Signal:
    """Return the signal that tells `peer` that `chunk` has arrived in the span `target` of its buffer."""
    assert target.buffer in ("output", "staging"), "a copy pushes where its receiver has flags"
    return Signal(peer, Flag(target.buffer, "arrived", rank, chunk))


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkTurns:
    """Says when a rank that pushes `rounds` chunks to every peer waits for its turn on a link, and passes the turn on.

    Without turns, a rank that is one copy ahead shares every further receiver's link with its neighbour, both at half
    the rate, while other links are idle; and all wait for the late one. In training steps a quarter to a third of the
    copies shared a link (4 x H200, 2026-11-21). So ranks take turns on the link into receiver p: p - 1 pushes first,
    then p - 2, and so on, in every round. A rank that has pushed signals the next: one signal's latency per copy.

    One flag for each receiver is enough. The rank that passes a turn on waits for later turns on other links, which
    depend on the rank that it passed to: so it cannot pass the same turn again before the first was taken. Between
    calls the receivers' `ready` separates turns, and an all_reduce has flags of its own for each half.
    """

    rank: int  # this rank
    world_size: int  # number of ranks
    buffer: Symmetric  # buffer that ranks push to; it has the flags of the turns
    rounds: int  # number of chunks that are pushed in turns; later, smaller ones are not

    @classmethod
    def of(cls, call: Call, rank: int, tuning: Tuning, *, buffer: Symmetric, chunks: Sequence[Span]) -> LinkTurns:
        """Return the turns that `tuning` asks for; none with two ranks, or if ranks push different sizes.

        Each peer gets the `chunks`, none of them larger than the one before.
        """
        sizes = {size for source, row in enumerate(call.sizes) for target, size in enumerate(row) if source != target}
        alike = len(sizes) == 1 and call.world_size > 2 and call.layout.all_send
        least = tuning.turn_bytes if alike else None
        rounds = 0 if least is None else sum(chunk.num_bytes >= max(least, 1) for chunk in chunks)
        return cls(rank=rank, world_size=call.world_size, buffer=buffer, rounds=rounds)

    def taken_in(self, round: int) -> bool:
        """Return whether ranks take turns in this round of pushes."""
        return round < self.rounds

    def before(self, peer: int, round: int) -> Batch:
        """Return the wait for this rank's turn on the link into `peer`; an empty batch if it need not wait."""
        first = round == 0 and self._distance(peer) == 1
        return Batch(() if first or not self.taken_in(round) else (Wait(self._word(peer)),))

    def after(self, peer: int, round: int) -> Batch:
        """Return the signal that passes the turn to the rank that pushes to `peer` next; empty if no rank does."""
        last = self._distance(peer) == self.world_size - 1
        if not self.taken_in(round) or (last and round == self.rounds - 1):
            return Batch(())
        following = (peer if last else self.rank) - 1
        return Batch((Signal(following % self.world_size, self._word(peer)),))

    def _word(self, peer: int) -> Flag:
        return Flag(self.buffer, "turn", peer)

    def _distance(self, peer: int) -> int:
        return (peer - self.rank) % self.world_size
