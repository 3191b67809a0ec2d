"""Allocate symmetric memory for single calls, eager or in graph captures."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from counterpoint.collectives.communicator import Communicator
from counterpoint.collectives.cuda.device import raw_stream

_MOST_WASTE = 2  # memory that is kept may be at most this many times as large as what is asked for


class CallMemory:
    """Allocates symmetric memory for single calls of a communicator.

    A tensor from `empty` is used again after `give_back`: each call begins with a handshake on its memory, behind the
    last call that used that memory. Eager calls and calls in graph captures use the same memory. Fresh memory for each
    call would save the handshake, but cost the host a quarter of its calls in a layer of experts. `shared` does make
    fresh memory for each call, and tells peers at once when it is free; calls in captures all share one tensor, since a
    graph would tell peers at every replay.

    Args:
        communicator: the communicator whose calls use the memory.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator, self._device = communicator, communicator.device
        self._on_gpu = self._device.type == "cuda"
        self._free: list[tuple[Tensor, int]] = []  # each with the stream that used it last
        self._lent: dict[int, Tensor] = {}  # tensors handed out, by address
        self._shared: dict[str, Tensor] = {}  # tensors for captures, by role

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor that peers may write; all ranks must ask for equal sizes in the same order."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if not num_bytes:
            return self._communicator.empty(*shape, dtype=dtype, early_release=True)
        chosen, most = -1, _MOST_WASTE * num_bytes
        for index, (one, _) in enumerate(self._free):
            if num_bytes <= one.nbytes <= most and (chosen < 0 or one.nbytes < self._free[chosen][0].nbytes):
                chosen = index
        if chosen < 0:
            found = self._communicator.empty(num_bytes, dtype=torch.uint8)
        else:
            found, last = self._free.pop(chosen)
            if self._on_gpu:
                self._wait_for(last)
        self._lent[found.data_ptr()] = found
        return found[:num_bytes].view(dtype).view(shape)

    def give_back(self, tensor: Tensor) -> None:
        """Allow `empty` to return this tensor's memory again, once the work that is queued now has ended."""
        found = self._lent.pop(tensor.data_ptr(), None)
        if found is not None:
            self._free.append((found, self._stream() if self._on_gpu else 0))

    def forget(self) -> None:
        """Drop all memory that was given back, because the communicator ends."""
        self._free.clear()

    def _wait_for(self, stream: int) -> None:
        """Let the current stream wait for the stream that last used a tensor; in a graph capture do nothing."""
        if stream != self._stream() and not self.is_capturing():
            # torch takes handle 0, the default stream's, for "no handle", and would make a new stream
            last = (
                torch.cuda.ExternalStream(stream, self._device) if stream else torch.cuda.default_stream(self._device)
            )
            torch.cuda.current_stream(self._device).wait_stream(last)

    def _stream(self) -> int:
        return int(raw_stream()(self._device.index))

    def shared(self, role: str, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor that peers may write; in captures all calls with one `role` share a tensor."""
        if not self.is_capturing():
            return self._communicator.empty(*shape, dtype=dtype, early_release=True)
        num_bytes, kept = math.prod(shape) * dtype.itemsize, self._shared.get(role)
        if kept is None or kept.numel() < num_bytes:
            kept = self._shared[role] = self._communicator.empty(num_bytes, dtype=torch.uint8)
        return kept[:num_bytes].view(dtype).view(shape)

    def is_capturing(self) -> bool:
        """Return whether the current stream is in a graph capture."""
        return self._on_gpu and torch.cuda.is_current_stream_capturing()
