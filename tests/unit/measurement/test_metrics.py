"""The ratios of a row, against values worked out by hand and against the baseline's definition."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.measurement.rows import timing
from counterpoint.pair.together import overlap, pair_class

TIMES = st.floats(min_value=1.0, max_value=1e6)


@pytest.mark.parametrize(
    ("compute_us", "comm_us", "both_us", "order", "head_us", "hidden"),
    [
        (1410.336, 359.584, 1732.224, "together", 0.0, 0.10483),  # rows measured on 8 x H200, 2026-11-20
        (1410.336, 359.584, 1632.416, "comm_first", 100.0, 0.66050),
        (1410.336, 359.584, 1716.672, "compute_first", 100.0, 0.33345),
    ],
)
def test_hidden_of_measured_rows(
    compute_us: float, comm_us: float, both_us: float, order: str, head_us: float, hidden: float
) -> None:
    """The formula gives what was published for these times."""
    found = overlap(compute_us=compute_us, comm_us=comm_us, both_us=both_us, order=order, head_us=head_us)  # type: ignore[arg-type]
    assert found.hidden == pytest.approx(hidden, abs=1e-5)


@given(TIMES, TIMES)
def test_perfect_overlap_hides_everything(compute_us: float, comm_us: float) -> None:
    """T = max(T_g, T_c) is hidden = 1 and all of the ideal speed-up."""
    found = overlap(
        compute_us=compute_us, comm_us=comm_us, both_us=max(compute_us, comm_us), order="together", head_us=0.0
    )
    assert [found.hidden, found.ideal_fraction] == pytest.approx([1.0, 1.0])


@given(TIMES, TIMES, st.floats(min_value=0.5, max_value=3.0))
def test_ideal_fraction_is_conccls(compute_us: float, comm_us: float, slower: float) -> None:
    """hidden * ideal / T equals (serial / T - 1) / (serial / ideal - 1)."""
    both = slower * max(compute_us, comm_us)
    found = overlap(compute_us=compute_us, comm_us=comm_us, both_us=both, order="together", head_us=0.0)
    expected = (found.serial_us / both - 1) / (found.serial_us / found.ideal_us - 1)
    assert found.ideal_fraction == pytest.approx(expected, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize(
    ("compute_us", "comm_us", "expected"),
    [(116, 100, "G-long"), (114, 100, "GC-equal"), (100, 114, "GC-equal"), (100, 116, "C-long")],
)
def test_class_border_is_15_percent(compute_us: float, comm_us: float, expected: str) -> None:
    """More than 15 % longer on one side."""
    assert pair_class(compute_us, comm_us) == expected


def test_timing_is_of_the_slowest_rank() -> None:
    """Median, percentiles and number of the rank with the largest median, not the largest outlier."""
    found = timing([[1.0, 2.0, 99.0], [3.0, 4.0, 5.0]])
    assert (found.us, found.rank, found.per_rank_us) == (4.0, 1, (2.0, 4.0))
    assert [found.p10_us, found.p90_us] == pytest.approx([3.2, 4.8])


def test_each_round_has_the_time_of_its_slowest_rank() -> None:
    """Of another rank in the last one; a round that does not count has none."""
    found = timing([[1.0, 2.0, 99.0], [3.0, 4.0, 5.0]], [True, False, True])
    assert (found.rounds_us, found.runs) == ((3.0, None, 99.0), 2)
