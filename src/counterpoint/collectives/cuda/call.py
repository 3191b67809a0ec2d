"""A call on a GPU: its driver calls, made once and issued often, and the work of each time that it was started."""

from __future__ import annotations

import time
from collections.abc import Hashable
from typing import Any, Literal

from counterpoint.collectives.cuda.context import CudaContext
from counterpoint.collectives.cuda.driver import Bound, Executor, Graph, ReductionLauncher
from counterpoint.collectives.cuda.events import EventPool, StreamPoint
from counterpoint.collectives.cuda.lower import DriverCall
from counterpoint.collectives.host.status import RankStatus
from counterpoint.collectives.host.watchdog import CurrentCall
from counterpoint.collectives.program.steps import Program
from counterpoint.collectives.submit.submission import Submission
from counterpoint.errors import PeerTimeout

_PAUSE_S = 1e-4


class Prepared:
    """Holds one program at its addresses, ready to be issued any number of times.

    A graph is made (if `graphs` allows it) when it comes for the second time: that takes longer than to issue the
    calls, and pays only for what comes again. In a capture of the caller's the calls are issued, and become part of
    that graph. The program is kept so that its identity stays its own.
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
        self.captured = False
        self.evicted = False  # no longer in the cache, and will be closed
        self.last: StreamPoint | None = None
        self.noted = (-1, 0)  # what the order of streams knows of its memory: in which epoch, on which stream

    def start(self, stream: int, events: EventPool, capture: int) -> None:
        """Issue everything on `stream`, which is in the capture of this number (0: none).

        If the driver refuses, that is raised: the peers may then wait for what was not issued.
        """
        if self._graph is not None and not capture:
            self._graph.launch(events.handle(stream))
            return
        self.captured |= bool(capture)
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
        """Give back what it holds, once its last issue has run."""
        for bound in self._bounds.values():
            bound.close()
        if self._graph is not None:
            self._graph.close()
        self._bounds, self._graph = {}, None


class PreparedCache:
    """Keeps up to `most` of what was prepared and may come again; what was not used for the longest time goes first."""

    def __init__(self, events: EventPool, *, most: int = 512) -> None:
        self._events, self._most = events, most
        self._kept: dict[Hashable, Prepared] = {}
        self._leaving: list[Prepared] = []  # until their last issue has run; for ever, if that is in a graph

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Hashable) -> Prepared | None:
        """Return what was put for `key`, if it is still here."""
        return self._kept.get(key)

    def put(self, key: Hashable, prepared: Prepared) -> None:
        """Keep it for `key`; if there is no room, the one that was used longest ago is evicted."""
        if len(self._kept) >= self._most:
            oldest = min(self._kept, key=lambda kept: _last_used(self._kept[kept]))
            evicted = self._kept.pop(oldest)
            evicted.evicted = True
            self._leaving.append(evicted)
            self._close_one()
        self._kept[key] = prepared

    def close(self) -> None:
        """Close all of them; only when everything has run."""
        for prepared in (*self._kept.values(), *self._leaving):
            prepared.close()
        self._kept.clear()
        self._leaving.clear()

    def _close_one(self) -> None:
        for prepared in self._leaving:
            if not prepared.captured and (prepared.last is None or self._events.passed(prepared.last)):
                prepared.close()
                self._leaving.remove(prepared)
                return  # one comes, one goes


def _last_used(prepared: Prepared) -> int:
    return 0 if prepared.last is None else prepared.last.serial


class CudaWork:
    """Represents a collective on a GPU that was started; see `Work`.

    It ends with the point `ended` of a stream; when `began` has passed, its stream has come to it, and all calls before
    it on its channel have ended. If it was captured, it is for the capture alone: `wait` joins it. The tensors of
    `keep` live until the end; `record` shows the call in this rank's status.
    """

    path: Literal["zero_sm", "torch"] = "zero_sm"

    def __init__(
        self,
        context: CudaContext,
        submission: Submission,
        number: int,
        record: RankStatus,
        calls: tuple[DriverCall, ...],
        began: StreamPoint,
        ended: StreamPoint,
        keep: tuple[Any, ...],
    ) -> None:
        self._context, self._submission = context, submission
        self.number, self.record, self.calls = number, record, calls
        self.began, self.ended, self.keep = began, ended, keep
        self.begun_s: float | None = None  # since when it has been seen to have begun

    @property
    def current(self) -> CurrentCall:
        """The call and its number."""
        return self._submission.current(self.number)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Let the current stream wait; the host does not, unless there is a `timeout_s`, in seconds.

        Returns:
            True.

        Raises:
            PeerTimeout: `timeout_s` has passed; or, as of any error that is known now, a rank died or did not come.
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
        self.keep = ()  # whatever uses their memory next on this stream comes after the end
        return True

    def is_completed(self) -> bool:
        """Return whether it has ended, well or not; never of one that was captured."""
        return not self.ended.capture and self._context.events.passed(self.ended)

    def exception(self) -> BaseException | None:
        """Return why the communicator failed; None if it did not."""
        return self._context.failure.error
