"""Turns on the links: ranks that do not begin at the same time must not push to one receiver at once.

Rank r pushes to r + 1, r + 2, ...: a permutation, while all are in step. A rank that is one copy ahead meets its
neighbour at every receiver from then on, both at half the rate, while other links stand idle; and it is the late one
that everybody waits for. In training steps a quarter to a third of the copies met (4 x H200, 2026-11-21).

So the link into every receiver goes from hand to hand: p - 1 pushes first, then p - 2, and so on, round after round.
Whoever has pushed tells the next. That costs the latency of a signal for each copy.

One word for each receiver is enough. The one who gives a turn is itself held by later turns on other links, which
pass through the one that it gave to: it cannot give the same turn again before the first was taken. From call to call
the receivers' `ready` keeps them apart, and an all_reduce has words of its own for each half.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from counterpoint.collectives.program import Batch, Call, Flag, Signal, Span, Symmetric, Tuning, Wait

__all__ = ["Turns"]

_ALL_TO_ALL = ("all_gather", "all_to_all", "reduce_scatter", "all_reduce")


@dataclass(frozen=True, kw_only=True, slots=True)
class Turns:
    """Those of one rank for `rounds` times a push to everyone, in rotation; or none.

    Args:
        rank: this one.
        world_size: ranks.
        buffer: beside which the words lie.
        rounds: how often it pushes to everyone in turns; what comes after needs none to speak of.
    """

    rank: int
    world_size: int
    buffer: Symmetric
    rounds: int

    @classmethod
    def of(cls, call: Call, rank: int, tuning: Tuning, *, buffer: Symmetric, chunks: Sequence[Span]) -> Turns:
        """Those that `tuning` asks for, if every rank pushes as much to every other one; two never meet.

        Args:
            chunks: of what is pushed to each peer, none larger than the one before.
        """
        sizes = {size for source, row in enumerate(call.sizes) for target, size in enumerate(row) if source != target}
        alike = len(sizes) == 1 and call.world_size > 2 and call.operation in _ALL_TO_ALL
        least = tuning.turn_bytes if alike else None
        rounds = 0 if least is None else sum(chunk.num_bytes >= max(least, 1) for chunk in chunks)
        return cls(rank=rank, world_size=call.world_size, buffer=buffer, rounds=rounds)

    def taken(self, round: int) -> bool:
        """Whether there are turns in this round."""
        return round < self.rounds

    def before(self, peer: int, round: int) -> Batch:
        """Wait until the link into `peer` is free."""
        first = round == 0 and self._distance(peer) == 1
        return Batch(() if first or not self.taken(round) else (Wait(self._word(peer)),))

    def after(self, peer: int, round: int) -> Batch:
        """Tell who pushes to `peer` next."""
        last = self._distance(peer) == self.world_size - 1
        if not self.taken(round) or (last and round == self.rounds - 1):
            return Batch(())
        following = (peer if last else self.rank) - 1
        return Batch((Signal(following % self.world_size, self._word(peer)),))

    def _word(self, peer: int) -> Flag:
        return Flag(self.buffer, "turn", peer)

    def _distance(self, peer: int) -> int:
        return (peer - self.rank) % self.world_size
