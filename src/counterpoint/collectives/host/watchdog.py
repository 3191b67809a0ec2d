"""Wait on the host for peers, and say why a wait will not end: a rank died, failed, made a different call or none."""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from counterpoint.collectives.host.shared_memory import CLOSED, DEPTH, FAILED, RUNNING, RankStatus
from counterpoint.errors import CounterpointError, Misconfigured, PeerTimeout

MISMATCH_AFTER_S = 2.0
"""Seconds after which two ranks that wait for each other in different calls get an error that says so."""
_forks = 0  # number of forks between the process that was started and this one


def _note_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_note_fork)  # so that a call compares a number instead of asking for its pid

_SPINS, _FIRST_PAUSE_S, _LONGEST_PAUSE_S, _LOOK_S = 30, 20e-6, 1e-3, 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class CurrentCall:
    """Names the call that a rank is in: number `number` among its calls with one peer, or with all peers (`line`)."""

    text: str
    channel: int
    line: int
    number: int

    def __str__(self) -> str:
        return f"{self.text} (call {self.number} on channel {self.channel})"


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerStatus:
    """Records what a peer's status and the peer's process show about one call of this rank."""

    rank: int  # of the peer, as errors name it
    latest: int = 0  # number of the peer's latest call on the line in question
    same: str | None = None  # the peer's call with the number in question; None: not made yet
    now: str = "no call"  # the call that the peer is in, or was in last, in words
    crossed: bool = False  # the peer is in a call on the same channel which this rank has not made
    alive: bool = True  # the peer's process has not ended
    state: int = 0  # RUNNING, CLOSED or FAILED
    reason: str = ""  # why the peer failed
    culprits: tuple[int, ...] = ()  # the ranks because of which the peer failed


def verdict(
    current: CurrentCall, peers: Sequence[PeerStatus], *, waiting_for: int, waited_s: float, timeout_s: float
) -> CounterpointError | None:
    """Return why this rank's wait in the call `current` for the rank `waiting_for` will not end; None while it may.

    `peers` are the statuses of all ranks of that call except this one; `waited_s` of `timeout_s` seconds have passed.
    """
    for peer in peers:
        if peer.same is not None and peer.same != current.text:
            return mismatch(current, peer.rank, peer.same)
    peer = next(peer for peer in peers if peer.rank == waiting_for)
    before = f"{current}: rank {peer.rank}"
    if peer.state == FAILED:  # before `alive`: its process may have ended since; its reason says why
        return PeerTimeout(f"{before} gave up: {peer.reason}", ranks=peer.culprits or (peer.rank,))
    if peer.state == CLOSED:
        return PeerTimeout(
            f"{before} has closed its communicator; make the same calls on every rank", ranks=(peer.rank,)
        )
    if not peer.alive:
        return PeerTimeout(f"{before} is dead; it was in {peer.now}", ranks=(peer.rank,))
    if peer.crossed and peer.same is None and waited_s > MISMATCH_AFTER_S:
        return mismatch(current, peer.rank, peer.now)
    if waited_s <= timeout_s:
        return None
    missing = [each for each in peers if each.latest < current.number] or [peer]
    named = "; ".join(f"rank {each.rank} ({_where(each, current)})" for each in missing)
    return PeerTimeout(
        f"{current}: no progress for {timeout_s:g} s; waiting for {named}", ranks=tuple(m.rank for m in missing)
    )


def _where(peer: PeerStatus, current: CurrentCall) -> str:
    return f"has not come, it shows {peer.now}" if peer.latest < current.number else f"has come, it shows {peer.now}"


def mismatch(current: CurrentCall, rank: int, other: str) -> Misconfigured:
    """Return the error for two ranks that made different calls: `current` on this rank, and `other` on `rank`."""
    return Misconfigured(
        f"the ranks do not match: this one is in {current}, rank {rank} in {other}; make the same calls in the same "
        "order, with the same sizes and dtypes, on every rank, and make and drop buffers in the same order"
    )


