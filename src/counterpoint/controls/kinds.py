"""Which of the things that ran are NCCL's kernels, matmuls or copies, and how to write their sizes down."""

from __future__ import annotations

import re
from collections.abc import Iterable

from counterpoint.records.evidence import Launched

__all__ = ["blocks", "copies", "matmul_kernels", "nccl_kernels", "symmetric_kernels", "written"]

_NCCL = re.compile(r"nccl", re.IGNORECASE)
_SYMMETRIC = re.compile(r"ncclSym", re.IGNORECASE)  # ncclSymDevKernel_* in NCCL 2.27, ncclSymkDevKernel_* since 2.28
_MATMUL = re.compile(r"nvjet|gemm|cutlass|xmma|wgmma|matmul", re.IGNORECASE)
_NOT_MATMUL = re.compile(  # attention is built of CUTLASS, too, and its names say so
    r"splitk\w*reduce|reduce_kernel|flash|fmha|sdpa|attention", re.IGNORECASE
)


def nccl_kernels(launched: Iterable[Launched]) -> tuple[Launched, ...]:
    """NCCL's own kernels."""
    return tuple(one for one in launched if one.kind == "kernel" and _NCCL.search(one.name))


def symmetric_kernels(launched: Iterable[Launched]) -> tuple[Launched, ...]:
    """NCCL's kernels for window-registered buffers."""
    return tuple(one for one in nccl_kernels(launched) if _SYMMETRIC.search(one.name))


def copies(launched: Iterable[Launched]) -> tuple[Launched, ...]:
    """Copies, by copy engines or within the device."""
    return tuple(one for one in launched if one.kind == "copy")


def matmul_kernels(launched: Iterable[Launched]) -> tuple[Launched, ...]:
    """GEMM kernels of cuBLAS, CUTLASS or Triton by their usual names; if there are none, the longest kernel."""
    kernels = [one for one in launched if one.kind == "kernel"]
    found = [one for one in kernels if _MATMUL.search(one.name) and not _NOT_MATMUL.search(one.name)]
    return tuple(found or sorted(kernels, key=lambda one: -one.duration_us)[:1])


def blocks(launched: Iterable[Launched]) -> list[int]:
    """Blocks of every kernel, sorted, each number once."""
    return sorted({one.num_blocks for one in launched})


def written(numbers: Iterable[int | None], *, nothing: str = "nothing") -> str:
    """`numbers` for a sentence: "8", "8, 24", "unknown", or `nothing` if there are none."""
    return ", ".join("unknown" if number is None else str(number) for number in numbers) or nothing
