"""Predict the cost of tensor-parallel communication that runs in pieces beside its matrix product.

exposed = end of the pieces (`pair/matmul_choice.py`) - the product alone, both by an estimated curve of the product
"""

from __future__ import annotations

from functools import lru_cache

from counterpoint.errors import Misconfigured, Unsupported
from counterpoint.pair.arrivals import ShardedMatmul, TensorOperation
from counterpoint.pair.curves import estimated_curve
from counterpoint.pair.matmul_choice import cut, with_best_chunks
from counterpoint.plan.job.cluster import plan_profile

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp8": "float8_e4m3fn", "fp32": "float32"}  # of operands, by precision


@lru_cache(maxsize=4096)
def pieces_us(
    operation: TensorOperation, columns: int, depth: int, dtype: str, rows: int, ranks: int, gpu: tuple[str, str]
) -> float:
    """Return the µs that a product with communication in pieces takes beyond the product alone.

    Args:
        operation: what comes first.
        columns: of the product.
        depth: elements of each sum.
        dtype: of the operands, torch's name.
        rows: of all ranks.
        ranks: that share them.
        gpu: its name, and the file of its profile as `ClusterGpu.machine` has it.

    Raises:
        Misconfigured: the GPU's data sheet is not known.
    """
    profile = plan_profile(*gpu)
    try:
        curve = estimated_curve(columns, depth, dtype, rows, profile)
    except Unsupported as error:
        raise Misconfigured(f"parallel.pieces_tp: {error}; leave it out") from None
    shares = tuple(rows // ranks + (rank < rows % ranks) for rank in range(ranks))
    task = with_best_chunks(ShardedMatmul(operation=operation, curves=(curve,), shard_rows=shares), profile)
    return max(0.0, cut(task, 0, profile).us - curve.us(rows))
