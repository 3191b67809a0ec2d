"""How layers are dealt to the stages of a pipeline, and to the parts of a stage."""

from __future__ import annotations

from counterpoint.plan.layers import expert_layers
from counterpoint.plan.model import Model
from counterpoint.plan.parallel import Parallel
from counterpoint.records.base import Record

__all__ = ["Part", "deal", "whole_stage"]


class Part(Record, frozen=True, kw_only=True):
    """Consecutive layers.

    Args:
        layers: how many, `routed` of them with experts.
        embedding: it begins with it.
        head: it ends with it.
    """

    layers: int
    routed: int = 0
    embedding: bool = False
    head: bool = False


def deal(model: Model, parallel: Parallel) -> tuple[tuple[Part, ...], ...]:
    """`[stage][part]`: equal numbers of layers, round the stages; with `ends_count` the ends have one less each.

    Layers with experts are spread evenly, as every so many-th is one; a part has a whole number of them.
    """
    parts = parallel.pp * parallel.virtual
    slots = model.layers + (2 if parallel.ends_count else 0)
    each, routed = slots // parts, expert_layers(model)

    def part(index: int) -> Part:
        first, last = index == 0, index == parts - 1
        layers = each - (first + last if parallel.ends_count else 0)
        share = routed * (index + 1) // parts - routed * index // parts
        return Part(layers=layers, routed=min(share, layers), embedding=first, head=last)

    return tuple(
        tuple(part(turn * parallel.pp + stage) for turn in range(parallel.virtual)) for stage in range(parallel.pp)
    )


def whole_stage(parts: tuple[Part, ...]) -> Part:
    """Everything that a stage has."""
    return Part(
        layers=sum(part.layers for part in parts),
        routed=sum(part.routed for part in parts),
        embedding=any(part.embedding for part in parts),
        head=any(part.head for part in parts),
    )
