"""Start all_reduces of gradient buckets from a separate thread, so that a backward pass does not wait for launches.

In Python, the host needs 60 to 130 µs to launch a collective. In a backward pass this delays the launches of matmuls,
and where the host is the bottleneck the time is lost. With this thread the backward pass only records an event and
hands the bucket over.

The thread also runs the callbacks of a call's future, and the collectives that these callbacks make: after the call,
and before the next call that was handed over. So all ranks have the same order of collectives.

With a single hardware queue (`CUDA_DEVICE_MAX_CONNECTIONS=1`) the work of all streams runs in the order in which it was
issued, so all ranks have to issue the calls of all groups in one order. A separate thread would not keep that order, so
the caller then starts the calls itself.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor

from counterpoint.collectives.cuda.driver import hardware_queues
from counterpoint.collectives.multihost.hierarchical import AnyCommunicator
from counterpoint.collectives.work import Work
from counterpoint.errors import Misconfigured, PeerTimeout

PIECE_BYTES = 1 << 28
"""Limits the bytes of a bucket that are reduced at once, and so the size of staging and landing memory.

Before its first step DDP has one bucket, of all gradients.
"""
Run: TypeAlias = Callable[[int], object]
"""Queues work on the current stream; its argument is the channel for its calls of the communicator."""
_PAUSE_S = 1e-3


def pieces(values: Tensor) -> Sequence[Tensor]:
    """Split a flat tensor into views of at most `PIECE_BYTES` bytes each."""
    return (values,) if values.nbytes <= PIECE_BYTES else values.split(PIECE_BYTES // values.itemsize)


def all_reduce_in_pieces(
    communicator: AnyCommunicator, values: Tensor, op: str, factor: float, channel: int, *, async_op: bool = False
) -> list[Work]:
    """Reduce a flat tensor by `Communicator.all_reduce`, at most `PIECE_BYTES` at a time; return the works, if any."""
    works = [
        communicator.all_reduce(piece, op, factor=factor, channel=channel, async_op=async_op)
        for piece in pieces(values)
    ]
    return [work for work in works if work is not None]


class BackgroundCall:
    """Represents a call that the background thread starts, with the methods of `Work`.

    `future` gets `value` when the call has ended; on a GPU already when it is queued, and streams that wait for the
    future wait for the call.
    """

    def __init__(self, background: Background, run: Run, channel: int, value: Any) -> None:
        self._background, self.run, self.channel, self.value = background, run, channel, value
        self.future: Any = background.new_future()
        self.stream: Any = None  # torch.cuda.Stream that it is queued on; None on a CPU
        self.behind: Any = None  # torch.cuda.Event of the stream that wrote the tensors; None on a CPU
        self.ended: Any = None  # torch.cuda.Event behind the call; None on a CPU
        self.captured = False

    def wait(self, timeout_s: float | None = None) -> bool:
        """Let the current stream (on a CPU, this thread) wait for the call; with `timeout_s` the host waits, too.

        Returns:
            True.

        Raises:
            PeerTimeout: `timeout_s` has passed, or a rank died or did not come in time.
            Misconfigured: a callback waits, and the thread cannot start the call before that callback has ended.
        """
        if timeout_s is not None and not self.captured:
            deadline = time.monotonic() + timeout_s
            while not self.is_completed():
                if time.monotonic() > deadline:
                    raise PeerTimeout(
                        f"an asynchronous call has not ended within {timeout_s:g} s; wait again, or longer"
                    )
                time.sleep(_PAUSE_S)
        with nullcontext() if self.future.done() else self._background.thread.waited_for():
            self.future.wait()
        if self.ended is not None:
            self._background.communicator.check()
        return True

    def is_completed(self) -> bool:
        """Return whether the call has ended, with or without an error; always False for a call captured in a graph."""
        return not self.captured and bool(self.future.done()) and (self.ended is None or bool(self.ended.query()))

    def exception(self) -> BaseException | None:
        """Return the error with which the call failed; None if no error is known so far."""
        if not self.future.done():
            return None
        try:
            self.future.value()
        except Exception as error:
            return error
        return None


class _Starter(threading.Thread):
    """Is the thread that starts the calls of one `Background`, without keeping the `Background` alive."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(name="counterpoint-buckets", daemon=True)
        self._device = device
        self.items: queue.SimpleQueue[BackgroundCall | threading.Event | None] = queue.SimpleQueue()
        self.done = 0  # number of calls that it has started, with their callbacks
        self._waits_for: _Starter | None = None  # the thread for which a callback in this thread waits

    def run(self) -> None:
        """Start calls from the queue `items`, in order, until the queue yields None."""
        current: Any = None
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        while (item := self.items.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            if item.stream is not current:
                torch.cuda.set_stream(item.stream)
                current = item.stream
            _run(item)
            self.done += 1
            del item  # the variable would keep the call's tensors alive

    @contextmanager
    def waited_for(self) -> Iterator[None]:
        """Raise `Misconfigured` if waiting for this thread in the `with` block would be a deadlock."""
        here, behind = threading.current_thread(), self
        if not isinstance(here, _Starter):
            yield
            return
        here._waits_for = self  # set before looking: of two threads that wait for each other, the later one sees it
        try:
            while behind is not here:
                if behind._waits_for is None:
                    yield
                    return
                behind = behind._waits_for
            raise Misconfigured(
                "a callback waits for a call behind its own, or for a callback that waits for it; let callbacks make "
                "calls on their own group only, and wait for others outside of them"
            )
        finally:
            here._waits_for = None


class Background:
    """Starts calls on any channel of a communicator from a background thread, in the order of `start`.

    Nothing else may use the communicator's channels before `drain` has returned.

    Args:
        communicator: runs the calls.
    """

    def __init__(self, communicator: AnyCommunicator) -> None:
        self.communicator, self._device = communicator, communicator.device
        self._on_gpu = self._device.type == "cuda"
        self._streams: dict[int, Any] = {}  # by channel
        self._by_caller = self._on_gpu and hardware_queues() == 1
        self._current: dict[int, Any] = {}  # torch's streams by handle, which is faster than asking torch
        self._lock, self._handed = threading.Lock(), 0
        self.thread = _Starter(self._device)
        self.thread.start()
        self._close = weakref.finalize(self, self.thread.items.put, None)  # None ends the thread

    def start(self, run: Run, channel: int, value: Any) -> BackgroundCall:
        """Let the thread call `run`, whose GPU work waits for what is now queued on the current stream.

        The caller itself runs `run`, at once, in a graph capture, in a callback in the thread, and if CUDA has one
        hardware queue.

        Args:
            run: queues the work.
            channel: channel of its calls, equal on all ranks; a bucket that keeps its channel repeats prepared calls.
            value: value that the future gets.

        Returns:
            The call.
        """
        call = BackgroundCall(self, run, channel, value)
        if self._on_gpu:
            call.stream, call.behind, call.ended = self._stream(channel), torch.cuda.Event(), torch.cuda.Event()
            call.behind.record(self._current_stream())
            call.captured = torch.cuda.is_current_stream_capturing()
        if call.captured or self._by_caller or self.is_this_thread():
            self.drain()
            with torch.cuda.stream(call.stream):
                _run(call)
            return call
        with self._lock:
            self._handed += 1
            self.thread.items.put(call)
        return call

    def new_future(self) -> Any:
        """Return a `torch.futures.Future` of tensors on the communicator's device."""
        devices: Any = [self._device] if self._on_gpu else []
        return torch.futures.Future(devices=devices)

    def is_this_thread(self) -> bool:
        """Return whether the caller runs in the background thread, as callbacks do."""
        return threading.current_thread() is self.thread

    def _stream(self, channel: int) -> Any:
        if channel not in self._streams:
            self._streams[channel] = torch.cuda.Stream(self._device, priority=-1)
        return self._streams[channel]

    def _current_stream(self) -> Any:
        handle = torch._C._cuda_getCurrentRawStream(self._device.index)
        stream = self._current.get(handle)
        if stream is None:
            stream = self._current[handle] = torch.cuda.current_stream(self._device)
        return stream

    def drain(self) -> None:
        """Wait until all calls given to `start` are queued (on a CPU: have ended), and their callbacks have returned.

        In a callback in the thread this returns at once: calls given to `start` run after that callback.
        `Misconfigured` is raised in a callback of another group for which callbacks of this thread wait.
        """
        if self.thread.done == self._handed or self.is_this_thread():
            return
        reached = threading.Event()
        self.thread.items.put(reached)
        with self.thread.waited_for():
            reached.wait()

    def close(self) -> None:
        """End the thread after all calls given to `start`."""
        self.drain()
        self.abort()

    def abort(self) -> None:
        """Tell the thread to end after the calls given to `start`, which the communicator makes fail; do not wait."""
        self._close()


def _run(call: BackgroundCall) -> None:
    try:
        if call.stream is not None:
            call.stream.wait_event(call.behind)
        call.run(call.channel)
        if call.stream is not None:
            call.ended.record(call.stream)
    except Exception as error:
        call.future.set_exception(error)
    else:
        call.future.set_result(call.value)
