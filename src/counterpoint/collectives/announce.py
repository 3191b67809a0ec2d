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

__all__ = ["Announcer"]


@dataclass(kw_only=True, slots=True)
class _Line:
    """The calls of this rank with the same peers, and where each of these shows its side: made once, read often."""

    own: Board
    records: list[Any]
    peers: list[tuple[int, Board, list[Any]]]  # rank, its line, its records
    room: int = 0  # below this number a call's slot is of interest to nobody


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

    def announce(self, doing: Doing, row: tuple[int, ...] = (), at: Location | None = None) -> Board:
        """Shows the call, once the slot that it takes is of interest to nobody; its record.

        Args:
            doing: the call.
            row: bytes for each rank, if only this rank knows.
            at: where peers may write its output.
        """
        line, number = self._line(doing.line), doing.number
        if number >= line.room:
            for peer, theirs, _ in line.peers:
                self._patience.until(partial(_is_above, theirs, number - DEPTH), doing, peer)
            line.room = min((theirs.latest for _, theirs, _ in line.peers), default=1 << 62) + DEPTH
        record = line.records[number % DEPTH]
        record.text, record.step, record.steps = doing.text.encode()[:159], 0, 1
        record.output_region, record.output_offset = (-1, 0) if at is None else (at.region, at.offset)
        if row:
            record.row[: len(row)] = row
        record.number = number
        self.board.line = doing.line
        line.own.latest = number  # last: whoever sees it sees the record
        with self._fence:
            return record

    def compare(self, doing: Doing) -> None:
        """Compares the call, which this rank has announced, with those of all peers that have announced theirs.

        Raises:
            Misconfigured: one has made another call.
        """
        number, text = doing.number, doing.text.encode()[:159]
        slot = number % DEPTH
        for peer, theirs, records in self._line(doing.line).peers:
            if theirs.latest >= number:  # and below number + DEPTH, as long as this rank has not gone on
                told = records[slot].text
                if told != text:
                    raise mismatch(doing, peer, told.decode(errors="replace"))

    def met(self, doing: Doing) -> dict[int, Board]:
        """Waits until every peer has announced this call, and compares; their records, by rank.

        Raises:
            PeerTimeout, Misconfigured: a peer does not come, or with another call.
        """
        line, found = self._line(doing.line), {}
        for peer, theirs, records in line.peers:
            self._patience.until(partial(_is_above, theirs, doing.number - 1), doing, peer)
            found[peer] = records[doing.number % DEPTH]
        self.compare(doing)
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