class Watchdog:
    """Reads the statuses of the peers and checks that their processes live; holds the timeout of waits for peers.

    Errors call the ranks by `names`; None: by their ranks in the group.
    """

    def __init__(
        self,
        statuses: Sequence[RankStatus],
        *,
        rank: int,
        pids: Sequence[int],
        timeout_s: float,
        names: Sequence[int] | None = None,
    ) -> None:
        self.statuses, self.rank, self.timeout_s = statuses, rank, timeout_s
        self.names = tuple(range(len(pids)) if names is None else names)
        self.name = self.names[rank]
        self._pid, self._forks = os.getpid(), _forks
        self._processes = {peer: os.pidfd_open(pid) for peer, pid in enumerate(pids) if peer != rank}

    def peers(self, line: int) -> tuple[int, ...]:
        """Return the peers that take part in the calls on `line` of this rank's status: one peer, or all."""
        if line < len(self.statuses):
            return (line,)
        return tuple(rank for rank in range(len(self.statuses)) if rank != self.rank)

    def why_stuck(self, current: CurrentCall, waiting_for: int, waited_s: float) -> CounterpointError | None:
        """Return why a wait for `waiting_for` will not end, None while it may; takes about 0.1 ms for each rank."""
        peers = [self._peer_status(current, peer) for peer in self.peers(current.line)]
        name = self.names[waiting_for]
        return verdict(current, peers, waiting_for=name, waited_s=waited_s, timeout_s=self.timeout_s)

    def dead_ranks(self) -> tuple[int, ...]:
        """Return the names of the ranks whose processes have ended."""
        return tuple(self.names[peer] for peer, process in self._processes.items() if _is_ready(process))

    def latest(self, current: CurrentCall, peer: int) -> int:
        """Return the number of the latest call of `peer` among the calls with the same ranks as `current`."""
        return int(self._line(current, peer).latest)

    def same(self, current: CurrentCall, peer: int) -> str | None:
        """Return the text of the call of `peer` with the same number as `current`; None if `peer` has not made it."""
        record = self.record(current, peer)
        return _text(record.text) if self.latest(current, peer) >= current.number == record.number else None

    def record(self, current: CurrentCall, peer: int) -> RankStatus:
        """Return the record of `peer`'s call with the same number as `current`, valid once `peer` has made it."""
        return self._line(current, peer).records[current.number % DEPTH]

    def in_own_process(self) -> bool:
        """Return True in the process that joined the group, False in a process forked from it.

        A forked child has the status of its parent mapped and runs its finalizers, but has none of its threads: it must
        neither end the communicator nor call it.
        """
        return self._forks == _forks

    def wrong_process(self) -> Misconfigured:
        """Return the error to raise when a process that was forked from a rank makes a call."""
        return Misconfigured(
            f"a call in process {os.getpid()}, forked from rank {self.name} in process {self._pid}: a communicator "
            "belongs to the process that made it; make its calls there"
        )

    def give_up(self, error: BaseException) -> None:
        """Show the peers that this rank has failed with `error`, and which ranks are to blame."""
        status = self.statuses[self.rank]
        status.reason = str(error).encode()[:380]
        for name in getattr(error, "ranks", ()):
            status.culprits[self.names.index(name)] = 1
        if status.state == RUNNING:
            status.state = FAILED

    def leave(self) -> None:
        """Show the peers that this rank has closed its communicator and makes no more calls."""
        self.statuses[self.rank].state = CLOSED

    def close(self) -> None:
        """Close the descriptors of the peers' processes."""
        while self._processes:
            os.close(self._processes.popitem()[1])

    def _line(self, current: CurrentCall, peer: int) -> RankStatus:
        """Return the line of `peer`'s status that counts the same calls as `current.line` of this rank's status."""
        line = self.rank if current.line < len(self.statuses) else current.line
        return self.statuses[peer].channels[current.channel].lines[line]

    def shown(self, channel: int, peer: int) -> str:
        """Return in words the call that `peer` is in on `channel`, or was in last."""
        status = self.statuses[peer].channels[channel]
        latest = status.lines[status.line].latest
        record = status.lines[status.line].records[latest % DEPTH]
        where = "which ended" if record.step >= record.steps else f"step {record.step + 1} of {record.steps}"
        return f"{_text(record.text)}, {where}" if latest else "no call"

    def _peer_status(self, current: CurrentCall, peer: int) -> PeerStatus:
        status = self.statuses[peer]
        return PeerStatus(
            rank=self.names[peer],
            latest=self.latest(current, peer),
            same=self.same(current, peer),
            now=self.shown(current.channel, peer),
            crossed=self._is_in_a_call_unknown_here(current.channel, peer),
            alive=not _is_ready(self._processes[peer]),
            state=status.state,
            reason=_text(status.reason),
            culprits=tuple(name for name, guilty in zip(self.names, status.culprits, strict=True) if guilty),
        )

    def _is_in_a_call_unknown_here(self, channel: int, peer: int) -> bool:
        """Return whether `peer` is in a call that this rank takes part in but has not made yet."""
        theirs, everyone = self.statuses[peer].channels[channel], len(self.statuses)
        latest = theirs.lines[theirs.line].latest
        record = theirs.lines[theirs.line].records[latest % DEPTH]
        if theirs.line not in (self.rank, everyone) or not latest or record.step >= record.steps:
            return False
        mine = self.statuses[self.rank].channels[channel].lines[peer if theirs.line == self.rank else everyone]
        return bool(mine.latest < latest)


