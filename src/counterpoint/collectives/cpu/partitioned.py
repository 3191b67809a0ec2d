"""Run a call in partitions on CPUs: the channel's thread pushes what was supplied, the caller waits for arrivals."""

from __future__ import annotations

import threading
from typing import Any

from counterpoint.collectives.cpu.channel import Channel, CpuCall
from counterpoint.collectives.program.partitions import Partitions, partitions
from counterpoint.collectives.submit.submission import Submission


class PartitionedCpuCall(CpuCall):
    """Represents a partitioned call under way; see `PartitionedWork`."""

    def __init__(
        self, channel: Channel, submission: Submission, number: int, *, handshake: bool, keep: tuple[Any, ...]
    ) -> None:
        super().__init__(channel, submission, number, handshake=handshake, keep=keep)
        assert submission.program is not None
        self._cut: Partitions = partitions(submission.program, early_release=not handshake)
        self.sent, self.received = self._cut.sent, self._cut.received
        self._ready = len(self.sent) if submission.partitioned == "output" else 0
        self._taken = 0
        self.is_finished = False
        self._begun = threading.Event()  # the output's place is known, so that arrivals can be waited for

    def ready(self, count: int) -> None:
        """Say that the first `count` partitions of the input are written; see `PartitionedWork`."""
        self._ready = max(self._ready, count)

    def arrived(self, count: int) -> None:
        """Wait until the first `count` partitions of the output are there; see `PartitionedWork`."""
        waiter = self.channel.waiter
        try:
            waiter.wait_until(lambda: self._begun.is_set() or self.work.is_completed(), self.current, None)
            while self._taken < min(count, len(self.received)):
                if self.work.is_completed():  # before its partitions were taken: it failed
                    self.work.wait()
                for step in self._cut.receives[self._taken]:
                    self._step(step)
                self._taken += 1
        except BaseException as error:
            self.channel.failure.set(error)  # so that neither the channel's thread nor a peer waits for ever
            raise

    def finish(self) -> None:
        """Let all partitions leave and arrive; see `PartitionedWork`."""
        self.ready(len(self.sent))
        self.arrived(len(self.received))
        self.is_finished = True
        self.work.wait()

    def _lane(self, lane: int) -> None:
        """Do what is before the first push, push what is supplied, and wait until the caller has taken everything."""
        self._begun.set()
        waiter, before_step = self.channel.waiter, self.channel.before_step
        number = 0
        for index, steps in enumerate((self._cut.begin, *self._cut.sends)):
            waiter.wait_until(lambda index=index: self._ready >= index, self.current, None)  # type: ignore[misc]
            for step in steps:
                if before_step is not None:
                    before_step(self.program, step)
                self.record.step = number
                self._step(step)
                number += 1
        waiter.wait_until(lambda: self._taken == len(self.received), self.current, None)
