"""From a wanted time to a size."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.measurement.pairs import size_for_time, time_at

CURVE = tuple((1 << power, 20.0 + (1 << power) / 300e3) for power in range(20, 31, 2))  # 20 µs + 300 GB/s


@given(st.floats(min_value=30.0, max_value=20_000.0))
def test_the_size_takes_the_time(time_us: float) -> None:
    """Within 6 % of what latency + bytes / bandwidth says, between and beyond the measured sizes."""
    size = size_for_time([CURVE], time_us)
    assert 20.0 + size / 300e3 == pytest.approx(time_us, rel=0.06)


def test_the_fastest_mechanism_counts() -> None:
    fast = tuple((size, time / 2) for size, time in CURVE)
    assert time_at(fast, size_for_time([CURVE, fast], 1000.0)) == pytest.approx(1000.0, rel=1e-3)


def test_measured_points_are_kept() -> None:
    assert [time_at(CURVE, size) for size, _ in CURVE] == pytest.approx([time for _, time in CURVE])
