"""Parse the names of what is measured: computations, matmuls with a collective, token exchanges, and dtypes.

Computations are short lists of operations, which `prepare` runs; it alone imports torch. Names: `gemm MxNxK`,
`gemm MxNxK*R` (R times, each with its own weights), `llama-8b layer T`, `llama-70b layer T` (the four matrix products
of a layer at T tokens), `attention BxHxSxD`, `elementwise N` (N elements: read, write).
Dependent work: `all_gather_matmul MxNxK` and `matmul_reduce_scatter MxNxK` (M rows of all ranks, N and K on each rank);
`exchange LAYER TOKENS ROUTING` (a name of `EXPERT_LAYERS` or `HIDDENxFFNxEXPERTSxTOP_K`, and the tokens of a rank).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from counterpoint.errors import Misconfigured, printable
from counterpoint.pair.arrivals import TensorOperation

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeOperation:
    """Represents one compute operation, as made by `matmul`, `attention` or `elementwise`."""

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
    """Represents compute operations that run in sequence on one stream."""

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
        """Return the bytes of all operations' operands, none of them shared."""
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
    """Return the workload called `name`; raise Misconfigured, which lists the allowed forms, for any other name."""
    for pattern, make in _NAMES:
        match = re.fullmatch(pattern, name)
        if match:
            return Workload(name=name, operations=make(*map(int, match.groups())))
    raise Misconfigured(f"there is no workload {printable(name)!r}; write one of: {_ALLOWED}")


def prepare(workload: Workload, device: torch.device, dtype: torch.dtype, seed: int) -> Callable[[], None]:
    """Return a function that launches the workload on the current stream, with operands allocated here, once.

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


_DEPENDENT = get_args(TensorOperation)


@dataclass(frozen=True, kw_only=True, slots=True)
class DependentMatmul:
    """Represents a matmul [m, k] @ [k, n] per rank, after an all_gather of its input or before a reduce_scatter."""

    operation: TensorOperation
    m: int  # rows of all ranks
    n: int  # columns on each rank
    k: int

    @property
    def collective(self) -> str:
        """Return PyTorch's name of the collective."""
        return "all_gather" if self.operation == "all_gather_matmul" else "reduce_scatter"

    @property
    def moved(self) -> int:
        """Return the number of elements in the collective's full array."""
        return self.m * (self.k if self.operation == "all_gather_matmul" else self.n)

    @property
    def flops(self) -> int:
        """Return the FLOPs of the matmul on one rank."""
        return 2 * self.m * self.n * self.k

    def memory_bytes(self, itemsize: int) -> int:
        """Return an upper bound of a rank's bytes: operands, buffers, results, and float64 copies to check results."""
        operands, product = self.m * self.k + self.k * self.n, self.m * self.n
        return itemsize * (6 * operands + 8 * product) + 8 * (operands + 3 * product)


def is_dependent(what: str) -> bool:
    """Return whether `what`, the name of a building block, names a `DependentMatmul`."""
    return what.partition(" ")[0] in _DEPENDENT


def find_dependent(what: str) -> DependentMatmul:
    """Return the `DependentMatmul` called `what`; raise Misconfigured, which lists the allowed forms, otherwise."""
    found = re.fullmatch(rf"({'|'.join(_DEPENDENT)}) ([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", what)
    if found is None:
        forms = ", ".join(f"{name} MxNxK" for name in _DEPENDENT)
        raise Misconfigured(f"there is no matmul {printable(what)!r}; write one of: {forms}")
    name, *sizes = found.groups()
    m, n, k = map(int, sizes)
    return DependentMatmul(operation=name, m=m, n=n, k=k)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertLayer:
    """Represents the experts of an MoE layer: gated feed-forward blocks, with `top_k` experts per token."""

    hidden: int
    ffn: int
    experts: int
    top_k: int


