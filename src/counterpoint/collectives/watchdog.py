"""Why a wait does not end: which rank died, gave up, made another call, or did not come in time."""

from __future__ import annotations

import os
import select
from collections.abc import Sequence
from dataclasses import dataclass

from counterpoint.collectives.board import CLOSED, DEPTH, FAILED, RUNNING, Board
from counterpoint.errors import CounterpointError, Misconfigured, PeerTimeout

__all__ = ["CROSSED_S", "Doing", "Seen", "Watchdog", "verdict"]

CROSSED_S = 2.0
"""Seconds after which two ranks that wait for each other in different calls are told so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Doing:
    """The call that a rank is in: the `number`-th on `line` of its board."""

    text: str
    channel: int
    line: int
    number: int

    def __str__(self) -> str:
        return f"{self.text} (call {self.number} on channel {self.channel})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What a peer shows.

    Args:
        latest: number of its latest call on the line in question.
        same: its call with the number in question; None if it has not made it.
        now: what it is in, or did last, as a text.
        crossed: it is in a call on the same channel which this rank has not made.
    """

    rank: int
    latest: int = 0
    same: str | None = None
    now: str = "no call"
    crossed: bool = False
    alive: bool = True
    state: int = 0
    reason: str = ""
    culprits: tuple[int, ...] = ()


def verdict(
    doing: Doing, seen: Sequence[Seen], *, waiting_for: int, waited_s: float, timeout_s: float
) -> CounterpointError | None:
    """Why a wait for `waiting_for` will not end; None while it may.

    Args:
        doing: the call of this rank.
        seen: all ranks of that call, but this one.
        waiting_for: the rank whose flag is waited for.
        waited_s: seconds so far.
        timeout_s: seconds allowed.
    """
    for peer in seen:
        if peer.same is not None and peer.same != doing.text:
            return mismatch(doing, peer.rank, peer.same)
    peer = next(peer for peer in seen if peer.rank == waiting_for)
    before = f"{doing}: rank {peer.rank}"
    if not peer.alive:
        return PeerTimeout(f"{before} is dead; it was in {peer.now}", ranks=(peer.rank,))
    if peer.state == FAILED:
        return PeerTimeout(f"{before} gave up: {peer.reason}", ranks=peer.culprits or (peer.rank,))
    if peer.state == CLOSED:
        return PeerTimeout(
            f"{before} has closed its communicator; make the same calls on every rank", ranks=(peer.rank,)
        )
    if peer.crossed and peer.same is None and waited_s > CROSSED_S:
        return mismatch(doing, peer.rank, peer.now)
    if waited_s <= timeout_s:
        return None
    missing = [each for each in seen if each.latest < doing.number] or [peer]
    named = "; ".join(f"rank {each.rank} ({_where(each, doing)})" for each in missing)
    return PeerTimeout(
        f"{doing}: no progress for {timeout_s:g} s; waiting for {named}", ranks=tuple(m.rank for m in missing)
    )


def _where(peer: Seen, doing: Doing) -> str:
    return f"has not come, it shows {peer.now}" if peer.latest < doing.number else f"has come, it shows {peer.now}"


def mismatch(doing: Doing, rank: int, other: str) -> Misconfigured:
    """The error of two calls that do not belong together."""
    return Misconfigured(
        f"the ranks do not match: this one is in {doing}, rank {rank} in {other}; make the same calls in the same "
        "order, with the same sizes and dtypes, on every rank, and make and drop buffers in the same order"
    )


