"""Draw the tokens that an exchange is measured with: their experts, and what their sums have to be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from counterpoint.measurement.collective import relative_error
from counterpoint.measurement.dependent import ExpertLayer, TokenExchange
from counterpoint.measurement.session import Session

if TYPE_CHECKING:
    from torch import Tensor

_SCALES = 128  # experts with another factor each, exact in bfloat16, so that a row at a wrong expert shows


def routed(way: str, tokens: int, layer: ExpertLayer, generator: torch.Generator) -> Tensor:
    """Return the experts of random tokens, int64 `[tokens, top_k]`, no expert twice.

    Args:
        way: `uniform`; `zipf`, the i-th expert being wanted 1 / i times as much as the first, and experts lying in a
            random order on the ranks, the same everywhere; or `one-hot`, all tokens going to the first experts.
        tokens: of this rank.
        layer: number of experts, and choices of a token.
        generator: of random numbers; its device is that of the result.
    """
    if way == "one-hot":
        return torch.arange(layer.top_k, device=generator.device).repeat(tokens, 1)
    noise = torch.empty(tokens, layer.experts, device=generator.device).exponential_(generator=generator)
    if way == "zipf":
        places = torch.randperm(layer.experts, generator=torch.Generator().manual_seed(0)).to(generator.device)
        noise *= 1.0 + places  # the first of several that wait, each for a time of this mean
    return noise.topk(layer.top_k, largest=False).indices


@dataclass(frozen=True, kw_only=True)
class SampleTokens:
    """Holds what a rank dispatches."""

    x: Tensor
    ids: Tensor
    weights: Tensor

    @classmethod
    def random(cls, session: Session, exchange: TokenExchange, seed: int) -> SampleTokens:
        """Return those of this rank."""
        generator = torch.Generator(device=session.device).manual_seed(seed + session.rank)
        layer = exchange.sizes
        ids = routed(exchange.routing, exchange.tokens, layer, generator)
        x = torch.empty(exchange.tokens, layer.hidden, device=session.device, dtype=session.dtype)
        weights = torch.empty(exchange.tokens, layer.top_k, device=session.device).uniform_(generator=generator)
        return cls(x=x.normal_(generator=generator), ids=ids, weights=weights / weights.sum(1, keepdim=True))

    def errors(self, sums: Tensor) -> tuple[float, float]:
        """Return the relative error of sums, with `expert_scales` for experts, and twice that of plain rounding."""
        exact, plain = torch.zeros_like(self.x, dtype=torch.float64), torch.zeros_like(self.x, dtype=torch.float32)
        for ids, weights in zip(self.ids.t(), self.weights.t(), strict=True):
            scales = expert_scales(ids)[:, None]
            exact += self.x.double() * (scales * weights[:, None]).double()
            plain += (self.x * scales).to(self.x.dtype).float() * weights[:, None]
        allowed = 2 * relative_error(plain.to(self.x.dtype), exact)
        return relative_error(sums, exact), max(allowed, torch.finfo(self.x.dtype).eps)


def expert_scales(experts: Tensor) -> Tensor:
    """Return what experts multiply their rows by, given their numbers."""
    return 1.0 + (experts % _SCALES).float() / _SCALES
