"""How sure a median and a difference of times are, and how often noise alone is taken for a gain."""

from __future__ import annotations

import random
from statistics import fmean, pstdev

import numpy as np
import pytest

from counterpoint.measurement.rounds import timing
from counterpoint.records.tuning import LEAVE, StepPair, Tried
from counterpoint.tuning.decide import RoundMean, RoundTimes, apart, decide, sigmas_of_proof, standard_error
from counterpoint.tuning.experiment import against_stock

PAIR = StepPair(operation="all_gather", compute="gemm 8x8x8", bytes_per_rank=64, ranks=2)


@pytest.mark.parametrize("runs", [3, 5, 10, 30])
def test_the_standard_error_is_that_of_medians(runs: int) -> None:
    """Over 1500 draws of normal noise it is, in the mean, the standard deviation of the medians, at most 15 % more."""
    draw = random.Random(0)
    times = [timing([[draw.gauss(1000.0, 10.0) for _ in range(runs)]]) for _ in range(1500)]
    spread = pstdev(time.us for time in times)
    assert 0.95 * spread < fmean(standard_error(time, runs) for time in times) < 1.15 * spread


def test_rounds_that_were_dropped_do_not_count() -> None:
    """A time knows its rounds; where it does not, those of the measurement count."""
    time = timing([list(np.linspace(1.0, 2.0, 5))])
    assert standard_error(time, 100) == standard_error(time, 5)


def mean_of(times: RoundTimes) -> RoundMean:
    found = RoundMean.of(times)
    assert found is not None
    return found


def test_a_drift_of_both_is_no_noise_of_their_difference() -> None:
    """Clocks that slow both from 1000 µs to 1090 leave a difference of 10 as sure as it is."""
    drift = [10.0 * place for place in range(10)]
    found = mean_of(apart([1010 + slower for slower in drift], [1000 + slower for slower in drift]))
    assert (found.us, found.sigma_us, found.runs) == (10.0, 0.0, 10)


def test_one_long_round_of_ten_does_not_count() -> None:
    """Neither in the mean nor in its error."""
    found = mean_of([100.0, 101.0] * 4 + [100.0, 200.0])
    assert found.us == pytest.approx(100.5, abs=0.1)
    assert found.sigma_us < 0.3


@pytest.mark.parametrize("runs", [5, 10, 30])
def test_the_error_of_a_mean_is_that_of_many_measurements(runs: int) -> None:
    """Over 1500 draws of normal noise it is the standard deviation of the means, within a tenth."""
    draw = random.Random(0)
    found = [mean_of([draw.gauss(1000.0, 9.0) for _ in range(runs)]) for _ in range(1500)]
    assert fmean(each.sigma_us for each in found) == pytest.approx(pstdev(each.us for each in found), rel=0.1)


def test_only_rounds_that_both_have_are_compared() -> None:
    """And nothing is said of fewer than five."""
    both = apart([1.0, None, 3.0, 4.0, 5.0, 6.0, 7.0], [9.0, 8.0, 7.0, None, 5.0, 4.0, 3.0])
    assert both == [-8.0, None, -4.0, None, 0.0, 2.0, 4.0]
    assert mean_of(both).runs == 5
    assert RoundMean.of(both[:6]) is None


@pytest.mark.parametrize(
    ("runs", "candidates", "expected"), [(9, 1, 2.367), (9, 3, 3.085), (10, 3, 3.371), (5, 3, 4.075)]
)
def test_the_bar_is_a_quantile_of_students_t(runs: int, candidates: int, expected: float) -> None:
    """As tables have it, within 1 %."""
    assert sigmas_of_proof(runs, candidates) == pytest.approx(expected, rel=0.01)


def test_the_bar_of_one_candidate_and_many_rounds_is_two_sigma() -> None:
    assert sigmas_of_proof(100_000, 1) == pytest.approx(2.0, abs=1e-3)


@pytest.mark.parametrize("runs", [5, 10])
@pytest.mark.parametrize("candidates", [1, 3, 8])
def test_noise_alone_is_chosen_in_at_most_one_pair_of_forty_four(runs: int, candidates: int) -> None:
    """2.3 % of 1000 pairs whose mechanisms are all equal, with 0.5 % of noise a round, and 3 sigma of such a count.

    By 2 sigma without the correction it would be 120 of three candidates, 220 of eight.
    """
    draw = random.Random(runs)
    names = ["nccl", *(f"m{place}" for place in range(candidates))]

    def measured(name: str) -> tuple[Tried, tuple[float | None, ...]]:
        time = timing([[draw.gauss(1000.0, 5.0) for _ in range(runs)]])
        tried = Tried(mechanism=name, us=time.us, sigma_us=standard_error(time, runs), runs=runs)
        return tried, time.rounds_us

    found = [
        decide(PAIR, against_stock([measured(name) for name in names], "nccl"), stock="nccl").mechanism
        for _ in range(1000)
    ]
    assert sum(mechanism != LEAVE for mechanism in found) <= 23 + 3 * 23**0.5
