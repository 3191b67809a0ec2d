"""Few GPUs: quadratic assignment of ranks to single GPUs, from many starts.

C = Σ d(slot i, slot j) · M(i, j) with every slot its own bin. Each start is improved by swaps (`placement_swaps.py`);
the starts are what is known already, the fast approximate algorithm of scipy.optimize.quadratic_assignment (Vogelstein
et al. 2015, arXiv 1112.5507), and random orders. One local search ends a few per cent above the optimum; the best of
many is the optimum, or next to it, for a host or two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import quadratic_assignment

from counterpoint.plan.placement_swaps import improve, total
from counterpoint.plan.topology import Topology

__all__ = ["MAX_SMALL", "best_of_many"]

I64 = NDArray[np.int64]
Csr = Any  # scipy.sparse.csr_array, which has no types
MAX_SMALL = 128  # GPUs
SLOTS_TRIED = 1_280  # random starts · GPUs: 160 starts for 8, 20 for 64


def best_of_many(matrix: Csr, topology: Topology, starts: Sequence[I64]) -> I64:
    """The best slots found for each row.

    Args:
        matrix: `[slots, slots]` traffic, symmetric.
        topology: of at most MAX_SMALL GPUs.
        starts: slots to begin with, besides those found here.
    """
    size, draw = topology.num_slots, np.random.default_rng(topology.num_slots)
    distance = topology.slot_distance()
    faq = quadratic_assignment(matrix.toarray(), distance.astype(np.float64), options={"rng": draw}).col_ind
    tried = [*starts, np.asarray(faq, dtype=np.int64)]
    tried += [draw.permutation(size) for _ in range(SLOTS_TRIED // size)]
    found = [improve(matrix, start, distance)[0] for start in tried]
    return min(found, key=lambda slots: total(matrix, slots, distance))
