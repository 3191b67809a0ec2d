"""Check the tensors of a call, compute block sizes, and describe tensors in a text that all ranks compare."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Hashable, Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import is_
from typing import Any

import torch

from counterpoint.collectives.program.calls import Span
from counterpoint.collectives.program.reductions import Reduction
from counterpoint.errors import Misconfigured

CPU = torch.device("cpu")


class TensorList:
    """Holds several tensors that one call treats as a single buffer, from the lowest byte of any to the highest.

    Empty tensors do not count for that range. Addresses and sizes are meaningful for contiguous tensors only: see
    `sendable`. A caller that repeats a call may keep its lists, or pass a `key` that is cheaper than `tensor_key` of
    each tensor; equal keys must mean equal addresses, shapes and dtypes. `Misconfigured` is raised if the list is empty
    or holds something else than tensors.
    """

    __slots__ = ("_flat", "_key", "_shape_key", "_sizes", "_span", "_tensors", "is_checked")

    def __init__(self, tensors: Iterable[torch.Tensor], *, key: Hashable = None) -> None:
        self._tensors: tuple[torch.Tensor, ...] | None = tuple(tensors)
        self._key = key
        self._shape_key: Hashable = None
        self._span: tuple[int, int] | None = None
        self._flat: torch.Tensor | None = None
        self._sizes: tuple[int, ...] = ()
        self.is_checked = False
        """Says that the tensors are known to be contiguous and neither conjugated nor negated."""
        if key is None and not (self._tensors and all(isinstance(tensor, torch.Tensor) for tensor in self._tensors)):
            raise Misconfigured(f"{self._tensors!r:.200}: give a list of tensors, one at least")

    @classmethod
    def checked(cls, tensors: Sequence[torch.Tensor], *, shape_key: Hashable) -> TensorList:
        """Return `tensors` as a list; the caller guarantees that all are contiguous and neither conjugated nor negated.

        `shape_key` is equal for lists of tensors of equal shapes and dtypes on the same device.
        """
        made = cls(tensors, key=(shape_key, tuple([tensor.data_ptr() for tensor in tensors])))
        made._shape_key, made.is_checked = shape_key, True
        return made

    @classmethod
    def split(cls, flat: torch.Tensor, sizes: tuple[int, ...]) -> TensorList:
        """Return a list of the consecutive pieces of `flat` (contiguous), of `sizes` elements each; split lazily."""
        shape_key = (flat.dtype, flat.device, sizes)
        made = cls((), key=(shape_key, flat.data_ptr()))
        made._tensors, made._flat, made._sizes = None, flat, sizes
        made._shape_key, made.is_checked = shape_key, True
        return made

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return all tensors, in the order in which they were passed."""
        if self._tensors is None:
            assert self._flat is not None
            self._tensors = self._flat.split(self._sizes)
        return self._tensors

    @property
    def key(self) -> Hashable:
        """Return a key of everything about the tensors that a call uses: addresses, shapes, dtypes, devices, flags."""
        if self._key is None:
            self._key = tuple(map(tensor_key, self.tensors))
        return self._key

    @property
    def shape_key(self) -> Hashable:
        """Return a key of everything about the tensors that a call uses, except their addresses."""
        if self._shape_key is None:
            self._shape_key = tuple([_shape_key(tensor) for tensor in self.tensors])
        return self._shape_key

    @property
    def is_split(self) -> bool:
        """Return whether the tensors were made by `split` from one tensor, so that no two of them share bytes."""
        return self._flat is not None

    @property
    def nbytes(self) -> int:
        """Return how many bytes lie from the lowest byte of any tensor to the highest, gaps included."""
        return self._spanned()[1]

    def data_ptr(self) -> int:
        """Return the lowest address of any of the tensors."""
        return self._spanned()[0]

    @property
    def addresses(self) -> tuple[int, ...]:
        """Return the address of each tensor."""
        if self._flat is None:
            return tuple([tensor.data_ptr() for tensor in self.tensors])
        start, item = self._flat.data_ptr(), self._flat.itemsize
        return tuple([start + item * at for at in (0, *accumulate(self._sizes[:-1]))])

    @property
    def starts(self) -> tuple[int, ...]:
        """Return the offset of each tensor from `data_ptr()` in bytes; 0 for an empty tensor."""
        base = self.data_ptr()
        return tuple(tensor.data_ptr() - base if tensor.numel() else 0 for tensor in self.tensors)

    def _spanned(self) -> tuple[int, int]:
        if self._span is None:
            if self._flat is not None:
                self._span = self._flat.data_ptr(), self._flat.nbytes
            else:
                places = [(tensor.data_ptr(), tensor.nbytes) for tensor in self.tensors if tensor.numel()]
                base = min((start for start, _ in places), default=0)
                self._span = base, max((start + size for start, size in places), default=0) - base
        return self._span


def tensor_list(tensors: Iterable[Any] | TensorList) -> TensorList:
    """Return the tensors as a `TensorList`."""
    return tensors if isinstance(tensors, TensorList) else TensorList(tensors)


def tensors_of(tensor: Any) -> tuple[Any, ...]:
    """Return the tensors in one argument of a call: in None, a tensor or a `TensorList`."""
    if isinstance(tensor, TensorList):
        return tensor.tensors
    return () if tensor is None else (tensor,)


def block_bytes(output: Any, input: Any, count: int, device: torch.device = CPU) -> int:
    """Return the input's size in bytes; raise unless the output is `count` times as large and both are on `device`."""
    check(output, input, device)
    if output.numel() != count * input.numel():
        raise Misconfigured(
            f"output of {output.numel()} and input of {input.numel()} elements: give {count} times as many in output"
        )
    return int(input.nbytes)


