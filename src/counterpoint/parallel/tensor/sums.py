"""Add up partial products of all ranks: in the order of ranks, in float32 for narrow dtypes, rounded once."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from counterpoint.collectives.cpu.channel import reference
from counterpoint.collectives.cuda.lower import ReduceLaunch
from counterpoint.collectives.cuda.sums import bind
from counterpoint.collectives.program.reductions import Reduction
from counterpoint.collectives.program.steps import COPY
from counterpoint.collectives.submit.tensors import dtype_name


def add_up(parts: Tensor, out: Tensor, op: str) -> None:
    """Write the sum, or with `avg` the mean, of `parts` to `out`.

    Args:
        parts: `[world_size, rows, n]`, the rows of each rank contiguous.
        out: `[rows, n]`, contiguous.
        op: sum or avg.
    """
    reduction = Reduction(op=op, dtype=dtype_name(out))  # type: ignore[arg-type]
    if not out.is_cuda:
        out.copy_(reference(list(parts), reduction))
        return
    sources = tuple(part.data_ptr() for part in parts)
    stream = torch.cuda.current_stream(out.device).cuda_stream
    _bound(sources, out.data_ptr(), out.nbytes, reduction, stream, out.device.index)()


@lru_cache(maxsize=1024)
def _bound(
    sources: tuple[int, ...], target: int, num_bytes: int, reduction: Reduction, stream: int, device: int
) -> Callable[[], Any]:
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    return bind(ReduceLaunch(sources, target, num_bytes, COPY), reduction, stream=stream, device_sms=sms)