def _is_ready(fd: int) -> bool:
    """Return whether a process has ended, reaped or not: its pidfd is readable then."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace")


class Failure:
    """Holds the error that ended this rank's communicator, if any; whichever thread sets it also tells the peers.

    With `prints` the error is printed, too: on GPUs the host runs ahead of the calls and may raise it late, or never.
    """

    def __init__(self, watchdog: Watchdog, *, prints: bool = False) -> None:
        self._watchdog, self._prints, self._forks = watchdog, prints, _forks
        self._lock = threading.Lock()
        self.error: BaseException | None = None

    def check(self) -> None:
        """Raise the error that ended this communicator, if any, or an error if this is a fork of the rank's process."""
        if self._forks != _forks:
            raise self._watchdog.wrong_process()
        if self.error is not None:
            raise self.error.with_traceback(None)

    def set(self, error: BaseException) -> BaseException:
        """End this communicator with `error`, unless an earlier error already has; return the first error."""
        with self._lock:
            if self.error is None:
                self.error = error
                self._watchdog.give_up(error)
                if self._prints:
                    print(f"counterpoint: rank {self._watchdog.name}: {error}", file=sys.stderr, flush=True)
            return self.error

    def close(self) -> None:
        """End this communicator because its user closes it; peers that wait for this rank are told."""
        with self._lock:
            if self.error is None:
                self._watchdog.leave()
                self.error = Misconfigured("this communicator was closed; make a new one")


class PeerWaiter:
    """Waits for conditions that peers fulfil, and raises when the watchdog finds that they will not."""

    def __init__(self, watchdog: Watchdog, failure: Failure) -> None:
        self.watchdog, self._failure = watchdog, failure

    def wait_until(self, condition: Callable[[], bool], current: CurrentCall, waiting_for: int | None) -> None:
        """Poll `condition` until it is true: at first as often as possible, then every millisecond.

        Every 50 ms the watchdog checks the peers. The reason is raised if the wait will not end, or this rank failed.
        """
        for _ in range(_SPINS):
            if condition():
                return
            time.sleep(0)
        started, pause = time.monotonic(), _FIRST_PAUSE_S
        next_look = started + _LOOK_S
        while not condition():
            if self._failure.error is not None:
                raise self._failure.error
            now = time.monotonic()
            if waiting_for is not None and now >= next_look:
                error = self.watchdog.why_stuck(current, waiting_for, now - started)
                if error is not None and not condition():  # a rank may end right after it has signalled
                    raise error
                next_look = now + _LOOK_S
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
