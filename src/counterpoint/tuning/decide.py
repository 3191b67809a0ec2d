"""Decide which mechanism a pair gets: one that is proved to be faster than stock, or none.

A mechanism is proved to be faster if

    T_stock - T > bar = x(n, k) · sigma

where T_stock - T is the difference over the n rounds that both share, sigma its standard error (`parts.py`), k the
number of other mechanisms, and x what `rounds.sigmas_of_proof` says: a pair in which nothing is faster gets a choice
with at most the chance of 2.3 % by which noise exceeds 2 sigma, however many were tried. Where rounds were not kept,
x = 2 and sigma = sqrt(sigma_T² + sigma_stock²) of the medians T by themselves.

Of what is proved the fastest is chosen. It was picked by the times that prove it, so that its gain is rather over- than
understated. What is marked, since a knob did nothing or a rank was late, proves nothing. Where nothing is proved, the
pair stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from counterpoint.records.tuning import LEAVE, StepPair, Tried, TunedPair, as_sentence
from counterpoint.tuning.rounds import SIGMAS, sigmas_of_proof


def decide(
    pair: StepPair,
    tried: Sequence[Tried],
    *,
    stock: str,
    compute_us: float | None = None,
    comm_us: float | None = None,
) -> TunedPair:
    """Return a pair with its mechanism and the reason.

    Args:
        pair: of a step.
        tried: what was measured of it, stock among it.
        stock: the mechanism that runs where nothing is chosen.
        compute_us: the computation alone.
        comm_us: the communication alone, by the fastest mechanism.
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
        **_fields(pair),
        mechanism=best.mechanism if proved else LEAVE,
        why=_gain(proved[0], base) if proved else _why_left(base, bars, tried),
        us=best.us,
        sigma_us=best.sigma_us,
        stock=stock,
        stock_us=base.us,
        stock_sigma_us=base.sigma_us,
        compute_us=compute_us,
        comm_us=comm_us,
        next_best=next_best.mechanism if next_best else None,
        next_best_us=next_best.us if next_best else None,
        tried=tuple(sorted(tried, key=lambda each: each.us)),
    )


def left(pair: StepPair, *, stock: str, why: str, predicted_us: float | None = None) -> TunedPair:
    """Return a pair that was not measured and is left as it is; a predicted time is uncertain by all of itself."""
    us = predicted_us or 0.0
    return TunedPair(
        **_fields(pair), mechanism=LEAVE, why=why, us=us, sigma_us=us, stock=stock, stock_us=us, stock_sigma_us=us
    )


def as_another(pair: StepPair, measured: TunedPair) -> TunedPair:
    """Return a pair with the choice for another one of its class, which was measured."""
    why = f"not measured; as {measured.operation} of {measured.bytes_per_rank} bytes a rank: {measured.why}"
    return structs.replace(measured, **_fields(pair), why=as_sentence(why))


def _fields(pair: StepPair) -> dict[str, Any]:
    return {name: getattr(pair, name) for name in StepPair.__struct_fields__}


@dataclass(frozen=True, kw_only=True)
class _Bar:
    """Holds what the gain of a candidate must exceed."""

    candidate: Tried
    us: float
    sigmas: float

    @classmethod
    def of(cls, each: Tried, base: Tried, candidates: int) -> _Bar:
        if each.paired_sigma_us is None:
            return cls(candidate=each, us=SIGMAS * math.hypot(each.sigma_us, base.sigma_us), sigmas=SIGMAS)
        sigmas = sigmas_of_proof(each.runs, candidates)
        return cls(candidate=each, us=sigmas * each.paired_sigma_us, sigmas=sigmas)


def _gain(bar: _Bar, base: Tried) -> str:
    saved = (base.us - bar.candidate.us) / base.us
    return f"{saved:.1%} less than {base.mechanism}, and the bar of {bar.sigmas:.1f} sigma is {bar.us / base.us:.1%}"


def _why_left(base: Tried, bars: Sequence[_Bar], tried: Sequence[Tried]) -> str:
    if base.marked is not None:
        return as_sentence(f"the time of {base.mechanism} must not be believed: {base.marked}")
    if bars:
        bar, first = bars[0], bars[0].candidate
        closest = f"{first.mechanism} takes {first.us:,.1f} µs, {base.mechanism} {base.us:,.1f}"
        return f"nothing is proved to be faster: {closest}, and the bar of {bar.sigmas:.1f} sigma is {bar.us:,.1f} µs"
    marked = next((each for each in tried if each.marked is not None), None)
    if marked is None:
        return f"nothing but {base.mechanism} can run here"
    return as_sentence(f"no time of another mechanism can be believed; {marked.mechanism}: {marked.marked}")