EXPERT_LAYERS = {
    "qwen3-30b-a3b": ExpertLayer(hidden=2048, ffn=768, experts=128, top_k=8),
    "mixtral-8x7b": ExpertLayer(hidden=4096, ffn=14336, experts=8, top_k=2),
    "deepseek-v3": ExpertLayer(hidden=7168, ffn=2048, experts=256, top_k=8),
    "tiny": ExpertLayer(hidden=64, ffn=32, experts=8, top_k=2),  # for CPUs
}
ROUTINGS = ("uniform", "zipf", "one-hot")
_ALLOWED_EXCHANGES = (
    f"write one of {', '.join(EXPERT_LAYERS)} or HIDDENxFFNxEXPERTSxTOP_K, tokens of a rank, and one of "
    f"{', '.join(ROUTINGS)}: exchange mixtral-8x7b 4096 zipf"
)


def find_layer(name: str) -> ExpertLayer:
    """Return the experts called `name`; raise Misconfigured, which lists the allowed forms, for any other name."""
    if name in EXPERT_LAYERS:
        return EXPERT_LAYERS[name]
    found = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,5})x([1-9]\d{0,3})x([1-9]\d{0,2})", name)
    if found is None or int(found[4]) > int(found[3]):
        raise Misconfigured(f"there are no experts {printable(name)!r}; {_ALLOWED_EXCHANGES}")
    hidden, ffn, experts, top_k = map(int, found.groups())
    return ExpertLayer(hidden=hidden, ffn=ffn, experts=experts, top_k=top_k)


@dataclass(frozen=True, kw_only=True)
class TokenExchange:
    """Represents the token exchange of an MoE layer: `tokens` tokens of each rank go to their experts and back."""

    layer: str  # as `find_layer` knows it
    tokens: int
    routing: str  # one of `ROUTINGS`

    @property
    def name(self) -> str:
        """Return the name of the exchange: layer, tokens and routing."""
        return f"{self.layer} {self.tokens} {self.routing}"

    @property
    def sizes(self) -> ExpertLayer:
        """Return the experts' sizes: hidden, ffn, number of experts, and experts per token."""
        return find_layer(self.layer)

    def size_bytes(self, itemsize: int) -> int:
        """Return the bytes of one rank's tokens, each counted `top_k` times, once per expert."""
        return self.tokens * self.sizes.top_k * self.sizes.hidden * itemsize

    def capacity(self, world_size: int) -> int:
        """Return the most rows that can arrive at one rank."""
        return world_size * self.tokens * min(self.sizes.top_k, self.sizes.experts // world_size)

    def memory_bytes(self, itemsize: int, world_size: int, mechanisms: int) -> int:
        """Return roughly the bytes that a rank needs: expert weights, and each mechanism's buffers and rows."""
        weights = 3 * self.sizes.hidden * self.sizes.ffn * self.sizes.experts // world_size
        rows = self.capacity(world_size)
        inside = rows * 3 * self.sizes.ffn
        return itemsize * (weights + inside + (2 * mechanisms + 3) * rows * self.sizes.hidden)


def is_exchange(what: str) -> bool:
    """Return whether `what`, the name of a building block, names a `TokenExchange`."""
    return what.partition(" ")[0] == "exchange"


def find_exchange(what: str) -> TokenExchange:
    """Return the `TokenExchange` called `what`; raise Misconfigured, which lists the allowed forms, otherwise."""
    found = re.fullmatch(rf"exchange (\S+) ([1-9]\d{{0,6}}) ({'|'.join(ROUTINGS)})", what)
    if found is None:
        raise Misconfigured(f"there is no exchange {printable(what)!r}; {_ALLOWED_EXCHANGES}")
    find_layer(found[1])
    return TokenExchange(layer=found[1], tokens=int(found[2]), routing=found[3])


MEASURABLE = ("bfloat16", "float16", "float32")  # torch's names
OF_DEVICE = {"cuda": "bfloat16", "cpu": "float32"}  # of parts that ask for none


def measured_dtype(dtype: str | None, device: str) -> str:
    """Return the dtype in which an operation of `dtype` is measured: `dtype` if measurable, else the device's own."""
    return dtype if dtype in MEASURABLE else OF_DEVICE[device]
