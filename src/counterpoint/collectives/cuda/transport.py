"""Run one process group's collectives on GPUs by copy engines and stream memory operations; a thread watches them.

Calls are announced and compared in statuses in host memory, as on CPUs; data and flags are in symmetric memory of the
GPUs. A call runs on the caller's current stream, or with `async_op=True` on the channel's own, of high priority.

A wait on a GPU has no timeout. So a host thread (`Watch`) queries the events of each call for its begin and end, shows
them in the status, and looks for the reason if a call has begun and does not end. A call that has not begun waits for
its own stream, which is no error of a peer. After a failure the thread sets every flag that is waited for, again and
again until all streams have reached their ends, so that the process can exit; their outputs are invalid from then on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from counterpoint.collectives.cuda.call import STEPS, CudaContext, CudaWork
from counterpoint.collectives.cuda.driver import Bound, EventPool, Executor, in_context
from counterpoint.collectives.cuda.lower import WORD_BYTES, MemoryOperation, MemoryOperations
from counterpoint.collectives.cuda.memory_reuse import StreamOrder
from counterpoint.collectives.cuda.queues import LANDING, CallQueue, CudaChannel, MailboxRoom
from counterpoint.collectives.cuda.regions import CudaMemory, FlagLayout, Growth, torch_pool
from counterpoint.collectives.host.announce import Announcer
from counterpoint.collectives.host.shared_memory import MAX_CHUNKS, SharedMemory
from counterpoint.collectives.host.watchdog import CurrentCall, Failure, PeerWaiter, Watchdog
from counterpoint.collectives.memory import EarlyBlock, EarlyPool, Location, NotReusable, Pool, SymmetricMemory
from counterpoint.collectives.options import CommunicatorOptions
from counterpoint.collectives.program.calls import Call
from counterpoint.collectives.program.messages import SLOTS, Mailbox
from counterpoint.collectives.program.operations import BY_TORCH, has_equal_outputs
from counterpoint.collectives.program.steps import COPY, Flag, Tuning, flag_word
from counterpoint.collectives.program.tuning import best_tuning, chunk_bytes_of, with_link_turns, with_staging_slices
from counterpoint.collectives.submit.submission import NOWHERE, Programs, Submission
from counterpoint.collectives.submit.tensors import tensors_of
from counterpoint.errors import CounterpointError, Misconfigured, PeerTimeout
from counterpoint.machine.profile import Profile

GRACE_S = 0.25  # seconds after a call's begin without checks: a peer that died or left may have done its part
_LOOK_S, _CLOSING_S = 0.05, 0.002  # seconds between looks, normally and while closing
_MOST_S = 10.0  # seconds that released streams may take to reach their ends


class Watch:
    """Runs the thread that watches the calls of one communicator.

    Each of `queues` lists the calls that it has issued; this removes ended calls. `side` sets the
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
        """Wait up to `timeout_s`, or 10 s after a failure, until no call is under way; return False if one still is."""
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
        """Return whether the first call of a channel has ended, and update the call's step in the status."""
        step = STEPS if call.is_completed() else int(self._events.passed(call.began))
        if step and call.begun_s is None:
            call.begun_s = time.monotonic()
        if call.record.number == call.number:
            call.record.step = step
        return step == STEPS

    def _judge_all(self, first: list[CudaWork]) -> None:
        """Check the first call of each channel, for which later calls wait; fail the communicator if one is stuck."""
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
        """Return why `call` will not end, as an error; None while the call may still end."""
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
        """Set the flags that the calls `going` wait for; if user graphs hold calls, all but early-release flags."""
        for call in going:
            self._side.let_go(call.prepared.calls)
        if self.captured:
            flags, memory, driver = self._context.flags, self._context.memory, self._context.gpu.driver
            mine = memory.address(memory.rank, Location(flags.region, 0), flags.captured_bytes)
            count = flags.captured_bytes // WORD_BYTES
            self._side.call("cuMemsetD32Async", driver.CUdeviceptr(mine), 1, count, self._side.side_stream)


class CudaTransport:
    """Runs all channels of one communicator on GPUs; all ranks of the group make it together.

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
        self.programs = Programs(memory.rank, self.tuning)
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
        """Return how many regions were made so far; a new one may cover addresses that were plain memory before."""
        return self._growth.created

    def tuning(self, call: Call, *, early_release: bool) -> Tuning:
        """Return the tuning that is fastest in simulation, or one with chunks of `options.chunk_bytes` if that is set.

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
        """Return the `Location` of a contiguous tensor in this rank's symmetric memory; None if it lies elsewhere."""
        return self.context.memory.locate(tensor.data_ptr(), tensor.nbytes)

    def place(self, call: Call | None, at: Location | None, num_bytes: int) -> str:
        """Return text that says where peers write the output, if the place must be equal on all ranks; else ""."""
        if call is None or not has_equal_outputs(call) or not num_bytes:
            return ""
        return " into the landing" if at is None else f" into region {at.region} + {at.offset}"

    def shown_at(self, at: Location | None, num_bytes: int) -> Location:
        """Return where peers may write an output: at `at`, or in the channel's landing buffer if `at` is None."""
        if at is not None:
            return at
        return LANDING if num_bytes else NOWHERE

    def read_at(self, input: Any) -> tuple[Location, ...]:
        """Return where the input's tensors lie in this rank's symmetric memory, as streams may read them later."""
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
        """Queue a call; return its `Work` with `async_op`, else None; raise if the call cannot be queued."""
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
        """Record that `stream` uses a tensor from `empty`: reuse of its memory then waits for the stream's work."""
        at = self.locate(tensor)
        if at is None:
            raise Misconfigured("record_stream of a tensor that is not from empty(): use torch's Tensor.record_stream")
        gpu, context = self.context.gpu, self.context
        handle = gpu.current_stream() if stream is None else int(stream.cuda_stream)
        context.order.used(at, handle, gpu.capture_of(context.events.handles[handle]))

    def memory_pool(self) -> AbstractContextManager[None]:
        """Put CUDA tensors made by this thread in the `with` block into symmetric memory; all ranks end the block."""
        memory = self.context.memory
        assert isinstance(memory, CudaMemory), "stand-ins have no pools of torch"
        return torch_pool(memory, self.context.growth)

    def close(self) -> None:
        """Wait until the calls under way end or fail, then free streams and memory; do nothing in a forked child."""
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
        """Make the current stream wait for this rank's work on the tensor that was in `block` before."""
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
