"""Define a GPU call whose driver calls are made once and issued often (`Prepared`), and the `Work` of each issue.

A call in partitions pushes on the stream that it was started on. Its waits for arrivals take no SM: they are stream
memory operations on the stream that reads the rows, in one batch for all partitions that are asked for together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from counterpoint.collectives.cuda.driver import (
    BindReduction,
    Bound,
    EventPool,
    Executor,
    Graph,
    StreamPoint,
    in_context,
)
from counterpoint.collectives.cuda.lower import DriverCall
from counterpoint.collectives.cuda.memory_reuse import StreamOrder
from counterpoint.collectives.cuda.regions import FlagLayout, Growth
from counterpoint.collectives.host.shared_memory import RankStatus
from counterpoint.collectives.host.watchdog import CurrentCall, Failure, PeerWaiter, Watchdog
from counterpoint.collectives.memory import SymmetricMemory
from counterpoint.collectives.options import CommunicatorOptions
from counterpoint.collectives.program.steps import BlockPartition, Partitions, Program, Step, merge_batches
from counterpoint.collectives.submit.submission import Programs, Submission
from counterpoint.errors import PeerTimeout

STEPS = 2  # steps of a GPU call in the status: 0 announced, 1 begun, 2 ended
_NEVER = (-1, 0)
_PAUSE_S = 1e-4
_Lower: TypeAlias = Callable[[Sequence[Step]], tuple[DriverCall, ...]]


@dataclass(frozen=True, kw_only=True)
class CudaContext:
    """Holds the objects that a communicator's queues, watching thread and calls share, such as memory and events."""

    gpu: Any  # this rank's `Gpu`, or a stand-in
    memory: SymmetricMemory  # symmetric memory of the group
    events: EventPool  # events of the device
    order: StreamOrder  # records which streams use which memory
    flags: FlagLayout  # says where the flag words lie
    watchdog: Watchdog  # checks the ranks' processes and statuses
    waiter: PeerWaiter  # lets the host wait for peers
    failure: Failure  # holds the error that ended this communicator
    growth: Growth  # makes regions of symmetric memory
    programs: Programs  # plans this rank's programs
    options: CommunicatorOptions  # options of the communicator


