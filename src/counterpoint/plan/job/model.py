"""Describe a transformer by its widths and counts, and compute its parameters and FLOPs.

    attention     h · (heads · d + kv_heads · (d + v)) + heads · v · h           v: width of a head's values, mostly d
    latent (MLA)  h · (q + kv + rope) + q · heads · (nope + rope) + kv · heads · (nope + v) + heads · v · h
    feed-forward  2 · h · f, gated 3 · h · f; experts: as many times, and a router h · count
    norms         h each; GPT-3's layers have a bias for each matrix and norm, too
    embedding     vocab · h, and once more for the head unless they are tied
    MTP module    a layer, a projection 2 · h · h and two norms; embedding and head are those of the model

Sources: arXiv 2104.04473, section 2 (its formula counts positions, too, which are less than 0.1 % here), arXiv
2405.04434, section 2.1 (MLA), arXiv 2412.19437, section 2.2 (multi-token prediction).
"""

from __future__ import annotations

import math
import tomllib
from difflib import get_close_matches
from functools import cache, lru_cache
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from counterpoint.errors import Misconfigured, printable
from counterpoint.plan.job.fields import Count, Factor, JobRecord, Layers, Name, Width, shown
from counterpoint.records import Record


class Experts(JobRecord, frozen=True, kw_only=True):
    """Describes the experts of a mixture-of-experts layer."""

    count: Width  # routed experts of a layer
    per_token: Width  # experts that a token visits
    width: Width  # of each expert's feed-forward block
    shared: Annotated[int, Meta(ge=0, le=1024)] = 0  # experts that every token visits, of the same width
    every: Layers = 1  # one layer in this many has experts; the others are dense
    first_dense: Annotated[int, Meta(ge=0, le=10_000)] = 0  # this many layers at the beginning are dense, too
    imbalance: Factor = 1.0  # tokens of the busiest rank / mean; 1: even

    def __post_init__(self) -> None:
        if self.per_token > self.count:
            raise Misconfigured(
                f"model.experts.per_token = {self.per_token} of count = {self.count}: "
                "give as many as there are experts, or fewer"
            )


class LatentAttention(JobRecord, frozen=True, kw_only=True):
    """Describes multi-head latent attention (MLA): keys, values and mostly queries come from low-rank projections."""

    q_lora_rank: Width | None = None  # width of the latent queries; None: queries are projected at once
    kv_lora_rank: Width  # width of the latent keys and values
    qk_nope_head_dim: Width  # part of a head of queries and keys without positions
    qk_rope_head_dim: Width  # part with rotary positions; that of the keys is shared by all heads
    v_head_dim: Width  # of a head's values

    @property
    def latent_width(self) -> int:
        """Return the total width of the down projections, which tp does not shard."""
        return (self.q_lora_rank or 0) + self.kv_lora_rank + self.qk_rope_head_dim