class Watchdog:
    """Looks at the boards and processes of the peers.

    Args:
        boards: of all ranks.
        rank: this one.
        pids: of all ranks.
        timeout_s: seconds that a wait may take.
    """

    def __init__(self, boards: Sequence[Board], *, rank: int, pids: Sequence[int], timeout_s: float) -> None:
        self.boards, self.rank, self.timeout_s = boards, rank, timeout_s
        self._processes = {peer: os.pidfd_open(pid) for peer, pid in enumerate(pids) if peer != rank}

    def peers(self, line: int) -> tuple[int, ...]:
        """The other ranks of a line of this rank's board."""
        if line < len(self.boards):
            return (line,)
        return tuple(rank for rank in range(len(self.boards)) if rank != self.rank)

    def look(self, doing: Doing, waiting_for: int, waited_s: float) -> CounterpointError | None:
        """Why a wait for `waiting_for` will not end; None while it may. Costs about 0.1 ms for each rank."""
        seen = [self._seen(doing, peer) for peer in self.peers(doing.line)]
        return verdict(doing, seen, waiting_for=waiting_for, waited_s=waited_s, timeout_s=self.timeout_s)

    def dead(self) -> tuple[int, ...]:
        """Ranks whose processes have ended."""
        return tuple(peer for peer, process in self._processes.items() if _is_ready(process))

    def latest(self, doing: Doing, peer: int) -> int:
        """Number of the latest call of `peer` on the line."""
        return int(self._line(doing, peer).latest)

    def same(self, doing: Doing, peer: int) -> str | None:
        """The call of `peer` that has the number of `doing`; None if it has not made it."""
        record = self.record(doing, peer)
        return _text(record.text) if self.latest(doing, peer) >= doing.number == record.number else None

    def record(self, doing: Doing, peer: int) -> Board:
        """Where `peer` shows its call with the number of `doing`, once it has made it."""
        return self._line(doing, peer).records[doing.number % DEPTH]

    def give_up(self, error: BaseException) -> None:
        """Tells the peers that this rank goes no further, and why."""
        board = self.boards[self.rank]
        board.reason = str(error).encode()[:380]
        for rank in getattr(error, "ranks", ()):
            board.culprits[rank] = 1
        if board.state == RUNNING:
            board.state = FAILED

    def leave(self) -> None:
        """Tells the peers that this rank has ended its calls and makes no more."""
        self.boards[self.rank].state = CLOSED

    def close(self) -> None:
        while self._processes:
            os.close(self._processes.popitem()[1])

    def _line(self, doing: Doing, peer: int) -> Board:
        """The line on the board of `peer` that has its side of the calls on this rank's line."""
        line = self.rank if doing.line < len(self.boards) else doing.line
        return self.boards[peer].channels[doing.channel].lines[line]

    def shown(self, channel: int, peer: int) -> str:
        """What `peer` is in on that channel, or did last."""
        board = self.boards[peer].channels[channel]
        latest = board.lines[board.line].latest
        record = board.lines[board.line].records[latest % DEPTH]
        where = "which ended" if record.step >= record.steps else f"step {record.step + 1} of {record.steps}"
        return f"{_text(record.text)}, {where}" if latest else "no call"

    def _seen(self, doing: Doing, peer: int) -> Seen:
        board = self.boards[peer]
        return Seen(
            rank=peer,
            latest=self.latest(doing, peer),
            same=self.same(doing, peer),
            now=self.shown(doing.channel, peer),
            crossed=self._is_in_a_call_unknown_here(doing.channel, peer),
            alive=not _is_ready(self._processes[peer]),
            state=board.state,
            reason=_text(board.reason),
            culprits=tuple(rank for rank, guilty in enumerate(board.culprits) if guilty),
        )

    def _is_in_a_call_unknown_here(self, channel: int, peer: int) -> bool:
        """Whether this rank has not made the call that `peer` is in, although it has a part in it."""
        theirs, everyone = self.boards[peer].channels[channel], len(self.boards)
        latest = theirs.lines[theirs.line].latest
        record = theirs.lines[theirs.line].records[latest % DEPTH]
        if theirs.line not in (self.rank, everyone) or not latest or record.step >= record.steps:
            return False
        mine = self.boards[self.rank].channels[channel].lines[peer if theirs.line == self.rank else everyone]
        return bool(mine.latest < latest)


def _is_ready(fd: int) -> bool:
    """Whether a process has ended, reaped or not: its descriptor can be read then."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace")
