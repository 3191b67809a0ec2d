"""Say how long something took over rounds and how sure that is, and compare two that took turns. No torch.

From the times x_r of n rounds (Yuen 1974), with g = n // 10:

    mean of x without the g smallest and the g largest
    sigma = s_w / ((1 - 2 g / n) · sqrt(n))      s_w: standard deviation of x, with these g replaced by the next ones

A hiccup in one of ten rounds is left out; a median would be less sure, by 1.2 times this sigma. Two times of the same
rounds are compared by x_r = T_1,r - T_2,r: clocks that drift from round to round slow both alike and leave it as it is.

From a median and its percentiles, where a measurement kept no rounds:

    s = (p90 - p10) / d(n)                 standard deviation of one round
    sigma = sqrt(pi / 2) · s / sqrt(n)     standard error of the median of n rounds

d(n) is the expected distance of both percentiles in n normal samples, in standard deviations: 2.56 for many, less for
few, whose percentiles lie further inside. Sample i of n is expected at the quantile (i - 3/8) / (n + 1/4) (Blom 1958),
and percentiles are interpolated between samples as numpy does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist, fmean, stdev

from counterpoint.errors import Misconfigured
from counterpoint.records.measurement import Timing

SIGMAS = 2.0
FEWEST = 5  # rounds from which something is told: of fewer nothing but large gains would be sure

RoundTimes = Sequence[float | None]
"""µs of each round; None: the round does not count."""


def standard_error(time: Timing, rounds: int) -> float:
    """Return the standard error of a median in µs; `rounds` count where the time does not say how many do."""
    runs = time.runs or rounds
    return math.sqrt(math.pi / 2 / runs) * (time.p90_us - time.p10_us) / _width(runs)


@lru_cache(maxsize=64)
def _width(runs: int) -> float:
    if runs < 2:
        raise Misconfigured(f"{runs} rounds have no spread; measure at least 2 that count")
    expected = [NormalDist().inv_cdf((place - 3 / 8) / (runs + 1 / 4)) for place in range(1, runs + 1)]
    at = 0.1 * (runs - 1)
    low = int(at)
    return -2 * (expected[low] + (at - low) * (expected[low + 1] - expected[low]))


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundMean:
    """Holds the mean over rounds in µs, with its standard error."""

    us: float
    sigma_us: float
    runs: int

    @classmethod
    def of(cls, times: RoundTimes) -> RoundMean | None:
        """Return that of the rounds that count; None if these are fewer than five."""
        ordered = sorted(us for us in times if us is not None)
        runs, out = len(ordered), len(ordered) // 10
        if runs < FEWEST:
            return None
        kept = ordered[out : runs - out]
        replaced = [kept[0]] * out + kept + [kept[-1]] * out
        sigma_us = stdev(replaced) / ((1 - 2 * out / runs) * math.sqrt(runs))
        return cls(us=fmean(kept), sigma_us=sigma_us, runs=runs)


def apart(first: RoundTimes, second: RoundTimes) -> RoundTimes:
    """Return by how much the first takes longer than the second in each round that counts for both."""
    return [None if one is None or other is None else one - other for one, other in zip(first, second, strict=False)]


@lru_cache(maxsize=64)
def sigmas_of_proof(runs: int, candidates: int) -> float:
    """Return how many sigma a paired difference must exceed to be proved, if the best of several candidates is taken.

        P(T > x) = p / k,    T: Student's t of n - 1 - 3 g degrees of freedom,    p = P(N > 2) = 2.3 %,    N: normal

    2 sigma would do for one candidate and many rounds. Of few rounds sigma itself is uncertain, which t allows for; and
    the best of k candidates that gain nothing passes any bar about k times as often as one (Bonferroni). So a pair in
    which nothing is faster gets a choice with a chance of at most 2.3 %. By 2 sigma it would be 12 % for three
    candidates and ten rounds, and with Yuen's n - 1 - 2 g degrees 2.4 %, in simulations of normal noise.

    The quantile is expanded in 1 / degrees (Abramowitz and Stegun 26.7.5): with 4 degrees it is 1 % too small for three
    candidates.

    Args:
        runs: n, rounds that were compared; 5 at least.
        candidates: k.
    """
    z, v = NormalDist().inv_cdf(1 - (1 - NormalDist().cdf(SIGMAS)) / candidates), runs - 1 - 3 * (runs // 10)
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    )
