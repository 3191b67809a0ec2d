"""Represent sets of times as sorted, disjoint intervals, with union, intersection and total length in O(n log n).

`unique_rows` does what numpy's `unique(..., axis=0)` does, several times as fast.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from counterpoint.trace.timeline import F64, I64, Bools

_ODD = np.random.default_rng(1).integers(1, 1 << 62, 64) * 2 + 1


@dataclass(frozen=True, slots=True)
class Intervals:
    """Holds disjoint intervals [start, end), sorted; times in µs."""

    start: F64
    end: F64

    @classmethod
    def union(cls, start: F64, end: F64) -> Intervals:
        """Return the union of intervals in any order; empty intervals are dropped."""
        keep = end > start
        start, end = start[keep], end[keep]
        if not len(start):
            return cls(np.empty(0), np.empty(0))
        order = np.argsort(start, kind="stable")
        start, reach = start[order], np.maximum.accumulate(end[order])
        first = np.concatenate(([True], start[1:] > reach[:-1]))
        last = np.concatenate((np.flatnonzero(first)[1:] - 1, [len(start) - 1]))
        return cls(start[first], reach[last])

    def __len__(self) -> int:
        return len(self.start)

    def before(self, at: F64) -> F64:
        """Return the total length of the intervals before each time in `at`, in µs."""
        if not len(self):
            return np.zeros(len(at))
        total = np.concatenate(([0.0], np.cumsum(self.end - self.start)))
        index = np.searchsorted(self.start, at, side="right")
        inside = np.where(index > 0, np.minimum(at, self.end[index - 1]) - self.start[index - 1], 0.0)
        return np.where(index > 0, total[index - 1] + inside, 0.0)

    def within(self, start: F64, end: F64) -> F64:
        """Return the total length of the intervals inside each window [start, end), in µs."""
        return np.maximum(self.before(end) - self.before(start), 0.0)

    def __and__(self, other: Intervals) -> Intervals:
        """Return the times that lie in both sets."""
        if not len(self) or not len(other):
            return Intervals(np.empty(0), np.empty(0))
        first = np.searchsorted(other.end, self.start, side="right")
        count = np.maximum(np.searchsorted(other.start, self.end) - first, 0)
        mine = np.repeat(np.arange(len(self)), count)
        theirs = np.arange(len(mine)) + np.repeat(first - (np.cumsum(count) - count), count)
        return Intervals(
            np.maximum(self.start[mine], other.start[theirs]), np.minimum(self.end[mine], other.end[theirs])
        )

    def __or__(self, other: Intervals) -> Intervals:
        """Return the times that lie in either set."""
        return Intervals.union(np.concatenate((self.start, other.start)), np.concatenate((self.end, other.end)))

    def covers(self, at: F64) -> Bools:
        """Return a mask of the times in `at` that lie in an interval."""
        index = np.searchsorted(self.start, at, side="right") - 1
        return (index >= 0) & (at < self.end[np.maximum(index, 0)]) if len(self) else np.zeros(len(at), bool)


def unique_rows(table: I64) -> tuple[I64, I64]:
    """Return the distinct rows of a table in lexicographic order, and each row's index among them."""
    mixed = (table.astype(np.int64) * _ODD[: table.shape[1]]).sum(axis=1)  # integer overflow is intended
    _, first, which = np.unique(mixed, return_index=True, return_inverse=True)
    found = table[first]
    if not (found[which] == table).all():  # a collision: two rows have one hash
        found, which = np.unique(table, axis=0, return_inverse=True)
        return found, which.ravel()
    order = np.lexsort(found.T[::-1])
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return found[order], place[which]
