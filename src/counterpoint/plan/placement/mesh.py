"""The best order of a mesh on a regular tree: the box of the mesh that each unit of the network should hold.

A unit of U GPUs holds a box of the mesh, extents e with Π e = U that divide the axes; the box of a unit is made of
boxes of the units below. With cut(e) the traffic between boxes and d the distances,

    C = Σ over levels l of (d(l + 1) - d(l)) · cut(e of l) + d(0) · (all traffic)

is a shortest path through the levels, found exactly: of all such orders none is better. (Others may be.)
"""

from __future__ import annotations

from itertools import product

import numpy as np
from numpy.typing import NDArray

from counterpoint.plan.placement.topology import Topology
from counterpoint.plan.placement.traffic import AxisTraffic, RankTraffic

__all__ = ["mesh_order"]

I64 = NDArray[np.int64]
Box = tuple[int, ...]
MAX_BOXES = 400  # per level; beyond, only every so-many-th is looked at


def mesh_order(traffic: RankTraffic, topology: Topology) -> I64 | None:
    """Return ranks in the order in which they fill the tree; None: no box of this mesh fits any level.

    The most frequent size of a unit counts where the tree is not regular.
    """
    lengths = tuple(length for _, length in traffic.mesh)
    coordinates = np.unravel_index(np.arange(traffic.world_size), lengths[::-1])[::-1]  # the first axis is the fastest
    best: dict[Box, tuple[float, tuple[Box, ...]]] = {(1,) * len(lengths): (0.0, ())}
    distances = [level.distance for level in topology.levels]
    for index, size in enumerate(_sizes(topology)[:-1]):
        boxes = boxes_of(lengths, size)
        if not boxes:
            continue  # this level is filled as it comes
        rise = distances[index + 1] - distances[index]
        cuts = {box: rise * _cut(traffic, coordinates, lengths, box) for box in boxes}
        best = {
            box: min((cost + cuts[box], (*path, box)) for below, (cost, path) in best.items() if _divides(below, box))
            for box in boxes
            if any(_divides(below, box) for below in best)
        } or best
    _, path = min(best.values())
    if not path:
        return None
    keys = [coordinates[axis] for axis in range(len(lengths))]
    for box in path:
        keys += [coordinates[axis] // box[axis] for axis in range(len(lengths))]
    return np.lexsort(keys)


def boxes_of(lengths: tuple[int, ...], size: int) -> list[Box]:
    """Return the extents that divide the axes and have `size` ranks, or all of them where there are fewer."""
    size = min(size, int(np.prod(lengths)))
    divisors = [[e for e in range(1, length + 1) if length % e == 0 and size % e == 0] for length in lengths[1:]]
    found = []
    for rest in product(*divisors):
        first, left = divmod(size, int(np.prod(rest)))
        if left == 0 and first and lengths[0] % first == 0:
            found.append((first, *rest))
    return found[:: -(-len(found) // MAX_BOXES)] if found else []


def _cut(traffic: RankTraffic, coordinates: tuple[I64, ...], lengths: tuple[int, ...], box: Box) -> float:
    """Return the bytes between different boxes."""
    label = np.zeros(traffic.world_size, dtype=np.int64)
    for at, length, extent in zip(coordinates, lengths, box, strict=True):
        label = label * length + at // extent
    return sum(part.num_bytes - _inside(part, label) for part in traffic.parts)


def _inside(part: AxisTraffic, label: I64) -> float:
    if part.in_pairs:
        first, second, num_bytes = part.pairs()
        return float(num_bytes[label[first] == label[second]].sum())
    group = np.arange(len(part.members))[:, None]
    keys, counts = np.unique(group * (label.max() + 1) + label[part.members], return_counts=True)
    return float((counts * (counts - 1) / 2) @ part.pair_bytes[keys // (label.max() + 1)])


def _divides(below: Box, box: Box) -> bool:
    return all(large % small == 0 for small, large in zip(below, box, strict=True))


def _sizes(topology: Topology) -> list[int]:
    """Return the GPUs of the most frequent unit of each level."""
    counts = [np.bincount(np.bincount(row)).argmax() for row in topology.units]
    return [topology.gpus, *(int(count) * topology.gpus for count in counts)]
