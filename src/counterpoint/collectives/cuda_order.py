"""When symmetric memory of a GPU may be used again: after what streams still do with it."""

from __future__ import annotations

import threading
import time
from typing import Any

from counterpoint.collectives.cuda_moments import Moment, Moments
from counterpoint.collectives.symmetric import Location

__all__ = ["StreamOrder"]

_PAUSE_S = 1e-4
_IN_A_GRAPH = -1  # instead of a stream: the memory is used whenever somebody replays that


class StreamOrder:
    """Which streams have used which bytes, since they were given out.

    A tensor dies on the host, with work on it still queued. When its memory is taken back, the end of what is queued
    then on each of its streams is marked; whoever gets it next waits for these moments on another stream.

    Args:
        moments: of the device.
        gpu: what has a current stream.
    """

    def __init__(self, moments: Moments, gpu: Any) -> None:
        self._moments, self._gpu = moments, gpu
        self._uses: dict[Location, set[int]] = {}
        self.epoch = 0  # changes when something is taken back: until then what was told need not be told again
        self._lock = threading.Lock()

    def used(self, at: Location, stream: int, capture: int = 0) -> None:
        """What begins at `at` is used on `stream`; in a capture: for ever."""
        use = _IN_A_GRAPH if capture else stream
        with self._lock:
            streams = self._uses.get(at)
            if streams is None:
                streams = self._uses[at] = set()
            streams.add(use)

    def freed(self, at: Location, num_bytes: int) -> tuple[Moment, ...] | None:
        """What has to end before these bytes are used again; None: a graph may use them at any time, or one of their
        streams is in a capture now, whose moments cannot be waited for from outside."""
        end = at + num_bytes
        with self._lock:
            places = [place for place in self._uses if at <= place < end]
            streams = set[int]().union(*(self._uses[place] for place in places))
            if _IN_A_GRAPH in streams or any(self._gpu.capture_of(self._moments.handle(stream)) for stream in streams):
                return None
            self.epoch += 1
            for place in places:
                del self._uses[place]
        return tuple(self._moments.record(stream) for stream in sorted(streams))

    def taken(self, at: Location, after: tuple[Any, ...]) -> None:
        """The current stream waits for `after`, and is the first that uses these bytes."""
        stream = self._gpu.current_stream()
        capture = self._gpu.capture_of(self._moments.handle(stream))
        if capture and after:  # a graph cannot wait for what is outside of it
            with self._gpu.relaxed():
                while not all(map(self._moments.passed, after)):
                    time.sleep(_PAUSE_S)
        else:
            for moment in after:
                if moment.stream != stream:
                    self._moments.wait(stream, moment)
        self.used(at, stream, capture)

    def merged(self, one: tuple[Moment, ...], other: tuple[Moment, ...]) -> tuple[Moment, ...]:
        """The latest moment of each stream."""
        latest: dict[int, Moment] = {}
        for moment in (*one, *other):
            known = latest.get(moment.stream)
            if known is None or known.serial < moment.serial:
                latest[moment.stream] = moment
        return tuple(latest.values())
