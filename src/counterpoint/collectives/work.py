"""What a call with `async_op=True` returns: a collective that was started and may not have ended."""

from __future__ import annotations

import threading
from typing import Any, Literal, Protocol

from counterpoint.errors import PeerTimeout


class Work(Protocol):
    """Represents a collective under way: it ends when its outputs may be read; until then its tensors belong to it.

    It holds them until then, and nothing else does: when they die is up to the program alone, not to when a thread has
    ended, or ranks would make their next tensors in different places.
    """

    path: Literal["zero_sm", "torch"]
    """Which way the call took."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return True when the output may be read and the input overwritten; on a GPU the current stream waits.

        With `timeout_s`, in seconds, only this wait ends sooner and the collective goes on; None: until it ends, or the
        communicator's watchdog ends it. `PeerTimeout` is raised if a rank died or did not come, or `timeout_s` has
        passed; `Misconfigured` if another rank made another call.
        """

    def is_completed(self) -> bool:
        """Return whether it has ended, well or not."""

    def exception(self) -> BaseException | None:
        """Return why it failed; None if it did not, or if that is not known yet."""


class HostWork:
    """A call that a thread of this process carries out; errors name it by its `str`. See `Work`."""

    def __init__(self, call: object, *, keep: tuple[Any, ...] = ()) -> None:
        self.path: Literal["zero_sm", "torch"] = "zero_sm"
        self._call, self.keep = call, keep
        self._ended = threading.Event()
        self._error: BaseException | None = None

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the output may be read and the input overwritten, or raise why that will not be: `Work.wait`."""
        if not self._ended.wait(timeout_s):
            raise PeerTimeout(f"{self._call} has not ended within {timeout_s:g} s; wait again, or longer")
        if self._error is not None:
            raise self._error
        self.keep = ()
        return True

    def is_completed(self) -> bool:
        """Return whether it has ended, well or not."""
        return self._ended.is_set()

    def exception(self) -> BaseException | None:
        """Return why it failed; None if it did not, or has not ended."""
        return self._error

    def end(self, error: BaseException | None = None) -> None:
        """Record that the call has ended; called once, by what runs it."""
        self._error = error
        self._ended.set()
