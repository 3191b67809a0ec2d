"""Floating-point operations of matrix products whose input shapes the trace holds (`record_shapes=True`)."""

from __future__ import annotations

import itertools
import math

import msgspec
import numpy as np

from counterpoint.trace.timeline import F64, Kind, Timeline

__all__ = ["matmul_flops", "product_flops"]

_GEMM = ("gemm", "nvjet", "cutlass", "xmma", "sm90_", "sm80_", "Cijk_", "wgmma", "matmul", "ampere_", "hopper_")


def product_flops(dims: list[list[int]]) -> float:
    """2·M·N·K of the product among the inputs: the first two with 2 (mm, linear) or 3 (bmm) dimensions that fit.

    `aten::addmm` puts its bias first, `aten::linear` transposes its weight; NaN where no two inputs make a product.
    """
    tensors = [d for d in dims if isinstance(d, list) and len(d) >= 2 and all(isinstance(v, int) for v in d)]
    for a, b in itertools.pairwise(tensors):
        batch = math.prod(a[:-2]) if len(a) > 2 else 1
        if a[-1] == b[-2] and (len(b) == 2 or b[:-2] == a[:-2]):
            return 2.0 * batch * a[-2] * a[-1] * b[-1]
        if a[-1] == b[-1] and len(b) == 2:
            return 2.0 * batch * a[-2] * a[-1] * b[-2]
    return float("nan")


def matmul_flops(timeline: Timeline) -> F64:
    """Per GPU operation; NaN where it is no matrix product or the shapes are not known."""
    gpu = timeline.gpu
    is_gemm = np.array([any(key in n for key in _GEMM) for n in timeline.names], bool)
    by_shape = np.full(len(timeline.shapes) + 1, np.nan)
    flops = np.full(len(gpu), np.nan)
    if not len(gpu):
        return flops
    rows = np.flatnonzero((gpu.kind == Kind.COMPUTE) & (gpu.shape >= 0) & is_gemm[gpu.name])
    for shape in np.unique(gpu.shape[rows]).tolist():
        try:
            dims = msgspec.json.decode(timeline.shapes[shape])
        except msgspec.DecodeError:
            continue
        by_shape[shape] = product_flops(dims) if isinstance(dims, list) else np.nan
    flops[rows] = by_shape[gpu.shape[rows]]
    return flops
