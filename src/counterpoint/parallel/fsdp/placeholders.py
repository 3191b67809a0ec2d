"""Give FSDP2 buffers without memory, so that FSDP2's copies into or out of these buffers are recorded, not executed.

FSDP2 asks its hooks for a buffer to gather into, and for one to scatter from. It copies shards or gradients into the
buffer by one operation, calls the hook, and copies parameters out by another operation. With a placeholder as the
buffer, these operations are dispatched to this file: shards go to where the unsharded parameters are (`slots.py`), and
gradients stay where autograd left them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from counterpoint.collectives.submit.tensors import TensorList
from counterpoint.errors import Unsupported
from counterpoint.parallel.fsdp.slots import ModuleParameters

_COPY_IN, _COPY_OUT = torch.ops.fsdp.all_gather_copy_in.default, torch.ops.fsdp.split_with_sizes_copy.default
_CHUNK_CAT = torch.ops.fsdp.chunk_cat.default
_WIDENED = (torch.bfloat16, torch.float16)  # sent as they are where FSDP2 wants float32: sums are in float32 anyway


class GatherPlaceholder(Tensor):
    """Replaces the buffer of one module's all-gathers by a tensor without memory."""

    parameters: ModuleParameters
    _other_shapes: dict[tuple[int, ...], GatherPlaceholder]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(
        cls,
        parameters: ModuleParameters,
        size: Sequence[int],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> GatherPlaceholder:
        """Return a new placeholder of this shape, without memory."""
        made: GatherPlaceholder = Tensor._make_wrapper_subclass(cls, tuple(size), dtype=dtype, device=device)
        made.parameters, made._other_shapes = parameters, {}
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is _COPY_IN:
            buffer = args[1]
            buffer.parameters.copy_in()
            numel = buffer.shape[0]
            return buffer.view(numel // buffer.parameters.ranks), buffer.view(numel)
        if function is _COPY_OUT:
            args[0].parameters.read()
            return None
        raise Unsupported(
            f"FSDP2 of torch {torch.__version__} does {function} with what it gathers, which this counterpoint does "
            "not know; use OverlapOptions(direct=False)"
        )

    def view(self, *size: Any) -> GatherPlaceholder:
        """Return this placeholder with another shape; the result is cached by shape."""
        other = self._other_shapes.get(size)
        if other is None:
            shape = _known_size(self, size)
            other = GatherPlaceholder(self.parameters, shape, dtype=self.dtype, device=self.device)
            self._other_shapes[size] = other
        return other


class ScatterSource:
    """Holds the input of a reduce-scatter: the gradients where autograd left them, or a buffer with copies of them.

    The buffer, of `numel` elements, is made only if the placeholder is used for anything but the scatter.
    """

    def __init__(self, numel: int, *, dtype: torch.dtype, device: torch.device, ranks: int) -> None:
        self.numel, self.dtype, self.device, self.ranks = numel, dtype, device, ranks
        self.gradients: TensorList | None = None
        self._shapes: tuple[torch.Size, ...] = ()
        self._buffer: Tensor | None = None
        self._copied: TensorList | None = None

    def accept(self, gradients: Sequence[Tensor]) -> None:
        """Hold the gradients, to send them from where they are; if that is not possible, copy them into the buffer."""
        first = gradients[0].dtype
        sent = first == self.dtype or (first in _WIDENED and self.dtype == torch.float32)
        for one in gradients:
            sent = sent and one.dtype == first and one.is_contiguous() and one.dim() > 0 and not one.is_neg()
        if not sent:
            self.copy(gradients)
            return
        self._shapes = tuple([one.shape for one in gradients])
        self.gradients = TensorList.checked(gradients, shape_key=(first, self.device, self._shapes))

    def shares(self) -> tuple[int, ...]:
        """Return, for each gradient, the number of elements that one rank gets: its share of dim 0, rounded up."""
        return _shares(self._shapes, self.ranks)

    def buffer(self) -> Tensor:
        """Return one tensor with all gradients, in the layout of FSDP2's own buffer."""
        if self._buffer is None:
            self._buffer = torch.empty(self.numel, dtype=self.dtype, device=self.device)
            if self.gradients is not None:  # copied on the scatter's stream, while the compute stream goes on:
                self._copied = self.gradients  # it must not get their memory before it has waited for the scatter
                self.copy(self.gradients.tensors)
        return self._buffer

    def copy(self, gradients: Sequence[Tensor]) -> None:
        """Copy the gradients into the buffer, by FSDP2's own operation."""
        self.gradients = None
        rows = self.buffer().view(self.ranks, -1)
        torch.ops.fsdp.chunk_cat(gradients, dim=0, num_chunks=self.ranks, out=rows)


class ScatterPlaceholder(Tensor):
    """Replaces the buffer of one reduce-scatter, or a view of that buffer, by a tensor without memory."""

    source: ScatterSource
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(cls, source: ScatterSource, size: Sequence[int]) -> ScatterPlaceholder:
        """Return a new placeholder of this shape, without memory."""
        made: ScatterPlaceholder = Tensor._make_wrapper_subclass(
            cls, tuple(size), dtype=source.dtype, device=source.device
        )
        made.source = source
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if function is _CHUNK_CAT and isinstance(named.get("out"), ScatterPlaceholder):
            named["out"].source.accept(args[0])
            return None
        return function(*tree_map(_buffer, args), **tree_map(_buffer, named))

    def view(self, *size: Any) -> Any:
        """Return a placeholder with another shape, or, for another dtype, a view of the real buffer."""
        if isinstance(size[0], torch.dtype):
            return _buffer(self).view(*size)
        return ScatterPlaceholder(self.source, _known_size(self, size))


@lru_cache(maxsize=1024)
def _shares(shapes: tuple[torch.Size, ...], ranks: int) -> tuple[int, ...]:
    return tuple(-(-shape[0] // ranks) * math.prod(shape[1:]) for shape in shapes)


def _known_size(tensor: Tensor, size: tuple[Any, ...]) -> list[int]:
    """Return the arguments `size` of `Tensor.view` as a shape, with -1 replaced by the inferred length."""
    lengths = list(size[0]) if isinstance(size[0], Sequence) else list(size)
    known = math.prod(length for length in lengths if length >= 0)
    return [length if length >= 0 else tensor.numel() // max(1, known) for length in lengths]


def _buffer(one: Any) -> Any:
    return one.source.buffer().view(one.shape) if isinstance(one, ScatterPlaceholder) else one
