"""Compute beside communication, and the slowest of many."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.errors import Misconfigured
from counterpoint.machine.profile import default_profile
from counterpoint.pair.together import disturbance, kept_us
from counterpoint.plan.step.step import expected_slowest

H200 = default_profile()
NAMES = (*H200.mechanisms, "ideal", "serial")
name = st.sampled_from(NAMES)
operation = st.sampled_from(["all_gather", "reduce_scatter", "all_reduce", "all_to_all"])
us = st.floats(0.0, 1e6)


@given(name=name, operation=operation, g=us, c=us, persistent=st.booleans())
def test_together_lies_between_ideal_and_serial(
    name: str, operation: str, g: float, c: float, persistent: bool
) -> None:
    """max(g, c) <= T <= g + c, by every mechanism."""
    found = kept_us(g, ((operation, c),), disturbance(name, H200), persistent=persistent)
    assert max(g, c) * (1 - 1e-9) <= found <= (g + c) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("mechanism", "operation", "hidden"),
    [("nccl", "all_gather", 0.46), ("nccl", "reduce_scatter", 0.54), ("nccl", "all_reduce", 0.53),
     ("nccl", "all_to_all", 0.40), ("zero_sm", "all_reduce", 0.71), ("zero_sm", "reduce_scatter", 0.87)],
)  # fmt: skip
def test_the_measured_part_is_hidden(mechanism: str, operation: str, hidden: float) -> None:
    """Beside a longer persistent matmul: (g + c - T) / c is what was measured on 8 × H200."""
    found = kept_us(2000.0, ((operation, 1000.0),), disturbance(mechanism, H200), persistent=True)
    assert (3000.0 - found) / 1000.0 == pytest.approx(hidden)


def test_compute_keeps_its_measured_part() -> None:
    """Not persistent, as before Hopper: while NCCL runs, compute has 82 % of its speed."""
    mechanism = disturbance("nccl", H200)
    found = kept_us(2000.0, (("all_gather", 930.0),), mechanism, persistent=False)
    assert found == pytest.approx(2000.0 + 1000.0 * (1 - 0.82))


@given(g=us, c=us, more=us)
def test_a_longer_collective_never_helps(g: float, c: float, more: float) -> None:
    """T does not fall with c."""
    times = [
        kept_us(g, (("all_gather", each),), disturbance("nccl", H200), persistent=True) for each in (c, c + more)
    ]  # fmt: skip
    assert times[1] >= times[0] * (1 - 1e-9)


def test_ideal_and_serial_are_the_bounds() -> None:
    both = [
        kept_us(300.0, (("all_reduce", 200.0),), disturbance(n, H200), persistent=True) for n in ("ideal", "serial")
    ]
    assert both == [300.0, 500.0]


def test_an_unknown_mechanism_names_the_known_ones() -> None:
    with pytest.raises(
        Misconfigured, match="known are nccl, nccl_zero_cta, nccl_capped, zero_sm, zero_sm_copied, ideal, serial"
    ):
        disturbance("telepathy", H200)


@pytest.mark.parametrize("ranks", [1, 8, 1024])
def test_the_slowest_is_that_of_a_simulation(ranks: int) -> None:
    """E[max] over the mean agrees with 4,000 draws to 0.5 %."""
    times = 1 + 0.05 * np.random.default_rng(1).standard_normal((4000, ranks))
    assert expected_slowest(0.05, ranks) == pytest.approx(float(times.max(axis=1).mean()), rel=0.005)


@given(spread=st.floats(0.0, 0.5), ranks=st.integers(1, 1 << 15), more=st.integers(0, 1 << 15))
def test_more_ranks_never_make_the_slowest_faster(spread: float, ranks: int, more: int) -> None:
    """And one rank alone waits for nobody."""
    few, many = expected_slowest(spread, ranks), expected_slowest(spread, ranks + more)
    assert (1.0 <= few <= many, expected_slowest(spread, 1)) == (True, 1.0)
