"""The computation of a pair, as data: a short list of operations with their FLOPs, and what runs them.

Names: `gemm MxNxK`, `gemm MxNxK*R` (R times, each with its own weights), `llama-8b layer T`, `llama-70b layer T` (the
four matrix products of a layer at T tokens), `attention BxHxSxD`, `elementwise N` (N elements: read, write).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from counterpoint.errors import Misconfigured, printable

if TYPE_CHECKING:
    import torch

__all__ = ["Attention", "Elementwise", "Matmul", "Workload", "find_workload", "prepare"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Matmul:
    """`out[m, n] = left[m, k] @ right[k, n]`, all row-major."""

    m: int
    n: int
    k: int

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    @property
    def numel(self) -> int:
        """Elements of the three operands."""
        return self.m * self.k + self.n * self.k + self.m * self.n


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """Causal scaled dot product attention `[batch, heads, sequence, head_dim]`, self-attention, forward."""

    batch: int
    heads: int
    sequence: int
    head_dim: int

    @property
    def flops(self) -> int:
        """Two products, of which the causal mask leaves half."""
        return 2 * self.batch * self.heads * self.sequence**2 * self.head_dim

    @property
    def numel(self) -> int:
        """q, k, v and the result."""
        return 4 * self.batch * self.heads * self.sequence * self.head_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class Elementwise:
    """`out = in * 1.0001`: bound by memory, a grid of many short blocks."""

    elements: int

    @property
    def flops(self) -> int:
        return self.elements

    @property
    def numel(self) -> int:
        return 2 * self.elements


Operation = Matmul | Attention | Elementwise


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Operations that run one after the other on one stream."""

    name: str
    operations: tuple[Operation, ...]

    @property
    def flops(self) -> int:
        return sum(operation.flops for operation in self.operations)

    def memory_bytes(self, itemsize: int) -> int:
        """Of all operands: each operation has its own."""
        return sum(operation.numel for operation in self.operations) * itemsize


def llama_layer(tokens: int, *, hidden: int, ffn: int, kv: int) -> tuple[Matmul, ...]:
    """q/k/v, output, gate and up in one, down: as torchtitan and vLLM fuse them."""
    return (
        Matmul(m=tokens, n=hidden + 2 * kv, k=hidden),
        Matmul(m=tokens, n=hidden, k=hidden),
        Matmul(m=tokens, n=2 * ffn, k=hidden),
        Matmul(m=tokens, n=hidden, k=ffn),
    )


def _gemm(m: str, n: str, k: str, times: str | None) -> tuple[Operation, ...]:
    return (Matmul(m=int(m), n=int(n), k=int(k)),) * int(times or 1)


def _llama(size: str, tokens: str) -> tuple[Operation, ...]:
    shape = {"8": (4096, 14336, 1024), "70": (8192, 28672, 1024)}[size]
    return llama_layer(int(tokens), hidden=shape[0], ffn=shape[1], kv=shape[2])


def _attention(batch: str, heads: str, sequence: str, head_dim: str) -> tuple[Operation, ...]:
    return (Attention(batch=int(batch), heads=int(heads), sequence=int(sequence), head_dim=int(head_dim)),)


def _elementwise(elements: str) -> tuple[Operation, ...]:
    return (Elementwise(elements=int(elements)),)


_N = r"([1-9]\d{0,10})"
_NAMES: tuple[tuple[str, Callable[..., tuple[Operation, ...]]], ...] = (
    (rf"gemm {_N}x{_N}x{_N}(?:\*([1-9]\d?))?", _gemm),
    (rf"llama-(8|70)b layer {_N}", _llama),
    (rf"attention {_N}x{_N}x{_N}x{_N}", _attention),
    (rf"elementwise {_N}", _elementwise),
)
_ALLOWED = "gemm MxNxK, gemm MxNxK*R, llama-8b layer T, llama-70b layer T, attention BxHxSxD, elementwise N"


def find_workload(name: str) -> Workload:
    """The workload of that name.

    Raises:
        Misconfigured: no such name; the text lists the forms.
    """
    for pattern, make in _NAMES:
        match = re.fullmatch(pattern, name)
        if match:
            return Workload(name=name, operations=make(*match.groups()))
    raise Misconfigured(f"there is no workload {printable(name)!r}; write one of: {_ALLOWED}")


def prepare(workload: Workload, device: torch.device, dtype: torch.dtype, seed: int) -> Callable[[], None]:
    """Allocates random operands and returns a function that queues the workload on the current stream.

    Random, never zeros: zeros make a bf16 product 13 % faster (measured 2026-10-28, H200).
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
    operation: Operation, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> Callable[[], object]:
    import torch

    def random(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device=device, dtype=dtype).normal_(generator=generator)

    match operation:
        case Matmul(m=m, n=n, k=k):
            left, right, product = random(m, k), random(k, n).div_(math.sqrt(k)), random(m, n)
            return lambda: torch.mm(left, right, out=product)
        case Attention(batch=b, heads=h, sequence=s, head_dim=d):
            query, key, value = random(b, h, s, d), random(b, h, s, d), random(b, h, s, d)
            attend = torch.nn.functional.scaled_dot_product_attention
            return lambda: attend(query, key, value, is_causal=True)
        case Elementwise(elements=elements):
            source, target = random(elements), random(elements)
            return lambda: torch.mul(source, 1.0001, out=target)
