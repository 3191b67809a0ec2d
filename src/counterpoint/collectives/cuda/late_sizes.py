"""Run an all_to_all whose sizes a GPU works out: a thread issues the copies when it knows them, nobody else waits.

The caller's stream copies the table of blocks to pinned memory, which needs no SM, and goes on to whatever comes next:
`wait` lets it wait for the arrivals, also before the pushes were issued. `PushThread` sees that the table is there and
issues one copy of the exact size for each peer, and its arrival signal, on a stream that nothing else uses.

*Dangers.* CUDA may put several streams on one hardware queue, in which the caller's wait would hold up the pushes that
the peers wait for. So the stream of the pushes has a priority of its own, as those of messages have (`mailbox.py`):
CUDA keeps streams of different priority on different queues. Where there are too few priorities for that, such calls
are refused. Two Python threads share the interpreter's lock: a push may begin some 20 to 100 us late when the other one
is busy. In a graph capture there is no host that could issue anything, so that these calls are refused there.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from queue import Empty, SimpleQueue
from typing import Any

from counterpoint.collectives.cuda.call import CudaWork, Prepared
from counterpoint.collectives.cuda.channel import CallQueue
from counterpoint.collectives.cuda.context import CudaContext
from counterpoint.collectives.cuda.driver import Bound, Executor
from counterpoint.collectives.cuda.events import StreamPoint
from counterpoint.collectives.cuda.lower import WORD_BYTES, Addresses, DriverCall, lower
from counterpoint.collectives.host.status import RankStatus
from counterpoint.collectives.memory.pool import Location
from counterpoint.collectives.program.late_sizes import FIELDS, PushedBlock
from counterpoint.collectives.program.partitions import partitions
from counterpoint.collectives.program.steps import Batch, Program, merge_batches
from counterpoint.collectives.submit.submission import Submission, used_twice
from counterpoint.errors import CounterpointError, Misconfigured, Unsupported

_PUSHES = 3  # levels of priority below the highest: not those of calls, nor of messages
_SPINS, _PAUSE_S, _IDLE_S = 200, 2e-5, 2e-4
_NUMBER_BYTES = 8  # of a number in the table
_CAPTURED = (
    " in a graph capture: a replay has no host that could issue copies of new sizes; use calls of fixed sizes there, "
    "such as all_gather, or an all_to_all of even blocks"
)


class PreparedPushes(Prepared):
    """Holds the driver calls of a call with late sizes, except its copies, which `push` makes and issues."""

    def __init__(self, program: Program, addresses: Addresses, executor: Executor, stream: int) -> None:
        cut = partitions(program, early_release=True)
        super().__init__(program, lower(program, addresses, cut.steps), executor, None, graphs=False)
        receives = merge_batches(tuple(step for steps in cut.receives for step in steps))
        self.receives = Prepared(program, lower(program, addresses, receives), executor, None, graphs=False)
        self._driver, self._stream = executor.driver, executor.driver.CUstream(stream)
        self._begin = executor.bind(lower(program, addresses, cut.begin), stream)
        self._signals: list[tuple[int, int, Bound]] = []
        for one, steps in zip(cut.sent, cut.sends, strict=True):
            signal: tuple[DriverCall, ...] = lower(program, addresses, [s for s in steps if isinstance(s, Batch)])
            self._signals.append((one.peer, addresses.output[one.peer], executor.bind(signal, stream)))

    def push(self, blocks: tuple[PushedBlock, ...], input: int, row_bytes: int) -> None:
        """Issue the copies of these blocks, each when its receiver is ready, and the signals of their arrival.

        Raises:
            CounterpointError: the driver refused.
        """
        driver = self._driver
        self._begin()
        for peer, output, signal in self._signals:
            block = blocks[peer]
            if block.rows:
                target = driver.CUdeviceptr(output + block.target * row_bytes)
                source = driver.CUdeviceptr(input + block.source * row_bytes)
                (error,) = driver.cuMemcpyDtoDAsync(target, source, block.rows * row_bytes, self._stream)
                if error:
                    raise CounterpointError(
                        f"cuMemcpyDtoDAsync failed: {getattr(error, 'name', error)}; a call was issued in part, so "
                        "that this group of ranks cannot be used any more"
                    )
            signal()

    def close(self) -> None:
        """Free its events; only when the last issued calls have run."""
        self.receives.close()
        self._begin.close()
        for _, _, signal in self._signals:
            signal.close()


class LateCudaWork(CudaWork):
    """Represents a call with late sizes; see `Work`.

    It has ended when this rank's pushes have ended and, once it was waited for, its arrivals have come. `numbers` is
    the table in pinned memory, which holds the blocks when the point `began` has passed.
    """

    pushed: StreamPoint | None = None  # end of its pushes
    taken: StreamPoint | None = None  # end of the first wait for its arrivals
    given_up = False  # the communicator failed before it was pushed

    def __init__(
        self,
        context: CudaContext,
        submission: Submission,
        number: int,
        record: RankStatus,
        prepared: PreparedPushes,
        began: StreamPoint,
        numbers: Any,
        keep: tuple[Any, ...],
    ) -> None:
        super().__init__(context, submission, number, record, prepared, began, began, keep)
        self.sent: Any = keep[0]  # the input, until its pushes have ended
        self.numbers = numbers
        self.pushes = prepared

    @property
    def blocks(self) -> tuple[PushedBlock, ...]:
        """Return what this rank pushes, when the table is there; raise if it goes beyond the tensors."""
        late = self._submission.late
        assert late is not None
        return late.blocks(self.numbers.tolist())

    def push(self, stream: int) -> None:
        """Issue the pushes on a stream, and record their end."""
        late = self._submission.late
        assert late is not None
        self.pushes.push(self.blocks, self._submission.input, late.row_bytes)
        self.pushed = self.pushes.last = self._context.events.record(stream)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Let the current stream wait for the arrivals; the input may be dropped at once, but not overwritten.

        Returns:
            True.

        Raises:
            Misconfigured: the current stream is in a capture.
        """
        context = self._context
        context.failure.check()
        stream, events = context.gpu.current_stream(), context.events
        if context.gpu.capture_of(events.handle(stream)):
            raise Misconfigured(f"{self.current}{_CAPTURED}")
        if self.taken is None:
            self.pushes.receives.start(stream, events, 0)
            if self._submission.at is not None:
                context.order.used(self._submission.at, stream)
            self.taken = self.ended = events.record(stream)
        return super().wait(timeout_s)

    def is_completed(self) -> bool:
        """Return whether the call has ended, with or without an error."""
        events = self._context.events
        taken = self.taken is None or events.passed(self.taken)
        return taken and (self.given_up or (self.pushed is not None and events.passed(self.pushed)))


