"""Who may share memory for whole parameters: a plan, made of the model's order before anything runs.

FSDP2 runs modules in an order that it does not know before; that of the model is nearly always the one. Where it is
not, modules move to other places when they are first gathered (fsdp_places.py): the plan only saves memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from counterpoint.parallel.fsdp_modules import ShardedModule

__all__ = ["Stay", "shared_places", "spans"]


@dataclass(frozen=True, slots=True)
class Stay:
    """How long a module is whole, counted in modules of the model's order.

    Args:
        num_bytes: of it.
        span: from when it computes to when it is freed.
    """

    num_bytes: int
    span: tuple[int, int]


def shared_places(stays: Sequence[Stay], *, ahead: int) -> list[int]:
    """Number of the place of each, so that those which are whole at the same time have different ones, also if the
    later is gathered `ahead` before it computes; of the places that are possible the one that has to grow least."""
    chosen: list[int] = []
    for stay in stays:
        taken = {place for place, other in zip(chosen, stays, strict=False) if other.span[1] >= stay.span[0] - ahead}
        sizes: dict[int, int] = {}
        for place, other in zip(chosen, stays, strict=False):
            sizes[place] = max(other.num_bytes, sizes.get(place, 0))
        free = [place for place in sizes if place not in taken]
        least = min(free, key=lambda place: (max(0, stay.num_bytes - sizes[place]), sizes[place]), default=len(sizes))
        chosen.append(least)
    return chosen


def spans(modules: Sequence[ShardedModule]) -> list[tuple[int, int]]:
    """A module is whole while those inside it compute; one that is kept after forward, to the end."""
    inside = [set(module.module.modules()) for module in modules]
    last = len(modules) - 1
    return [
        (at, last if module.kept else max(i for i, other in enumerate(modules) if other.module in inside[at]))
        for at, module in enumerate(modules)
    ]
