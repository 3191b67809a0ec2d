"""A transformer as a planner sees it: widths and counts, nothing else."""

from __future__ import annotations

from counterpoint.errors import Misconfigured
from counterpoint.records.base import Record

__all__ = ["Experts", "Model"]


class Experts(Record, frozen=True, kw_only=True):
    """The feed-forward blocks of a mixture-of-experts layer.

    Args:
        count: routed experts of a layer.
        per_token: of them, how many a token visits.
        width: of each expert's feed-forward block.
        shared: experts that every token visits, of the same width.
        every: each so many-th layer has experts; the others are dense.
        imbalance: tokens of the busiest rank over the mean; 1 is even.
    """

    count: int
    per_token: int
    width: int
    shared: int = 0
    every: int = 1
    imbalance: float = 1.0


class Model(Record, frozen=True, kw_only=True):
    """A decoder-only transformer.

    Args:
        name: for people.
        layers: transformer blocks.
        hidden: width of the residual stream.
        heads: of attention.
        kv_heads: of keys and values; None: as many as `heads`.
        head_dim: None: hidden / heads.
        ffn: width of a dense feed-forward block; None: 4 · hidden.
        gated: SwiGLU: three matrices instead of two.
        vocab: rows of the embedding.
        tied: embedding and output projection share their weights.
        dropout: there are dropouts, with masks that backward needs (GPT-3 had them).
        causal: attention looks back only; flash attention then does half the work.
        experts: None: dense.
    """

    name: str = "model"
    layers: int
    hidden: int
    heads: int
    kv_heads: int | None = None
    head_dim: int | None = None
    ffn: int | None = None
    gated: bool = False
    vocab: int
    tied: bool = False
    dropout: bool = False
    causal: bool = True
    experts: Experts | None = None

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "vocab"):
            positive(f"model.{name}", getattr(self, name))
        for name in ("kv_heads", "head_dim", "ffn"):
            if getattr(self, name) is not None:
                positive(f"model.{name}", getattr(self, name))
        if self.head_dim is None:
            divides("model.heads", self.heads, "model.hidden", self.hidden)
        divides("model.kv_heads", self.key_heads, "model.heads", self.heads)

    @property
    def key_heads(self) -> int:
        """Heads of keys and of values."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def head_width(self) -> int:
        return self.hidden // self.heads if self.head_dim is None else self.head_dim

    @property
    def ffn_width(self) -> int:
        return 4 * self.hidden if self.ffn is None else self.ffn


def positive(name: str, value: float) -> None:
    """Raises Misconfigured if it is not."""
    if not value > 0:
        raise Misconfigured(f"{name} = {value}: give a number above 0")


def divides(small: str, divisor: int, large: str, number: int) -> None:
    """Raises Misconfigured if it does not."""
    if number % divisor:
        raise Misconfigured(f"{small} = {divisor} does not divide {large} = {number}: give a divisor of {number}")
