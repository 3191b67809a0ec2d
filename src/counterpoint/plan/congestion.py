"""What collectives take from each other on shared links.

    uplinks     a GPU gets min(1, 1 / (oversubscription · active)) of its bandwidth at a level, `active` = part of the
                GPUs that send up there at once: all of an axis' groups (1, the usual case) or only some stages;
                what goes further up takes the links below, too, so no level is faster than a network below it
    together    collectives that begin at once and meet on a level share it in equal parts until one has finished:
                each is late by what the others move meanwhile,
                late_k = max over levels of Σ over the others j of min(busy_k, busy_j)
                which is exact where they meet on one level; busy = time of its bytes at that level alone

Not modelled: flows that hash onto the same uplink while another is idle. Efficiency of `network` has their mean in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING

from counterpoint.errors import Misconfigured
from counterpoint.plan.cluster import Level

if TYPE_CHECKING:
    from counterpoint.plan.collective_cost import CollectiveEstimate

__all__ = ["shares_gb_per_s", "together_us"]


def shares_gb_per_s(levels: Sequence[Level], active: float = 1.0) -> tuple[float, ...]:
    """Bandwidth of one GPU at each level while this part of all GPUs sends there.

    Raises:
        Misconfigured: `active` is not within 0 (excluded) and 1.
    """
    if not 0 < active <= 1:
        raise Misconfigured(f"active = {active}: give the part of GPUs that send at once, above 0 and at most 1")
    shares: list[float] = []
    below = inf
    for level in levels:
        share = level.gb_per_s / max(1.0, level.oversubscription * active)
        if level.kind == "network":
            share = below = min(share, below)
        shares.append(share)
    return tuple(shares)


def together_us(estimates: Sequence[CollectiveEstimate]) -> tuple[float, ...]:
    """How long each takes if all begin at once on the same GPUs."""
    busy = [{term.level: term.bandwidth_us for term in estimate.terms} for estimate in estimates]
    late = [
        max((sum(min(us, other.get(level, 0.0)) for other in busy if other is not mine) for level, us in mine.items()))
        if mine
        else 0.0
        for mine in busy
    ]
    return tuple(estimate.us + more for estimate, more in zip(estimates, late, strict=True))
