"""Make symmetric memory for single calls, eager ones and those in graph captures."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from counterpoint.collectives.communicator import Communicator


class CallMemory:
    """Makes symmetric memory for single calls.

    Peers are told at once when it is free. A graph would tell them at every replay: so calls in captures use memory
    that is kept, and begin with a handshake there, behind the last call that used it. `empty` hands out what
    `give_back` has returned, for calls of which several are under way; `shared` the same memory for each call.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._kept: list[Tensor] = []
        self._shared: dict[str, Tensor] = {}  # by role

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor that peers may write."""
        if not self.is_capturing():
            return self._communicator.empty(*shape, dtype=dtype, early_release=True)
        num_bytes = math.prod(shape) * dtype.itemsize
        fitting = [one for one in self._kept if one.nbytes == num_bytes]
        if fitting:
            self._kept = [one for one in self._kept if one is not fitting[0]]
        found = fitting[0] if fitting else self._communicator.empty(num_bytes, dtype=torch.uint8)
        return found.view(dtype).view(shape)

    def give_back(self, tensor: Tensor) -> None:
        """Say that the work queued so far is the last that uses a tensor of `empty`."""
        if self.is_capturing():
            self._kept.append(tensor.view(-1).view(torch.uint8))

    def shared(self, role: str, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor that peers may write; in captures, one for all calls in the same role."""
        if not self.is_capturing():
            return self._communicator.empty(*shape, dtype=dtype, early_release=True)
        num_bytes, kept = math.prod(shape) * dtype.itemsize, self._shared.get(role)
        if kept is None or kept.numel() < num_bytes:
            kept = self._shared[role] = self._communicator.empty(num_bytes, dtype=torch.uint8)
        return kept[:num_bytes].view(dtype).view(shape)

    def is_capturing(self) -> bool:
        """Return whether the current stream is in a graph capture."""
        return self._communicator.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
