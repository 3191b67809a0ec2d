"""Which GPU of its host a rank gets: where hosts have rails, or links of different speed inside.

With hosts given, a rank i at place k of its host costs

    E[i, k] = Σ over j in the same host: M(i, j) · inside[k, place of j]
            - Σ over j in other hosts, at place k: M(i, j) · (off_rail - distance) of the level that joins the hosts

First every host in turn takes the best places beside the hosts before it: a linear assignment, exact for one host.
Then pairs of places are swapped, in all hosts at once, while C falls.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import linear_sum_assignment

from counterpoint.plan.topology import Topology

__all__ = ["improve_places"]

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
Csr = Any  # scipy.sparse.csr_array, which has no types
MAX_ROUNDS = 200


def improve_places(matrix: Csr, topology: Topology, slots: I64) -> I64:
    """Better places in the same hosts.

    Args:
        matrix: `[slots, slots]` traffic, symmetric; free slots have empty rows.
        topology: of equal hosts.
        slots: of every row of `matrix`.
    """
    work = _Work.of(matrix, topology, slots)
    aligned = work.swapped(work.aligned(slots % topology.gpus))
    kept = work.swapped(slots % topology.gpus)
    places = min(kept, aligned, key=work.cost)
    return slots // topology.gpus * topology.gpus + places


class _Work:
    """Traffic inside hosts and what rails would save on the traffic between them."""

    def __init__(self, near: Csr, saved: Csr, inside: F64, rows: I64) -> None:
        self.near, self.saved, self.inside, self.rows = near, saved, inside, rows  # rows: [hosts, gpus]

    @classmethod
    def of(cls, matrix: Csr, topology: Topology, slots: I64) -> _Work:
        host = slots // topology.gpus
        row = np.repeat(np.arange(len(slots)), np.diff(matrix.indptr))
        pair = host[row], host[matrix.indices]
        apart = np.sum([units[pair[0]] != units[pair[1]] for units in topology.units], axis=0) + 1
        apart = np.where(pair[0] == pair[1], 0, apart)
        bonus = np.array([0.0 if each.off_rail is None else each.off_rail - each.distance for each in topology.levels])
        bonus[0] = 0.0
        shape, where = matrix.shape, (row, matrix.indices)
        saved = sparse.csr_array((matrix.data * bonus[apart], where), shape=shape)
        near = sparse.csr_array((matrix.data * (apart == 0), where), shape=shape)
        for each in (saved, near):
            each.eliminate_zeros()
        flat = np.full((topology.gpus, topology.gpus), topology.levels[0].distance) - np.diag(
            np.full(topology.gpus, topology.levels[0].distance)
        )
        inside = flat if topology.inside is None else topology.inside - np.diag(np.diag(topology.inside))
        return cls(near, saved, inside, np.argsort(slots).reshape(-1, topology.gpus))

    def expense(self, places: I64) -> F64:
        """E, `[rows, gpus]`."""
        one_hot = np.eye(len(self.inside))[places]
        return np.asarray(self.near @ self.inside[places] - self.saved @ one_hot)

    def cost(self, places: I64) -> float:
        """What depends on places, of C."""
        return float(self.expense(places)[np.arange(len(places)), places].sum() / 2)

    def between(self, places: I64) -> F64:
        """Traffic between two places of a host, `[hosts, gpus, gpus]`."""
        near, found = self.near.tocoo(), np.zeros((len(self.rows), *self.inside.shape))
        host = np.empty(len(places), dtype=np.int64)
        host[self.rows] = np.arange(len(self.rows))[:, None]
        found[host[near.row], places[near.row], places[near.col]] = near.data
        return found

    def aligned(self, places: I64) -> I64:
        """Places found host by host, each beside those before it."""
        places, known = places.copy(), np.zeros(len(places))
        gpus = len(self.inside)
        for ranks in self.rows:
            saved = self.saved[ranks]
            at = saved.indices
            weight = np.repeat(np.arange(gpus), np.diff(saved.indptr)) * gpus + places[at]
            gain = np.bincount(weight, saved.data * known[at], minlength=gpus * gpus).reshape(gpus, gpus)
            if gain.any():
                row, column = linear_sum_assignment(gain, maximize=True)
                places[ranks[row]] = column
            known[ranks] = 1.0
        return places

    def swapped(self, places: I64) -> I64:
        """Swaps of two places in many hosts at once, while the cost falls."""
        cost, gpus = self.cost(places), len(self.inside)
        for _ in range(MAX_ROUNDS):
            rows = np.take_along_axis(self.rows, np.argsort(places[self.rows], axis=1), axis=1)  # by place
            change = self.expense(places)[rows]  # [hosts, place, other place]
            change -= np.diagonal(change, axis1=1, axis2=2)[:, :, None]
            gain = change + change.transpose(0, 2, 1)
            gain += 2 * self.inside * self.between(places)
            best = gain.reshape(len(gain), -1).argmin(axis=1)
            value = gain.reshape(len(gain), -1)[np.arange(len(gain)), best]
            hosts = np.argsort(value, kind="stable")
            hosts = hosts[: int((value < -1e-9 * max(abs(cost), 1e-300)).sum())]
            count = len(hosts)
            while count:
                some = hosts[:count]
                one, other = rows[some, best[some] // gpus], rows[some, best[some] % gpus]
                trial = places.copy()
                trial[one], trial[other] = places[other], places[one]
                found = self.cost(trial)
                if found < cost - 1e-12 * abs(cost):
                    break
                count //= 2
            if not count:
                break
            places, cost = trial, found
        return places
