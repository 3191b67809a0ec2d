"""Announce calls in a rank's status before they begin, and compare them with the peers' calls.

*Who compares.* A rank announces its call first, then looks at the peers' statuses. Of two ranks the last one to
announce sees the other's call, so at least one of them sees a difference before it has done anything. For that, the
store of a rank's own announcement must come before its loads of the others', the one order that x86-64 does not keep by
itself: between them we take a lock, whose atomic instruction is a full fence.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial
from typing import Any

from counterpoint.collectives.host.shared_memory import DEPTH, RankStatus
from counterpoint.collectives.host.watchdog import PeerWaiter, mismatch
from counterpoint.collectives.submit.submission import Submission


@dataclass(kw_only=True, slots=True)
class _CallLine:
    """Holds this rank's records of its calls with one set of peers, and those peers' records of the same calls."""

    own: RankStatus
    records: list[Any]
    peers: list[tuple[int, RankStatus, list[Any]]]  # each peer's rank, line and records
    free_below: int = 0  # calls below this number may take their record: no peer reads the old content


class Announcer:
    """Announces this rank's calls on one channel to peers: each as a record of how many of `steps` steps ran."""

    def __init__(self, waiter: PeerWaiter, channel: int, *, steps: int) -> None:
        self._steps = steps
        self._waiter, self._watchdog, self.channel = waiter, waiter.watchdog, channel
        self.status: RankStatus = self._watchdog.statuses[self._watchdog.rank].channels[channel]
        self._lines: dict[int, _CallLine] = {}
        self._fence = threading.Lock()

    def announce(self, submission: Submission, number: int) -> RankStatus:
        """Write the call into a record of this rank's status once no peer reads the old content; return the record."""
        line = self._lines.get(submission.line) or self._line(submission.line)
        if number >= line.free_below:
            for peer, theirs, _ in line.peers:
                self._waiter.wait_until(partial(_is_above, theirs, number - DEPTH), submission.current(number), peer)
            line.free_below = min((theirs.latest for _, theirs, _ in line.peers), default=1 << 62) + DEPTH
        record = line.records[number % DEPTH]
        record.text, record.step, record.steps = submission.words, 0, self._steps
        record.output_region, record.output_offset = submission.shown_at.region, submission.shown_at.offset
        if submission.row:
            record.row[: len(submission.row)] = submission.row
        record.number = number
        self.status.line = submission.line
        line.own.latest = number  # last: who sees it sees the record
        with self._fence:
            return record

    def announce_if_free(self, submission: Submission, number: int) -> bool:
        """Announce a message and return True; return False if an earlier message or a peer still uses its record."""
        line = self._line(submission.line)
        record = line.records[number % DEPTH]
        if record.step < record.steps or any(theirs.latest <= number - DEPTH for _, theirs, _ in line.peers):
            return False
        self.announce(submission, number)
        return True

    def record(self, submission: Submission, number: int) -> RankStatus:
        """Return the record of this rank's status in which the call with this number is announced."""
        return self._line(submission.line).records[number % DEPTH]

    def compare(self, submission: Submission, number: int) -> None:
        """Raise if a peer has announced a different call under this number."""
        words, slot = submission.words, number % DEPTH
        for peer, theirs, records in self._lines[submission.line].peers:
            # what is at or above number is below number + DEPTH, as long as this rank has not gone on
            if theirs.latest >= number and records[slot].text != words:
                other = records[slot].text.decode(errors="replace")
                raise mismatch(submission.current(number), self._watchdog.names[peer], other)

    def met(self, submission: Submission, number: int) -> dict[int, RankStatus]:
        """Wait until every peer has announced this call; return peers' records by rank, or raise if calls differ."""
        current, found = submission.current(number), {}
        for peer, theirs, records in self._line(submission.line).peers:
            self._waiter.wait_until(partial(_is_above, theirs, number - 1), current, peer)
            found[peer] = records[number % DEPTH]
        self.compare(submission, number)
        return found

    def _line(self, number: int) -> _CallLine:
        line = self._lines.get(number)
        if line is None:
            rank, statuses = self._watchdog.rank, self._watchdog.statuses
            theirs = rank if number < len(statuses) else number
            lines = [
                (peer, statuses[peer].channels[self.channel].lines[theirs]) for peer in self._watchdog.peers(number)
            ]
            own = self.status.lines[number]
            line = self._lines[number] = _CallLine(
                own=own, records=list(own.records), peers=[(peer, their, list(their.records)) for peer, their in lines]
            )
        return line


def _is_above(line: RankStatus, number: int) -> bool:
    return bool(line.latest > number)
