"""Start reductions of gradient buckets from a thread of its own, so that a backward pass does not wait for launches.

To launch a collective takes the host some 60 to 130 us in Python. In a backward pass that time delays the launches of
matmuls, and where the host is the limit it is lost. Here the pass only records an event and hands the bucket over.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from counterpoint.collectives.multihost.communicator import AnyCommunicator

Future: TypeAlias = Any
"""A `torch.futures.Future`."""
PIECE_BYTES = 1 << 28
"""Largest part of a bucket that is reduced at once: staging and landing are as large, and stay.

Before its first step DDP has one bucket, of all gradients.
"""
Run: TypeAlias = Callable[[int], object]
"""Queues work on the current stream, with calls of the communicator on the channel that it is given."""


def pieces(values: Tensor) -> Sequence[Tensor]:
    """Return a flat tensor in pieces of up to `PIECE_BYTES`."""
    return (values,) if values.nbytes <= PIECE_BYTES else values.split(PIECE_BYTES // values.itemsize)


def all_reduce_in_pieces(communicator: AnyCommunicator, values: Tensor, op: str, factor: float, channel: int) -> None:
    """Do `Communicator.all_reduce` of a flat tensor, in pieces of up to `PIECE_BYTES`."""
    for piece in pieces(values):
        communicator.all_reduce(piece, op, factor=factor, channel=channel)


@dataclass(frozen=True, slots=True)
class _Place:
    """Holds what is kept for a tensor: the channel of work on it, and the event of the stream that wrote it."""

    channel: int
    behind: Any  # torch.cuda.Event; None on a CPU


@dataclass(slots=True)
class _Item:
    run: Run
    place: _Place
    value: Any
    future: Future


class Background:
    """Starts work on a communicator in the order in which it was handed over, on as many channels as there are.

    Nothing else may use the communicator's channels before `drain` has returned.

    Args:
        communicator: runs the calls.
    """

    def __init__(self, communicator: AnyCommunicator) -> None:
        self._communicator, self._device, self._channels = communicator, communicator.device, communicator.channels
        self._on_gpu = self._device.type == "cuda"
        streams = [torch.cuda.Stream(self._device, priority=-1) for _ in range(self._channels)] if self._on_gpu else []
        self._streams: list[Any] = streams
        self._items: queue.SimpleQueue[_Item | threading.Event | None] = queue.SimpleQueue()
        self._places: dict[int, _Place] = {}
        self._current: dict[int, Any] = {}  # torch's streams by handle: to ask torch for one takes longer
        self._is_idle = True
        thread = threading.Thread(
            target=_serve, args=(self._items, self._device, streams), name="counterpoint-buckets", daemon=True
        )
        thread.start()
        self._close = weakref.finalize(self, self._items.put, None)  # None ends the thread

    def start(self, run: Run, tensor: Tensor, value: Any) -> Future:
        """Hand `run` over, behind the current stream; in a graph capture its work is queued at once.

        Work on a tensor in symmetric memory always runs on the same channel, whose prepared calls are then repeated.

        Args:
            run: queues the work.
            tensor: what it works on.
            value: what the future gets.

        Returns:
            A future that gets it when the work has ended; on a GPU already when it is queued, and streams that
            wait for the future wait for the work.
        """
        devices: Any = [self._device] if self._on_gpu else []
        future: Future = torch.futures.Future(devices=devices)
        place = self._place(tensor)
        item = _Item(run, place, value, future)
        if self._on_gpu:
            place.behind.record(self._current_stream())
            if torch.cuda.is_current_stream_capturing():
                self.drain()
                stream = self._streams[place.channel]
                with torch.cuda.stream(stream):
                    _run(item, stream)
                return future
        self._is_idle = False
        self._items.put(item)
        return future

    def stream_of(self, tensor: Tensor) -> Any:
        """Return torch's stream that runs work on this tensor; None on a CPU."""
        return self._streams[self._place(tensor).channel] if self._streams else None

    def _place(self, tensor: Tensor) -> _Place:
        """Return a tensor's place; in plain memory, whose addresses differ between ranks, that has channel 0."""
        if not self._communicator.is_symmetric(tensor):
            return _Place(0, torch.cuda.Event() if self._on_gpu else None)
        address = tensor.data_ptr()
        place = self._places.get(address)
        if place is None:
            event = torch.cuda.Event() if self._on_gpu else None
            place = self._places[address] = _Place(len(self._places) % self._channels, event)
        return place

    def _current_stream(self) -> Any:
        handle = torch._C._cuda_getCurrentRawStream(self._device.index)
        stream = self._current.get(handle)
        if stream is None:
            stream = self._current[handle] = torch.cuda.current_stream(self._device)
        return stream

    def drain(self) -> None:
        """Return when all that was handed over is queued (on a CPU: has ended)."""
        if self._is_idle:
            return
        reached = threading.Event()
        self._items.put(reached)
        reached.wait()
        self._is_idle = True

    def close(self) -> None:
        """End the thread, after what was handed over."""
        self.drain()
        self._close()


def _serve(items: queue.SimpleQueue[_Item | threading.Event | None], device: torch.device, streams: list[Any]) -> None:
    current: Any = None
    if streams:
        torch.cuda.set_device(device)
    while (item := items.get()) is not None:
        if isinstance(item, threading.Event):
            item.set()
            continue
        stream: Any = streams[item.place.channel] if streams else None
        if stream is not current:
            torch.cuda.set_stream(stream)
            current = stream
        _run(item, stream)
        del item  # it keeps tensors alive


def _run(item: _Item, stream: Any) -> None:
    try:
        if stream is not None:
            stream.wait_event(item.place.behind)
        item.run(item.place.channel)
    except Exception as error:
        item.future.set_exception(error)
    else:
        item.future.set_result(item.value)
