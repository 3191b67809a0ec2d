"""Collectives of one process group on GPUs: copy engines and stream memory operations, watched from the host.

Calls are shown and compared on boards in the memory of the host, as on CPUs; data and flags are in symmetric memory of
the GPUs. A call runs on the caller's current stream, or with `async_op=True` on the channel's own, of high priority.
"""

from __future__ import annotations

import sys
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from counterpoint.collectives.announce import Announcer, Notice
from counterpoint.collectives.board import MAX_CHUNKS
from counterpoint.collectives.cuda import Bound, Executor
from counterpoint.collectives.cuda_call import CudaCall
from counterpoint.collectives.cuda_channel import PLACED, CudaChannel
from counterpoint.collectives.cuda_moments import Moments
from counterpoint.collectives.cuda_order import StreamOrder
from counterpoint.collectives.cuda_watch import Watch
from counterpoint.collectives.cuda_words import Words
from counterpoint.collectives.cuda_work import CudaWork
from counterpoint.collectives.early import EarlyBlock, EarlyPool
from counterpoint.collectives.fallback import CROSSOVER_BYTES
from counterpoint.collectives.lower import MemoryOperation, MemoryOperations
from counterpoint.collectives.patience import Patience
from counterpoint.collectives.program import ALIGNMENT, COPY, Call, Flag, Tuning, flag_word
from counterpoint.collectives.shared_memory import SharedMemory
from counterpoint.collectives.symmetric import Location, Pool, SymmetricMemory
from counterpoint.collectives.transport import Job, Start
from counterpoint.collectives.tuning import best_tuning, in_slices, in_turns
from counterpoint.collectives.watchdog import Watchdog
from counterpoint.errors import Misconfigured, Unsupported

if TYPE_CHECKING:
    from counterpoint.collectives.opening import Options

__all__ = ["CudaTransport"]

_WORD_BYTES = 4


