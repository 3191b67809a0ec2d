"""Describe a transformer by its widths and counts, and compute its parameters and FLOP.

    attention     h · (heads + 2 · kv_heads) · d + heads · d · h
    feed-forward  2 · h · f, gated 3 · h · f; experts: as many times, and a router h · count
    norms         2 · h per layer; GPT-3's layers have a bias for each matrix and norm, too
    embedding     vocab · h, and once more for the head unless they are tied

Source: arXiv 2104.04473, section 2 (its formula counts positions, too, which are less than 0.1 % here).
"""

from __future__ import annotations

import math
import tomllib
from functools import cache
from pathlib import Path
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from counterpoint.errors import Misconfigured, printable
from counterpoint.plan.job.fields import CheckedRecord, Count, Factor, Layers, Name, Width, shown
from counterpoint.records import Record


class Experts(CheckedRecord, frozen=True, kw_only=True):
    """Describes the feed-forward blocks of a mixture-of-experts layer."""

    table: ClassVar[str] = "model.experts"

    count: Width  # routed experts of a layer
    per_token: Width  # experts that a token visits
    width: Width  # of each expert's feed-forward block
    shared: Annotated[int, Meta(ge=0, le=1024)] = 0  # experts that every token visits, of the same width
    every: Layers = 1  # one layer in so many has experts; the others are dense
    imbalance: Factor = 1.0  # tokens of the busiest rank over the mean; 1 is even

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.per_token > self.count:
            raise Misconfigured(
                f"model.experts.per_token = {self.per_token} of count = {self.count}: "
                "give as many as there are experts, or fewer"
            )


class Model(CheckedRecord, frozen=True, kw_only=True):
    """Describes a decoder-only transformer."""

    table: ClassVar[str] = "model"

    name: Name = "model"  # for people
    layers: Layers  # transformer blocks
    hidden: Width  # width of the residual stream
    heads: Width  # attention heads
    kv_heads: Width | None = None  # heads of keys and values; None: as many as `heads`
    head_dim: Width | None = None  # None: hidden / heads
    ffn: Width | None = None  # width of a dense feed-forward block; None: 4 · hidden
    gated: bool = False  # SwiGLU: three matrices instead of two
    vocab: Count  # rows of the embedding
    tied: bool = False  # embedding and output projection share their weights
    dropout: bool = False  # whether there are dropouts, whose masks backward needs (as in GPT-3)
    causal: bool = True  # attention looks back only; flash attention then does half the work
    experts: Experts | None = None  # None: dense

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_dim is None:
            divides("model.heads", self.heads, "model.hidden", self.hidden)
        divides("model.kv_heads", self.key_heads, "model.heads", self.heads)
        if self.experts is not None and self.experts.every > self.layers:
            raise Misconfigured(
                f"model.experts.every = {self.experts.every} of {self.layers} layers: no layer has experts; "
                "give a smaller number, or no experts"
            )

    @property
    def key_heads(self) -> int:
        """Return the number of heads of keys, which is that of values."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def head_width(self) -> int:
        """Return the width of one attention head."""
        return self.hidden // self.heads if self.head_dim is None else self.head_dim

    @property
    def ffn_width(self) -> int:
        """Return the width of a dense feed-forward block."""
        return 4 * self.hidden if self.ffn is None else self.ffn

    @property
    def expert_layers(self) -> int:
        """Return how many of the layers have experts."""
        return 0 if self.experts is None else self.layers // self.experts.every


class ParameterCount(Record, frozen=True, kw_only=True):
    """Counts parameters: `shared` are reduced over all replicas, `experts` over those with the same experts."""

    shared: float
    experts: float = 0.0

    @property
    def total(self) -> float:
        """Return the number of all parameters, `shared` and `experts`."""
        return self.shared + self.experts


def positive(name: str, value: float) -> None:
    """Raise Misconfigured, with the name, unless `value` is above 0 and finite."""
    if not 0 < value < math.inf:
        raise Misconfigured(f"{name} = {shown(value)}: give a number above 0")


def divides(small: str, divisor: int, large: str, number: int) -> None:
    """Raise Misconfigured, with both names, unless `divisor` divides `number`."""
    if number % divisor:
        raise Misconfigured(f"{small} = {divisor} does not divide {large} = {number}: give a divisor of {number}")


def layer_parameters(model: Model, experts: Experts | None = None) -> ParameterCount:
    """Return the parameters of one whole layer, dense or with these experts."""
    heads, matrices = model.heads + 2 * model.key_heads, 3 if model.gated else 2
    attention = model.hidden * model.head_width * (heads + model.heads)
    norms = 2 * model.hidden
    if not model.gated:  # GPT-3: biases
        norms += 2 * model.hidden + heads * model.head_width + model.hidden + model.ffn_width + model.hidden
    if experts is None:
        return ParameterCount(shared=float(attention + norms + matrices * model.hidden * model.ffn_width))
    each = matrices * model.hidden * experts.width
    shared = attention + norms + model.hidden * experts.count + each * experts.shared
    return ParameterCount(shared=float(shared), experts=float(each * experts.count))


def layer_flops(model: Model, sequence: int, experts: Experts | None = None) -> float:
    """Return the forward FLOP of one token in one layer, for samples of `sequence` tokens.

    They are 2 per parameter of a matrix that the token visits, and 4 · heads · d · sequence of attention, which is
    counted in full although flash attention skips the causal half (arXiv 2204.02311, appendix B).
    """
    heads, matrices = model.heads + 2 * model.key_heads, 3 if model.gated else 2
    visited = model.hidden * model.head_width * (heads + model.heads)
    if experts is None:
        visited += matrices * model.hidden * model.ffn_width
    else:
        visited += model.hidden * experts.count
        visited += matrices * model.hidden * experts.width * (experts.per_token + experts.shared)
    return 2.0 * visited + 4.0 * model.heads * model.head_width * sequence


def model_flops(model: Model, sequence: int) -> float:
    """Return the FLOP of one token, forward and backward without recomputation: 3 times forward."""
    routed = model.expert_layers
    layers = (model.layers - routed) * layer_flops(model, sequence)
    layers += routed * layer_flops(model, sequence, model.experts)
    return 3.0 * (layers + 2.0 * model.vocab * model.hidden)


def find_model(name: str) -> Model:
    """Return the model of that name in models.toml, or raise Misconfigured with the names that there are."""
    models = known_models()
    if name not in models:
        raise Misconfigured(
            f'model "{printable(name, 80)}" is not known: give one of {", ".join(sorted(models))}, or its widths'
        )
    return models[name]


@cache
def known_models() -> dict[str, Model]:
    """Return all models of models.toml by name; the file has the source of each."""
    tables = tomllib.loads(Path(__file__).with_name("models.toml").read_text("utf-8"))
    return {
        name: msgspec.convert({key: value for key, value in fields.items() if key != "source"} | {"name": name}, Model)
        for name, fields in tables.items()
    }
