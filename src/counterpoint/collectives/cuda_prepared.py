"""Driver calls made once and issued often: bound to each stream that they ran on, or replayed as a graph."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from counterpoint.collectives.cuda import BindReduction, Bound, Executor, Graph
from counterpoint.collectives.cuda_moments import Moment, Moments
from counterpoint.collectives.lower import DriverCall
from counterpoint.collectives.program import Program

__all__ = ["Prepared", "Shelf"]


class Prepared:
    """One program at its addresses.

    A graph is made when it comes for the second time: that takes longer than to issue the calls, and pays only for what
    comes again. In a capture of the caller's the calls are issued, and become part of that graph.

    Args:
        program: kept, so that its identity stays its own.
        calls: what it came to.
        executor: of its channel.
        bind_reduction: for programs that reduce.
        graphs: whether there may be one.
    """

    def __init__(
        self,
        program: Program,
        calls: tuple[DriverCall, ...],
        executor: Executor,
        bind_reduction: BindReduction | None,
        *,
        graphs: bool,
    ) -> None:
        self.program, self.calls = program, calls
        self._executor, self._bind_reduction, self._graphs = executor, bind_reduction, graphs
        self._bounds: dict[int, Bound] = {}
        self._graph: Graph | None = None
        self._begun = False
        self.captured = False
        self.left = False  # the shelf, and will be closed
        self.last: Moment | None = None

    def start(self, stream: int, moments: Moments, capture: int) -> None:
        """Issues everything on `stream`.

        Raises:
            CounterpointError: the driver refused; the peers may wait for what was not issued.
        """
        if self._graph is not None and not capture:
            self._graph.launch(moments.handle(stream))
            return
        self.captured |= bool(capture)
        if self._graphs and self._begun and not capture and self.calls:
            self._graph = self._executor.graph(self.calls, bind_reduction=self._bind_reduction)
            self._graph.launch(moments.handle(stream))
            return
        bound = self._bounds.get(stream)
        if bound is None:
            bound = self._executor.bind(self.calls, stream, bind_reduction=self._bind_reduction)
            self._bounds[stream] = bound
        bound()
        self._begun = True

    def close(self) -> None:
        """Only when its last issue has run."""
        for bound in self._bounds.values():
            bound.close()
        if self._graph is not None:
            self._graph.close()
        self._bounds, self._graph = {}, None


class Shelf:
    """What was prepared and may come again; the one that was not used for the longest time goes first.

    Args:
        moments: of the device.
        most: how many are kept.
    """

    def __init__(self, moments: Moments, *, most: int = 512) -> None:
        self._moments, self._most = moments, most
        self._kept: dict[Hashable, Prepared] = {}
        self._leaving: list[Prepared] = []  # until their last issue has run; for ever, if that is in a graph

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Hashable, make: Callable[[], Prepared]) -> Prepared:
        """What was made for `key`, now or before."""
        prepared = self._kept.get(key)
        if prepared is None:
            if len(self._kept) >= self._most:
                self._drop()
            prepared = self._kept[key] = make()
        return prepared

    def _drop(self) -> None:
        oldest = min(self._kept, key=lambda key: _last_used(self._kept[key]))
        self._leaving.append(self._kept.pop(oldest))
        self._leaving[-1].left = True
        self._let_leave()

    def close(self) -> None:
        """Only when everything has run."""
        for prepared in (*self._kept.values(), *self._leaving):
            prepared.close()
        self._kept.clear()
        self._leaving.clear()

    def _let_leave(self) -> None:
        for prepared in self._leaving:
            if not prepared.captured and (prepared.last is None or self._moments.passed(prepared.last)):
                prepared.close()
                self._leaving.remove(prepared)
                return  # one comes, one goes


def _last_used(prepared: Prepared) -> int:
    return 0 if prepared.last is None else prepared.last.serial