class Model(JobRecord, frozen=True, kw_only=True):
    """Describes a decoder-only transformer."""

    name: Name = "model"  # for people
    layers: Layers  # transformer blocks
    hidden: Width  # width of the residual stream
    heads: Width  # attention heads
    kv_heads: Width | None = None  # heads of keys and values; None: as many as `heads`
    head_dim: Width | None = None  # None: hidden / heads
    v_head_dim: Width | None = None  # of values; None: as of keys
    mla: LatentAttention | None = None  # instead of kv_heads, head_dim and v_head_dim
    window: Count | None = None  # attention looks back only this many tokens; None: to the beginning
    # one layer in so many ignores `window` and attends to all earlier tokens; None: no layer does
    full_every: Layers | None = None
    qk_norm: bool = False  # queries and keys are normalised
    bias: Literal["none", "qkv", "all"] | None = None  # of matrices; None: "all" as in GPT-3, gated "none"
    rotary: bool | None = None  # rotary positions; None: if gated
    norms: Annotated[int, Meta(ge=1, le=64)] = 2  # of a layer, over the residual stream
    ffn: Width | None = None  # width of a dense feed-forward block; None: 4 · hidden
    gated: bool = False  # SwiGLU: three matrices instead of two
    vocab: Count  # rows of the embedding
    tied: bool = False  # embedding and output projection share their weights
    dropout: bool = False  # whether there are dropouts, whose masks backward needs (as in GPT-3)
    causal: bool = True  # attention looks back only; flash attention then does half the work
    experts: Experts | None = None  # None: dense
    mtp: Annotated[int, Meta(ge=0, le=64)] = 0  # modules that each predict one token more (MTP), on the last stage

    def __post_init__(self) -> None:
        if self.mla is not None and any(each is not None for each in (self.kv_heads, self.head_dim, self.v_head_dim)):
            raise Misconfigured("model.mla with kv_heads, head_dim or v_head_dim: give its widths in mla alone")
        if self.full_every is not None and self.window is None:
            raise Misconfigured(f"model.full_every = {self.full_every} without window: give both, or none")
        if self.window is not None and not self.causal:
            raise Misconfigured(f"model.window = {self.window} with causal = false: a window looks back; leave out one")
        if self.head_dim is None and self.mla is None:
            divides("model.heads", self.heads, "model.hidden", self.hidden)
        divides("model.kv_heads", self.key_heads, "model.heads", self.heads)
        if self.experts is not None and not self.expert_layers:
            raise Misconfigured(
                f"model.experts with every = {self.experts.every}, first_dense = {self.experts.first_dense} of "
                f"{self.layers} layers: none has experts; give smaller numbers, or no experts"
            )

    @property
    def key_heads(self) -> int:
        """Return the number of key heads, equal to the number of value heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def head_width(self) -> int:
        """Return the width of one attention head's queries and keys."""
        if self.mla is not None:
            return self.mla.qk_nope_head_dim + self.mla.qk_rope_head_dim
        return self.hidden // self.heads if self.head_dim is None else self.head_dim

    @property
    def value_width(self) -> int:
        """Return the width of one attention head's values."""
        if self.mla is not None:
            return self.mla.v_head_dim
        return self.head_width if self.v_head_dim is None else self.v_head_dim

    @property
    def ffn_width(self) -> int:
        """Return the inner width of a dense feed-forward block."""
        return 4 * self.hidden if self.ffn is None else self.ffn

    @property
    def biased(self) -> Literal["none", "qkv", "all"]:
        """Return which matrices have a bias: none, only the projections to queries, keys and values, or all."""
        return self.bias or ("none" if self.gated else "all")

    @property
    def rotates(self) -> bool:
        """Return whether queries and keys have rotary position embeddings."""
        return self.gated if self.rotary is None else self.rotary

    @property
    def expert_layers(self) -> int:
        """Return the number of layers that have experts."""
        return self.experts_between(0, self.layers)

    def experts_between(self, first: int, end: int) -> int:
        """Return how many layers of `range(first, end)` have experts: after dense layers, the last of every `every`."""
        if self.experts is None:
            return 0
        dense, every = self.experts.first_dense, self.experts.every
        return max(end - dense, 0) // every - max(first - dense, 0) // every

    def seen(self, sequence: int) -> float:
        """Return the fraction of all (query, key) pairs that attention computes, as the mean over the layers."""
        whole = 0.5 if self.causal else 1.0
        if self.window is None or self.window >= sequence:
            return whole
        part = self.window / sequence
        full = 0.0 if self.full_every is None else self.layers // self.full_every / self.layers
        return full * whole + (1.0 - full) * part * (1.0 - part / 2)


class ParameterCount(Record, frozen=True, kw_only=True):
    """Counts parameters whose gradients all replicas reduce (`shared`), or ranks with the same experts (`experts`)."""

    shared: float
    experts: float = 0.0
    uncut: float = 0.0  # of `shared`, those that tp does not shard

    @property
    def total(self) -> float:
        """Return the number of all parameters, `shared` and `experts`."""
        return self.shared + self.experts

    def of_rank(self, tp: int, ep: int, expert_tp: int) -> ParameterCount:
        """Return one rank's count: `tp` ranks divide matrices, `ep` the experts, `expert_tp` each expert's matrices."""
        return ParameterCount(
            shared=(self.shared - self.uncut) / tp + self.uncut, experts=self.experts / expert_tp / ep
        )  # fmt: skip


def positive(name: str, value: float) -> None:
    """Raise Misconfigured, with the name, unless `value` is positive and finite."""
    if not 0 < value < math.inf:
        raise Misconfigured(f"{name} = {shown(value)}: give a number above 0")


def divides(small: str, divisor: int, large: str, number: int) -> None:
    """Raise Misconfigured, with both names, unless `divisor` divides `number`."""
    if number % divisor:
        raise Misconfigured(f"{small} = {divisor} does not divide {large} = {number}: give a divisor of {number}")


