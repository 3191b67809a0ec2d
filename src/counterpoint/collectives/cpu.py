"""Runs programs on CPUs: a thread for each lane of each channel, over memory that all processes of a group have mapped.

A channel runs one call after another; channels run at the same time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeAlias

from counterpoint.collectives.board import CLOSED, FAILED, RUNNING, Board
from counterpoint.collectives.cpu_run import Job, Room, Run
from counterpoint.collectives.program import COPY, REDUCE, Program, Step
from counterpoint.collectives.shared_memory import SharedMemory
from counterpoint.collectives.watchdog import Doing, Watchdog
from counterpoint.collectives.work import Work
from counterpoint.errors import Misconfigured

__all__ = ["BeforeStep", "Channel", "CpuExecutor"]

BeforeStep: TypeAlias = Callable[[Program, Step], None]
"""Called in the lane's thread before every step; tests put delays and deaths here."""

_SPINS, _FIRST_PAUSE_S, _LONGEST_PAUSE_S, _LOOK_S = 30, 20e-6, 1e-3, 0.05


class CpuExecutor:
    """All channels of one communicator.

    Args:
        memory: joined by all ranks.
        watchdog: of the same ranks.
        channels: how many calls may run at once.
        before_step: called before every step.
    """

    def __init__(
        self, memory: SharedMemory, watchdog: Watchdog, *, channels: int, before_step: BeforeStep | None = None
    ) -> None:
        self.memory, self.watchdog, self.before_step = memory, watchdog, before_step
        self.failure: BaseException | None = None
        self._lock = threading.Lock()
        self._channels = [Channel(self, index) for index in range(channels)]

    def submit(self, job: Job) -> Work:
        """Queues the job behind the others of its channel; returns at once.

        Raises:
            PeerTimeout, Misconfigured: an earlier call failed, and how.
        """
        if self.failure is not None:
            raise self.failure.with_traceback(None)
        work = Work(str(job.doing))
        self._channels[job.doing.channel].lanes[COPY].put(lambda: self._channels[job.doing.channel].run(job, work))
        return work

    def fail(self, error: BaseException) -> BaseException:
        """Ends all waits of this rank, now and later, and tells the peers; returns the first error of all."""
        with self._lock:
            if self.failure is None:
                self.failure = error
                board = self.memory.boards[self.memory.rank]
                board.reason = str(error).encode()[:380]
                for rank in getattr(error, "ranks", ()):
                    board.culprits[rank] = 1
                if board.state == RUNNING:
                    board.state = FAILED
            return self.failure

    def close(self) -> None:
        """Ends what still runs, then the threads."""
        if self.failure is None:
            self.memory.boards[self.memory.rank].state = CLOSED
        self.fail(Misconfigured("this communicator was closed; make a new one"))
        for channel in self._channels:
            channel.close()


class _Lane:
    """A thread that does one thing after another."""

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=_serve, args=(self._queue,), name=name, daemon=True)
        self._thread.start()

    def put(self, action: Callable[[], None]) -> None:
        self._queue.put(action)

    def close(self) -> None:
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()


def _serve(queue: SimpleQueue[Callable[[], None] | None]) -> None:
    while (action := queue.get()) is not None:
        action()
        del action  # or its tensors would live until the next one comes


class Channel:
    """One call after another: lanes, staging, and a place for outputs that are not in symmetric memory."""

    def __init__(self, executor: CpuExecutor, index: int) -> None:
        self.executor, self.memory, self.watchdog = executor, executor.memory, executor.watchdog
        self.index, self.rank = index, executor.memory.rank
        self.board: Board = self.memory.boards[self.rank].channels[index]
        self.lanes = {lane: _Lane(f"counterpoint channel {index} lane {lane}") for lane in (COPY, REDUCE)}
        self.staging = Room(self.memory)
        self.landing = Room(self.memory)

    def close(self) -> None:
        for lane in self.lanes.values():
            lane.close()

    def run(self, job: Job, work: Work) -> None:
        """The whole call, in the thread of lane `COPY`."""
        run = None
        try:
            if self.executor.failure is not None:
                raise self.executor.failure
            run = Run(self, job)
            run.do()
            work.end()
        except BaseException as error:
            work.end(self.executor.fail(error))
        finally:
            if run is not None:
                run.wait_for_lanes()  # they still use the tensors

    def until(self, there: Callable[[], bool], doing: Doing, waiting_for: int | None) -> None:
        """Returns as soon as `there()`: looks often at first, then every millisecond, and asks why from time to time.

        Raises:
            PeerTimeout, Misconfigured: it will not come, or this rank has given up.
        """
        for _ in range(_SPINS):
            if there():
                return
            time.sleep(0)
        started, pause = time.monotonic(), _FIRST_PAUSE_S
        next_look = started + _LOOK_S
        while not there():
            if self.executor.failure is not None:
                raise self.executor.failure
            now = time.monotonic()
            if waiting_for is not None and now >= next_look:
                error = self.watchdog.look(doing, waiting_for, now - started)
                if error is not None and not there():  # a rank may end right after it has signalled
                    raise error
                next_look = now + _LOOK_S
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
