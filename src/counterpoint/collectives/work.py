"""A collective that was started and may not have ended."""

from __future__ import annotations

import threading
from typing import Any, Literal

from counterpoint.errors import PeerTimeout

__all__ = ["Work"]


class Work:
    """What a call with `async_op=True` returns. Its tensors belong to the collective until `wait` returns.

    It holds them until then, and nothing else does: when they die is up to the program alone, not to when a thread has
    ended, or ranks would make their next tensors in different places.

    Args:
        text: the call.
        keep: tensors that have to live until the end.
    """

    path: Literal["zero_sm", "torch"] = "zero_sm"
    """Which way the call took."""

    def __init__(self, text: str, *, keep: tuple[Any, ...] = ()) -> None:
        self._text, self.keep = text, keep
        self._ended = threading.Event()
        self._error: BaseException | None = None

    def wait(self, timeout_s: float | None = None) -> bool:
        """Returns True when the output may be read and the input overwritten.

        Args:
            timeout_s: seconds to wait here; None: until it ends, or the communicator's watchdog ends it. A shorter
                time only ends this wait: the collective goes on.

        Raises:
            PeerTimeout: a rank died or did not come, or `timeout_s` has passed.
            Misconfigured: another rank made another call.
        """
        if not self._ended.wait(timeout_s):
            raise PeerTimeout(f"{self._text} has not ended within {timeout_s:g} s; wait again, or longer")
        if self._error is not None:
            raise self._error
        self.keep = ()
        return True

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def exception(self) -> BaseException | None:
        """Why it failed; None if it did not, or has not ended."""
        return self._error

    def end(self, error: BaseException | None = None) -> None:
        """Called by the executor, once."""
        self._error = error
        self._ended.set()
