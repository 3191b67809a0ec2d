"""Parameters of a model, and how many of them one rank holds before `zero` shards them.

    attention     h · (heads + 2 · kv_heads) · d + heads · d · h
    feed-forward  2 · h · f, gated 3 · h · f; experts: as many times, and a router h · count
    norms         2 · h per layer; GPT-3's layers have a bias for each matrix and norm, too
    embedding     vocab · h, and once more for the head unless they are tied

Source: arXiv 2104.04473, section 2 (its formula counts positions, too, which are less than 0.1 % here).
"""

from __future__ import annotations

from counterpoint.plan.layers import expert_layers
from counterpoint.plan.model import Experts, Model
from counterpoint.plan.parallel import Parallel
from counterpoint.records.base import Record

__all__ = ["Held", "layer_flops", "layer_parameters", "model_flops", "model_parameters", "most_held"]


class Held(Record, frozen=True, kw_only=True):
    """Parameters of one rank: `shared` are reduced over all replicas, `experts` over those with the same experts."""

    shared: float
    experts: float = 0.0

    @property
    def total(self) -> float:
        return self.shared + self.experts


def layer_parameters(model: Model, experts: Experts | None = None) -> Held:
    """Of one layer, undivided; with `experts` its feed-forward part is theirs."""
    heads, matrices = model.heads + 2 * model.key_heads, 3 if model.gated else 2
    attention = model.hidden * model.head_width * (heads + model.heads)
    norms = 2 * model.hidden
    if not model.gated:  # GPT-3: biases
        norms += 2 * model.hidden + heads * model.head_width + model.hidden + model.ffn_width + model.hidden
    if experts is None:
        return Held(shared=float(attention + norms + matrices * model.hidden * model.ffn_width))
    each = matrices * model.hidden * experts.width
    shared = attention + norms + model.hidden * experts.count + each * experts.shared
    return Held(shared=float(shared), experts=float(each * experts.count))


def model_parameters(model: Model) -> float:
    """All of them, experts included."""
    routed = expert_layers(model)
    dense, sparse = layer_parameters(model), layer_parameters(model, model.experts)
    ends = model.vocab * model.hidden * (1 if model.tied else 2) + model.hidden
    return (model.layers - routed) * dense.total + routed * sparse.total + ends


def layer_flops(model: Model, sequence: int, experts: Experts | None = None) -> float:
    """Forward, per token: 2 per parameter of a matrix that the token visits, and 4 · heads · d · sequence of attention.

    Attention is counted in full although the causal half is skipped by flash attention (arXiv 2204.02311, appendix B).
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
    """Forward and backward, per token, without recomputation: 3 times forward."""
    routed = expert_layers(model)
    layers = (model.layers - routed) * layer_flops(model, sequence)
    layers += routed * layer_flops(model, sequence, model.experts)
    return 3.0 * (layers + 2.0 * model.vocab * model.hidden)


def most_held(model: Model, parallel: Parallel, *, layers: int, routed: int, embedding: bool, head: bool) -> Held:
    """Of a rank whose stage has so many layers, `routed` of them with experts, and perhaps one of the ends."""
    dense, sparse = layer_parameters(model), layer_parameters(model, model.experts)
    shared = ((layers - routed) * dense.shared + routed * sparse.shared) / parallel.tp
    table = model.vocab * model.hidden / parallel.tp
    if model.tied and parallel.pp == 1:
        shared += table if embedding or head else 0.0
    else:
        shared += table * (embedding + head)
    return Held(shared=shared, experts=routed * sparse.experts / parallel.tp / parallel.ep)
