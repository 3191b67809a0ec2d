"""Compute beside communication, and the slowest of many."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.errors import Misconfigured
from counterpoint.plan.overlap import MECHANISMS, find_mechanism, together_us
from counterpoint.plan.stragglers import Jitter, expected_slowest

name = st.sampled_from(sorted(MECHANISMS))
operation = st.sampled_from(["all_gather", "reduce_scatter", "all_reduce", "all_to_all"])
us = st.floats(0.0, 1e6)


@given(name=name, operation=operation, g=us, c=us, persistent=st.booleans())
def test_together_lies_between_ideal_and_serial(
    name: str, operation: str, g: float, c: float, persistent: bool
) -> None:
    """max(g, c) <= T <= g + c, by every mechanism."""
    found = together_us(g, ((operation, c),), MECHANISMS[name], persistent=persistent)
    assert max(g, c) * (1 - 1e-9) <= found <= (g + c) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("mechanism", "operation", "hidden"),
    [("nccl", "all_gather", 0.46), ("nccl", "reduce_scatter", 0.54), ("nccl", "all_reduce", 0.53),
     ("nccl", "all_to_all", 0.40), ("zero_sm", "all_reduce", 0.71), ("zero_sm", "reduce_scatter", 0.87)],
)  # fmt: skip
def test_the_measured_part_is_hidden(mechanism: str, operation: str, hidden: float) -> None:
    """Beside a longer persistent matmul: (g + c - T) / c is what was measured on 8 × H200."""
    found = together_us(2000.0, ((operation, 1000.0),), find_mechanism(mechanism), persistent=True)
    assert (3000.0 - found) / 1000.0 == pytest.approx(hidden)


def test_compute_keeps_its_measured_part() -> None:
    """Not persistent, as before Hopper: while NCCL runs, compute has 82 % of its speed."""
    mechanism = find_mechanism("nccl")
    found = together_us(2000.0, (("all_gather", 930.0),), mechanism, persistent=False)
    assert found == pytest.approx(2000.0 + 1000.0 * (1 - 0.82))


@given(g=us, c=us, more=us)
def test_a_longer_collective_never_helps(g: float, c: float, more: float) -> None:
    """T does not fall with c."""
    times = [
        together_us(g, (("all_gather", each),), MECHANISMS["nccl"], persistent=True) for each in (c, c + more)
    ]  # fmt: skip
    assert times[1] >= times[0] * (1 - 1e-9)


def test_ideal_and_serial_are_the_bounds() -> None:
    """By definition, ours to compare with."""
    both = [together_us(300.0, (("all_reduce", 200.0),), MECHANISMS[n], persistent=True) for n in ("ideal", "serial")]
    assert both == [300.0, 500.0]


def test_an_unknown_mechanism_names_the_known_ones() -> None:
    """Misconfigured, with all of them."""
    with pytest.raises(
        Misconfigured, match="known are nccl, nccl_zero_cta, nccl_capped, zero_sm, zero_sm_copied, ideal, serial"
    ):
        find_mechanism("telepathy")


@pytest.mark.parametrize("ranks", [1, 8, 1024])
@pytest.mark.parametrize("kind", ["normal", "exponential"])
def test_the_slowest_is_that_of_a_simulation(kind: str, ranks: int) -> None:
    """E[max] over the mean agrees with 4,000 draws to 0.5 %."""
    rng = np.random.default_rng(1)
    draws = rng.standard_normal((4000, ranks)) if kind == "normal" else rng.standard_exponential((4000, ranks))
    times = 1 + 0.05 * draws
    expected = float(times.max(axis=1).mean() / (1.0 if kind == "normal" else 1.05))
    jitter = Jitter(kind=kind, spread=0.05)  # type: ignore[arg-type]
    assert expected_slowest(jitter, ranks) == pytest.approx(expected, rel=0.005)


def test_measured_times_are_drawn_from() -> None:
    """Two samples, two ranks: three times out of four one of them is the slow one."""
    assert expected_slowest(Jitter(kind="measured", samples=(1.0, 3.0)), 2) == pytest.approx((0.25 + 0.75 * 3) / 2)


@given(spread=st.floats(0.0, 0.5), ranks=st.integers(1, 1 << 15), more=st.integers(0, 1 << 15))
def test_more_ranks_never_make_the_slowest_faster(spread: float, ranks: int, more: int) -> None:
    """And one rank alone waits for nobody."""
    jitter = Jitter(spread=spread)
    few, many = expected_slowest(jitter, ranks), expected_slowest(jitter, ranks + more)
    assert (1.0 <= few <= many, expected_slowest(jitter, 1)) == (True, 1.0)


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [({"spread": -0.1}, "from 0 to below 10"), ({"kind": "measured"}, "0 given"),
     ({"kind": "measured", "samples": (1.0, -1.0)}, "above 0")],
)  # fmt: skip
def test_what_is_no_distribution_is_refused(kwargs: dict[str, object], says: str) -> None:
    """With the field and what is allowed."""
    with pytest.raises(Misconfigured, match=says):
        Jitter(**kwargs)  # type: ignore[arg-type]
