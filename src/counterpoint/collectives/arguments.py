"""The tensors of a call: whether they fit it, and what to call them in words that all ranks must agree on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from operator import is_
from typing import Any

import torch

from counterpoint.collectives.reduce import Reduction
from counterpoint.errors import Misconfigured

__all__ = [
    "CPU",
    "Several",
    "block_bytes",
    "check",
    "described",
    "dtype_name",
    "even_blocks",
    "face",
    "overlap",
    "reduction_name",
    "reduction_of",
    "sendable",
    "splits",
]

CPU = torch.device("cpu")


class Several:
    """Tensors of one call taken for one: from the first byte of all of them to the last. Empty ones are nowhere.

    Args:
        tensors: one or more.

    Raises:
        Misconfigured: something else, or none.
    """

    def __init__(self, tensors: Sequence[Any]) -> None:
        self.tensors = tuple(tensors)
        if not self.tensors or not all(isinstance(tensor, torch.Tensor) for tensor in self.tensors):
            raise Misconfigured(f"{tensors!r:.200}: give a list of tensors, one at least")
        places = [(tensor.data_ptr(), tensor.nbytes) for tensor in self.tensors if tensor.numel()]
        self._base = min((start for start, _ in places), default=0)
        self.nbytes = max((start + size for start, size in places), default=0) - self._base

    def data_ptr(self) -> int:
        """Where the first of them lies."""
        return self._base

    @property
    def starts(self) -> tuple[int, ...]:
        """Of each, counted from there; 0 of an empty one."""
        return tuple(tensor.data_ptr() - self._base if tensor.numel() else 0 for tensor in self.tensors)


def block_bytes(
    output: Any = None, input: Any = None, *, outputs: int = 1, inputs: int = 1, device: torch.device = CPU
) -> int:
    """Bytes of one block: output is `outputs` of them, input is `inputs`; the one that is missing fits.

    Raises:
        Misconfigured: the tensors differ in dtype, do not have these sizes, or output cannot be written.
    """
    check(output, input, device)
    if output is not None and input is not None and output.numel() * inputs != input.numel() * outputs:
        raise Misconfigured(
            f"output of {output.numel()} and input of {input.numel()} elements: "
            f"{'output' if outputs > 1 else 'input'} has to be {max(outputs, inputs)} times the other, a block per rank"
        )
    return int(output.nbytes) // outputs if output is not None else int(input.nbytes) // inputs


def check(output: Any, input: Any, device: torch.device = CPU) -> None:
    """Whatever is given can be written or read, and both have one dtype.

    Raises:
        Misconfigured: it cannot, or they have not.
    """
    for tensor in (output, input):
        if tensor is not None and (tensor.device != device or tensor.layout is not torch.strided):
            raise Misconfigured(f"a tensor on {tensor.device}, {tensor.layout}: allowed are strided ones on {device}")
    if output is not None and (not output.is_contiguous() or output.is_conj() or output.is_neg()):
        raise Misconfigured(f"output of strides {output.stride()}: give a contiguous one, and copy from it")
    if output is not None and input is not None and input.dtype != output.dtype:
        raise Misconfigured(f"output of {output.dtype}, input of {input.dtype}: give both the same dtype")


def even_blocks(output: Any, input: Any, world_size: int, device: torch.device = CPU) -> int:
    """Bytes of each block of an all_to_all without split sizes.

    Raises:
        Misconfigured: the rows of the tensors are no multiple of `world_size`, or the tensors differ.
    """
    size = block_bytes(output, input, device=device)
    rows = input.shape[0] if input.dim() else 1
    if rows % world_size:
        raise Misconfigured(f"all_to_all of {rows} rows: give a multiple of {world_size}, or split sizes")
    return size // world_size


def splits(tensor: Any, sizes: Sequence[int], world_size: int) -> tuple[int, ...]:
    """Bytes of each block, from rows of dim 0.

    Raises:
        Misconfigured: the sizes do not add up to its rows.
    """
    rows = tensor.shape[0] if tensor.dim() else 1
    if len(sizes) != world_size or sum(sizes) != rows or min(sizes) < 0:
        raise Misconfigured(f"split sizes {list(sizes)} of {rows} rows: give {world_size} that add up to these")
    row_bytes = math.prod(tensor.shape[1:]) * tensor.element_size()
    return tuple(size * row_bytes for size in sizes)


def sendable(tensor: Any) -> Any:
    """`tensor` if its bytes lie one after the other as they are meant, else a copy of which that is true."""
    if isinstance(tensor, Several):
        whole = [sendable(one) for one in tensor.tensors]
        return tensor if all(map(is_, whole, tensor.tensors)) else Several(whole)
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def face(tensor: Any) -> tuple[Any, ...]:
    """All that a call can see of a tensor, or of several: what looks the same is treated the same.

    Raises:
        RuntimeError: of torch, for what is not strided.
    """
    if tensor is None:
        return (None,)
    if isinstance(tensor, Several):
        return tuple(map(face, tensor.tensors))
    return (
        tensor.data_ptr(),
        tensor.shape,
        tensor.dtype,
        tensor.device,
        tensor.is_contiguous(),
        tensor.is_conj(),
        tensor.is_neg(),
    )


def overlap(one: Any, other: Any) -> bool:
    """Whether two contiguous tensors share bytes."""
    first, second = one.data_ptr(), other.data_ptr()
    return bool(first < second + other.nbytes and second < first + one.nbytes)


def reduction_of(op: Any, factor: float, tensor: Any) -> Reduction:
    """`op` by its name, or torch's ReduceOp of that name.

    Raises:
        Misconfigured: it is none, or none for this dtype.
    """
    return _reduction(reduction_name(op), dtype_name(tensor), float(factor))


def reduction_name(op: Any) -> str:
    """Of torch's ReduceOps, too: they are all equal to numbers, and some to each other."""
    return op if isinstance(op, str) else str(getattr(op, "name", op)).lower()


def described(tensor: Any, reduction: Reduction | None = None) -> str:
    """Size and dtype, and what is done to the elements: all of it equal on all ranks."""
    how = "" if reduction is None else f", {reduction.op} {reduction.factor!r}"
    return f"{tensor.nbytes} bytes of {dtype_name(tensor)}{how}"


def dtype_name(tensor: Any) -> str:
    """Without `torch.`."""
    return _name(tensor.dtype)


@lru_cache(maxsize=64)
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@lru_cache(maxsize=256)
def _reduction(name: Any, dtype: str, factor: float) -> Reduction:
    return Reduction(op=name, dtype=dtype, factor=factor)