class PushThread:
    """Issues the pushes of a communicator's calls in their order, each as soon as its table is there."""

    def __init__(self, context: CudaContext, stream: int) -> None:
        self._context, self.stream = context, stream
        self._queue: SimpleQueue[LateCudaWork | None] = SimpleQueue()
        self._issued: deque[LateCudaWork] = deque()  # whose pushes may not have ended
        self._free: deque[Any] = deque()
        self._stopped = False
        self._thread = threading.Thread(target=self._serve, name="counterpoint pushes", daemon=True)
        self._thread.start()

    def numbers(self) -> Any:
        """Return pinned memory for a table."""
        try:
            return self._free.popleft()
        except IndexError:
            return self._context.gpu.pinned_numbers(FIELDS * self._context.memory.world_size)

    def put(self, work: LateCudaWork) -> None:
        """Push the blocks of a call behind those that were put before."""
        self._queue.put(work)

    def close(self) -> None:
        """End the thread; calls that were not pushed never are."""
        self._stopped = True
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _serve(self) -> None:
        self._context.gpu.enter_thread()
        while not self._stopped:
            try:
                work = self._queue.get(timeout=_IDLE_S if self._issued else None)
            except Empty:
                work = None
            if work is not None:
                self._push(work)
            del work
            self._let_die()

    def _push(self, work: LateCudaWork) -> None:
        failure = self._context.failure
        try:
            if self._is_there(work):
                work.push(self.stream)
        except BaseException as error:
            failure.set(error)
        if work.pushed is None:
            work.given_up, work.sent = True, None
            return
        self._free.append(work.numbers)
        self._issued.append(work)

    def _is_there(self, work: LateCudaWork) -> bool:
        """Wait until the table of a call is there; return False if the communicator ended before."""
        passed, failure = self._context.events.passed, self._context.failure
        spins = 0
        while not passed(work.began):
            if failure.error is not None or self._stopped:
                return False
            time.sleep(0 if spins < _SPINS else _PAUSE_S)
            spins += 1
        return failure.error is None

    def _let_die(self) -> None:
        """Drop the inputs whose pushes have ended: torch may reuse their memory at once."""
        issued = self._issued
        while issued:
            pushed = issued[0].pushed
            assert pushed is not None
            if not self._context.events.passed(pushed):
                return
            issued.popleft().sent = None


