"""Clocks that were planted are found, and drifts of many ranks together are those of each alone."""

import numpy as np
import pytest

from counterpoint.trace.clocks import Clocks, _slope, _slopes, align_clocks


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


def test_times_of_a_clock_come_back() -> None:
    """As `Clocks` defines it: own = reference + offset + drift · (reference - pivot); unknown ones change nothing."""
    reference = np.array([0.0, 1e6, 3e6])
    offset, drift = np.array([0.0, 500.0, np.nan]), np.array([0.0, 2e-2, 1.0])
    clocks = Clocks(offset=offset, drift=drift, uncertainty=np.zeros(3), pivot=1e6)
    own = reference + 500.0 + 2e-2 * (reference - 1e6)
    np.testing.assert_allclose(clocks.corrected(1, own), reference, atol=1e-6)
    np.testing.assert_array_equal(clocks.corrected(2, own), own)


def test_planted_clocks_are_found() -> None:
    """A rank late by the host's order, two of another host known through one of them, one that drifts, one alone."""
    at = np.arange(1, 42) * 1e5
    end = at[:, None] + np.array([0.0, 40.0, -5000.0, -4940.0, 700.0, np.nan])
    end[:, 4] += 1e-4 * (at - at[20])
    end[:21, 3], end[21:, 0] = np.nan, np.nan
    clocks, second_order = align_clocks(end), 2 * 1e-4**2
    np.testing.assert_allclose(clocks.offset, [0.0, 0.0, -4990.0, -4990.0, 680.0, np.nan], atol=1.0)
    np.testing.assert_allclose(clocks.drift, [0.0, 0.0, 0.0, 0.0, 1e-4, 0.0], atol=second_order)


def test_an_offset_is_as_uncertain_as_its_median() -> None:
    """Ends 4 µs off their means at 40 collectives: 1.4826 · 4 is their deviation, 1.25 / √40 of it the median's."""
    end = np.arange(40)[:, None] * 1e3 + np.array([0.0, 5000.0])
    end[:, 1] += np.tile([8.0, -8.0], 20)
    clocks = align_clocks(end)
    np.testing.assert_allclose([clocks.offset[1], clocks.uncertainty[1]], [5000.0, 1.25 * 1.4826 * 4 / 40**0.5])


def test_noise_is_no_drift_however_far_the_clocks_are_from_zero() -> None:
    """Ends up to 8 µs apart at random, within 40 ms of a clock that has counted for ten days."""
    end = 9e11 + np.arange(40)[:, None] * 1e3 + np.zeros(2)
    end[:, 1] += np.random.default_rng(1).normal(0, 4, 40)
    assert not align_clocks(end).drift.any()
