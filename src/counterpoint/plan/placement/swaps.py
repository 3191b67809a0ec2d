"""Run a local search: swap two vertices in different bins while that lowers Σ D(bin i, bin j) · M(i, j).

With E[i, b] = Σ_k M(i, k) · D(b, bin of k), what i would cost in bin b, the swap of i in a and j in b changes C by

    E[i, b] - E[i, a] + E[j, a] - E[j, b] + M(i, j) · (2 D(a, b) - D(a, a) - D(b, b))

(the last term, because E sees the other at its old place). One round takes the best swap of each pair of bins, applies
as many disjoint ones as lower C together, and adds to E what they changed. This is the local search of quadratic
assignment (Koopmans and Beckmann 1957) with as many swaps at once as do not disturb each other.

For few GPUs every GPU is a bin of its own, and the search begins from many starts: what is known already, the fast
approximate algorithm of scipy.optimize.quadratic_assignment (Vogelstein et al. 2015, arXiv 1112.5507), and random
orders. One local search ends a few per cent above the optimum; the best of many is the optimum, or next to it, for a
host or two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import quadratic_assignment

from counterpoint.plan.placement.topology import Topology

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
Csr = Any  # scipy.sparse.csr_array, which has no types
MAX_VALUES = 1 << 25  # of E: 128 MiB of float32, and as much again while it is made
MAX_WORK = 4e9  # values of E looked at; bounds the rounds, and so the time, on large problems
MAX_SMALL = 128  # GPUs
SLOTS_TRIED = 1_280  # random starts · GPUs: 160 starts for 8, 20 for 64
WORTH = 1e-6  # of C: swaps that gain less than this are rounding errors of float32


def fits_memory(vertices: int, bins: int) -> bool:
    """Return whether E, `[vertices, bins]`, is small enough to be kept in memory."""
    return vertices * bins <= MAX_VALUES


def improve(matrix: Csr, bins: I64, distance: F32) -> tuple[I64, int]:
    """Return the bins after swaps until none helps or `MAX_WORK` is spent, and the number of swaps made.

    `matrix` is the traffic, `[n, n]`, symmetric; `bins`, `[n]`, the bin of each vertex, and bins keep their sizes;
    `distance` is `[bins, bins]`, its diagonal the distance inside a bin.
    """
    scale = float(matrix.data.max(initial=0.0)) or 1.0
    matrix, bins, swaps = (matrix / scale).astype(np.float32), bins.copy(), 0
    expense = matrix @ distance[bins]  # E
    cost = _total(matrix, bins, distance)
    for _ in range(max(2, int(MAX_WORK / expense.size))):
        first, second = _swaps(matrix, bins, distance, expense, worth=WORTH * cost / len(bins))
        count = len(first)
        while count:
            trial = bins.copy()
            trial[first[:count]], trial[second[:count]] = bins[second[:count]], bins[first[:count]]
            found = _total(matrix, trial, distance)
            if found < cost * (1 - WORTH / len(bins)):
                break
            count //= 2
        if not count:
            break
        moved = np.concatenate([first[:count], second[:count]])
        expense += sparse.csr_array(matrix[moved].T) @ (distance[trial[moved]] - distance[bins[moved]])
        bins, cost, swaps = trial, found, swaps + count
    return bins, swaps


def best_of_many(matrix: Csr, topology: Topology, starts: Sequence[I64]) -> I64:
    """Return the best slots found for each row of the traffic, `[slots]`, from these starts and more; for few GPUs."""
    size, draw = topology.num_slots, np.random.default_rng(topology.num_slots)
    distance = topology.slot_distance()
    faq = quadratic_assignment(matrix.toarray(), distance.astype(np.float64), options={"rng": draw}).col_ind
    tried = [*starts, np.asarray(faq, dtype=np.int64)]
    tried += [draw.permutation(size) for _ in range(SLOTS_TRIED // size)]
    found = [improve(matrix, start, distance)[0] for start in tried]
    return min(found, key=lambda slots: _total(matrix, slots, distance))


def _total(matrix: Csr, bins: I64, distance: F32 | F64) -> float:
    """Return Σ D · M over pairs."""
    row = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
    return float((matrix.data.astype(np.float64) * distance[bins[row], bins[matrix.indices]]).sum() / 2)


def _swaps(matrix: Csr, bins: I64, distance: F32, expense: F32, *, worth: float) -> tuple[I64, I64]:
    """Return two arrays of vertices, to be swapped pair by pair: the best pair first, no bin twice."""
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
    """Return, for each pair of bins, the vertex of the bin `here` that gains most by a move to `there`."""
    ends = np.append(starts[1:], len(order))
    found = [
        start + np.argmin(change[start:end, to]) for start, end, to in zip(starts[here], ends[here], there, strict=True)
    ]
    return order[np.array(found, dtype=np.int64)]
