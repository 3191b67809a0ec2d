"""Add up the partial products of all ranks in the order of ranks: narrow dtypes in float32, rounded once."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from counterpoint.collectives.cpu.call import reference
from counterpoint.collectives.cuda.device import raw_stream
from counterpoint.collectives.cuda.lower import ReduceLaunch
from counterpoint.collectives.cuda.sum_launch import bind
from counterpoint.collectives.program.reductions import Reduction
from counterpoint.collectives.program.steps import COPY
from counterpoint.collectives.submit.tensors import dtype_name, reduction_of


def add_up(parts: Tensor, out: Tensor, op: str) -> None:
    """Write the sum of `parts` over ranks, or with `avg` the mean, to `out`.

    Args:
        parts: `[world_size, rows, n]`, the rows of each rank contiguous.
        out: `[rows, n]`, contiguous.
        op: sum or avg.
    """
    if not out.is_cuda:
        out.copy_(reference(list(parts), reduction_of(op, 1.0, out)))
        return
    index, stride = out.device.index, parts.stride(0) * parts.itemsize
    stream = raw_stream()(index)
    _bound(parts.data_ptr(), stride, len(parts), out.data_ptr(), out.nbytes, op, out.dtype, stream, index)()


@lru_cache(maxsize=1024)
def _bound(
    first: int,
    stride: int,
    count: int,
    target: int,
    num_bytes: int,
    op: str,
    dtype: torch.dtype,
    stream: int,
    index: int,
) -> Callable[[], Any]:
    """Return a function that launches a kernel to add `count` arrays, which lie `stride` bytes apart."""
    sources = tuple(range(first, first + count * stride, stride))
    sms = torch.cuda.get_device_properties(index).multi_processor_count
    return bind(
        ReduceLaunch(sources, target, num_bytes, COPY),
        Reduction(op=op, dtype=dtype_name(dtype)),  # type: ignore[arg-type]
        stream=stream,
        device_sms=sms,
    )
