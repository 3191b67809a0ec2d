"""Choices of experts, as models and bad luck give them."""

import torch

ROUTINGS = ("random", "distinct", "one-hot", "zipf", "nobody", "elsewhere")


def routing(kind: str, tokens: int, top_k: int, experts: int, seed: int = 0) -> torch.Tensor:
    """Ids of experts, int64 [tokens, top_k]; `distinct` is what a router gives, the others are harder."""
    dice = torch.Generator().manual_seed(seed)
    match kind:
        case "random":  # -1 and the same expert twice among them
            return torch.randint(-1, experts, (tokens, top_k), generator=dice)
        case "distinct":
            return torch.rand(tokens, max(experts, top_k), generator=dice).argsort(1)[:, :top_k]
        case "one-hot":
            return torch.full((tokens, top_k), experts // 2)
        case "zipf":
            return ((experts + 1) ** torch.rand(tokens, top_k, generator=dice)).long() - 1
        case "nobody":
            return torch.full((tokens, top_k), -1)
        case "elsewhere":
            return torch.full((tokens, top_k), experts + 3)
    raise ValueError(f"{kind}: give one of {ROUTINGS}")
