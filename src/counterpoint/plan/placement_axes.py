"""Axes of a mesh, found again where only the traffic is known: a trace, a matrix, ranks in unknown order.

On a mesh, ranks that differ along one axis exchange what that axis exchanges, so entries of M that are equal, or have
no gap between them where they are noisy, are an axis. Leave out the entries of one axis: whoever is still connected has
the same coordinate on it. That is checked (as many parts as the axis is long, all equal, and all coordinates together
name each rank once); traffic that is no mesh gives None. Parts are put in the order of the smoothest vector of the
traffic between them, which for stages is their order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse.csgraph import connected_components

from counterpoint.plan.placement_partition import contracted, fiedler
from counterpoint.plan.traffic import Traffic

__all__ = ["with_mesh"]

I64 = NDArray[np.int64]
Csr = Any  # scipy.sparse.csr_array, which has no types
GAPS = (1.001, 1.02, 1.1)  # from one entry to the next smaller that begins another axis; the first that gives a mesh
MAX_AXES = 6


def with_mesh(traffic: Traffic) -> tuple[Traffic, I64] | None:
    """The same traffic with ranks counted along a mesh, and the rank at each of those numbers; None: there is none."""
    for gap in GAPS:
        coordinates = _coordinates(traffic.sampled, gap)
        lengths = tuple(int(each.max()) + 1 for each in coordinates)
        if not coordinates or int(np.prod(lengths)) != traffic.world_size:
            continue
        number = np.ravel_multi_index(tuple(coordinates[::-1]), lengths[::-1])
        if len(np.unique(number)) == traffic.world_size:
            mesh = tuple((f"axis {index}", length) for index, length in enumerate(lengths))
            counted = traffic.permuted(number)
            return Traffic(world_size=traffic.world_size, blocks=counted.blocks, mesh=mesh), np.argsort(number)
    return None


def _coordinates(matrix: Csr, gap: float) -> list[I64]:
    """Of each rank on each axis, the axis with the heaviest entries first; none if this is no mesh."""
    weights = np.unique(matrix.data)[::-1]
    edges = np.append(np.flatnonzero(weights[:-1] > gap * weights[1:]) + 1, len(weights))
    if len(weights) == 0 or len(edges) > MAX_AXES:
        return []
    axis = np.searchsorted(edges, np.searchsorted(-weights, -matrix.data), side="right")
    found = []
    for index in range(len(edges)):
        others, own = matrix.copy(), matrix.copy()
        others.data *= axis != index
        own.data *= axis == index
        others.eliminate_zeros()
        parts, label = connected_components(others, directed=False)
        if parts < 2 or len(np.unique(np.bincount(label))) > 1:
            return []
        if parts > 2:
            smooth = fiedler(contracted(own, label.astype(np.int64), parts), 1)[:, 0]
            label = np.argsort(np.argsort(smooth, kind="stable"))[label]
        found.append(label.astype(np.int64))
    return found
