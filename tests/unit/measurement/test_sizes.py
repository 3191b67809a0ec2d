"""From a wanted time to a size."""

from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.measurement.mechanisms import find_mechanism
from counterpoint.measurement.pairs import Calibration, _size_bytes, size_for_time, time_at
from counterpoint.records.measurement import Scenario

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


def test_the_ratio_is_of_the_computation() -> None:
    """Three times 400 µs, by the mechanism that runs."""
    calibration = Calibration(collectives={("all_gather", "nccl"): CURVE, ("all_gather", "zero_sm"): ()})
    mechanisms = [find_mechanism(name, "cuda") for name in ("nccl", "zero_sm")]
    scenario = Scenario(name="", workload="", collective="all_gather", mechanisms=(), orders=(), ratio=3.0)
    size = _size_bytes(cast(Any, None), scenario, mechanisms, lambda: 400.0, calibration)
    assert time_at(CURVE, size) == pytest.approx(1200.0, rel=1e-3)