class Prepared:
    """Holds one program's driver calls with fixed addresses, to be issued any number of times, whole or part by part.

    The part `start` is the whole program, or, if the call is in the partitions `cut`, the steps before its pushes (with
    `supplied` the pushes, too); `lower` makes the driver calls of further parts when they are first issued.

    If `graphs` is set, the second start captures the calls in a CUDA graph, which later starts replay (a call that is
    made once does without: making the graph takes longer than issuing the calls). In a graph capture of the caller the
    calls are issued, and become part of that graph. `borrowed` says (address, bytes) of the memory that this rank
    copies and others may free.
    """

    def __init__(
        self,
        program: Program,
        calls: tuple[DriverCall, ...],
        executor: Executor,
        *,
        reduction: BindReduction | None = None,
        graphs: bool = False,
        cut: Partitions | None = None,
        lower: _Lower | None = None,
        supplied: bool = False,
        borrowed: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.program = program  # kept so that no other object can get its `id`, which keys use
        self.calls = calls  # all driver calls, for `Executor.let_go`, which sets the flags that they wait for
        self.cut, self.sends = cut, () if cut is None or supplied else cut.sends
        self._executor, self._reduction, self._lower, self._borrowed = executor, reduction, lower, borrowed
        self._start = calls if cut is None else self._lowered([cut.begin, *(cut.sends if supplied else ())])
        self._graphs = graphs and bool(self._start) and (cut is None or supplied)
        self._bounds: dict[tuple[Hashable, int], Bound] = {}  # by part and stream
        self._graph: Graph | None = None
        self.epoch = -1  # `Growth.created` for which its addresses are known to be right; -1: not in the cache any more
        self.last: StreamPoint | None = None
        self.noted = _NEVER  # epoch of `StreamOrder` and stream in which the use of its memory was last recorded

    def start(self, stream: int, events: EventPool, capture: int) -> None:
        """Issue the first part, `start`, on `stream`, which is in the graph capture with the id `capture` (0: none).

        An error of the driver is raised; the peers may then wait for signals that were not issued.
        """
        graph = self._replayable() if self._graphs and not capture else None
        if graph is None:
            self._issue("start", stream, lambda: self._start)
        else:
            graph.launch(events.handles[stream])

    def _replayable(self) -> Graph | None:
        """Return the graph of the part `start`, captured anew if memory that it copies was freed; None: issue calls."""
        if self._graph is not None and self._graph.is_stale():
            stale, self._graph = self._graph, None  # not closed a second time if no new one can be captured
            stale.close()  # nothing runs of it: the driver waits for all work before it frees memory
        if self._graph is None and self._bounds:
            allocations = self._executor.allocations(self._borrowed)
            if allocations is None:
                self._graphs = False
            else:
                self._graph = self._executor.graph(self._start, reduction=self._reduction, allocations=allocations)
        return self._graph

    def send(self, first: int, end: int, stream: int) -> None:
        """Push the partitions `first` to `end` - 1 on `stream`."""
        self._issue(("send", first, end), stream, lambda: self._lowered(self.sends[first:end]))

    def receive(self, first: int, end: int, stream: int) -> None:
        """Make `stream` wait for the arrival of the partitions `first` to `end` - 1."""
        assert self.cut is not None
        receives = self.cut.receives[first:end]
        self._issue(("receive", first, end), stream, lambda: self._lowered(receives))

    def close(self) -> None:
        """Free the graph and the events; call this only when the GPU has finished all issued driver calls."""
        for bound in self._bounds.values():
            bound.close()
        if self._graph is not None:
            self._graph.close()
        self._bounds, self._graph = {}, None

    def _issue(self, part: Hashable, stream: int, calls: Callable[[], tuple[DriverCall, ...]]) -> None:
        """Issue `part` of the program on `stream`; `calls` makes the part's driver calls at its first issue."""
        bound = self._bounds.get((part, stream))
        if bound is None:
            bound = self._executor.bind(calls(), stream, reduction=self._reduction)
            self._bounds[part, stream] = bound
        bound()

    def _lowered(self, parts: Sequence[tuple[Step, ...]]) -> tuple[DriverCall, ...]:
        assert self._lower is not None
        return self._lower(merge_batches(tuple(step for steps in parts for step in steps)))


class PreparedCache:
    """Caches up to `most` prepared calls, and evicts the least recently used one when it is full."""

    def __init__(self, events: EventPool, *, most: int = 512) -> None:
        self._events, self._most = events, most
        self._cached: dict[Hashable, Prepared] = {}
        self._leaving: list[Prepared] = []  # evicted, to be closed when their last issue has run

    def __len__(self) -> int:
        return len(self._cached)

    def get(self, key: Hashable) -> Prepared | None:
        """Return the prepared call cached under `key`; None if `key` was never cached or its call was evicted."""
        return self._cached.get(key)

    def put(self, key: Hashable, prepared: Prepared) -> None:
        """Cache `prepared` under `key`; if the cache is full, evict the least recently used one."""
        if len(self._cached) >= self._most:
            evicted = self._cached.pop(min(self._cached, key=lambda cached: _last_used(self._cached[cached])))
            evicted.epoch = -1
            self._leaving.append(evicted)
            self._close_one()
        self._cached[key] = prepared

    def close(self) -> None:
        """Close all prepared calls, evicted ones included; call this only when the GPU has finished all of them."""
        for prepared in (*self._cached.values(), *self._leaving):
            prepared.close()
        self._cached.clear()
        self._leaving.clear()

    def _close_one(self) -> None:
        for prepared in self._leaving:
            last = prepared.last
            if last is None or last.capture or self._events.passed(last):  # a graph has its own copy of what it took
                prepared.close()
                self._leaving.remove(prepared)
                return  # each `put` closes one


def _last_used(prepared: Prepared) -> int:
    return 0 if prepared.last is None else prepared.last.serial


class CudaWork:
    """Represents a collective started on a GPU; see `Work`, and `PartitionedWork` for a call in partitions.

    The call begins at the point `began` of its stream, by which all earlier calls of its channel have ended, and
    ends at the point `ended`: in partitions only after `finish`. In a graph capture, `wait` joins the call to the
    captured stream, and no more is known of it. This object keeps the tensors of `keep` alive until `wait` or
    `finish`; `record` shows the call in this rank's status.
    """

    begun_s: float | None = None  # monotonic time at which the watch first saw that the call had begun
    _left = 0  # number of partitions of the input that were let leave
    _come = 0  # number of partitions of the output that a stream waits for

    def __init__(
        self,
        context: CudaContext,
        submission: Submission,
        number: int,
        record: RankStatus,
        prepared: Prepared,
        stream: int,
        began: StreamPoint,
        ended: StreamPoint,
        keep: tuple[Any, ...],
    ) -> None:
        self._context, self._gpu, self._submission = context, context.gpu, submission
        self.number, self.record, self.prepared, self._stream = number, record, prepared, stream
        self.began, self.ended, self.keep = began, ended, keep
        self.is_finished = prepared.cut is None

    @property
    def sent(self) -> tuple[BlockPartition, ...]:
        """Return the partitions of the input, in the order in which they are sent."""
        return () if self.prepared.cut is None else self.prepared.cut.sent

    @property
    def received(self) -> tuple[BlockPartition, ...]:
        """Return the partitions of the output, in the order in which they arrive."""
        return () if self.prepared.cut is None else self.prepared.cut.received

    @property
    def current(self) -> CurrentCall:
        """Return the name and number of the call, for errors and the watchdog."""
        return self._submission.current(self.number)

    @in_context
    def wait(self, timeout_s: float | None = None) -> bool:
        """Return True after making the current stream, and with `timeout_s` also the host, wait for the call.

        Raises:
            PeerTimeout: `timeout_s` has passed, or the communicator has failed as a rank died or did not come in time.
        """
        context, ended = self._context, self.ended
        context.failure.check()
        if timeout_s is not None and not ended.capture:
            deadline = time.monotonic() + timeout_s
            while not context.events.passed(ended):
                if time.monotonic() > deadline:
                    raise PeerTimeout(f"{self.current} has not ended within {timeout_s:g} s; wait again, or longer")
                time.sleep(_PAUSE_S)
            context.failure.check()
        stream = context.gpu.current_stream()
        if stream != ended.stream:
            context.events.wait(stream, ended)
        self.keep = ()  # this stream now waits for the end, so later users of the memory on it do, too
        return True

    @in_context
    def is_completed(self) -> bool:
        """Return whether the call has ended, with or without an error; always False if it was captured in a graph."""
        return self.is_finished and not self.ended.capture and self._context.events.passed(self.ended)

    def exception(self) -> BaseException | None:
        """Return the error that ended the communicator; None if there is none."""
        return self._context.failure.error

    @in_context
    def ready(self, count: int) -> None:
        """Send the first `count` partitions of the input behind the current stream's work; see `PartitionedWork`."""
        count = min(count, len(self.prepared.sends))
        if count <= self._left:
            return
        events = self._context.events
        events.wait(self._stream, events.record(*self._current()))
        self.prepared.send(self._left, count, self._stream)
        self._left = count

    @in_context
    def arrived(self, count: int) -> None:
        """Make the current stream wait for the first `count` partitions of the output; see `PartitionedWork`."""
        count = min(count, len(self.received))
        if count <= self._come:
            return
        self.prepared.receive(self._come, count, self._current()[0])
        self._come = count

    @in_context
    def finish(self) -> None:
        """Send the remaining partitions, and make the current stream wait for all arrivals; see `PartitionedWork`."""
        if self.is_finished:
            return
        self.ready(len(self.sent))
        self.arrived(len(self.received))
        context, stream, (current, capture) = self._context, self._stream, self._current()
        context.events.wait(current, context.events.record(stream, capture))
        self.ended = self.prepared.last = context.events.record(current, capture)
        for at in (self._submission.at, *self._submission.input_at):
            if at is not None:
                context.order.joined(at, stream, current, capture)
        self.prepared.noted = _NEVER
        self.is_finished, self.keep = True, ()

    def _current(self) -> tuple[int, int]:
        """Return the current stream and the id of its graph capture (0: none); raise if the communicator has failed."""
        context = self._context
        context.failure.check()
        current = context.gpu.current_stream()
        if current == self.began.stream:  # a call begins and ends in the same capture
            return current, self.began.capture
        return current, context.gpu.capture_of(context.events.handles[current])
