"""A Llama-3-shaped decoder in plain torch: the shapes of the 8B model by default, as few layers as the trace needs.

Input: token ids [sequences, length] and labels of the same shape. Output: the mean cross-entropy, a scalar.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of the model; the defaults are Llama-3-8B's, but for the number of layers."""

    layers: int = 8
    hidden: int = 4096
    ffn: int = 14336
    heads: int = 32
    kv_heads: int = 8
    vocabulary: int = 128256

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.heads


def rotary_table(length: int, head_dim: int, device: torch.device) -> Tensor:
    """Angles of the rotary embedding as [2, length, head_dim], cosines then sines."""
    frequency = 500_000.0 ** (-torch.arange(0, head_dim, 2, device=device) / head_dim)
    angle = torch.outer(torch.arange(length, device=device), frequency).repeat(1, 2)
    return torch.stack((angle.cos(), angle.sin()))


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Apply the rotary embedding to [batch, heads, length, head_dim]."""
    cosine, sine = table.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    rotated: Tensor = x * cosine + torch.cat((-second, first), dim=-1) * sine
    return rotated


class Attention(nn.Module):
    """Causal self-attention with grouped key and value heads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.query = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.key = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.value = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.output = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        batch, length, _ = x.shape
        split = (batch, length, -1, self.shape.head_dim)
        query, key, value = (layer(x).view(split).transpose(1, 2) for layer in (self.query, self.key, self.value))
        query, key = rotate(query, table), rotate(key, table)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        out: Tensor = self.output(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.up = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Layer(nn.Module):
    """One decoder layer, pre-norm."""

    def __init__(self, shape: Shape, ffn: Callable[[Shape], nn.Module] = FeedForward) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.hidden)
        self.attention = Attention(shape)
        self.ffn_norm = nn.RMSNorm(shape.hidden)
        self.ffn = ffn(shape)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), table)
        out: Tensor = x + self.ffn(self.ffn_norm(x))
        return out


class Llama(nn.Module):
    """Embedding, layers, head and loss."""

    def __init__(self, shape: Shape, ffn: Callable[[Shape], nn.Module] = FeedForward) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape, ffn) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor, table: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, table)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
