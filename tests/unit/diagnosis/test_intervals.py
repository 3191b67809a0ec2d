"""Distinct rows of a table, as numpy finds them but faster."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.diagnosis import intervals
from counterpoint.diagnosis.intervals import unique_rows

ROWS = st.lists(st.lists(st.sampled_from([-1, 0, 1, 7, 1 << 40, -(1 << 62)]), min_size=3, max_size=3), max_size=30)


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
