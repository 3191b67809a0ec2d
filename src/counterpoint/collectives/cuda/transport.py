"""Run the collectives of one process group on GPUs by copy engines and stream memory operations; the host watches.

Calls are announced and compared in statuses in host memory, as on CPUs; data and flags are in symmetric memory of the
GPUs. A call runs on the caller's current stream, or with `async_op=True` on the channel's own, of high priority.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from counterpoint.collectives.cuda.call import STEPS, CudaContext, CudaWork
from counterpoint.collectives.cuda.driver import Bound, EventPool, Executor, in_context
from counterpoint.collectives.cuda.lower import WORD_BYTES, MemoryOperation, MemoryOperations
from counterpoint.collectives.cuda.order import StreamOrder
from counterpoint.collectives.cuda.queues import LANDING, CallQueue, CudaChannel, MailboxRoom
from counterpoint.collectives.cuda.regions import CudaMemory, FlagLayout, Growth, torch_pool
from counterpoint.collectives.cuda.watch import GRACE_S, Watch
from counterpoint.collectives.host.announce import Announcer
from counterpoint.collectives.host.shared_memory import SharedMemory
from counterpoint.collectives.host.shared_status import MAX_CHUNKS
from counterpoint.collectives.host.watchdog import Failure, PeerWaiter, Watchdog
from counterpoint.collectives.memory.early_release import EarlyBlock, EarlyPool
from counterpoint.collectives.memory.pool import Location, NotReusable, Pool, SymmetricMemory
from counterpoint.collectives.options import CommunicatorOptions
from counterpoint.collectives.program.calls import Call
from counterpoint.collectives.program.messages import SLOTS, Mailbox
from counterpoint.collectives.program.operations import BY_TORCH, has_equal_outputs
from counterpoint.collectives.program.steps import COPY, Flag, Tuning, flag_word
from counterpoint.collectives.program.tuning import best_tuning, chunk_bytes_of, with_link_turns, with_staging_slices
from counterpoint.collectives.submit.submission import NOWHERE, Programs, Submission
from counterpoint.collectives.submit.tensors import tensors_of
from counterpoint.errors import Misconfigured
from counterpoint.machine.profile import Profile


class CudaTransport:
    """Runs all channels of one communicator. All ranks of the group make it together.

    `gpu` is a `Gpu` or a stand-in; `boards` holds the ranks' statuses on the host, with one channel more than
    `options.channels`. `Unsupported` is raised if the driver or GPU lacks a feature.
    """

    def __init__(
        self,
        gpu: Any,
        memory: SymmetricMemory,
        boards: SharedMemory,
        watchdog: Watchdog,
        options: CommunicatorOptions,
        profile: Profile,
    ) -> None:
        self._gpu, self.device, self._rates = gpu, gpu.device, profile.rates
        self.watchdog = watchdog
        self._boards, self._chunk_bytes, self._staging_bytes = boards, options.chunk_bytes, options.staging_bytes
        self.names, self.failure = watchdog.names, Failure(watchdog, prints=True)
        waiter, events = PeerWaiter(watchdog, self.failure), EventPool(gpu.driver)
        order, mailbox = StreamOrder(events, gpu), _mailbox_of(memory, options)
        flags = FlagLayout(memory, options.channels, 0 if mailbox is None else mailbox.slots)
        meeting = Announcer(waiter, options.channels, steps=STEPS)
        self._growth = Growth(gpu, memory, events, meeting, max_bytes=options.max_bytes)
        self.programs = Programs(memory.rank, self)
        self.context = CudaContext(
            gpu=gpu, memory=memory, events=events, order=order, flags=flags, watchdog=watchdog, waiter=waiter,
            failure=self.failure, growth=self._growth, programs=self.programs, options=options,
        )  # fmt: skip
        self._side = Executor(driver=gpu.driver)  # its streams, but those of messages, never wait for a peer
        self._releases = int(self._side.stream())
        self._released: dict[int, Bound] = {}
        reserve = options.reserve_bytes
        self.pool = Pool(
            memory, region_bytes=reserve or 1 << 25, create=partial(self._growth.create, "empty()"), reuse=order
        )
        self.early = EarlyPool(
            memory,
            region_bytes=1 << 25,
            create=partial(self._growth.create, "empty(early_release=True)"),
            release=self._release,
            taken=self._taken,
        )
        self.channels = [CudaChannel(self.context, index) for index in range(options.channels)]
        self.mailbox_channel = None if mailbox is None else options.channels + 1
        self._queues: list[CallQueue] = [*self.channels]
        self._mailbox = None if mailbox is None else MailboxRoom(self.context, self._side, mailbox, self._queues)
        if reserve:
            self.pool.reserve()
        gpu.synchronize()
        self.watch = Watch(self.context, self._queues, self._side)

    @property
    def epoch(self) -> int:
        """Return how many regions were made so far; a new one may lie where an address meant plain memory before."""
        return self._growth.created

    def tuning(self, call: Call, *, early_release: bool) -> Tuning:
        """Return the tuning that is fastest in simulation (`program/clock.py`), or by `chunk_bytes` if that was set.

        Calls with an early release, of varied sizes, or of operations that torch cannot take get one chunk, with one
        arrival signal for each peer. Calls that have no handshake (early release, reductions) push large chunks in
        turns.
        """
        found = with_staging_slices(partial(self._tuned, early_release=early_release), call, self._staging_bytes)
        return with_link_turns(found) if early_release or call.reduces else found

    def _tuned(self, call: Call, *, early_release: bool) -> Tuning:
        varied = call.operation not in BY_TORCH or len({size for row in call.sizes for size in row}) > 2
        if early_release or varied:
            return Tuning(arrivals="together")
        if self._chunk_bytes is None:
            return best_tuning(call, self._rates, max_chunks=MAX_CHUNKS)
        chunk_bytes = chunk_bytes_of(call, self._chunk_bytes, max_chunks=MAX_CHUNKS)
        return Tuning(chunk_bytes=chunk_bytes, arrivals="together")

    def locate(self, tensor: Any) -> Location | None:
        """Return the place of a contiguous tensor in this rank's symmetric memory; None if it lies elsewhere."""
        return self.context.memory.locate(tensor.data_ptr(), tensor.nbytes)

    def place(self, call: Call | None, at: Location | None, num_bytes: int) -> str:
        """Return in words where peers write the output, if all ranks must have the same place for it; else ""."""
        if call is None or not has_equal_outputs(call) or not num_bytes:
            return ""
        return " into the landing" if at is None else f" into region {at.region} + {at.offset}"

    def shown_at(self, at: Location | None, num_bytes: int) -> Location:
        """Return where peers may write an output: at `at`, or in the channel's landing if that is None."""
        if at is not None:
            return at
        return LANDING if num_bytes else NOWHERE

    def read_at(self, input: Any) -> tuple[Location, ...]:
        """Return the places of the input's tensors in this rank's symmetric memory, which streams may read later."""
        found = [self.locate(tensor) for tensor in tensors_of(input)]
        return tuple(at for at in found if at is not None)

    def accept(self, submission: Submission) -> None:
        """Check a new submission before its first start; raise if GPUs cannot run it."""
        self.check()
        lands = submission.message is not None or submission.line == self.context.memory.world_size
        if not lands and submission.output_bytes and submission.at is None:
            raise Misconfigured(
                f"{submission.text}: on a GPU a rank receives into a tensor of empty() only; give it one"
            )

    def start(self, submission: Submission, number: int, keep: tuple[Any, ...]) -> CudaWork | None:
        """Queue a call, or raise why that is impossible; return its work with `async_op`, else None."""
        self.failure.check()
        if self.early.dropped:
            self.early.collect()
        queue = self.channels[submission.channel] if submission.message is None else self._line(submission)
        if self._gpu.is_current():
            work = queue.start(submission, number, keep)
        else:
            with self._gpu.current():
                work = queue.start(submission, number, keep)
        if work.began.capture:
            self.watch.captured = True
        return work if submission.async_op else None

    @in_context
    def _line(self, submission: Submission) -> CallQueue:
        assert self._mailbox is not None
        return self._mailbox.line(submission.channel, submission.line)

    def check(self) -> None:
        """Raise the error that ended this communicator, if there was one."""
        self.context.failure.check()

    @in_context
    def record_stream(self, tensor: Any, stream: Any) -> None:
        """Record that `stream` uses a tensor of `empty`, so that work queued there delays the reuse of its memory."""
        at = self.locate(tensor)
        if at is None:
            raise Misconfigured("record_stream of a tensor that is not from empty(): use torch's Tensor.record_stream")
        gpu, context = self.context.gpu, self.context
        handle = gpu.current_stream() if stream is None else int(stream.cuda_stream)
        context.order.used(at, handle, gpu.capture_of(context.events.handles[handle]))

    @contextmanager
    def memory_pool(self) -> Iterator[None]:
        """Put CUDA tensors made by this thread in the `with` block into symmetric memory; ranks leave it together."""
        memory = self.context.memory
        assert isinstance(memory, CudaMemory), "stand-ins have no pools of torch"
        with torch_pool(memory, self.context.growth):
            yield

    def close(self) -> None:
        """Wait until the calls under way end or fail, then free streams and memory. Do nothing in a forked child."""
        context = self.context
        if not context.watchdog.in_own_process():
            return
        drained = self.watch.drain()
        context.failure.close()
        self.watch.close()
        if drained:  # else streams are stuck, and destroying anything would wait for them
            with context.gpu.current():
                self._give_back()
        context.watchdog.close()
        self._boards.close()

    def abort(self) -> None:
        """Fail the calls that do not end within 0.25 s, then close: see `Transport.abort`."""
        if self.context.watchdog.in_own_process():
            self.watch.drain(GRACE_S)
            self.context.failure.close()
            self.close()

    def _give_back(self) -> None:
        for queue in self._queues:
            queue.close()
        for bound in self._released.values():
            bound.close()
        self._side.close()
        self.context.events.close()
        self.context.memory.close()

    @in_context
    def _taken(self, block: EarlyBlock) -> None:
        """Let the current stream wait for this rank's work on the previous tensor in the block."""
        stream = self.context.gpu.current_stream()
        if self.context.gpu.capture_of(self.context.events.handles[stream]):
            raise Misconfigured("empty(early_release=True) in a capture: use empty(), whose memory the graph keeps")
        self.context.order.taken_on(stream, 0, block.at, block.uses or ())

    @in_context
    def _release(self, block: EarlyBlock) -> NotReusable | None:
        """Signal the peers, after all work queued on a dead tensor, that they may write its block again.

        This runs in a thread that uses the communicator, never in a finalizer.

        Returns:
            None if the block is free, else why it is not.
        """
        context = self.context
        if context.failure.error is not None:
            return None
        uses = context.order.freed(block.at, block.num_bytes)
        if isinstance(uses, str):
            return uses
        block.uses = uses
        if block.ready:
            return None
        for point in uses:
            context.events.wait(self._releases, point)
        bound = self._released.get(block.number)
        if bound is None:
            bound = self._released[block.number] = self._side.bind([self._signals(block)], self._releases)
        bound()
        block.ready = True
        return None

    def _signals(self, block: EarlyBlock) -> MemoryOperations:
        memory = self.context.memory
        word = flag_word(Flag("output", "ready", memory.rank), memory.world_size)
        at = self.context.flags.of_block(block.number) + WORD_BYTES * word
        peers = [memory.address(peer, at, WORD_BYTES) for peer in range(memory.world_size) if peer != memory.rank]
        return MemoryOperations(tuple(MemoryOperation("write", address, 1) for address in peers), COPY)


def _mailbox_of(memory: SymmetricMemory, options: CommunicatorOptions) -> Mailbox | None:
    if options.mailbox_bytes is None or memory.world_size == 1:
        return None
    return Mailbox(world_size=memory.world_size, slot_bytes=options.mailbox_bytes // SLOTS)
