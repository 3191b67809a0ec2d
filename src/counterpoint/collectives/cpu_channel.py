"""One channel of a communicator on CPUs: two lanes, which are threads, and memory that calls share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeAlias

from counterpoint.collectives.announce import Announcer
from counterpoint.collectives.patience import Patience
from counterpoint.collectives.program import COPY, REDUCE, Program, Step
from counterpoint.collectives.shared_memory import SharedMemory
from counterpoint.collectives.symmetric import Room

__all__ = ["BeforeStep", "Channel"]

BeforeStep: TypeAlias = Callable[[Program, Step], None]
"""Called in the lane's thread before every step; tests put delays and deaths here."""


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
    """One call after another: lanes, staging, and a place for outputs that are not in symmetric memory.

    Args:
        memory: joined by all ranks.
        patience: how to wait for them.
        index: its number.
        fail: ends the communicator with an error; returns the first one of all.
        before_step: called before every step.
    """

    def __init__(
        self,
        memory: SharedMemory,
        patience: Patience,
        index: int,
        *,
        fail: Callable[[BaseException], BaseException],
        before_step: BeforeStep | None,
    ) -> None:
        self.memory, self.index, self.rank = memory, index, memory.rank
        self.fail, self.before_step = fail, before_step
        self.watchdog, self.until = patience.watchdog, patience.until
        self.announcer = Announcer(patience, index)
        self.board = self.announcer.board
        self.lanes = {lane: _Lane(f"counterpoint channel {index} lane {lane}") for lane in (COPY, REDUCE)}
        self.staging = Room(memory.create, memory.release)
        self.landing = Room(memory.create, memory.release)

    def close(self) -> None:
        for lane in self.lanes.values():
            lane.close()