def check(output: Any, input: Any, device: torch.device = CPU) -> None:
    """Raise if output cannot be written or input cannot be read on this device, or their dtypes differ."""
    for tensor in (output, input):
        if tensor is not None and (tensor.device != device or tensor.layout is not torch.strided):
            raise Misconfigured(f"a tensor on {tensor.device}, {tensor.layout}: allowed are strided ones on {device}")
    if output is not None and (not output.is_contiguous() or output.is_conj() or output.is_neg()):
        raise Misconfigured(f"output of strides {output.stride()}: give a contiguous one, and copy from it")
    if output is not None and input is not None and input.dtype != output.dtype:
        raise Misconfigured(f"output of {output.dtype}, input of {input.dtype}: give both the same dtype")


def splits(tensor: Any, sizes: Sequence[int], world_size: int) -> tuple[int, ...]:
    """Return the bytes of each block, given `sizes` in rows (dim 0); raise if `sizes` do not add up to all rows."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if len(sizes) != world_size or sum(sizes) != rows or min(sizes) < 0:
        raise Misconfigured(f"split sizes {list(sizes)} of {rows} rows: give {world_size} that add up to these")
    row_bytes = math.prod(tensor.shape[1:]) * tensor.element_size()
    return tuple(size * row_bytes for size in sizes)


def sendable(tensor: Any) -> Any:
    """Return `tensor` if it is contiguous and neither conjugated nor negated, else a copy that is."""
    if isinstance(tensor, TensorList):
        if tensor.is_checked:
            return tensor
        whole = [sendable(one) for one in tensor.tensors]
        return tensor if all(map(is_, whole, tensor.tensors)) else TensorList(whole)
    if tensor is None or tensor.layout is not torch.strided:  # `check` refuses the latter
        return tensor
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def copied(tensor: Any) -> Any:
    """Return a copy of a contiguous tensor, or of a `TensorList` with each of its tensors copied."""
    if isinstance(tensor, TensorList):
        return TensorList([copied(one) for one in tensor.tensors])
    return tensor.detach().clone()


def flat_bytes(tensor: Any, dtype: torch.dtype = torch.uint8) -> Any:
    """Return a one-dimensional view, of `dtype`, of the memory of a contiguous tensor."""
    if not tensor.numel():
        return tensor.new_empty(0, dtype=dtype)
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(dtype)  # one element may have any stride


def cut(flat: Any, span: Span) -> Any:
    """Return the elements of the flat tensor `flat` that `span` (in bytes) covers."""
    size = flat.element_size()
    return flat[span.offset // size : (span.offset + span.num_bytes) // size]


def tensor_key(tensor: Any) -> Hashable:
    """Return a cache key of a tensor or list (address, shape, dtype, ...): equal keys give equal submissions."""
    if tensor is None:
        return None
    if type(tensor) is TensorList:
        return tensor.key
    return (  # `_shape_key`, without a call: every start of a collective comes here
        tensor.data_ptr(), tensor.shape, tensor.dtype, tensor.device,
        tensor.is_contiguous(), tensor.is_conj(), tensor.is_neg(),
    )  # fmt: skip


def _shape_key(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.is_contiguous(), tensor.is_conj(), tensor.is_neg()


def overlap(one: Any, other: Any) -> bool:
    """Return whether the byte ranges (first to last byte) of two contiguous tensors or two lists overlap."""
    first, second = one.data_ptr(), other.data_ptr()
    return bool(first < second + other.nbytes and second < first + one.nbytes)


def is_block(part: Any, whole: Any, rank: int) -> bool:
    """Return whether `part` is the block of `rank` in `whole`; both are contiguous."""
    return bool(part.data_ptr() == whole.data_ptr() + rank * part.nbytes and part.dtype == whole.dtype)


def overlap_elsewhere(outputs: Sequence[Any], inputs: Sequence[Any], in_place: Sequence[bool]) -> bool:
    """Return whether an input shares bytes with any output, except with the input's own output if `in_place`.

    If so, the inputs have to be sent as a copy. All tensors are contiguous; `in_place` says for each pair of output and
    input whether one of them is this rank's block of the other.

    Raises:
        Misconfigured: two outputs share bytes.
    """
    written = sorted((one.data_ptr(), one.data_ptr() + one.nbytes, i) for i, one in enumerate(outputs) if one.nbytes)
    for (_, end, one), (start, _, other) in pairwise(written):
        if start < end:
            raise Misconfigured(f"outputs {one} and {other} share bytes: give each its own, or what is written is lost")
    starts = [start for start, _, _ in written]
    for number, one in enumerate(inputs):
        index = bisect_left(starts, one.data_ptr() + one.nbytes) - 1
        while one.nbytes and index >= 0 and written[index][1] > one.data_ptr():
            if not (in_place[number] and written[index][2] == number):
                return True
            index -= 1
    return False


def reduction_of(op: Any, factor: float, tensor: Any) -> Reduction:
    """Return the `Reduction` for `op` (a name or torch's ReduceOp) and the tensor's dtype; raise if they do not fit."""
    return _reduction(reduction_name(op), dtype_name(tensor.dtype), float(factor))


def reduction_name(op: Any) -> str:
    """Return the lower-case name of a reduction, given as a name or as torch's ReduceOp."""
    return op if isinstance(op, str) else str(getattr(op, "name", op)).lower()


def described(tensor: Any) -> str:
    """Return a tensor's size and dtype as text, without anything that differs between ranks."""
    return f"{tensor.nbytes} bytes of {dtype_name(tensor.dtype)}"


@lru_cache(maxsize=64)
def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype without the prefix `torch.`."""
    return str(dtype).removeprefix("torch.")


@lru_cache(maxsize=256)
def _reduction(name: Any, dtype: str, factor: float) -> Reduction:
    return Reduction(op=name, dtype=dtype, factor=factor)
