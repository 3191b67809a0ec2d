"""How sure a median and a difference of times are, and how often noise alone is taken for a gain."""

from __future__ import annotations

import random
from statistics import fmean, pstdev

import numpy as np
import pytest

from counterpoint.measurement.rounds import timing
from counterpoint.records.tuning import LEAVE, StepPair, Tried
from counterpoint.tuning.decide import RoundMean, RoundTimes, apart, decide, sigmas_of_proof, standard_error, students_t
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
    ("p", "degrees", "expected"), [(0.0228, 8, 2.367), (0.0076, 8, 3.085), (0.0076, 6, 3.371), (0.0076, 4, 4.075)]
)
def test_students_t_is_that_of_tables(p: float, degrees: int, expected: float) -> None:
    """Within 1 %."""
    assert students_t(p, degrees) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(("runs", "batches"), [(5, 5), (10, 10), (40, 10), (400, 20)])
def test_the_bar_is_that_of_correlated_rounds(runs: int, batches: int) -> None:
    """By the covariance 0.8^|i - j| of all rounds: of the mean, and of what the means of batches tell of its error."""
    covariance = 0.8 ** abs(np.subtract.outer(range(runs), range(runs)))
    of_means = covariance.reshape(batches, runs // batches, batches, runs // batches).mean(axis=(1, 3))
    told = np.linalg.eigvalsh(of_means - of_means.mean(axis=0) - of_means.mean(axis=1)[:, None] + of_means.mean())
    student = students_t(0.02275 / 6, told.sum() ** 2 / (told**2).sum())
    expected = student * (covariance.mean() / (told.sum() / batches / (batches - 1))) ** 0.5
    assert sigmas_of_proof(runs, 6) == pytest.approx(expected, rel=1e-3)


def test_the_bar_of_one_candidate_and_many_rounds_is_two_sigma() -> None:
    """And 1 % more, since there are 316 batches, whose neighbours are correlated by a hundredth."""
    assert sigmas_of_proof(100_000, 1) == pytest.approx(2.02, abs=0.01)


@pytest.mark.parametrize(("apart_by", "least", "most"), [(1, 0.9, 1.1), (10, 3.0, 3.3)])
def test_the_error_of_a_mean_knows_rounds_that_are_alike(apart_by: int, least: float, most: float) -> None:
    """Where ten rounds are equal each time there are a tenth of the values, whose mean is sqrt(10) = 3.16 less sure."""
    draw = random.Random(0)
    found = [
        mean_of([us for _ in range(400 // apart_by) for us in [draw.gauss(0.0, 1.0)] * apart_by]) for _ in range(300)
    ]
    assert least < fmean(each.sigma_us for each in found) * 400**0.5 < most


@pytest.mark.parametrize("correlation", [0.0, 0.8])
@pytest.mark.parametrize(("runs", "candidates"), [(5, 1), (10, 1), (10, 3), (10, 8), (38, 3)])
def test_noise_alone_is_chosen_in_at_most_one_pair_of_forty_four(
    runs: int, candidates: int, correlation: float
) -> None:
    """2.3 % of 1000 pairs whose mechanisms are all equal, with 0.5 % of noise a round, and 3 sigma of such a count.

    With noise that lasts it would be 310 of three candidates in ten rounds, were rounds taken to be independent.
    """
    draw = random.Random(runs)
    names = ["nccl", *(f"m{place}" for place in range(candidates))]

    def measured(name: str) -> tuple[Tried, tuple[float | None, ...]]:
        noise = [draw.gauss(0.0, 5.0)]
        while len(noise) < runs:
            noise.append(correlation * noise[-1] + draw.gauss(0.0, 5.0 * (1 - correlation**2) ** 0.5))
        time = timing([[1000.0 + us for us in noise]])
        tried = Tried(mechanism=name, us=time.us, sigma_us=standard_error(time, runs), runs=runs)
        return tried, time.rounds_us

    found = [
        decide(PAIR, against_stock([measured(name) for name in names], "nccl"), stock="nccl").mechanism
        for _ in range(1000)
    ]
    assert sum(mechanism != LEAVE for mechanism in found) <= 23 + 3 * 23**0.5
