"""Issue a call in partitions on a GPU: pushes on the channel's stream, waits for arrivals on the caller's.

The waits take no SM: each is one stream memory operation on the stream that reads the rows. A partition leaves when the
stream that wrote it has come to the moment of `ready`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from counterpoint.collectives.cuda.call import CudaWork, Prepared
from counterpoint.collectives.cuda.driver import Executor
from counterpoint.collectives.cuda.events import EventPool
from counterpoint.collectives.cuda.lower import WORD_BYTES, DriverCall, MemoryOperation, MemoryOperations
from counterpoint.collectives.program.partitions import BlockPartition, Partitions
from counterpoint.collectives.program.steps import COPY, Program, Step


class PreparedPartitions(Prepared):
    """Holds the driver calls of a call in partitions: those of its start, and of each partition.

    With `supplied` the start pushes everything.
    """

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
        self.cut = cut
        self._gates: dict[tuple[MemoryOperation, ...], Prepared] = {}
        pushes = [step for steps in cut.sends for step in steps] if supplied else []
        self._first = Prepared(program, lowered([*cut.begin, *pushes]), executor, None, graphs=graphs and supplied)
        self.sends, self.receives = (
            [Prepared(program, lowered(steps), executor, None, graphs=False) for steps in each]
            for each in (() if supplied else cut.sends, cut.receives)
        )

    def start(self, stream: int, events: EventPool, capture: int) -> None:
        """Issue the start of the call; see `Prepared.start`."""
        self.captured |= bool(capture)
        self._first.start(stream, events, capture)

    def gate(self, operations: tuple[MemoryOperation, ...]) -> Prepared:
        """Return the call that does these stream memory operations, made once."""
        found = self._gates.get(operations)
        if found is None:
            calls = (MemoryOperations(operations, COPY),)
            found = self._gates[operations] = Prepared(self.program, calls, self._executor, None, graphs=False)
        return found

    def close(self) -> None:
        """Free graphs and events; only when the last issued calls have run."""
        for one in (self._first, *self.sends, *self.receives, *self._gates.values()):
            one.close()


class PartitionedCudaWork(CudaWork):
    """Represents a call in partitions; see `PartitionedWork`. It has ended after `finish`, in stream order."""

    is_finished = False
    _left = 0  # partitions that were let leave
    _come = 0  # partitions that a stream waits for

    @property
    def sent(self) -> tuple[BlockPartition, ...]:
        """Return the partitions of the input, in the order in which they leave."""
        return self._cut.cut.sent

    @property
    def received(self) -> tuple[BlockPartition, ...]:
        """Return the partitions of the output, in the order in which they come."""
        return self._cut.cut.received

    @property
    def _cut(self) -> PreparedPartitions:
        assert isinstance(self.prepared, PreparedPartitions)
        return self.prepared

    @property
    def _stream(self) -> int:
        """Return the channel's own stream, on which the call runs but for its waits."""
        return self.ended.stream

    def ready(self, count: int) -> None:
        """Let the first `count` partitions leave after what the current stream holds; see `PartitionedWork`."""
        sends = self._cut.sends[self._left : count]
        if not sends:
            return
        events, (current, capture) = self._context.events, self._current()
        events.wait(self._stream, events.record(current, capture))
        for one in sends:
            one.start(self._stream, events, capture)
        self._left += len(sends)

    def ready_when(self, word: int, value: int) -> None:
        """Let the next partition leave when the word at this address is `value` or more; it is set to 0 then.

        A kernel under way counts there what it has stored. Launch it before: CUDA may put its stream behind this one's,
        which waits.
        """
        send = self._cut.sends[self._left]
        events, (_, capture) = self._context.events, self._current()
        operations = MemoryOperation("wait", word, value), MemoryOperation("write", word, 0)
        self._cut.gate(operations).start(self._stream, events, capture)
        send.start(self._stream, events, capture)
        self._left += 1

    @property
    def arrival_words(self) -> int:
        """Return an address: 4 (chunk · world_size + peer) bytes behind it is the word that a partition's arrival sets.

        A kernel may read these words; `arrived` or `finish` waits for them, which is short by then, and resets them.
        """
        (first,) = self._cut.receives[0].calls
        assert isinstance(first, MemoryOperations)
        one, world_size = self.received[0], self.prepared.program.world_size
        return first.operations[0].address - WORD_BYTES * (one.chunk * world_size + one.peer)

    def arrived(self, count: int) -> None:
        """Let the current stream wait for the first `count` partitions of the output; see `PartitionedWork`."""
        receives = self._cut.receives[self._come : count]
        if not receives:
            return
        current, capture = self._current()
        for one in receives:
            one.start(current, self._context.events, capture)
        self._come += len(receives)

    def finish(self) -> None:
        """Let all partitions leave and arrive, and the current stream wait for that; see `PartitionedWork`."""
        if self.is_finished:
            return
        self.ready(len(self.sent))
        self.arrived(len(self.received))
        context, (current, capture) = self._context, self._current()
        events = context.events
        events.wait(self._stream, events.record(current, capture))
        self.ended = self.prepared.last = events.record(self._stream, capture)
        if self._submission.at is not None:
            context.order.used(self._submission.at, current, capture)
        events.wait(current, self.ended)
        self.is_finished, self.keep = True, ()

    def is_completed(self) -> bool:
        """Return whether the call has ended, with or without an error; see `CudaWork.is_completed`."""
        return self.is_finished and super().is_completed()

    def _current(self) -> tuple[int, int]:
        """Return the current stream, and the id of its graph capture; raise if the communicator has failed."""
        self._context.failure.check()
        gpu = self._context.gpu
        current = gpu.current_stream()
        return current, gpu.capture_of(self._context.events.handle(current))