def push_stream(executor: Executor) -> int:
    """Return a new stream for pushes; raise `Unsupported` if the device has too few priorities for one of its own."""
    lowest, highest = executor.call("cuCtxGetStreamPriorityRange")
    if highest + _PUSHES >= lowest:
        raise Unsupported(
            f"all_to_all_vdev: the device has streams of priorities {highest} to {lowest}, and the pushes need one "
            "that no other stream has; use all_to_all, whose sizes are known"
        )
    return int(executor.stream(below_highest=_PUSHES))


class LateQueue(CallQueue):
    """Starts the calls with late sizes of one channel, which other calls of it do not wait for."""

    def __init__(self, context: CudaContext, executor: Executor, channel: int, thread: PushThread) -> None:
        super().__init__(context, executor, thread.stream, channel)
        self._thread = thread
        self._made: dict[tuple[int, Location, int], PreparedPushes] = {}  # by program, output and block
        self._latest: dict[int, LateCudaWork] = {}  # by early-release block

    def close(self) -> None:
        """Free events; only when all calls have run."""
        super().close()
        for prepared in self._made.values():
            prepared.close()

    def start(self, submission: Submission, number: int, keep: tuple[Any, ...]) -> tuple[CudaWork, int]:
        """Queue a call.

        Returns:
            Its work, and 0.

        Raises:
            Misconfigured: the stream is in a capture, or peers may not write the output, as a call has used it before.
        """
        context, current = self.context, submission.current(number)
        stream, early, late = context.gpu.current_stream(), submission.early, submission.late
        assert early is not None
        assert late is not None
        if context.gpu.capture_of(context.events.handle(stream)):
            raise Misconfigured(f"{current}{_CAPTURED}")
        before = self._latest.get(early.block.number)
        if before is not None and before.taken is None:
            raise Misconfigured(
                f"{current} into the memory of {before.current}, which was not waited for: do that first"
            )
        if early.handshake:
            raise Misconfigured(used_twice(current))
        try:
            record = self._announced(submission, number)
            prepared = self._pushes(submission)
            early.block.ready = False
            numbers = self._thread.numbers()
            self._copy_table(numbers, late.table, stream)
            began = context.events.record(stream)
        except BaseException as error:
            first = context.failure.set(error)
            if first is error:
                raise
            raise first from error
        work = LateCudaWork(context, submission, number, record, prepared, began, numbers, keep)
        self._latest[early.block.number] = work
        self.under_way.append(work)
        self._thread.put(work)
        return work, 0

    def _copy_table(self, numbers: Any, table: int, stream: int) -> None:
        driver, handle = self.context.gpu.driver, self.context.events.handle(stream)
        num_bytes = numbers.numel() * _NUMBER_BYTES
        (error,) = driver.cuMemcpyDtoHAsync(numbers.data_ptr(), driver.CUdeviceptr(table), num_bytes, handle)
        if error:
            raise CounterpointError(
                f"cuMemcpyDtoHAsync failed: {error}; an earlier call on this device may have failed"
            )

    def _pushes(self, submission: Submission) -> PreparedPushes:
        program, early, at = submission.program, submission.early, submission.at
        assert program is not None
        assert early is not None
        assert at is not None
        key = id(program), at, early.block.number
        found = self._made.get(key)
        if found is None or found.program is not program:
            found = self._made[key] = PreparedPushes(program, self._addresses(submission), self.executor, self.stream)
        return found

    def _addresses(self, submission: Submission) -> Addresses:
        memory, early, at = self.context.memory, submission.early, submission.at
        assert early is not None
        assert at is not None
        flags = self.context.flags.of_block(early.block.number)
        ranks = range(memory.world_size)
        return Addresses(
            input=submission.input,
            output=tuple(memory.address(rank, at, submission.output_bytes) for rank in ranks),
            output_flags=tuple(memory.address(rank, flags, WORD_BYTES) for rank in ranks),
        )
