"""Choose for each pair the mechanism that is proved faster than the default (`stock`), or none.

Means over rounds are computed from the times x_r of n rounds (Yuen 1974), with g = n // 10:

    mean of x without the g smallest and the g largest
    sigma = s_w / ((1 - 2 g / n) · sqrt(B))      s_w: standard deviation of the means of B batches of successive x, with
                                                 these g replaced by the next ones

B is n for fewer than 20 rounds, about the larger of 10 and sqrt(n) for more: where noise lasts over some rounds, means
of long batches are nearly independent.

A hiccup in one of ten rounds is left out; the sigma of a median would be 1.2 times as large. Two times of the same
rounds are compared by x_r = T_1,r - T_2,r: clocks that drift from round to round slow both alike and cancel.

From a median and its percentiles, where a measurement kept no rounds:

    s = (p90 - p10) / d(n)                 standard deviation of one round
    sigma = sqrt(pi / 2) · s / sqrt(n)     standard error of the median of n rounds

d(n) is the expected distance of both percentiles in n normal samples, in standard deviations: 2.56 for many, less for
few, whose percentiles lie further inside. Sample i of n is expected at the quantile (i - 3/8) / (n + 1/4) (Blom 1958),
and percentiles are interpolated between samples as numpy does.

A mechanism is proved to be faster if

    T_stock - T > bar = x(n, k) · sigma

where T_stock - T is the difference over the n rounds that both share, sigma its standard error (`experiment.py`), k the
number of other mechanisms, twice as a pair may be measured again with more rounds, and x what `sigmas_of_proof` says: a
pair in which nothing is faster gets a choice with at most the chance of 2.3 % by which noise exceeds 2 sigma, however
many were tried, and though noise of a mechanism last over several rounds, up to a correlation of 0.8 from one to the
next. Where rounds were not kept, x = 2 and sigma = sqrt(sigma_T² + sigma_stock²) of the medians T by themselves.

Of the proved mechanisms the fastest is chosen. The same times pick and prove it, so its gain is rather over- than
understated. Times marked as invalid, since a setting did nothing or a rank was late, prove nothing. If no mechanism is
proved, the pair keeps its default.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist, fmean, stdev
from typing import Any

import numpy as np
from msgspec import structs

from counterpoint.errors import Misconfigured
from counterpoint.records.measurement import Timing
from counterpoint.records.tuning import LEAVE, StepPair, Tried, TunedPair, as_sentence

SIGMAS = 2.0
LOOKS = 2  # a pair that proves nothing may be measured again
BATCHES = 10  # at least, where there are as many rounds
CORRELATION = 0.8  # of a round with the next, up to which a choice is proved
FEWEST = 5  # rounds from which something is told: of fewer nothing but large gains would be sure

RoundTimes = Sequence[float | None]
"""Holds the µs of each round; None: the round is not valid."""


def standard_error(time: Timing, rounds: int) -> float:
    """Return the standard error of a time's median in µs; `rounds` is used if the time has no count of rounds."""
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
    """Holds the trimmed mean of a time over rounds, and the mean's standard error, in µs."""

    us: float
    sigma_us: float
    runs: int

    @classmethod
    def of(cls, times: RoundTimes) -> RoundMean | None:
        """Return the trimmed mean over valid rounds; None if fewer than five are valid."""
        counted = [us for us in times if us is not None]
        runs, out = len(counted), len(counted) // 10
        if runs < FEWEST:
            return None
        kept = sorted(counted)[out : runs - out]
        replaced, batches = [min(max(us, kept[0]), kept[-1]) for us in counted], _batches(runs)
        means = [fmean(replaced[i * runs // batches : (i + 1) * runs // batches]) for i in range(batches)]
        sigma_us = stdev(means) / ((1 - 2 * out / runs) * math.sqrt(batches))
        return cls(us=fmean(kept), sigma_us=sigma_us, runs=runs)


def _batches(runs: int) -> int:
    return runs // max(1, runs // max(BATCHES, math.isqrt(runs)))


def apart(first: RoundTimes, second: RoundTimes) -> RoundTimes:
    """Return the first minus the second time (µs) of each round that is valid in both."""
    return [None if one is None or other is None else one - other for one, other in zip(first, second, strict=False)]


@lru_cache(maxsize=64)
def sigmas_of_proof(runs: int, candidates: int) -> float:
    """Return how many sigma a gain must exceed to be proved, given that the best of k `candidates` is chosen.

        x = c · t,    P(T > t) = p / k,    T: Student's t,    p = P(N > 2) = 2.3 %,    N: normal

    2 sigma would do for one candidate and many rounds that know nothing of each other. Of few rounds sigma itself is
    uncertain, which t allows for; the best of k candidates that gain nothing passes any bar about k times as often as
    one (Bonferroni); and noise that lasts makes sigma c times too small. So a pair in which nothing is faster gets a
    choice with a chance of at most 2.3 %. By 2 sigma alone it would be 12 % for three candidates and ten rounds, and
    51 % if noise lasts; benchmarks/tune_correlation.py has the shares by this bar.

    c and the degrees of freedom assume normal noise with a correlation of 0.8 from one round to the next, of which B
    means of batches show a part: they are 3.3 and 3.7 for ten rounds, 1.1 and 19 for 478. The degrees are at most
    n - 1 - 3 g: with Yuen's n - 1 - 2 g that chance is 2.4 % in ten rounds of which none knows of another.
    """
    degrees, understated = _of_batches(runs)
    return understated * students_t((1 - NormalDist().cdf(SIGMAS)) / candidates, degrees)


def students_t(p: float, degrees: float) -> float:
    """Return the value that Student's t exceeds with probability p, by Abramowitz and Stegun 26.7.5.

    The value is a series in 1 / degrees; with 4 degrees it is 1 % too small for p = 0.8 %.
    """
    z, v = NormalDist().inv_cdf(1 - p), degrees
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    )


def _of_batches(runs: int) -> tuple[float, float]:
    """Return sigma's degrees of freedom for correlated rounds, and the factor by which sigma is too small.

    With C, the covariance of the means of B batches of b rounds, and M C M, that of their distances from their mean:
    tr(M C M)² / tr((M C M)²) degrees (Satterthwaite 1946), and sigma² is tr(M C M) / (B (B - 1)) instead of mean(C).
    """
    batches, r = _batches(runs), CORRELATION
    b = runs / batches
    lags = np.abs(np.subtract.outer(np.arange(batches), np.arange(batches)))
    covariance = r * (1 - r**b) ** 2 / (b * (1 - r)) ** 2 * r ** (b * (lags - 1))
    np.fill_diagonal(covariance, ((1 + r) / (1 - r) - 2 * r * (1 - r**b) / (b * (1 - r) ** 2)) / b)
    rest = covariance - covariance.mean(axis=0) - covariance.mean(axis=1, keepdims=True) + covariance.mean()
    degrees = float(rest.trace() ** 2 / (rest**2).sum())
    understated = math.sqrt(covariance.mean() * batches * (batches - 1) / rest.trace())
    return min(degrees, runs - 1 - 3 * (runs // 10)), understated


def decide(
    pair: StepPair, tried: Sequence[Tried], *, stock: str, compute_us: float | None = None, comm_us: float | None = None
) -> TunedPair:
    """Return a compute-collective pair with its chosen mechanism and the reason for the choice.

    `tried` has the measured mechanisms, also `stock`, which runs where nothing is chosen; `compute_us` and `comm_us`
    (by the fastest mechanism) are the times of computation and collective alone.
    """
    base = next((each for each in tried if each.mechanism == stock), None)
    if base is None:
        return left(pair, stock=stock, why=f"{stock} itself could not be measured, so nothing is proved to be faster")
    believed = sorted((each for each in tried if each.marked is None), key=lambda each: each.us)
    others = [each for each in believed if each is not base]
    bars = [_Bar.of(each, base, len(others)) for each in others]
    proved = [bar for bar in bars if base.us - bar.candidate.us > bar.us] if not base.marked else []
    best = proved[0].candidate if proved else base
    next_best = next((each for each in believed if each is not best), None)
    return TunedPair(
        **_fields(pair), mechanism=best.mechanism if proved else LEAVE,
        why=_gain(proved[0], base) if proved else _why_left(base, bars, tried), us=best.us, sigma_us=best.sigma_us,
        stock=stock, stock_us=base.us, stock_sigma_us=base.sigma_us, compute_us=compute_us, comm_us=comm_us,
        next_best=next_best.mechanism if next_best else None, next_best_us=next_best.us if next_best else None,
        tried=tuple(sorted(tried, key=lambda each: each.us)),
    )  # fmt: skip


def is_open(found: TunedPair) -> bool:
    """Return whether more rounds could prove a gain: no gain is proved, and some mechanism may still be faster."""
    base = next((each for each in found.tried if each.mechanism == found.stock and each.marked is None), None)
    others = [each for each in found.tried if each.marked is None and each.mechanism != found.stock]
    if base is None or found.mechanism != LEAVE:
        return False
    return any(each.us - base.us < _Bar.of(each, base, len(others)).us / 2 for each in others)


def left(pair: StepPair, *, stock: str, why: str, predicted_us: float | None = None) -> TunedPair:
    """Return an unmeasured pair that keeps `stock`; the sigma of its predicted time is set to the time itself."""
    us = predicted_us or 0.0
    return TunedPair(
        **_fields(pair), mechanism=LEAVE, why=why, us=us, sigma_us=us, stock=stock, stock_us=us, stock_sigma_us=us
    )


def as_another(pair: StepPair, measured: TunedPair) -> TunedPair:
    """Return an unmeasured pair with the choice of a measured pair of its class."""
    why = f"not measured; as {measured.operation} of {measured.bytes_per_rank} bytes a rank: {measured.why}"
    return structs.replace(measured, **_fields(pair), why=as_sentence(why))


def _fields(pair: StepPair) -> dict[str, Any]:
    return {name: getattr(pair, name) for name in StepPair.__struct_fields__}


@dataclass(frozen=True, kw_only=True)
class _Bar:
    """Holds the threshold that a candidate mechanism's gain must exceed."""

    candidate: Tried
    us: float
    sigmas: float

    @classmethod
    def of(cls, each: Tried, base: Tried, candidates: int) -> _Bar:
        if each.paired_sigma_us is None:
            return cls(candidate=each, us=SIGMAS * math.hypot(each.sigma_us, base.sigma_us), sigmas=SIGMAS)
        sigmas = sigmas_of_proof(each.runs, LOOKS * candidates)
        return cls(candidate=each, us=sigmas * each.paired_sigma_us, sigmas=sigmas)


def _gain(bar: _Bar, base: Tried) -> str:
    saved = (base.us - bar.candidate.us) / base.us
    return (
        f"{saved:.1%} less than {base.mechanism}; the bar of {bar.sigmas:.1f} sigma, the smallest gain that these "
        f"{bar.candidate.runs} rounds could prove, is {bar.us / base.us:.1%}"
    )


def _why_left(base: Tried, bars: Sequence[_Bar], tried: Sequence[Tried]) -> str:
    if base.marked is not None:
        return as_sentence(f"the time of {base.mechanism} must not be believed: {base.marked}")
    if bars:
        bar, first = bars[0], bars[0].candidate
        closest = f"{first.mechanism} takes {first.us:,.1f} µs, {base.mechanism} {base.us:,.1f}"
        return (
            f"nothing is proved to be faster: {closest}; the bar of {bar.sigmas:.1f} sigma, the smallest gain that "
            f"these {first.runs} rounds could prove, is {bar.us:,.1f} µs ({bar.us / base.us:.1%})"
        )
    marked = next((each for each in tried if each.marked is not None), None)
    if marked is None:
        return f"nothing but {base.mechanism} can run here"
    return as_sentence(f"no time of another mechanism can be believed; {marked.mechanism}: {marked.marked}")