class CudaTransport:
    """All channels of one communicator. All ranks of the group make it together.

    Args:
        gpu: of this rank.
        memory: symmetric memory of the group.
        hosts: boards on the host, joined by all ranks, with one channel more than `options.channels`.
        watchdog: of the same ranks.
        options: what was asked for.

    Raises:
        Unsupported: the driver or GPU lacks something.
    """

    def __init__(
        self, gpu: Any, memory: SymmetricMemory, hosts: SharedMemory, watchdog: Watchdog, options: Options
    ) -> None:
        self.gpu, self.memory, self.hosts, self.watchdog = gpu, memory, hosts, watchdog
        self.device = gpu.device
        self.graphs, self.sum_sms = options.graphs is not False, options.sum_sms
        self.failure: BaseException | None = None
        self._failing = threading.Lock()
        self._chunk_bytes, self._staging_bytes = options.chunk_bytes, options.staging_bytes
        self._most_bytes, self._bytes = options.max_bytes, 0
        self.patience = Patience(watchdog, lambda: self.failure)
        self.moments = Moments(gpu.driver)
        self.order = StreamOrder(self.moments, gpu)
        self.words = Words(memory, options.channels)
        self._side = Executor(driver=gpu.driver)  # its streams never wait for a peer
        self._releases = int(self._side.stream())
        self._released: dict[int, Bound] = {}
        self._grower, self._growths, self.epoch = Announcer(self.patience, options.channels), 0, 0
        reserve = options.reserve_bytes
        self.pool = Pool(
            memory, region_bytes=reserve or 1 << 25, create=partial(self.grow, "empty()"), order=self.order
        )
        self.early = EarlyPool(
            memory,
            region_bytes=1 << 25,
            create=partial(self.grow, "empty(early_release=True)"),
            release=self._release,
            taken=self._taken,
        )
        self.channels = [CudaChannel(self, index) for index in range(options.channels)]
        if reserve:
            self.pool.reserve()
        gpu.synchronize()
        self.watch = Watch(
            watchdog,
            self.moments,
            [channel.under_way for channel in self.channels],
            enter_thread=gpu.enter_thread,
            failure=lambda: self.failure,
            fail=self.fail,
            let_go=self._let_go,
        )

    def tuning(self, call: Call, *, early_release: bool) -> Tuning:
        """The fastest on the clock of simulate.py, for calls whose sizes tend to come again; one signal for each peer
        for all others. With an early release every rank has to send to every other, which is the direct way. Where no
        handshake keeps the ranks in step, large chunks are pushed in turns."""
        found = in_slices(partial(self._tuned, early_release=early_release), call, self._staging_bytes)
        return in_turns(found) if early_release or call.reduces else found

    def _tuned(self, call: Call, *, early_release: bool) -> Tuning:
        varied = call.operation not in CROSSOVER_BYTES or len({size for row in call.sizes for size in row}) > 2
        if early_release or varied:
            return Tuning(arrivals="together")
        if self._chunk_bytes is None:
            return best_tuning(call, max_chunks=MAX_CHUNKS)
        units = -(-max(map(max, call.sizes)) // (MAX_CHUNKS * ALIGNMENT))
        return Tuning(chunk_bytes=max(self._chunk_bytes, units * ALIGNMENT), arrivals="together")

    def locate(self, tensor: Any) -> Location | None:
        """Where a contiguous tensor lies in own symmetric memory; None if it does not."""
        return self.memory.locate(tensor.data_ptr(), tensor.nbytes)

    def place(self, call: Call | None, at: Location | None, num_bytes: int) -> str:
        """Where peers write, of calls that have equal outputs on all ranks: there it has to be the same place."""
        if call is None or call.operation not in PLACED or not num_bytes:
            return ""
        return " into the landing" if at is None else f" into region {at.region} + {at.offset}"

    def starter(self, job: Job) -> Start:
        """What starts the job.

        Raises:
            Misconfigured: it cannot be done.
            CounterpointError: this communicator has failed, and how.
        """
        self.check()
        return CudaCall(self, self.channels[job.channel], job).start

    def check(self) -> None:
        """Raises what ended this communicator, if something did."""
        if self.failure is not None:
            raise self.failure.with_traceback(None)

    def record_stream(self, tensor: Any, stream: Any) -> None:
        """What is queued on `stream` until `tensor` dies has to end before its memory is used again.

        Raises:
            Misconfigured: a tensor that is not from `empty`.
        """
        at = self.locate(tensor)
        if at is None:
            raise Misconfigured("record_stream of a tensor that is not from empty(): use torch's Tensor.record_stream")
        handle = self.gpu.current_stream() if stream is None else int(stream.cuda_stream)
        self.order.used(at, handle, self.gpu.capture_of(self.moments.handle(handle)))

    def grow(self, what: str, num_bytes: int) -> int:
        """A new region, made by all ranks together: they meet first, so that one that does not come is named.

        Raises:
            Misconfigured: in a capture, or another rank wants something else.
            Unsupported: more than `max_bytes`, or than there is.
            PeerTimeout: a rank does not come.
        """
        if self.gpu.capture_of(self.moments.handle(self.gpu.current_stream())):
            raise Misconfigured(f"{what}: {num_bytes} bytes more cannot be made in a capture; make them before it")
        if self._most_bytes is not None and self._bytes + num_bytes > self._most_bytes:
            raise Unsupported(
                f"{what}: {num_bytes} bytes of symmetric memory, with {self._bytes} in use; allowed are "
                f"{self._most_bytes}: drop tensors that are no longer used, or give a larger max_bytes"
            )
        self._growths += 1
        channel, line = len(self.watchdog.boards[0].channels) - 1, self.memory.world_size
        text = f"growing {what} by {num_bytes} bytes"
        notice = Notice(text, channel, line)
        record = self._grower.announce(notice, self._growths)
        self._grower.met(notice, self._growths)
        region = self.memory.create(num_bytes)
        self.epoch += 1
        self._bytes += num_bytes
        record.step = record.steps
        return region

    def fail(self, error: BaseException) -> BaseException:
        """Ends this communicator: tells the peers and the user; the watch lets go what is under way. The first error
        counts, and is returned."""
        with self._failing:
            if self.failure is None:
                self.failure = error
                self.watchdog.give_up(error)
                print(f"counterpoint: rank {self.memory.rank}: {error}", file=sys.stderr, flush=True)
            return self.failure

    def close(self) -> None:
        """Waits for what is under way, which ends or fails; then gives everything back."""
        drained = self.watch.drain()
        with self._failing:
            if self.failure is None:
                self.watchdog.leave()
                self.failure = Misconfigured("this communicator was closed; make a new one")
        self.watch.close()
        if drained:  # else streams are stuck, and to destroy anything would wait for them
            with self.gpu.current():
                self._give_back()
        self.watchdog.close()
        self.hosts.close()

    def _give_back(self) -> None:
        for channel in self.channels:
            channel.close()
        for bound in self._released.values():
            bound.close()
        self._side.close()
        self.moments.close()
        self.memory.close()

    def _taken(self, block: EarlyBlock) -> None:
        """The current stream waits for what its last tensor was used for here."""
        stream = self.gpu.current_stream()
        if self.gpu.capture_of(self.moments.handle(stream)):
            raise Misconfigured("empty(early_release=True) in a capture: use empty(), whose memory the graph keeps")
        self.order.taken(block.at, block.uses or ())

    def _release(self, block: EarlyBlock) -> bool:
        """Its tensor has died: behind everything that was queued with it, the peers are told. Runs in a thread that
        uses the communicator, never in a finalizer. Not while one of its streams is in a capture."""
        if self.failure is not None:
            return True
        uses = self.order.freed(block.at, block.num_bytes)
        if uses is None:
            return False
        block.uses = uses
        if block.ready:
            return True
        for moment in uses:
            self.moments.wait(self._releases, moment)
        bound = self._released.get(block.number)
        if bound is None:
            bound = self._released[block.number] = self._side.bind([self._signals(block)], self._releases)
        bound()
        block.ready = True
        return True

    def _signals(self, block: EarlyBlock) -> MemoryOperations:
        rank, ranks = self.memory.rank, range(self.memory.world_size)
        word = flag_word(Flag("output", "ready", rank), self.memory.world_size)
        at = self.words.of_block(block.number) + _WORD_BYTES * word
        peers = [self.memory.address(peer, at, _WORD_BYTES) for peer in ranks if peer != rank]
        return MemoryOperations(tuple(MemoryOperation("write", address, 1) for address in peers), COPY)

    def _let_go(self, going: list[CudaWork]) -> None:
        """Sets the words that these calls wait for; if there are graphs, those of all channels."""
        for call in going:
            self._side.let_go(call.calls)
        if self.watch.captured:
            mine = self.memory.address(self.memory.rank, Location(self.words.region, 0), self.words.channels_bytes)
            driver, count = self.gpu.driver, self.words.channels_bytes // _WORD_BYTES
            self._side.call("cuMemsetD32Async", driver.CUdeviceptr(mine), 1, count, self._side.side_stream)
