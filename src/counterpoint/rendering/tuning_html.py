"""Write what `tune` chose as one HTML page: before and after by pair, what was tried, what lost and by how much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from counterpoint.records.tuning import StepTuning, Tried, Tuned, TunedPair
from counterpoint.rendering import formatting as say
from counterpoint.rendering.safe_html import write_page
from counterpoint.rendering.tuning_terminal import verdict

MAX_PAIRS = 300  # that the page shows
OPEN_PAIRS = 12  # up to so many, what was tried is shown at once
ORDERS = {"compute_first": "compute first", "comm_first": "communication first", "together": "both at once"}


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeBar:
    """Holds a bar: a time, its standard error, and both as percent of the longest bar beside it."""

    name: str
    us: float
    sigma_us: float
    width: float  # up to the time less one sigma
    sigma_width: float  # of two sigma, drawn at its end


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownPair:
    """Holds a pair as the page shows it."""

    number: int  # in the file, from 1 on
    pair: TunedPair
    bars: Sequence[TimeBar]  # stock, and what was chosen instead
    tried: Sequence[Tried]  # fastest first, marked ones last


def write_tuning_page(path: Path, tuned: Tuned) -> None:
    """Write the page; `path` appears whole or not at all.

    Raises:
        OSError: the folder is missing or may not be written to.
    """
    pairs = shown_pairs(tuned.pair)
    write_page(
        path,
        "tuning",
        data={},
        own="figures",
        plot=False,
        filters={
            "ms": say.milliseconds,
            "time": say.duration,
            "pct": say.percent,
            "size": say.size,
            "facts": facts,
        },
        t=tuned,
        headline=headline(tuned),
        open_pairs=OPEN_PAIRS,
        pairs=pairs[:MAX_PAIRS],
        changed=[one for one in pairs if not one.pair.is_left],
        saved_us=sum(one.pair.saved_us for one in pairs),
        variants=[] if tuned.step is None else variant_bars(tuned.step),
        marked=[(one, each) for one in pairs[:MAX_PAIRS] for each in one.tried if each.marked],
        untried=[one for one in pairs[:MAX_PAIRS] if not one.tried],
    )


def headline(tuned: Tuned) -> str:
    """Return what tuning brought: to whole steps if they were measured, else to pairs."""
    if tuned.step is not None:
        before, after = tuned.step.before_us, tuned.step.after_us
        if abs(after - before) <= 2 * tuned.step.sigma_us:
            noise = say.duration(2 * tuned.step.sigma_us)
            return f"A step takes as long as before: {say.duration(before)}, to within 2 sigma of {noise}"
        change = say.percent(after / before - 1 if before else None, digits=1, sign=True)
        return f"A step takes {say.duration(after)} instead of {say.duration(before)}: {change}"
    return verdict(tuned)


def facts(one: ShownPair) -> str:
    """Return what else is known of a pair: where it is, its launch order, each side alone, the next best mechanism."""
    pair = one.pair
    known = {
        "in": " ".join(pair.where),
        "launched": ORDERS[pair.first] if pair.first else "in any order",
        "compute alone": pair.compute_us and say.duration(pair.compute_us),
        "communication alone, by the fastest mechanism": pair.comm_us and say.duration(pair.comm_us),
        "next best": pair.next_best,
    }
    text = "; ".join(f"{name} {value}" for name, value in known.items() if value)
    return text[0].upper() + text[1:]


def shown_pairs(pairs: Sequence[TunedPair]) -> list[ShownPair]:
    """Return all pairs, those that save most in a step first."""
    found = [_shown(number, pair) for number, pair in enumerate(pairs, 1)]
    return sorted(found, key=lambda one: (one.pair.is_left, -one.pair.saved_us))


def variant_bars(step: StepTuning) -> list[TimeBar]:
    """Return a bar for each variant of the step, in the order of the file."""
    return _bars([(each.name, each.us, each.sigma_us) for each in step.variants])


def _shown(number: int, pair: TunedPair) -> ShownPair:
    times = [(pair.stock, pair.stock_us, pair.stock_sigma_us)]
    if not pair.is_left:
        times.append((pair.mechanism, pair.us, pair.sigma_us))
    return ShownPair(
        number=number,
        pair=pair,
        bars=_bars(times),
        tried=sorted(pair.tried, key=lambda each: (each.marked is not None, each.us)),
    )


def _bars(times: Sequence[tuple[str, float, float]]) -> list[TimeBar]:
    longest = max((us + sigma for _, us, sigma in times), default=0.0) or 1.0
    return [
        TimeBar(
            name=name,
            us=us,
            sigma_us=sigma,
            width=100 * max(us - sigma, 0.0) / longest,
            sigma_width=100 * (us + sigma - max(us - sigma, 0.0)) / longest,
        )
        for name, us, sigma in times
    ]
