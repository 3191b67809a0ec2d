"""Define `Work`, the handle that a call with `async_op=True` returns."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

from counterpoint.collectives.program.steps import BlockPartition
from counterpoint.errors import Misconfigured, PeerTimeout


class Work(Protocol):
    """Represents a started collective; do not read outputs or overwrite inputs before the collective has ended.

    Only this object keeps the call's tensors alive, until `wait`. So the caller's code decides when tensors die, not
    the moment at which a thread ends; otherwise ranks would allocate their next tensors at different offsets.
    """

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the output may be read and the input overwritten (on a GPU the current stream waits); return True.

        `timeout_s` limits this wait in seconds, while the collective goes on; None: wait until it ends or the
        communicator's watchdog ends it. `PeerTimeout` is raised if a rank died or made no such call in time, or if
        `timeout_s` has passed; `Misconfigured` if another rank made a different call.
        """

    def is_completed(self) -> bool:
        """Return whether the collective has ended, with or without an error."""

    def exception(self) -> BaseException | None:
        """Return the error that the collective failed with; None if it did not fail, or if that is not known yet."""


class PartitionedWork(Protocol):
    """Represents a call whose caller supplies the input and takes the output partition by partition.

    Partitions are sent and arrive in the order of `sent` and `received`. On a GPU `ready` and `arrived` order work on
    the current stream. The channel runs no other call before `finish`.
    """

    sent: tuple[BlockPartition, ...]
    """Names the partitions of the input, in the order in which they are sent."""
    received: tuple[BlockPartition, ...]
    """Names the partitions of the output, in the order in which they come."""

    def ready(self, count: int) -> None:
        """Send the first `count` partitions of the input, which the caller has written."""

    def arrived(self, count: int) -> None:
        """Wait until the first `count` partitions of the output may be read; on a GPU the current stream waits."""

    def finish(self) -> None:
        """Send and receive all remaining partitions, and wait until the input, too, may be overwritten.

        `PeerTimeout` is raised if a rank died or made no such call in time; `Misconfigured` if it made a different one.
        """


class HostWork:
    """Represents a call that runs in a thread of this process; errors name the call by `str(call)`. See `Work`."""

    def __init__(self, call: object, *, keep: tuple[Any, ...] = ()) -> None:
        self._call, self.keep = call, keep
        self._ended = threading.Event()
        self._error: BaseException | None = None

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the output may be read and the input overwritten; raise the call's error. See `Work.wait`."""
        if not self._ended.wait(timeout_s):
            raise PeerTimeout(f"{self._call} has not ended within {timeout_s:g} s; wait again, or longer")
        if self._error is not None:
            raise self._error
        self.keep = ()
        return True

    def is_completed(self) -> bool:
        """Return whether the call has ended, with or without an error."""
        return self._ended.is_set()

    def exception(self) -> BaseException | None:
        """Return the error that the call failed with; None if it did not fail, or has not ended."""
        return self._error

    def end(self, error: BaseException | None = None) -> None:
        """Record that the call has ended, with `error` if it failed; called once, by the thread that runs it."""
        self._error = error
        self._ended.set()


class TorchWork:
    """Represents a call that torch runs as one or more torch `Work`s; errors name the call by `text`. See `Work`."""

    def __init__(self, text: str, works: Sequence[Any]) -> None:
        self._text, self._works = text, works
        self._error: BaseException | None = None

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return True after waiting for all of torch's works; on CUDA the current stream waits, not the host.

        Raises:
            Misconfigured: `timeout_s` was given; a work of torch has only the timeout of its process group.
        """
        if timeout_s is not None:
            raise Misconfigured(f"{self._text}: timeout_s={timeout_s} has no effect there; give the group a timeout")
        try:
            for work in self._works:
                work.wait()
        except BaseException as error:
            self._error = error
            raise
        return True

    def is_completed(self) -> bool:
        """Return whether the call has ended, with or without an error."""
        return all(work.is_completed() for work in self._works)

    def exception(self) -> BaseException | None:
        """Return the error that `wait` raised; None before `wait`, since torch reports errors only in `wait`."""
        return self._error
