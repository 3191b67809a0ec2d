"""Define work that depends on communication, by name: matmuls, and tokens that go to experts and back. No torch.

`all_gather_matmul MxNxK` and `matmul_reduce_scatter MxNxK`: M rows of all ranks, N and K on each rank.
`exchange LAYER TOKENS ROUTING`: a name of `EXPERT_LAYERS` or `HIDDENxFFNxEXPERTSxTOP_K`, and the tokens of a rank.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import get_args

from counterpoint.errors import Misconfigured, printable
from counterpoint.pair.arrivals import TensorOperation

_OPERATIONS = get_args(TensorOperation)


@dataclass(frozen=True, kw_only=True, slots=True)
class DependentMatmul:
    """Represents a matmul [m, k] @ [k, n] on each rank, its rows all_gathered before or reduce_scattered after."""

    operation: TensorOperation
    m: int  # rows of all ranks
    n: int  # columns on each rank
    k: int

    @property
    def collective(self) -> str:
        """Return PyTorch's name of the communication."""
        return "all_gather" if self.operation == "all_gather_matmul" else "reduce_scatter"

    @property
    def moved(self) -> int:
        """Return the number of elements of the full array that is communicated."""
        return self.m * (self.k if self.operation == "all_gather_matmul" else self.n)

    @property
    def flops(self) -> int:
        """Return the FLOPs of the matmul on one rank."""
        return 2 * self.m * self.n * self.k

    def memory_bytes(self, itemsize: int) -> int:
        """Return an upper bound of a rank's bytes: operands, buffers, results, and some float64 copies to check."""
        operands, product = self.m * self.k + self.k * self.n, self.m * self.n
        return itemsize * (6 * operands + 8 * product) + 8 * (operands + 3 * product)


def is_dependent(what: str) -> bool:
    """Return whether a building block's name is that of a `DependentMatmul`."""
    return what.partition(" ")[0] in _OPERATIONS


def find_dependent(what: str) -> DependentMatmul:
    """Return the `DependentMatmul` called `what`; raise Misconfigured, with the allowed forms, if there is none."""
    found = re.fullmatch(rf"({'|'.join(_OPERATIONS)}) ([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", what)
    if found is None:
        forms = ", ".join(f"{name} MxNxK" for name in _OPERATIONS)
        raise Misconfigured(f"there is no matmul {printable(what)!r}; write one of: {forms}")
    name, *sizes = found.groups()
    m, n, k = map(int, sizes)
    return DependentMatmul(operation=name, m=m, n=n, k=k)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertLayer:
    """Represents the experts of a layer: gated feed-forward blocks, with `top_k` experts per token."""

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
_ALLOWED = (
    f"write one of {', '.join(EXPERT_LAYERS)} or HIDDENxFFNxEXPERTSxTOP_K, tokens of a rank, and one of "
    f"{', '.join(ROUTINGS)}: exchange mixtral-8x7b 4096 zipf"
)


def find_layer(name: str) -> ExpertLayer:
    """Return the experts called `name`; raise Misconfigured, with the allowed forms, if there are none."""
    if name in EXPERT_LAYERS:
        return EXPERT_LAYERS[name]
    found = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,5})x([1-9]\d{0,3})x([1-9]\d{0,2})", name)
    if found is None or int(found[4]) > int(found[3]):
        raise Misconfigured(f"there are no experts {printable(name)!r}; {_ALLOWED}")
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
        """Return the name of the exchange, without the leg or case that is measured."""
        return f"{self.layer} {self.tokens} {self.routing}"

    @property
    def sizes(self) -> ExpertLayer:
        """Return the sizes of the experts."""
        return find_layer(self.layer)

    def size_bytes(self, itemsize: int) -> int:
        """Return the bytes of one rank's tokens, counted `top_k` times."""
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
    """Return whether a building block's name is that of a `TokenExchange`."""
    return what.partition(" ")[0] == "exchange"


def find_exchange(what: str) -> TokenExchange:
    """Return the `TokenExchange` called `what`; raise Misconfigured, with the allowed forms, if there is none."""
    found = re.fullmatch(rf"exchange (\S+) ([1-9]\d{{0,6}}) ({'|'.join(ROUTINGS)})", what)
    if found is None:
        raise Misconfigured(f"there is no exchange {printable(what)!r}; {_ALLOWED}")
    find_layer(found[1])
    return TokenExchange(layer=found[1], tokens=int(found[2]), routing=found[3])
