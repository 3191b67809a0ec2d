"""Calls shown on the board before they begin, and compared with those of the peers.

*Who compares.* A rank announces its call first and looks at the peers' boards then. Of two ranks the one that announces
last sees the other's call, so a difference is seen by at least one of them, before that one has done anything. It needs
the store of the own announcement to be done before the loads of the others', which is the one order that x86-64 does
not keep by itself: between them a lock is taken, whose atomic instruction is a full fence.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial
from typing import Any

from counterpoint.collectives.board import DEPTH, Board
from counterpoint.collectives.patience import Patience
from counterpoint.collectives.symmetric import Location
from counterpoint.collectives.watchdog import Doing, mismatch

__all__ = ["Announcer", "Notice"]


@dataclass(kw_only=True, slots=True)
class _Line:
    """The calls of this rank with the same peers, and where each of these shows its side: made once, read often."""

    own: Board
    records: list[Any]
    peers: list[tuple[int, Board, list[Any]]]  # rank, its line, its records
    room: int = 0  # below this number a call's slot is of interest to nobody


class Notice:
    """What a call is announced as, each time that it is made.

    Args:
        text: equal on all ranks, or their calls do not belong together.
        channel: that it runs on.
        line: of the board.
        at: where peers may write its output.
        steps: that its record counts.
    """

    def __init__(self, text: str, channel: int, line: int, at: Location | None = None, steps: int = 1) -> None:
        self.text, self.channel, self.line, self.steps = text, channel, line, steps
        self.words = text.encode()[:159]
        self.region, self.offset = (-1, 0) if at is None else (at.region, at.offset)

    def doing(self, number: int) -> Doing:
        """The `number`-th call of the line, which is this one."""
        return Doing(text=self.text, channel=self.channel, line=self.line, number=number)


class Announcer:
    """One channel of this rank's board.

    Args:
        patience: with the ranks whose boards these are.
        channel: which one.
    """

    def __init__(self, patience: Patience, channel: int) -> None:
        self._patience, self._watchdog, self._channel = patience, patience.watchdog, channel
        self.board: Board = self._watchdog.boards[self._watchdog.rank].channels[channel]
        self._lines: dict[int, _Line] = {}
        self._fence = threading.Lock()

    def announce(self, notice: Notice, number: int, row: tuple[int, ...] = ()) -> Board:
        """Shows the call, once the slot that it takes is of interest to nobody; its record.

        Args:
            notice: what is shown.
            number: of the call on its line.
            row: bytes for each rank, if only this rank knows.
        """
        line = self._lines.get(notice.line) or self._line(notice.line)
        if number >= line.room:
            for peer, theirs, _ in line.peers:
                self._patience.until(partial(_is_above, theirs, number - DEPTH), notice.doing(number), peer)
            line.room = min((theirs.latest for _, theirs, _ in line.peers), default=1 << 62) + DEPTH
        record = line.records[number % DEPTH]
        record.text, record.step, record.steps = notice.words, 0, notice.steps
        record.output_region, record.output_offset = notice.region, notice.offset
        if row:
            record.row[: len(row)] = row
        record.number = number
        self.board.line = notice.line
        line.own.latest = number  # last: whoever sees it sees the record
        with self._fence:
            return record

    def compare(self, notice: Notice, number: int) -> None:
        """Compares the call, which this rank has announced, with those of all peers that have announced theirs.

        Raises:
            Misconfigured: one has made another call.
        """
        words, slot = notice.words, number % DEPTH
        for peer, theirs, records in self._lines[notice.line].peers:
            # what is at or above number is below number + DEPTH, as long as this rank has not gone on
            if theirs.latest >= number and records[slot].text != words:
                raise mismatch(notice.doing(number), peer, records[slot].text.decode(errors="replace"))

    def met(self, notice: Notice, number: int) -> dict[int, Board]:
        """Waits until every peer has announced this call, and compares; their records, by rank.

        Raises:
            PeerTimeout, Misconfigured: a peer does not come, or with another call.
        """
        doing, found = notice.doing(number), {}
        for peer, theirs, records in self._line(notice.line).peers:
            self._patience.until(partial(_is_above, theirs, number - 1), doing, peer)
            found[peer] = records[number % DEPTH]
        self.compare(notice, number)
        return found

    def _line(self, number: int) -> _Line:
        line = self._lines.get(number)
        if line is None:
            rank, boards = self._watchdog.rank, self._watchdog.boards
            theirs = rank if number < len(boards) else number
            lines = [
                (peer, boards[peer].channels[self._channel].lines[theirs]) for peer in self._watchdog.peers(number)
            ]
            own = self.board.lines[number]
            line = self._lines[number] = _Line(
                own=own, records=list(own.records), peers=[(peer, their, list(their.records)) for peer, their in lines]
            )
        return line


def _is_above(line: Board, number: int) -> bool:
    return bool(line.latest > number)
