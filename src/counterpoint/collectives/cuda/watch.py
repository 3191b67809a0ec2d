"""Watch the calls under way on a GPU: record which have ended, find calls that never will, and release their streams.

A wait on a GPU has no timeout. So a host thread queries the events of each call for its begin and end, shows them in
the status, and looks for the reason if a call has begun and does not end. A call that has not begun waits for its own
stream, which is no error of a peer. After a failure the thread sets every flag that is waited for, again and again
until all streams have reached their ends, so that the process can exit; their outputs are invalid from then on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from counterpoint.collectives.cuda.call import STEPS, CudaContext, CudaWork
from counterpoint.collectives.cuda.driver import Executor
from counterpoint.collectives.cuda.lower import WORD_BYTES
from counterpoint.collectives.cuda.queues import CallQueue
from counterpoint.collectives.host.watchdog import CurrentCall
from counterpoint.collectives.memory.pool import Location
from counterpoint.errors import CounterpointError, PeerTimeout

GRACE_S = 0.25  # seconds after a call's begin without checks: a peer that died or left may have done its part
_LOOK_S, _CLOSING_S = 0.05, 0.002  # seconds between looks, normally and while closing
_MOST_S = 10.0  # seconds that released streams may take to reach their ends


class Watch:
    """Runs the thread that watches the calls of one communicator.

    Each of `queues` has issued calls, to which more are added; this removes those that have ended. `side` sets the
    flags that stuck calls wait for; its `side_stream` never waits for a peer.
    """

    def __init__(self, context: CudaContext, queues: Sequence[CallQueue], side: Executor) -> None:
        self._context, self._watchdog, self._events = context, context.watchdog, context.events
        self._failure, self._side = context.failure, side
        self._queues, self._wake = queues, threading.Event()
        self._pause_s = _LOOK_S
        self._stopped = False
        self.captured = False  # calls are in graphs of the caller, whose replays the watch cannot see
        self._thread = threading.Thread(target=self._serve, name="counterpoint watch", daemon=True)
        self._thread.start()

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until no call is under way, up to `timeout_s`, or 10 s after a failure; return whether none is left."""
        self._pause_s = _CLOSING_S
        self._wake.set()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while any(queue.under_way or queue.unshown for queue in self._queues):
            time.sleep(_CLOSING_S)
            if self._failure.error is not None:
                deadline = deadline or time.monotonic() + _MOST_S
            if deadline is not None and time.monotonic() > deadline:
                return False
        return True

    def close(self) -> None:
        """End the watching thread."""
        self._stopped = True
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _serve(self) -> None:
        self._context.gpu.enter_thread()
        while not self._stopped:
            try:
                self._look()
            except Exception as error:  # of the driver: the device is lost, and with it this group
                self._failure.set(error)
            self._wake.wait(self._pause_s)
            self._wake.clear()

    def _look(self) -> None:
        for queue in self._queues:
            calls = queue.under_way
            while calls and self._ended(calls[0]):
                calls.popleft()
        if self._failure.error is None:
            for queue in self._queues:
                queue.show()
            self._judge_all([queue.under_way[0] for queue in self._queues if queue.under_way])
        going = [call for queue in self._queues for call in tuple(queue.under_way)]
        if self._failure.error is not None and (going or self.captured):
            self._let_go(going)

    def _ended(self, call: CudaWork) -> bool:
        """Return whether the first call of a channel has ended, and update its step in the status."""
        step = STEPS if call.is_completed() else int(self._events.passed(call.began))
        if step and call.begun_s is None:
            call.begun_s = time.monotonic()
        if call.record.number == call.number:
            call.record.step = step
        return step == STEPS

    def _judge_all(self, first: list[CudaWork]) -> None:
        """Check the first call of each channel, for which later calls wait; fail the communicator if it is stuck."""
        for call in first:
            error = self._judge(call)
            if error is not None and not call.is_completed():
                self._failure.set(error)
                return
        dead = self._watchdog.dead_ranks() if self.captured else ()
        if dead:
            text = f"rank {dead[0]} is dead, and calls of its group are in graphs, which would hang; end the processes"
            self._failure.set(PeerTimeout(text, ranks=dead))

    def _judge(self, call: CudaWork) -> CounterpointError | None:
        """Return the error of a call that will not end; None while it may still end."""
        waited_s = 0.0 if call.begun_s is None else time.monotonic() - call.begun_s
        if waited_s < GRACE_S:
            return None
        current, watchdog = call.current, self._watchdog
        owing = [peer for peer in watchdog.peers(current.line) if self._progress(current, peer) < STEPS]
        late = sorted(owing, key=lambda peer: self._progress(current, peer))  # whom the others wait for comes first
        for peer in late:
            error = watchdog.why_stuck(current, peer, waited_s)
            if error is not None:
                return error
        if not late and waited_s > watchdog.timeout_s:
            return PeerTimeout(
                f"{current}: no progress for {watchdog.timeout_s:g} s, although every other rank has done its part; "
                "this rank's GPU is held up by something else",
                ranks=(watchdog.name,),
            )
        return None

    def _progress(self, current: CurrentCall, peer: int) -> int:
        """Return the step of call `current` that `peer` shows in its status; -1 if it has not announced the call."""
        if self._watchdog.latest(current, peer) < current.number:
            return -1
        record = self._watchdog.record(current, peer)
        return int(record.step) if record.number == current.number else STEPS

    def _let_go(self, going: list[CudaWork]) -> None:
        """Set the flags that these calls wait for; if the caller's graphs have calls, all of channels and mailbox."""
        for call in going:
            self._side.let_go(call.prepared.calls)
        if self.captured:
            flags, memory, driver = self._context.flags, self._context.memory, self._context.gpu.driver
            mine = memory.address(memory.rank, Location(flags.region, 0), flags.captured_bytes)
            count = flags.captured_bytes // WORD_BYTES
            self._side.call("cuMemsetD32Async", driver.CUdeviceptr(mine), 1, count, self._side.side_stream)
