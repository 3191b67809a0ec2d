"""Decide when freed memory may be reused: after the work of all streams that used it."""

from __future__ import annotations

import threading
import time
from typing import Any

from counterpoint.collectives.cuda.driver import EventPool, StreamPoint, in_context
from counterpoint.collectives.memory import Location, NotReusable

_PAUSE_S = 1e-4
_IN_A_GRAPH = -1  # stands for a stream: a graph uses the memory at every replay


class StreamOrder:
    """Records which streams use which tensors, so that freed memory is reused only after these streams' work.

    A tensor dies on the host while work on it may still be queued. When its memory is freed, the present end of each
    stream that used it is recorded; the stream that uses the memory next waits for these points.
    """

    def __init__(self, events: EventPool, gpu: Any) -> None:
        self._events, self._gpu = events, gpu
        self._uses: dict[Location, set[int]] = {}
        self.epoch = 0  # changes when memory is freed: until then a repeated call need not record its uses again
        self._lock = threading.Lock()

    def used(self, at: Location, stream: int, capture: int = 0) -> None:
        """Record that `stream` uses the tensor at `at`; in a graph capture, mark the memory as never reusable."""
        use = _IN_A_GRAPH if capture else stream
        with self._lock:
            streams = self._uses.get(at)
            if streams is None:
                streams = self._uses[at] = set()
            streams.add(use)

    def joined(self, at: Location, stream: int, into: int, capture: int = 0) -> None:
        """Record that stream `into` uses the tensor at `at` and has waited for the work of `stream` on that tensor."""
        self.used(at, into, capture)
        if stream != into:
            self._uses[at].discard(stream)

    @in_context
    def freed(self, at: Location, num_bytes: int) -> tuple[StreamPoint, ...] | NotReusable:
        """Return the stream points to wait for before the freed `num_bytes` at `at` are reused, or "never" or "later".

        Return "never" if a graph may use the bytes at any replay, "later" while a stream that used them is in a graph
        capture, whose points cannot be waited for from outside.
        """
        region, first, end = at.region, at.offset, at.offset + num_bytes
        with self._lock:
            places = [place for place in self._uses if place.region == region and first <= place.offset < end]
            streams = set[int]().union(*(self._uses[place] for place in places))
            if _IN_A_GRAPH in streams:
                return "never"
            if any(self._gpu.capture_of(self._events.handles[stream]) for stream in streams):
                return "later"
            self.epoch += 1
            for place in places:
                del self._uses[place]
        return tuple(self._events.record(stream) for stream in sorted(streams))

    @in_context
    def taken(self, at: Location, after: tuple[Any, ...]) -> None:
        """Make the current stream wait for the points in `after`, and record that it uses the tensor at `at`."""
        stream = self._gpu.current_stream()
        self.taken_on(stream, self._gpu.capture_of(self._events.handles[stream]), at, after)

    def taken_on(self, stream: int, capture: int, at: Location, after: tuple[Any, ...]) -> None:
        """Do what `taken` does, given the current stream and the id `capture` of its graph capture (0: none)."""
        if capture and after:  # a graph cannot wait for what is outside of it
            with self._gpu.relaxed():
                while not all(map(self._events.passed, after)):
                    time.sleep(_PAUSE_S)
        else:
            for point in after:
                if point.stream != stream:
                    self._events.wait(stream, point)
        self.used(at, stream, capture)

    def merged(self, one: tuple[StreamPoint, ...], other: tuple[StreamPoint, ...]) -> tuple[StreamPoint, ...]:
        """Return the latest point of each stream in the two tuples."""
        latest: dict[int, StreamPoint] = {}
        for point in (*one, *other):
            known = latest.get(point.stream)
            if known is None or known.serial < point.serial:
                latest[point.stream] = point
        return tuple(latest.values())
