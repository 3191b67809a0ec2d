"""Drifts of many ranks' clocks, computed together, against those of each rank alone."""

import numpy as np
import pytest

from counterpoint.trace.clocks import _slope, _slopes


@pytest.mark.parametrize("rows", [3, 8, 31])
def test_slopes_of_ranks_together_are_those_of_each(rows: int) -> None:
    """To the last bit: ranks without gaps, one with a gap, one whose times stand still, all rows out of order."""
    rng = np.random.default_rng(rows)
    x = rng.permuted(np.cumsum(rng.uniform(1, 50, (rows, 6)), axis=0), axis=0)
    y = 3e-5 * x + rng.normal(0, 0.4, (rows, 6))
    y[1, 2] = np.nan
    x[:, 4] = 7.0
    x[::2, 5] = x[0, 5]
    np.testing.assert_array_equal(_slopes(x, y), [_slope(x[:, r], y[:, r]) for r in range(6)])


def test_no_rank_has_no_slope() -> None:
    """Nothing to compute, nothing fails."""
    assert _slopes(np.empty((9, 0)), np.empty((9, 0))).shape == (0,)
