"""Define a GPU call whose driver calls are made once and issued often, and the `Work` of each start of it."""

from __future__ import annotations

import time
from collections.abc import Hashable
from typing import Any

from counterpoint.collectives.cuda.context import CudaContext
from counterpoint.collectives.cuda.device import in_context
from counterpoint.collectives.cuda.driver import Bound, Executor, Graph, ReductionLauncher
from counterpoint.collectives.cuda.events import EventPool, StreamPoint
from counterpoint.collectives.cuda.lower import DriverCall
from counterpoint.collectives.host.status import RankStatus
from counterpoint.collectives.host.watchdog import CurrentCall
from counterpoint.collectives.program.steps import Program
from counterpoint.collectives.submit.submission import Submission
from counterpoint.errors import PeerTimeout

NEVER = (-1, 0)
_PAUSE_S = 1e-4


class Prepared:
    """Holds the driver calls of one program at fixed addresses, ready to be issued any number of times.

    If `graphs` is set, the second start captures the calls in a CUDA graph, which later starts replay: to make it takes
    longer than to issue the calls. In a graph capture of the caller the calls are issued, and become part of that
    graph. The program is kept so that no other object can get its `id`, which keys use.
    """

    def __init__(
        self,
        program: Program,
        calls: tuple[DriverCall, ...],
        executor: Executor,
        reduction: ReductionLauncher | None,
        *,
        graphs: bool,
    ) -> None:
        self.program, self.calls = program, calls
        self._executor, self._reduction, self._graphs = executor, reduction, graphs
        self._bounds: dict[int, Bound] = {}
        self._graph: Graph | None = None
        self._begun = False
        self.evicted = False  # no longer in the cache, and will be closed
        self.last: StreamPoint | None = None
        self.noted = NEVER  # epoch of `StreamOrder` and stream in which the use of its memory was last recorded

    def start(self, stream: int, events: EventPool, capture: int) -> None:
        """Issue all driver calls on `stream`, which is in the graph capture with the id `capture` (0: none).

        An error of the driver is raised; the peers may then wait for signals that were not issued.
        """
        if self._graph is not None and not capture:
            self._graph.launch(events.handle(stream))
            return
        if self._graphs and self._begun and not capture and self.calls:
            self._graph = self._executor.graph(self.calls, reduction=self._reduction)
            self._graph.launch(events.handle(stream))
            return
        bound = self._bounds.get(stream)
        if bound is None:
            bound = self._bounds[stream] = self._executor.bind(self.calls, stream, reduction=self._reduction)
        bound()
        self._begun = True

    def close(self) -> None:
        """Free its graph and events; only when the last issued calls have run."""
        for bound in self._bounds.values():
            bound.close()
        if self._graph is not None:
            self._graph.close()
        self._bounds, self._graph = {}, None


class PreparedCache:
    """Caches up to `most` prepared calls, and evicts the least recently used one when it is full."""

    def __init__(self, events: EventPool, *, most: int = 512) -> None:
        self._events, self._most = events, most
        self._kept: dict[Hashable, Prepared] = {}
        self._leaving: list[Prepared] = []  # evicted, to be closed when their last issue has run

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Hashable) -> Prepared | None:
        """Return the prepared call that was put under `key`; None if there is none, or it was evicted."""
        return self._kept.get(key)

    def put(self, key: Hashable, prepared: Prepared) -> None:
        """Cache `prepared` under `key`; if the cache is full, evict the least recently used one."""
        if len(self._kept) >= self._most:
            oldest = min(self._kept, key=lambda kept: _last_used(self._kept[kept]))
            evicted = self._kept.pop(oldest)
            evicted.evicted = True
            self._leaving.append(evicted)
            self._close_one()
        self._kept[key] = prepared

    def close(self) -> None:
        """Close all prepared calls, evicted ones included; only when all calls have run."""
        for prepared in (*self._kept.values(), *self._leaving):
            prepared.close()
        self._kept.clear()
        self._leaving.clear()

    def _close_one(self) -> None:
        for prepared in self._leaving:
            last = prepared.last
            if last is None or last.capture or self._events.passed(last):  # a graph has its own copy of what it took
                prepared.close()
                self._leaving.remove(prepared)
                return  # one is closed for each that is put


def _last_used(prepared: Prepared) -> int:
    return 0 if prepared.last is None else prepared.last.serial


class CudaWork:
    """Represents a collective that was started on a GPU; see `Work`.

    It has begun when its stream has passed the point `began`, by which all earlier calls of its channel have ended, and
    has ended at the point `ended`. In a graph capture, `wait` joins it to the captured stream, and nothing else is
    known of it. This object keeps the tensors of `keep` alive until `wait`; `record` shows the call in this rank's
    status.
    """

    def __init__(
        self,
        context: CudaContext,
        submission: Submission,
        number: int,
        record: RankStatus,
        prepared: Prepared,
        began: StreamPoint,
        ended: StreamPoint,
        keep: tuple[Any, ...],
    ) -> None:
        self._context, self._gpu, self._submission = context, context.gpu, submission
        self.number, self.record, self.prepared = number, record, prepared
        self.began, self.ended, self.keep = began, ended, keep
        self.begun_s: float | None = None  # monotonic time when the watch first saw that it had begun

    @property
    def calls(self) -> tuple[DriverCall, ...]:
        """Return the driver calls that it made, whose flags streams wait for."""
        return self.prepared.calls

    @property
    def current(self) -> CurrentCall:
        """Return the name and number of the call, for errors and the watchdog."""
        return self._submission.current(self.number)

    @in_context
    def wait(self, timeout_s: float | None = None) -> bool:
        """Let the current stream wait for the end; the host waits only with `timeout_s`, for up to that many seconds.

        Returns:
            True.

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
        return not self.ended.capture and self._context.events.passed(self.ended)

    def exception(self) -> BaseException | None:
        """Return the error that ended the communicator; None if there is none."""
        return self._context.failure.error