@lru_cache(maxsize=256)
def layer_parameters(model: Model, experts: Experts | None = None) -> ParameterCount:
    """Return the number of parameters of one unsharded layer: a dense one, or one with these `experts`."""
    matrices, biased = 3 if model.gated else 2, model.biased == "all"
    uncut = 0
    if (mla := model.mla) is not None:
        uncut = model.hidden * mla.latent_width + (mla.q_lora_rank or 0) + mla.kv_lora_rank  # and the latents' norms
    small = model.norms * model.hidden * (2 if biased else 1)
    if model.biased != "none":
        small += model.heads * model.head_width + model.key_heads * (model.head_width + model.value_width)
    if biased:  # of attention's output, and of the feed-forward block
        small += model.hidden
    if model.qk_norm:
        small += 2 * model.head_width
    shared = _cut_attention(model) + uncut + small
    if experts is None:
        shared += matrices * model.hidden * model.ffn_width + _block_bias(model, model.ffn_width)
        return ParameterCount(shared=float(shared), uncut=float(uncut))
    each = matrices * model.hidden * experts.width + _block_bias(model, experts.width)
    shared += model.hidden * experts.count + each * experts.shared
    return ParameterCount(shared=float(shared), experts=float(each * experts.count), uncut=float(uncut))


def _cut_attention(model: Model) -> int:
    """Return the number of parameters of the attention matrices that tp shards."""
    out = model.heads * model.value_width * model.hidden
    if (mla := model.mla) is not None:
        up = (mla.q_lora_rank or model.hidden) * model.head_width
        return model.heads * (up + mla.kv_lora_rank * (mla.qk_nope_head_dim + mla.v_head_dim)) + out
    columns = model.heads * model.head_width + model.key_heads * (model.head_width + model.value_width)
    return model.hidden * columns + out


def _block_bias(model: Model, width: int) -> int:
    return (2 if model.gated else 1) * width + model.hidden if model.biased == "all" else 0


def mtp_parameters(model: Model) -> float:
    """Return how many parameters a multi-token prediction module has besides its layer; tp shards none of them."""
    return 2.0 * model.hidden * model.hidden + 3.0 * model.hidden


def layer_flops(model: Model, sequence: int, experts: Experts | None = None) -> float:
    """Return the forward FLOPs of one token in one layer, for samples of `sequence` tokens.

    They are 2 per parameter of a matrix that the token visits, and 2 · heads · (d + v) · sequence of attention, which
    is counted in full although flash attention skips the causal half (arXiv 2204.02311, appendix B); a sliding window
    lowers this count by the fraction of pairs that it drops.
    """
    matrices = 3 if model.gated else 2
    visited = _cut_attention(model) + (model.hidden * model.mla.latent_width if model.mla else 0)
    if experts is None:
        visited += matrices * model.hidden * model.ffn_width
    else:
        visited += model.hidden * experts.count
        visited += matrices * model.hidden * experts.width * (experts.per_token + experts.shared)
    keys = sequence * model.seen(sequence) * (2 if model.causal else 1)
    return 2.0 * visited + 2.0 * model.heads * (model.head_width + model.value_width) * keys


def model_flops(model: Model, sequence: int) -> float:
    """Return the FLOPs of one token, forward and backward without recomputation: 3 times forward."""
    routed, head = model.expert_layers, 2.0 * model.vocab * model.hidden
    layers = (model.layers - routed) * layer_flops(model, sequence)
    layers += routed * layer_flops(model, sequence, model.experts)
    more = layer_flops(model, sequence, model.experts) + 4.0 * model.hidden * model.hidden + head
    return 3.0 * (layers + head + model.mtp * more)


def find_model(name: str) -> Model:
    """Return the model called `name` in models.toml; raise Misconfigured, with the known names, if there is none."""
    models = known_models()
    if name not in models:
        near = get_close_matches(name[:80].lower(), models, n=3)
        known = f"did you mean {' or '.join(near)}" if near else f"known are {', '.join(sorted(models))}"
        raise Misconfigured(f'model "{printable(name, 80)}" is not known; {known}; or give its widths')
    return models[name]


@cache
def known_models() -> dict[str, Model]:
    """Return all models of models.toml by name; that file states the source of each."""
    tables = tomllib.loads(Path(__file__).with_name("models.toml").read_text("utf-8"))
    return {
        name: msgspec.convert({key: value for key, value in fields.items() if key != "source"} | {"name": name}, Model)
        for name, fields in tables.items()
    }
