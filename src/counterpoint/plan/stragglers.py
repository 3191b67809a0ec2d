"""The slowest of n ranks: a synchronous step ends with the last one, so what counts is the expected maximum.

    E[max of n] = ∫ q(u^(1/n)) du over 0..1,     q: quantile function of one rank's relative time

    normal       mean 1, standard deviation `spread`        thermal differences between GPUs
    exponential  1 + `spread` · Exp(1)                      jitter, rare and long; E[max] = 1 + spread · H_n
    measured     the given samples, over their mean         from a trace: n draws with replacement

Replicas that do not wait for each other (asynchronous) go on at the mean of their paces; n is then one replica's ranks.
Ranks are independent here. One known slow rank is a distribution of its own: `measured`, or a slower GPU.
"""

from __future__ import annotations

from functools import cache
from statistics import NormalDist
from typing import Literal

import numpy as np

from counterpoint.errors import Misconfigured
from counterpoint.plan.model import positive
from counterpoint.records.base import Record

__all__ = ["Jitter", "expected_slowest"]

POINTS = 2048
MOST_SAMPLES = 1 << 20


class Jitter(Record, frozen=True, kw_only=True):
    """How the times of ranks differ for the same work.

    Args:
        kind: the distribution.
        spread: over the mean; of `normal` and `exponential`.
        samples: times of ranks in any unit; of `measured`.

    Raises:
        Misconfigured: a negative spread, or samples that are not times.
    """

    kind: Literal["normal", "exponential", "measured"] = "normal"
    spread: float = 0.0
    samples: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.spread < 10:
            raise Misconfigured(f"jitter.spread = {self.spread}: give a part of the mean, from 0 to below 10")
        if self.kind == "measured" and not 1 <= len(self.samples) <= MOST_SAMPLES:
            raise Misconfigured(f"jitter.samples: {len(self.samples)} given; give 1 to {MOST_SAMPLES}")
        for sample in self.samples:
            positive("jitter.samples", sample)


def expected_slowest(jitter: Jitter, ranks: int) -> float:
    """E[max] over the mean of one rank, at least 1.

    Args:
        jitter: of one rank.
        ranks: that wait for each other.
    """
    positive("ranks", ranks)
    if jitter.kind == "exponential":
        return (1.0 + jitter.spread * _harmonic(ranks)) / (1.0 + jitter.spread)
    if jitter.kind == "measured":
        return _slowest_sample(np.sort(np.asarray(jitter.samples)), ranks)
    if not jitter.spread or ranks == 1:
        return 1.0
    return 1.0 + jitter.spread * _slowest_normal(ranks)


def _harmonic(n: int) -> float:
    if n < 64:
        return float(sum(1.0 / k for k in range(1, n + 1)))
    return float(np.log(n) + np.euler_gamma + 0.5 / n - 1.0 / (12.0 * n * n))


def _slowest_sample(ordered: np.ndarray[tuple[int], np.dtype[np.float64]], ranks: int) -> float:
    """P(max <= x_i) = (i / N)^n for n draws out of N samples."""
    below = (np.arange(len(ordered) + 1) / len(ordered)) ** ranks
    return float(np.dot(ordered, np.diff(below)) / ordered.mean())


@cache
def _slowest_normal(ranks: int) -> float:
    """In standard deviations, by the midpoint rule over the distribution of the maximum."""
    normal = NormalDist()
    middle = (np.arange(POINTS) + 0.5) / POINTS
    return float(np.mean([normal.inv_cdf(u) for u in np.minimum(middle ** (1.0 / ranks), 1.0 - 1e-15)]))
