"""Local search: swap two vertices in different bins while that lowers Σ D(bin i, bin j) · M(i, j).

With E[i, b] = Σ_k M(i, k) · D(b, bin of k), what i would cost in bin b, the swap of i in a and j in b changes C by

    E[i, b] - E[i, a] + E[j, a] - E[j, b] + M(i, j) · (2 D(a, b) - D(a, a) - D(b, b))

(the last term, because E sees the other at its old place). One round takes the best swap of each pair of bins, applies
as many disjoint ones as lower C together, and adds to E what they changed. This is the local search of quadratic
assignment (Koopmans and Beckmann 1957) with as many swaps at once as do not disturb each other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

__all__ = ["improve", "room_for", "total"]

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
Csr = Any  # scipy.sparse.csr_array, which has no types
MAX_VALUES = 1 << 25  # of E: 128 MiB of float32, and as much again while it is made
MAX_WORK = 4e9  # values of E looked at; bounds the rounds, and so the time, on large problems
WORTH = 1e-6  # of C: swaps that gain less than this are rounding errors of float32


def room_for(vertices: int, bins: int) -> bool:
    """E is small enough to be kept."""
    return vertices * bins <= MAX_VALUES


def improve(matrix: Csr, bins: I64, distance: F32) -> tuple[I64, int]:
    """Swaps until none helps, or the work is spent.

    Args:
        matrix: `[n, n]` traffic, symmetric.
        bins: bin of each vertex; bins keep their sizes.
        distance: `[bins, bins]`; the diagonal is the distance inside a bin.

    Returns:
        The bins, and how many swaps were made.
    """
    scale = float(matrix.data.max(initial=0.0)) or 1.0
    matrix, bins, swaps = (matrix / scale).astype(np.float32), bins.copy(), 0
    expense = matrix @ distance[bins]  # E
    cost = total(matrix, bins, distance)
    for _ in range(max(2, int(MAX_WORK / expense.size))):
        first, second = candidates(matrix, bins, distance, expense, worth=WORTH * cost / len(bins))
        count = len(first)
        while count:
            trial = bins.copy()
            trial[first[:count]], trial[second[:count]] = bins[second[:count]], bins[first[:count]]
            found = total(matrix, trial, distance)
            if found < cost * (1 - WORTH / len(bins)):
                break
            count //= 2
        if not count:
            break
        moved = np.concatenate([first[:count], second[:count]])
        expense += sparse.csr_array(matrix[moved].T) @ (distance[trial[moved]] - distance[bins[moved]])
        bins, cost, swaps = trial, found, swaps + count
    return bins, swaps


def total(matrix: Csr, bins: I64, distance: F32 | F64) -> float:
    """Σ D · M over pairs."""
    row = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
    return float((matrix.data.astype(np.float64) * distance[bins[row], bins[matrix.indices]]).sum() / 2)


def candidates(matrix: Csr, bins: I64, distance: F32, expense: F32, *, worth: float) -> tuple[I64, I64]:
    """Vertices to swap with each other, the best first, no bin twice."""
    order = np.argsort(bins, kind="stable")
    starts = np.searchsorted(bins[order], np.arange(len(distance)))
    change = expense[order]
    change -= np.take_along_axis(change, bins[order][:, None], axis=1)
    best = np.minimum.reduceat(change, starts, axis=0)  # [from bin, to bin]
    a, b = np.nonzero(np.triu(best + best.T < -worth, 1))
    pick = np.argsort((best + best.T)[a, b], kind="stable")[: 8 * len(distance)]
    a, b = a[pick], b[pick]
    first, second = _movers(change, order, starts, a, b), _movers(change, order, starts, b, a)
    if not len(first):
        return first, second
    between = np.asarray(matrix[first, second]).ravel()
    gain = best[a, b] + best[b, a] + between * (2 * distance[a, b] - distance[a, a] - distance[b, b])
    keep, used = [], np.zeros(len(distance), dtype=bool)
    for index in np.argsort(gain, kind="stable"):
        if gain[index] < -worth and not used[a[index]] and not used[b[index]]:
            used[a[index]] = used[b[index]] = True
            keep.append(index)
    return first[keep], second[keep]


def _movers(change: F32, order: I64, starts: I64, here: I64, there: I64) -> I64:
    """For each pair of bins, the vertex of the one that gains most in the other."""
    ends = np.append(starts[1:], len(order))
    found = [
        start + np.argmin(change[start:end, to]) for start, end, to in zip(starts[here], ends[here], there, strict=True)
    ]
    return order[np.array(found, dtype=np.int64)]
