"""Tensors without memory that stand in for FSDP2's buffers: what would be copied in or out is noted, not copied.

FSDP2 asks its hooks for a buffer to gather into, and for one to scatter from; copies shards or gradients into it by one
operation, calls the hook, and copies parameters out by another. Given one of these instead, the operation comes here:
the gather's shards go where the parameters are (fsdp_places.py), and gradients stay where autograd left them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from counterpoint.errors import Unsupported
from counterpoint.parallel.fsdp_places import Home

__all__ = ["Gathering", "Gradients", "Sent"]

_VIEW = torch.ops.aten.view.default
_WIDENED = (torch.bfloat16, torch.float16)  # sent as they are where float32 is asked for, in which they are added up


class Gathering(Tensor):
    """What FSDP2 takes for the buffer of one all-gather.

    Args:
        home: of the module's parameters.
        channel: of its gathers.
        size: that was asked for.
        dtype: likewise.
        device: likewise.
    """

    home: Home
    channel: int

    @staticmethod
    def __new__(
        cls, home: Home, channel: int, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> Gathering:
        made: Gathering = Tensor._make_wrapper_subclass(cls, tuple(size), dtype=dtype, device=device)
        made.home, made.channel = home, channel
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.ops.fsdp.all_gather_copy_in.default:
            buffer = args[1]
            buffer.home.fill()
            return buffer.detached((len(buffer) // buffer.home.ranks,)), buffer.detached(buffer.shape)
        if function is _VIEW:
            return args[0].detached(_viewed(args[0], args[1]))
        if function is torch.ops.fsdp.split_with_sizes_copy.default:
            args[0].home.read(channel=args[0].channel)
            return None
        raise Unsupported(
            f"FSDP2 of torch {torch.__version__} does {function} with what it gathers, which this counterpoint does "
            "not know; use Options(direct=False)"
        )

    def detached(self, size: Sequence[int]) -> Gathering:
        """The same buffer, of another shape."""
        return Gathering(self.home, self.channel, size, dtype=self.dtype, device=self.device)


class Sent:
    """What a reduce-scatter sends: gradients where they are; or, once anything else is done with the buffer than to
    scatter it, that buffer, which they are copied into.

    Args:
        numel: of the buffer.
        dtype: in which gradients are reduced.
        device: of the model.
        ranks: that share them.
    """

    def __init__(self, numel: int, *, dtype: torch.dtype, device: torch.device, ranks: int) -> None:
        self.numel, self.dtype, self.device, self.ranks = numel, dtype, device, ranks
        self.gradients: list[Tensor] | None = None
        self._buffer: Tensor | None = None

    def takes(self, gradients: Sequence[Tensor]) -> bool:
        """Whether they can be sent as they are."""
        first = gradients[0].dtype
        fits = first == self.dtype or (first in _WIDENED and self.dtype == torch.float32)
        if not fits or not all(one.dtype == first and one.is_contiguous() and one.dim() for one in gradients):
            return False
        self.gradients = list(gradients)
        return True

    def shares(self) -> list[int]:
        """Elements of each gradient that one rank gets: of dim 0 a share, rounded up."""
        assert self.gradients is not None
        return [-(-len(one) // self.ranks) * math.prod(one.shape[1:]) for one in self.gradients]

    def buffer(self) -> Tensor:
        """All of it, as FSDP2 would have copied it."""
        if self._buffer is None:
            self._buffer = torch.empty(self.numel, dtype=self.dtype, device=self.device)
            if self.gradients is not None:
                self.copy(self.gradients)
        return self._buffer

    def copy(self, gradients: Sequence[Tensor]) -> None:
        """As FSDP2 does it."""
        self.gradients = None
        rows = self.buffer().view(self.ranks, -1)
        torch.ops.fsdp.chunk_cat(gradients, dim=0, num_chunks=self.ranks, out=rows)


class Gradients(Tensor):
    """What FSDP2 takes for the buffer of one reduce-scatter.

    Args:
        sent: what is behind it.
        size: of the buffer, or of a view.
    """

    sent: Sent

    @staticmethod
    def __new__(cls, sent: Sent, size: Sequence[int]) -> Gradients:
        made: Gradients = Tensor._make_wrapper_subclass(cls, tuple(size), dtype=sent.dtype, device=sent.device)
        made.sent = sent
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if function is _VIEW:
            return Gradients(args[0].sent, _viewed(args[0], args[1]))
        out = named.get("out")
        if function is torch.ops.fsdp.chunk_cat.default and isinstance(out, Gradients):
            if not out.sent.takes(args[0]):
                out.sent.copy(args[0])
            return None
        return function(*tree_map(_buffer, args), **tree_map(_buffer, named))


def _viewed(tensor: Tensor, size: Sequence[int]) -> list[int]:
    """`size` with its one unknown axis known."""
    known = math.prod(length for length in size if length >= 0)
    return [length if length >= 0 else tensor.numel() // max(1, known) for length in size]


def _buffer(one: Any) -> Any:
    return one.sent.buffer().view(one.shape) if isinstance(one, Gradients) else one
