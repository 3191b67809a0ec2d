"""Intersections of sets of times; distinct rows of a table, as numpy finds them but faster."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.diagnosis.reading import intervals
from counterpoint.diagnosis.reading.intervals import Intervals, unique_rows

ROWS = st.lists(st.lists(st.sampled_from([-1, 0, 1, 7, 1 << 40, -(1 << 62)]), min_size=3, max_size=3), max_size=30)

SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=12)


@given(SPANS, SPANS)
def test_intersection_is_what_both_sets_cover(one: list[tuple[int, int]], two: list[tuple[int, int]]) -> None:
    """Every unit of time is in it if it is in both, and what touches is one interval."""
    sets = [Intervals.union(*np.array(spans, np.float64).reshape(-1, 2).T) for spans in (one, two)]
    both = sets[0] & sets[1]
    middle = np.arange(0.5, 40)
    assert (both.covers(middle) == (sets[0].covers(middle) & sets[1].covers(middle))).all()
    assert (both.end > both.start).all()
    assert (both.start[1:] > both.end[:-1]).all()


@given(ROWS)
def test_distinct_rows_are_those_of_numpy(rows: list[list[int]]) -> None:
    """In the same order, with the same numbers."""
    table = np.array(rows, np.int64).reshape(-1, 3)
    found, which = unique_rows(table)
    expected, numbers = np.unique(table, axis=0, return_inverse=True)
    assert (found.tolist(), which.tolist()) == (expected.tolist(), numbers.ravel().tolist())


def test_rows_with_one_number_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where two rows happen to mix to the same number, they are compared as a whole."""
    monkeypatch.setattr(intervals, "_ODD", np.ones(2, np.int64))
    found, which = unique_rows(np.array([[2, 1], [1, 2], [2, 1]]))
    assert (found.tolist(), which.tolist()) == ([[1, 2], [2, 1]], [1, 0, 1])
