"""Issue a call in partitions on a GPU: pushes on the channel's stream, waits for arrivals on the caller's.

The waits take no SM: they are stream memory operations on the stream that reads the rows, in one batch for all that are
asked for together. A partition leaves when the stream that wrote it has come to the moment of `ready`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from counterpoint.collectives.cuda.call import NEVER, CudaWork, Prepared
from counterpoint.collectives.cuda.context import CudaContext
from counterpoint.collectives.cuda.device import in_context
from counterpoint.collectives.cuda.driver import Executor
from counterpoint.collectives.cuda.events import EventPool, StreamPoint
from counterpoint.collectives.cuda.lower import WORD_BYTES, DriverCall, MemoryOperation, MemoryOperations
from counterpoint.collectives.host.status import RankStatus
from counterpoint.collectives.program.partitions import BlockPartition, Partitions
from counterpoint.collectives.program.steps import COPY, Program, Step, merge_batches
from counterpoint.collectives.submit.submission import Submission


class PreparedPartitions(Prepared):
    """Holds the driver calls of a call in partitions: those of its start, and of partitions that go together.

    With `supplied` the start pushes everything.
    """

    stream = 0  # on which it was started last

    def __init__(
        self,
        program: Program,
        cut: Partitions,
        lowered: Callable[[Sequence[Step]], tuple[DriverCall, ...]],
        executor: Executor,
        *,
        supplied: bool,
        graphs: bool,
    ) -> None:
        super().__init__(program, lowered(cut.steps), executor, None, graphs=False)
        self.cut, self._lowered = cut, lowered
        self._parts: dict[object, Prepared] = {}
        pushes = [step for steps in cut.sends for step in steps] if supplied else []
        self._first = Prepared(program, lowered([*cut.begin, *pushes]), executor, None, graphs=graphs and supplied)
        self.sends = () if supplied else cut.sends

    def start(self, stream: int, events: EventPool, capture: int) -> None:
        """Issue the start of the call; see `Prepared.start`."""
        self.stream = stream
        self._first.start(stream, events, capture)

    def send(self, first: int, end: int) -> Prepared:
        """Return the call that pushes the partitions from `first` to before `end`, made once."""
        return self._parts.get(("send", first, end)) or self._made(("send", first, end), self.sends[first:end])

    def receive(self, first: int, end: int) -> Prepared:
        """Return the call that waits for the partitions from `first` to before `end`, made once."""
        key = "receive", first, end
        return self._parts.get(key) or self._made(key, self.cut.receives[first:end])

    def gate(self, operations: tuple[MemoryOperation, ...]) -> Prepared:
        """Return the call that does these stream memory operations, made once."""
        found = self._parts.get(operations)
        if found is None:
            calls = (MemoryOperations(operations, COPY),)
            found = self._parts[operations] = Prepared(self.program, calls, self._executor, None, graphs=False)
        return found

    def word(self, partition: int) -> int:
        """Return the address of the word that the arrival of a partition sets."""
        (call,) = self._lowered(self.cut.receives[partition])
        assert isinstance(call, MemoryOperations)
        return call.operations[0].address

    def _made(self, key: object, parts: Sequence[tuple[Step, ...]]) -> Prepared:
        steps = merge_batches(tuple(step for steps in parts for step in steps))
        found = self._parts[key] = Prepared(self.program, self._lowered(steps), self._executor, None, graphs=False)
        return found

    def close(self) -> None:
        """Free graphs and events; only when the last issued calls have run."""
        for one in (self._first, *self._parts.values()):
            one.close()


class PartitionedCudaWork(CudaWork):
    """Represents a call in partitions; see `PartitionedWork`. It has ended after `finish`, in stream order."""

    is_finished = False
    _left = 0  # partitions that were let leave
    _come = 0  # partitions that a stream waits for

    def __init__(
        self,
        context: CudaContext,
        submission: Submission,
        number: int,
        record: RankStatus,
        prepared: PreparedPartitions,
        began: StreamPoint,
        ended: StreamPoint,
        keep: tuple[Any, ...],
    ) -> None:
        super().__init__(context, submission, number, record, prepared, began, ended, keep)
        self._cut, self._stream = prepared, prepared.stream  # the channel's own, of all but the waits
        self.sent: tuple[BlockPartition, ...] = prepared.cut.sent
        self.received: tuple[BlockPartition, ...] = prepared.cut.received

    @in_context
    def ready(self, count: int) -> None:
        """Let the first `count` partitions leave after what the current stream holds; see `PartitionedWork`."""
        cut, stream = self._cut, self._stream
        count = min(count, len(cut.sends))
        if count <= self._left:
            return
        events, (current, capture) = self._context.events, self._current()
        events.wait(stream, events.record(current, capture))
        cut.send(self._left, count).start(stream, events, capture)
        self._left = count

    @in_context
    def ready_when(self, word: int, value: int) -> None:
        """Let the next partition leave when the word at this address is `value` or more; it is set to 0 then.

        A kernel under way counts there what it has stored. Launch it before: CUDA may put its stream behind this one's,
        which waits.
        """
        cut, stream = self._cut, self._stream
        events, (_, capture) = self._context.events, self._current()
        operations = MemoryOperation("wait", word, value), MemoryOperation("write", word, 0)
        cut.gate(operations).start(stream, events, capture)
        cut.send(self._left, self._left + 1).start(stream, events, capture)
        self._left += 1

    @property
    def arrival_words(self) -> int:
        """Return an address: 4 (chunk · world_size + peer) bytes behind it is the word that a partition's arrival sets.

        A kernel may read these words; `arrived` or `finish` waits for them, which is short by then, and resets them.
        """
        one, world_size = self.received[0], self.prepared.program.world_size
        return self._cut.word(0) - WORD_BYTES * (one.chunk * world_size + one.peer)

    @in_context
    def arrived(self, count: int) -> None:
        """Let the current stream wait for the first `count` partitions of the output; see `PartitionedWork`."""
        count = min(count, len(self.received))
        if count <= self._come:
            return
        current, capture = self._current()
        self._cut.receive(self._come, count).start(current, self._context.events, capture)
        self._come = count

    @in_context
    def finish(self) -> None:
        """Let all partitions leave and arrive, and the current stream wait for that; see `PartitionedWork`."""
        if self.is_finished:
            return
        self.ready(len(self.sent))
        self.arrived(len(self.received))
        context, (current, capture) = self._context, self._current()
        events, stream = context.events, self._stream
        events.wait(current, events.record(stream, capture))
        self.ended = self.prepared.last = events.record(current, capture)
        for at in (self._submission.at, *self._submission.input_at):
            if at is not None:
                context.order.joined(at, stream, current, capture)
        self.prepared.noted = NEVER
        self.is_finished, self.keep = True, ()

    def is_completed(self) -> bool:
        """Return whether the call has ended, with or without an error; see `CudaWork.is_completed`."""
        return self.is_finished and super().is_completed()

    def _current(self) -> tuple[int, int]:
        """Return the current stream, and the id of its graph capture; raise if the communicator has failed."""
        context = self._context
        context.failure.check()
        current = context.gpu.current_stream()
        if current == self.began.stream:  # a call begins and ends in the same capture
            return current, self.began.capture
        return current, context.gpu.capture_of(context.events.handle(current))
