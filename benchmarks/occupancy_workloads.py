"""What the study of occupancy shaping runs: a plain Triton GEMM, kernels of PyTorch and cuBLAS, and collectives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

__all__ = ["GEMMS", "Workload", "collective", "cublas_fp64", "elementwise", "gemm"]

GEMMS = {"4096": (4096, 4096, 4096), "8192": (8192, 8192, 8192), "57344": (8192, 57344, 8192)}
GROUP_OF_TILES = 8  # rows of tiles that share columns in the cache


@triton.jit  # type: ignore[untyped-decorator]
def matmul(  # type: ignore[no-untyped-def]
    a, b, c, log, rows, columns, depth, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, LOG: tl.constexpr
):
    """C = A B, row-major, every size a multiple of the tile's: one block per 64 x 64 tile, fp32 accumulation.

    With LOG every block writes its SM, its first and its last moment (ns on the device's clock) to `log[blocks, 3]`.
    """
    tile = tl.program_id(0)
    if LOG:
        tl.store(log + tile * 3, tl_cuda.smid().to(tl.int64))
        tl.store(log + tile * 3 + 1, tl_cuda.globaltimer())
    tiles_down, tiles_across = rows // 64, columns // 64
    first = tile // (GROUP * tiles_across) * GROUP
    height = min(tiles_down - first, GROUP)
    row = (first + tile % (GROUP * tiles_across) % height) * 64 + tl.arange(0, 64)
    column = (tile % (GROUP * tiles_across) // height) * 64 + tl.arange(0, 64)
    k = tl.arange(0, BLOCK_K)
    left, right = a + row[:, None] * depth + k[None, :], b + k[:, None] * columns + column[None, :]
    total = tl.zeros((64, 64), tl.float32)
    for _ in range(0, depth, BLOCK_K):
        total = tl.dot(tl.load(left), tl.load(right), total)
        left += BLOCK_K
        right += BLOCK_K * columns
    tl.store(c + row[:, None] * columns + column[None, :], total.to(tl.bfloat16))
    if LOG:
        tl.store(log + tile * 3 + 2, tl_cuda.globaltimer())


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The compute side: what one trial queues, and the numbers of blocks per SM to try."""

    name: str
    queue: Callable[[], object]
    kernels: str
    interpose: bool
    flops: float
    settings: tuple[int, ...]


def gemm(size: str, block_k: int, log: torch.Tensor | None = None) -> Workload:
    """A plain Triton GEMM; checked against float64 on its first rows. With `log` its blocks say where they ran."""
    rows, columns, depth = GEMMS[size]
    a = torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(depth, columns, device="cuda", dtype=torch.bfloat16)
    c = torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16)

    def queue() -> None:
        grid = (rows // 64 * (columns // 64),)
        sizes = (rows, columns, depth, block_k, GROUP_OF_TILES, log is not None)
        matmul[grid](a, b, c, c if log is None else log, *sizes, num_warps=4, num_stages=3)

    queue()
    exact = a[:128].double() @ b[:, :1024].double()
    error, stock = (
        ((found.double() - exact).norm() / exact.norm()).item() for found in (c[:128, :1024], a[:128] @ b[:, :1024])
    )
    assert error <= 2 * stock, f"the GEMM is wrong: relative error {error:.1e}, torch's {stock:.1e}"
    name = f"gemm {rows}x{columns}x{depth} tile 64x64x{block_k}"
    return Workload(
        name=name,
        queue=queue,
        kernels="matmul",
        interpose=False,
        flops=2.0 * rows * columns * depth,
        settings=(6, 5, 4, 3, 2, 1) if block_k == 32 else (3, 2, 1),
    )


def elementwise() -> Workload:
    """PyTorch's own kernel for y = x + 1 over 4 GiB."""
    x, y = (torch.randn(1 << 30, device="cuda") for _ in range(2))
    return Workload(
        name="torch.add 4 GiB fp32",
        queue=lambda: torch.add(x, 1.0, out=y),
        kernels="elementwise",
        interpose=True,
        flops=1.0 * x.numel(),
        settings=(8, 4, 3, 2, 1),
    )


def cublas_fp64() -> Workload:
    """cuBLAS's fp64 GEMM of 4096 x 4096 x 4096, whose kernel has two blocks per SM."""
    a, b, c = (torch.randn(4096, 4096, device="cuda", dtype=torch.float64) for _ in range(3))
    return Workload(
        name="cuBLAS gemm 4096x4096x4096 fp64",
        queue=lambda: torch.mm(a, b, out=c),
        kernels="gemm",
        interpose=True,
        flops=2.0 * 4096**3,
        settings=(1,),
    )


def collective(name: str, mebibytes: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """(one trial of it on the current stream, restore its input), checked once on random data."""
    numel = mebibytes << 19  # bf16
    source = torch.randn(numel, device="cuda", dtype=torch.bfloat16)
    buffer, out = source.clone(), torch.empty_like(source)
    if name == "all_reduce":
        everyone = [torch.empty(4096, device="cuda", dtype=torch.bfloat16) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, source[:4096])
        dist.all_reduce(buffer)
        expected = torch.stack(everyone).double().sum(0)
        assert torch.allclose(buffer[:4096].double(), expected, atol=0.1), "the all-reduce is wrong"
        return lambda: dist.all_reduce(buffer), lambda: buffer.copy_(source)
    back = torch.empty_like(source)
    dist.all_to_all_single(out, source)
    dist.all_to_all_single(back, out)
    assert torch.equal(back, source), "the all-to-all is wrong"
    return lambda: dist.all_to_all_single(out, source), lambda: None
