"""Runs programs on CPUs: a thread for each lane of each channel, over memory that all processes of a group have mapped.

A channel runs one call after another; channels run at the same time.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

from counterpoint.collectives.announce import Notice
from counterpoint.collectives.arguments import CPU
from counterpoint.collectives.board import MAX_CHUNKS
from counterpoint.collectives.cpu_channel import BeforeStep, Channel
from counterpoint.collectives.cpu_run import Run
from counterpoint.collectives.early import EarlyBlock, EarlyPool
from counterpoint.collectives.patience import Patience
from counterpoint.collectives.program import ALIGNMENT, COPY, Call, Flag, Tuning, flag_word
from counterpoint.collectives.shared_memory import SharedMemory
from counterpoint.collectives.symmetric import Location, Pool
from counterpoint.collectives.transport import Job, Start
from counterpoint.collectives.tuning import in_slices
from counterpoint.collectives.watchdog import Watchdog
from counterpoint.collectives.work import Work
from counterpoint.errors import Misconfigured

__all__ = ["CpuTransport"]

CHUNK_BYTES = 1 << 16  # smaller, and Python's time for each piece counts; larger, and less is added while more comes


class CpuTransport:
    """All channels of one communicator.

    Args:
        memory: joined by all ranks.
        watchdog: of the same ranks.
        channels: how many calls may run at once.
        chunk_bytes: smallest piece of a block; None: what is best here.
        staging_bytes: most staging of a reduce_scatter; None: what it needs.
        reserve_bytes: the first region for outputs has this size.
        before_step: called before every step.
    """

    device = CPU

    def __init__(
        self,
        memory: SharedMemory,
        watchdog: Watchdog,
        *,
        channels: int,
        chunk_bytes: int | None = None,
        staging_bytes: int | None = None,
        reserve_bytes: int | None = None,
        before_step: BeforeStep | None = None,
    ) -> None:
        self.memory, self.watchdog = memory, watchdog
        self.failure: BaseException | None = None
        self.patience = Patience(watchdog, lambda: self.failure)
        self.pool = Pool(memory, region_bytes=reserve_bytes or 1 << 22)
        self.early = EarlyPool(memory, create=self._early_region, release=self._release)
        if reserve_bytes:
            self.pool.reserve()
        self._chunk_bytes, self._staging_bytes = chunk_bytes or CHUNK_BYTES, staging_bytes
        self._lock = threading.Lock()
        self._channels = [
            Channel(memory, self.patience, index, fail=self.fail, before_step=before_step) for index in range(channels)
        ]

    def tuning(self, call: Call, *, early_release: bool) -> Tuning:
        """Chunks of at least the size asked for, and no more of them than a channel has flags."""
        return in_slices(self._tuned, call, self._staging_bytes)

    def _tuned(self, call: Call) -> Tuning:
        units = -(-max(map(max, call.sizes)) // (MAX_CHUNKS * ALIGNMENT))
        chunk_bytes = max(self._chunk_bytes, units * ALIGNMENT)
        return Tuning(chunk_bytes=chunk_bytes, relay_bytes=4 * self._chunk_bytes)

    def locate(self, tensor: Any) -> Location | None:
        """Where a contiguous tensor lies in own symmetric memory; None if it does not."""
        return self.memory.locate(tensor.data_ptr(), tensor.nbytes)

    def place(self, call: Call | None, at: Location | None, num_bytes: int) -> str:
        """Nothing: ranks read on the board where outputs are."""
        return ""

    @property
    def epoch(self) -> int:
        """Counts regions."""
        return self.memory.created

    def starter(self, job: Job) -> Start:
        """What starts the job."""
        return partial(self._start, job, Notice(job.text, job.channel, job.line))

    def _start(self, job: Job, notice: Notice, number: int, tensors: tuple[Any, ...]) -> Work:
        """Queues the job behind the others of its channel; returns at once.

        Raises:
            PeerTimeout, Misconfigured: an earlier call failed, and how.
        """
        self.check()
        self.early.collect()
        handshake = job.early is None or job.early.handshake
        if job.early is not None:
            job.early.block.ready = False
        channel = self._channels[job.channel]
        run, work = Run(channel, job, notice, number, handshake), Work(str(notice.doing(number)), keep=tensors)
        channel.lanes[COPY].put(lambda: self._run(run, work))
        return work

    def check(self) -> None:
        """Raises what ended this communicator, if something did."""
        if self.failure is not None:
            raise self.failure.with_traceback(None)

    def record_stream(self, tensor: Any, stream: Any) -> None:
        """Refused: a CPU has no streams."""
        raise Misconfigured("record_stream on a CPU: what uses a tensor there has ended when the tensor dies")

    def fail(self, error: BaseException) -> BaseException:
        """Ends all waits of this rank, now and later, and tells the peers; returns the first error of all."""
        with self._lock:
            if self.failure is None:
                self.failure = error
                self.watchdog.give_up(error)
            return self.failure

    def close(self) -> None:
        """Ends what still runs, then the threads."""
        if self.failure is None:
            self.watchdog.leave()
        self.fail(Misconfigured("this communicator was closed; make a new one"))
        for channel in self._channels:
            channel.close()
        self.watchdog.close()
        self.memory.close()

    def _run(self, run: Run, work: Work) -> None:
        """The whole call, in the thread of lane `COPY`."""
        try:
            self.check()
            run.do()
            work.end()
        except BaseException as error:
            work.end(self.fail(error))
        finally:
            run.wait_for_lanes()  # they still use the tensors

    def _early_region(self, num_bytes: int) -> int:
        region = self.memory.create(num_bytes)
        self.watchdog.boards[self.memory.rank].early_regions[len(self.early.regions)] = region
        return region

    def _release(self, block: EarlyBlock) -> bool:
        """Tells the peers that the block is free. All loads of what was in it were before: its tensor has died."""
        if block.ready or self.failure is not None:
            return True
        word = flag_word(Flag("output", "ready", self.memory.rank), self.memory.world_size)
        for peer in range(self.memory.world_size):
            if peer != self.memory.rank:
                self.memory.boards[peer].early[block.number][word] = 1
        block.ready = True
        return True
