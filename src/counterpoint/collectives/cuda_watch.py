"""Looks at the calls under way on a GPU: notes which have ended, sees which will not, and lets their streams go.

A wait on a GPU never ends by itself. A thread of the host asks the events of each call whether it has begun and ended,
shows that on the board, and judges a call that has begun and does not end. A call that has not begun waits for its own
stream and is nobody's fault yet. After a failure it sets every word that is waited for, again and again until all
streams have come to their ends, so that the process can end; what they do from then on is rubbish.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from counterpoint.collectives.cuda_moments import Moments
from counterpoint.collectives.cuda_work import CudaWork
from counterpoint.collectives.watchdog import Doing, Watchdog
from counterpoint.errors import CounterpointError, PeerTimeout

__all__ = ["GRACE_S", "STEPS", "Watch"]

STEPS = 2  # of a record: announced is step 0 of them, begun 1, ended 2
GRACE_S = 0.25  # of a call that has begun: the part of a rank that has died or left meanwhile may be done
_LOOK_S, _CLOSING_S = 0.05, 0.002
_MOST_S = 10.0  # until streams that were let go have to be at their ends


class Watch:
    """The thread.

    Args:
        watchdog: of the same ranks.
        moments: of the device.
        under_way: calls that were issued, of each channel in their order; those that have ended are taken out.
        enter_thread: makes a thread one of the device's.
        failure: why this rank has given up; None while it has not.
        fail: called with the reason when a call will not end; must be there from any thread.
        let_go: sets the words that the calls wait for.
    """

    def __init__(
        self,
        watchdog: Watchdog,
        moments: Moments,
        under_way: Sequence[deque[CudaWork]],
        *,
        enter_thread: Callable[[], None],
        failure: Callable[[], BaseException | None],
        fail: Callable[[BaseException], BaseException],
        let_go: Callable[[list[CudaWork]], None],
    ) -> None:
        self._watchdog, self._moments, self._enter_thread = watchdog, moments, enter_thread
        self._failure, self._fail, self._let_go = failure, fail, let_go
        self._under_way, self._wake = under_way, threading.Event()
        self._pause_s = _LOOK_S
        self._stopped = False
        self.captured = False  # calls are in graphs of the caller's, which are replayed unseen
        self._thread = threading.Thread(target=self._serve, name="counterpoint watch", daemon=True)
        self._thread.start()

    def drain(self, timeout_s: float = _MOST_S) -> bool:
        """Waits until no call is under way: without a failure as long as that takes, after one for `timeout_s`."""
        self._pause_s = _CLOSING_S
        self._wake.set()
        deadline = None
        while any(self._under_way):
            time.sleep(_CLOSING_S)
            if self._failure() is not None:
                deadline = deadline or time.monotonic() + timeout_s
                if time.monotonic() > deadline:
                    return False
        return True

    def close(self) -> None:
        """Ends the thread."""
        self._stopped = True
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _serve(self) -> None:
        self._enter_thread()
        while not self._stopped:
            try:
                self._look()
            except Exception as error:  # of the driver: the device is lost, and with it this group
                self._fail(error)
            self._wake.wait(self._pause_s)
            self._wake.clear()

    def _look(self) -> None:
        for calls in self._under_way:
            while calls and self._ended(calls[0]):
                calls.popleft()
        if self._failure() is None:
            self._judge_all([calls[0] for calls in self._under_way if calls])
        going = [call for calls in self._under_way for call in tuple(calls)]
        if self._failure() is not None and (going or self.captured):
            self._let_go(going)

    def _ended(self, call: CudaWork) -> bool:
        """Whether the first call of a channel has; what the board shows about it is brought up to date."""
        step = 2 if self._moments.passed(call.ended) else int(self._moments.passed(call.began))
        if step and call.begun_s is None:
            call.begun_s = time.monotonic()
        if call.record.number == call.number:
            call.record.step = step
        return step == STEPS

    def _judge_all(self, first: list[CudaWork]) -> None:
        """Looks at the first call of each channel; those behind it wait for it."""
        for call in first:
            error = self._judge(call)
            if error is not None and not self._moments.passed(call.ended):
                self._fail(error)
                return
        dead = self._watchdog.dead() if self.captured else ()
        if dead:
            text = f"rank {dead[0]} is dead, and calls of its group are in graphs, which would hang; end the processes"
            self._fail(PeerTimeout(text, ranks=dead))

    def _judge(self, call: CudaWork) -> CounterpointError | None:
        """Why it will not end; None while it may."""
        waited_s = 0.0 if call.begun_s is None else time.monotonic() - call.begun_s
        if waited_s < GRACE_S:
            return None
        doing, watchdog = call.doing, self._watchdog
        owing = [peer for peer in watchdog.peers(doing.line) if not self._has_done_its_part(doing, peer)]
        late = sorted(owing, key=lambda peer: self._progress(doing, peer))  # whom the others wait for comes first
        for peer in late:
            error = watchdog.look(doing, peer, waited_s)
            if error is not None:
                return error
        if not late and waited_s > watchdog.timeout_s:
            return PeerTimeout(
                f"{doing}: no progress for {watchdog.timeout_s:g} s, although every other rank has done its part; this "
                "rank's GPU is held up by something else",
                ranks=(watchdog.rank,),
            )
        return None

    def _has_done_its_part(self, doing: Doing, peer: int) -> bool:
        return self._progress(doing, peer) >= STEPS

    def _progress(self, doing: Doing, peer: int) -> int:
        """-1: not announced; else the step that `peer` shows."""
        if self._watchdog.latest(doing, peer) < doing.number:
            return -1
        record = self._watchdog.record(doing, peer)
        return int(record.step) if record.number == doing.number else STEPS
