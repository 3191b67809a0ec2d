"""Moments of streams: events that are used again when nothing refers to them any more."""

from __future__ import annotations

from collections import deque
from itertools import count
from typing import Any

from counterpoint.errors import CounterpointError

__all__ = ["Moment", "Moments"]

_NOT_READY = 600  # CUDA_ERROR_NOT_READY


class Moment:
    """A point of a stream: all that was queued there before.

    Args:
        event: that marks it; goes back to `free` with this object, in whatever thread that dies, without the driver.
        stream: handle.
        serial: larger than that of every earlier moment.
        capture: number of the capture that it is part of; 0: it is none of a graph, and will pass.
        free: where the event goes back to.
    """

    __slots__ = ("_free", "capture", "event", "serial", "stream")

    def __init__(self, event: Any, stream: int, serial: int, capture: int, free: deque[Any]) -> None:
        self.event, self.stream, self.serial, self.capture, self._free = event, stream, serial, capture, free

    def __del__(self) -> None:
        self._free.append(self.event)


class Moments:
    """Events of one device, and the handles of its streams as the driver wants them.

    Args:
        driver: the module `cuda.bindings.driver`, or what stands in for it.
    """

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self._free: deque[Any] = deque()
        self._made: list[Any] = []
        self._serials = count(1)
        self._handles: dict[int, Any] = {}
        self._record, self._query, self._wait = driver.cuEventRecord, driver.cuEventQuery, driver.cuStreamWaitEvent

    def handle(self, stream: int) -> Any:
        """The stream as a `CUstream`, made once: an integer is converted at every call."""
        handle = self._handles.get(stream)
        if handle is None:
            handle = self._handles[stream] = self._driver.CUstream(stream)
        return handle

    def record(self, stream: int, capture: int = 0) -> Moment:
        """This point of the stream, which is in `capture`.

        Raises:
            CounterpointError: the driver refused.
        """
        try:
            event = self._free.popleft()
        except IndexError:
            event = self._new()
        error = self._record(event, self._handles.get(stream) or self.handle(stream))[0]
        if error:
            raise _failed("cuEventRecord", error)
        return Moment(event, stream, next(self._serials), capture, self._free)

    def wait(self, stream: int, moment: Moment) -> None:
        """What is queued on the stream from now on runs after the moment.

        Raises:
            CounterpointError: the driver refused.
        """
        (error,) = self._wait(self.handle(stream), moment.event, 0)
        if error:
            raise _failed("cuStreamWaitEvent", error)

    def passed(self, moment: Moment) -> bool:
        """Whether the stream has come to it.

        Raises:
            CounterpointError: an earlier call on this device failed.
        """
        (error,) = self._query(moment.event)
        if not error:
            return True
        if int(error) == _NOT_READY:
            return False
        raise _failed("cuEventQuery", error)

    def close(self) -> None:
        """Destroys all events."""
        while self._made:
            self._driver.cuEventDestroy(self._made.pop())
        self._free.clear()

    def _new(self) -> Any:
        error, event = self._driver.cuEventCreate(self._driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        if error:
            raise _failed("cuEventCreate", error)
        self._made.append(event)
        return event


def _failed(name: str, error: Any) -> CounterpointError:
    told = getattr(error, "name", error)
    return CounterpointError(f"{name} failed: {told}; an earlier call on this device may have failed")
