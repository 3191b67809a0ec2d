"""Binds the matmuls that poll without a GPU: compiled for Hopper, not loaded; says what their code is like.

Started by path with the cases as JSON on standard input; writes for each the instructions that tests look for in the
order of the text, the kinds of stores, shared memory, spilled bytes, and how many kernels other layouts need.
"""

import json
import re
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from triton.compiler import CompiledKernel
from triton.runtime import driver

from counterpoint.pair.arrivals import ShardedRows
from counterpoint.parallel.tensor.flagged import MatmulTiles, bind_flagged
from tests.process.parallel.offline_compiler import OfflineDriver, spilled_bytes

SEEN = {
    "poll": r"(?:ld|atom)\.global\.sys\.acquire",
    "count": r"atom\.global\.sys\.release\.add",
    "barrier": r"bar\.sync",
    "proxy_fence": r"fence\.proxy\.async;",
    "tma": r"cp\.async\.bulk\.tensor",
    "wgmma": r"wgmma\.mma_async",
    "store": r"st\.global",
}
LAYOUTS = (
    ShardedRows(rank=0, rows=(512, 512)),
    ShardedRows(rank=5, rows=(33,) * 8, chunk_rows=16),
    ShardedRows(rank=1, rows=(16, 1, 0, 250), batch=3),
)
bound: list[CompiledKernel] = []


def bind(case: dict[str, Any], layout: ShardedRows) -> None:
    """Bind a matmul whose K makes rows of a multiple of 16 bytes, or not, with everything but a GPU."""
    k, n, tiles = (128 if case["tma"] else 129), 512, MatmulTiles(stages=case["stages"])
    dtype = getattr(torch, case["dtype"])
    a, own = torch.empty(layout.total, k, dtype=dtype), torch.empty(layout.shard(layout.rank), k, dtype=dtype)
    weight = torch.empty(n, k, dtype=dtype).t() if case["transposed"] else torch.empty(k, n, dtype=dtype)
    out = torch.empty(layout.total, n, dtype=torch.bfloat16)
    words: dict[str, Any] = {"words": 1 << 40, "error": 1 << 41, "num_sms": 132, "tiles": tiles}
    if case["kernel"] == "all_gather_matmul":
        bind_flagged("all_gather_matmul", {"own": own, "gathered": a, "b": weight, "out": out}, layout, **words)
        return
    staged, result = out.new_empty(layout.world_size, len(own), n), out.new_empty(len(own), n)
    tensors = {"a": a, "b": weight, "partial": out, "staged": staged, "out": result}
    bind_flagged("matmul_reduce_scatter", tensors, layout, stored=1 << 42, **words)


def compiled(case: dict[str, Any]) -> dict[str, Any]:
    bound.clear()
    for layout in LAYOUTS:
        bind(case, layout)
    code = bound[0]
    text = code.asm["ptx"]
    pattern = "|".join(f"(?P<{name}>{expression})" for name, expression in SEEN.items())
    return {
        "kernels": len({id(kernel) for kernel in bound}),
        "shared": code.metadata.shared,
        "spilled_bytes": spilled_bytes(code.asm["cubin"]),
        "stores": sorted(set(re.findall(r"st\.global[\w.]*", text))),
        "order": [str(match.lastgroup) for match in re.finditer(pattern, text)],
    }


def loaded(kernel: CompiledKernel, grid: tuple[int, int, int]) -> Callable[..., None]:
    bound.append(kernel)
    return lambda *arguments: None


if __name__ == "__main__":
    driver.set_active(OfflineDriver())
    with patch.object(CompiledKernel, "__getitem__", loaded):
        json.dump([compiled(case) for case in json.load(sys.stdin)], sys.stdout)
