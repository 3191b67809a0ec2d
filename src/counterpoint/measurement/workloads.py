"""Describe the computation of a pair as a short list of operations with their FLOPs, and run it.

Names: `gemm MxNxK`, `gemm MxNxK*R` (R times, each with its own weights), `llama-8b layer T`, `llama-70b layer T` (the
four matrix products of a layer at T tokens), `attention BxHxSxD`, `elementwise N` (N elements: read, write).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from counterpoint.errors import Misconfigured, printable

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeOperation:
    """Represents one operation, as made by `matmul`, `attention` or `elementwise`."""

    kind: Literal["matmul", "attention", "elementwise"]
    sizes: tuple[int, ...]
    flops: int
    numel: int  # elements of all operands; no two operations share one


def matmul(m: int, n: int, k: int) -> ComputeOperation:
    """Describe `out[m, n] = left[m, k] @ right[k, n]`, all row-major."""
    return ComputeOperation(kind="matmul", sizes=(m, n, k), flops=2 * m * n * k, numel=m * k + n * k + m * n)


def attention(batch: int, heads: int, sequence: int, head_dim: int) -> ComputeOperation:
    """Describe causal self-attention forward, `[batch, heads, sequence, head_dim]`; the mask halves the FLOPs."""
    numel = batch * heads * sequence * head_dim  # of each of q, k, v and the result
    sizes = (batch, heads, sequence, head_dim)
    return ComputeOperation(kind="attention", sizes=sizes, flops=2 * numel * sequence, numel=4 * numel)


def elementwise(elements: int) -> ComputeOperation:
    """Describe `out = in * 1.0001`: limited by memory bandwidth, with many short thread blocks."""
    return ComputeOperation(kind="elementwise", sizes=(elements,), flops=elements, numel=2 * elements)


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Represents operations that run in sequence on one stream."""

    name: str
    operations: tuple[ComputeOperation, ...]

    @property
    def flops(self) -> int:
        """Return the FLOPs of all operations."""
        return sum(operation.flops for operation in self.operations)

    @property
    def products(self) -> tuple[tuple[int, int, int], ...]:
        """Return (M, N, K) of the workload's matrix products; () if it has any other operation."""
        products = tuple((m, n, k) for one in self.operations if one.kind == "matmul" for m, n, k in [one.sizes])
        return products if len(products) == len(self.operations) else ()

    def memory_bytes(self, itemsize: int) -> int:
        """Return the bytes of all operands; operations do not share them."""
        return sum(operation.numel for operation in self.operations) * itemsize


def llama_layer(billions: int, tokens: int) -> tuple[ComputeOperation, ...]:
    """Return a Llama layer's matrix products, fused as in torchtitan and vLLM: q/k/v, output, gate and up, down."""
    hidden, ffn, kv = {8: (4096, 14336, 1024), 70: (8192, 28672, 1024)}[billions]
    outputs_inputs = ((hidden + 2 * kv, hidden), (hidden, hidden), (2 * ffn, hidden), (hidden, ffn))
    return tuple(matmul(tokens, n, k) for n, k in outputs_inputs)


_N = r"([1-9]\d{0,10})"
_NAMES: tuple[tuple[str, Callable[..., tuple[ComputeOperation, ...]]], ...] = (
    (rf"gemm {_N}x{_N}x{_N}", lambda m, n, k: (matmul(m, n, k),)),
    (rf"gemm {_N}x{_N}x{_N}\*([1-9]\d?)", lambda m, n, k, times: (matmul(m, n, k),) * times),
    (rf"llama-(8|70)b layer {_N}", llama_layer),
    (rf"attention {_N}x{_N}x{_N}x{_N}", lambda *sizes: (attention(*sizes),)),
    (rf"elementwise {_N}", lambda elements: (elementwise(elements),)),
)
_ALLOWED = "gemm MxNxK, gemm MxNxK*R, llama-8b layer T, llama-70b layer T, attention BxHxSxD, elementwise N"


def find_workload(name: str) -> Workload:
    """Return the workload called `name`; raise Misconfigured, with the allowed forms, if there is none."""
    for pattern, make in _NAMES:
        match = re.fullmatch(pattern, name)
        if match:
            return Workload(name=name, operations=make(*map(int, match.groups())))
    raise Misconfigured(f"there is no workload {printable(name)!r}; write one of: {_ALLOWED}")


def prepare(workload: Workload, device: torch.device, dtype: torch.dtype, seed: int) -> Callable[[], None]:
    """Return a function that launches the workload on the current stream; its operands are allocated once.

    These are random, never zeros: zeros make a bf16 product 13 % faster (measured 2026-10-28, H200).
    """
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    launches = [_prepare(operation, device, dtype, generator) for operation in workload.operations]

    @torch.no_grad()
    def run() -> None:
        for launch in launches:
            launch()

    return run


def _prepare(
    operation: ComputeOperation, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> Callable[[], object]:
    import torch

    def random(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device=device, dtype=dtype).normal_(generator=generator)

    match operation.kind, operation.sizes:
        case "matmul", (m, n, k):
            left, right, product = random(m, k), random(k, n).div_(math.sqrt(k)), random(m, n)
            return lambda: torch.mm(left, right, out=product)
        case "attention", sizes:
            query, key, value = random(*sizes), random(*sizes), random(*sizes)
            attend = torch.nn.functional.scaled_dot_product_attention
            return lambda: attend(query, key, value, is_causal=True)
        case _, sizes:
            source, target = random(*sizes), random(*sizes)
            return lambda: torch.mul(source, 1.0001, out=target)
