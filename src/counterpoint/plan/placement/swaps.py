"""Swap two vertices in different bins while that lowers Σ D(bin i, bin j) · M(i, j).

With E[i, j] = Σ_k M(i, k) · D(bin of j, bin of k), what i would cost in the place of j, their swap changes the sum by

    E[i, j] - E[i, i] + E[j, i] - E[j, j] + M(i, j) · (2 D(i, j) - D(i, i) - D(j, j))

(the last term, because E sees the other at its old place). One round looks at all pairs, and makes as many of the best
swaps as lower the sum together, no bin twice: the local search of quadratic assignment (Koopmans and Beckmann 1957).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
MAX_WORK = 5e8  # most pairs that are tried, which bounds the time on large problems
WORTH = 1e-6  # fraction of a vertex's mean cost: smaller gains are float32 rounding errors


def swapped(matrix: F64, bins: I64, distance: F32) -> tuple[I64, int]:
    """Return the bins after swapping until nothing helps or `MAX_WORK` is spent, and the number of swaps.

    Args:
        matrix: M, `[vertices, vertices]`, symmetric, with a diagonal of 0.
        bins: `[vertices]`, the bin of each vertex; bins keep their sizes.
        distance: D, `[bins, bins]`, symmetric, its diagonal the distance inside a bin.
    """
    traffic, swaps = (matrix / (matrix.max(initial=0.0) or 1.0)).astype(np.float32), 0
    cost = _cost(traffic, bins, distance)
    for _ in range(max(2, int(MAX_WORK / matrix.size))):
        first, second = _best_swaps(traffic, bins, distance, worth=WORTH * cost / len(bins))
        while len(first):
            trial = bins.copy()
            trial[first], trial[second] = bins[second], bins[first]
            if (found := _cost(traffic, trial, distance)) < cost * (1 - WORTH / len(bins)):
                break
            first, second = first[: len(first) // 2], second[: len(second) // 2]
        else:
            break
        bins, cost, swaps = trial, found, swaps + len(first)
    return bins, swaps


def _cost(traffic: F32, bins: I64, distance: F32) -> float:
    """Return Σ D · M over all pairs of vertices."""
    return float(np.einsum("ij,ij->", traffic, distance[np.ix_(bins, bins)], dtype=np.float64) / 2)


def _best_swaps(traffic: F32, bins: I64, distance: F32, *, worth: float) -> tuple[I64, I64]:
    """Return two arrays of vertices to swap pairwise: the best pair first, no bin twice."""
    near, inside = distance[np.ix_(bins, bins)], distance[bins, bins]
    change = (traffic @ distance[bins])[:, bins]  # E
    change -= np.diag(change).copy()[:, None]
    change += change.T.copy()
    change += traffic * (2 * near - inside - inside[:, None])
    partner = change.argmin(axis=1)
    gain = change[np.arange(len(bins)), partner]
    keep, used = [], np.zeros(len(distance), dtype=bool)
    for i in np.argsort(gain, kind="stable"):
        here, there = bins[i], bins[partner[i]]
        if gain[i] < -worth and not used[here] and not used[there]:
            used[here] = used[there] = True
            keep.append(i)
    return np.array(keep, dtype=np.int64), partner[keep]
