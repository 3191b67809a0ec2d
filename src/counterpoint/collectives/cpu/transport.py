"""Run programs on CPUs: one thread for each lane of each channel, over memory that all processes have mapped.

A channel runs one call after another; channels run at the same time.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from counterpoint.collectives.cpu.call import BeforeStep, Channel, CpuCall
from counterpoint.collectives.host.shared_memory import MAX_CHUNKS, SharedMemory
from counterpoint.collectives.host.watchdog import Failure, PeerWaiter, Watchdog
from counterpoint.collectives.memory import EarlyBlock, EarlyPool, Location, Pool
from counterpoint.collectives.options import CommunicatorOptions
from counterpoint.collectives.program.calls import Call
from counterpoint.collectives.program.steps import COPY, Flag, Tuning, flag_word
from counterpoint.collectives.program.tuning import chunk_bytes_of, with_staging_slices
from counterpoint.collectives.submit.submission import NOWHERE, Programs, Submission, unfinished
from counterpoint.collectives.submit.tensors import CPU
from counterpoint.errors import Misconfigured, Unsupported

CHUNK_BYTES = 1 << 16  # smaller chunks cost Python time for each; larger ones overlap sums with copies less


class CpuTransport:
    """Runs all channels of one communicator on CPUs, over memory that all ranks have mapped."""

    device = CPU
    mailbox_channel: int | None = None

    def __init__(
        self,
        memory: SharedMemory,
        watchdog: Watchdog,
        options: CommunicatorOptions,
        *,
        before_step: BeforeStep | None = None,
    ) -> None:
        self.memory, self.watchdog = memory, watchdog
        self.names, self.failure = watchdog.names, Failure(watchdog)
        self.pool = Pool(memory, region_bytes=options.reserve_bytes or 1 << 22)
        self.early = EarlyPool(memory, create=self._early_region, release=self._release)
        if options.reserve_bytes:
            self.pool.reserve()
        self._chunk_bytes, self._staging_bytes = options.chunk_bytes or CHUNK_BYTES, options.staging_bytes
        self.programs = Programs(memory.rank, self.tuning)
        waiter = PeerWaiter(watchdog, self.failure)
        self._channels = [
            Channel(memory, waiter, index, failure=self.failure, programs=self.programs, before_step=before_step)
            for index in range(options.channels)
        ]

    def tuning(self, call: Call, *, early_release: bool) -> Tuning:
        """Return the tuning of `call`: chunks of `options.chunk_bytes`, or larger chunks if there are too few flags."""
        return with_staging_slices(self._tuned, call, self._staging_bytes)

    def _tuned(self, call: Call) -> Tuning:
        chunk_bytes = chunk_bytes_of(call, self._chunk_bytes, max_chunks=MAX_CHUNKS)
        return Tuning(chunk_bytes=chunk_bytes, relay_bytes=4 * self._chunk_bytes)

    def locate(self, tensor: Any) -> Location | None:
        """Return the `Location` of a contiguous tensor in this rank's symmetric memory; None if it lies elsewhere."""
        return self.memory.locate(tensor.data_ptr(), tensor.nbytes)

    def place(self, call: Call | None, at: Location | None, num_bytes: int) -> str:
        """Return "": on CPUs outputs may lie at different places, which ranks read from each other's statuses."""
        return ""

    @property
    def epoch(self) -> int:
        """Return how many regions this rank has made; a new one may cover addresses that were plain memory before."""
        return self.memory.created

    def shown_at(self, at: Location | None, num_bytes: int) -> Location:
        """Return `NOWHERE`: on CPUs a rank publishes the output's place when the call runs, not at announcement."""
        return NOWHERE

    def read_at(self, input: Any) -> tuple[Location, ...]:
        """Return (): on CPUs a call keeps its input alive until it has ended, so no location needs to be protected."""
        return ()

    def accept(self, submission: Submission) -> None:
        """Accept every submission; raise only if the communicator has failed."""
        self.check()

    def start(self, submission: Submission, number: int, keep: tuple[Any, ...]) -> CpuCall:
        """Queue a call behind its channel's other calls; raise if the communicator failed. See `Transport.start`."""
        self.failure.check()
        if self.early.dropped:
            self.early.collect()
        channel = self._channels[submission.channel]
        if channel.cut is not None and not channel.cut.is_finished:
            raise unfinished(channel.cut.current)
        early = submission.early
        handshake = early is None or early.handshake
        if early is not None:
            early.block.ready = False
        call = CpuCall(channel, submission, number, handshake=handshake, keep=keep)
        if not call.is_finished:
            channel.cut = call
        channel.lanes[COPY].put(call)
        return call

    def check(self) -> None:
        """Raise the error that ended this communicator, if there was one."""
        self.failure.check()

    def record_stream(self, tensor: Any, stream: Any) -> None:
        """Raise Misconfigured: a CPU has no streams."""
        raise Misconfigured("record_stream on a CPU: what uses a tensor there has ended when the tensor dies")

    def memory_pool(self) -> AbstractContextManager[None]:
        """Raise Unsupported: torch has memory pools on GPUs only."""
        raise Unsupported("a memory pool on a CPU: torch has them on GPUs only; calls there copy from their landing")

    def close(self) -> None:
        """Fail the calls that still wait, then end threads and free memory; do nothing in a forked child."""
        if not self.watchdog.in_own_process():
            return
        self.failure.close()
        for channel in self._channels:
            channel.close()
        self.watchdog.close()
        self.memory.close()

    def abort(self) -> None:
        """End the communicator by `close`, which on CPUs waits for no peer."""
        self.close()

    def _early_region(self, num_bytes: int) -> int:
        region = self.memory.create(num_bytes)
        self.watchdog.statuses[self.memory.rank].early_regions[len(self.early.regions)] = region
        return region

    def _release(self, block: EarlyBlock) -> None:
        """Signal the peers that they may write an early-release block, whose last tensor on this rank has died."""
        if block.ready or self.failure.error is not None:
            return
        word = flag_word(Flag("output", "ready", self.memory.rank), self.memory.world_size)
        for peer in range(self.memory.world_size):
            if peer != self.memory.rank:
                self.memory.statuses[peer].early[block.number][word] = 1
        block.ready = True
