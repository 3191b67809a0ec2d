"""A mixture-of-experts decoder in plain torch: llama.py with experts, divided among ranks, for its feed-forward.

How tokens reach their experts is one function; `exchanged` is the one that everybody has, with torch's collectives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from llama import FeedForward, Llama, Shape
from torch import Tensor, nn

from counterpoint import expert_parallel

Route = Callable[[Tensor, Tensor, Tensor, expert_parallel.LocalExperts, nn.Module | None], Tensor]
"""Takes tokens, their experts, the weights of these, this rank's experts and the shared one; returns what they make."""


@dataclass(frozen=True, kw_only=True)
class MoeShape(Shape):
    """Sizes of the model; `ffn` is the width of an expert."""

    head_size: int = 128
    experts: int
    top_k: int
    shared_ffn: int = 0  # width of an expert that every token visits

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.head_size


class RoutedExperts(nn.Module):
    """This rank's part of the experts, and the way of tokens to all of them: what FSDP2 shards as one."""

    def __init__(self, shape: MoeShape, ranks: int, route: Route) -> None:
        super().__init__()
        self.local = expert_parallel.LocalExperts(shape.experts // ranks, shape.hidden, shape.ffn)
        self.route = route

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor, shared: nn.Module | None) -> Tensor:
        return self.route(x, ids, weights, self.local, shared)


class MixtureOfExperts(nn.Module):
    """Router, experts and perhaps a shared one."""

    def __init__(self, shape: MoeShape, ranks: int, route: Route) -> None:
        super().__init__()
        self.top_k = shape.top_k
        self.router = nn.Linear(shape.hidden, shape.experts, bias=False)
        self.experts = RoutedExperts(shape, ranks, route)
        width = shape.shared_ffn
        self.shared = FeedForward(Shape(hidden=shape.hidden, ffn=width)) if width else None

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, ids = self.router(rows).float().softmax(-1).topk(self.top_k)
        out: Tensor = self.experts(rows, ids, weights / weights.sum(-1, keepdim=True), self.shared)
        return out.view_as(x)


def moe(shape: MoeShape, ranks: int, route: Route) -> Llama:
    """Build the model, with the part of the experts that one of `ranks` has."""
    return Llama(shape, lambda _: MixtureOfExperts(shape, ranks, route))


def exchanged(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: expert_parallel.LocalExperts,
    shared: nn.Module | None,
    *,
    group: dist.ProcessGroup,
) -> Tensor:
    """Bring tokens to their experts and back by all_to_all_single, for whose sizes the host waits."""
    ranks, local = group.size(), experts.down.shape[0]
    order = ids.flatten().argsort(stable=True)
    counts = ids.new_zeros(ranks * local).scatter_add_(0, ids.flatten(), torch.ones_like(ids.flatten()))
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts, group=group)
    sent, received = (each.view(ranks, local).sum(1).tolist() for each in (counts, arriving))
    rows = _moved(x[order // ids.shape[1]], sent, received, group)
    expert = torch.arange(local, device=x.device).repeat(ranks).repeat_interleave(arriving, output_size=len(rows))
    by_expert = expert.argsort(stable=True)
    made = experts(rows[by_expert], arriving.view(ranks, local).sum(0).cumsum(0).int())
    back = _moved(made[by_expert.argsort()], received, sent, group)[order.argsort()]
    out = (back.view(*ids.shape, -1) * weights[..., None]).sum(1).to(x.dtype)
    return out if shared is None else out + shared(x)


def _moved(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    out: Tensor = _Moved.apply(rows, sent, received, group)  # type: ignore[no-untyped-call]
    return out


class _Moved(torch.autograd.Function):
    """Exchanges rows; backward exchanges their derivatives."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes, ctx.group = (sent, received), group
        out = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group)
        return out

    @staticmethod
    def backward(ctx: Any, grads: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received = ctx.sizes
        return _moved(grads, received, sent, ctx.group), None, None, None
