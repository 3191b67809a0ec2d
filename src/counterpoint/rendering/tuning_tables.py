"""Show the choices of `tune` on a terminal or a page: time saved, mechanisms tried, why other pairs stay with stock."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from counterpoint.records.tuning import StepTuning, StepVariant, Tried, Tuned, TunedPair
from counterpoint.rendering import formatting as say
from counterpoint.rendering.safe_html import Page, write_page
from counterpoint.rendering.table import BarPart, Column, LengthBar, Table, environment_table, machine_line

if TYPE_CHECKING:
    from rich.console import Console

MOST = 40  # rows of one kind on a terminal; the file has all
MAX_PAIRS = 300  # that the page shows one by one
OPEN_PAIRS = 12  # up to this number none are folded
ORDERS = {"compute_first": "compute first", "comm_first": "communication first", "together": "both at once"}


def render_tuned(tuned: Tuned, console: Console) -> None:
    """Print headline, whole steps, choices (largest saving first), the pairs that stay with stock, and the notes."""
    from counterpoint.rendering.print_table import QUIET, line, print_tables

    line(console, headline(tuned), "bold")
    line(console, f"{machine_line(tuned.made)} · {tuned.seconds:.0f} s", QUIET)
    print_tables(summary_tables(tuned), console)


def write_tuning_page(path: Path, tuned: Tuned) -> None:
    """Write a tuning as a page; `path` appears complete or not at all.

    Raises:
        OSError: the folder is missing or may not be written to.
    """
    where = environment_table(
        "Where it was made",
        tuned.made,
        "a file of another GPU is not followed",
        **{"figures of the model": tuned.profile},
    )
    pairs = pair_tables(tuned.pair)
    if len(pairs) < len(tuned.pair):
        pairs += (
            Table(title="More", notes=[f"The first {len(pairs)} of {len(tuned.pair)} pairs; the file holds all."]),
        )
    page = Page(
        title="what was chosen for each pair",
        kind="tuning",
        scope=machine_line(tuned.made),
        headline=headline(tuned),
        figures=_figures(tuned),
        tables=(*summary_tables(tuned), *pairs, where),
    )
    write_page(path, page)


def headline(tuned: Tuned) -> str:
    """Return one line on the gain of a tuning: in whole steps if they were measured, else summed over pairs."""
    if tuned.step is None:
        return verdict(tuned)
    before, after = tuned.step.before_us, tuned.step.after_us
    if abs(after - before) <= 2 * tuned.step.sigma_us:
        noise = say.duration(2 * tuned.step.sigma_us)
        return f"A step takes as long as before: {say.duration(before)}, to within 2 sigma of {noise}"
    change = say.change(after / before - 1 if before else None)
    return f"A step takes {say.duration(after)} instead of {say.duration(before)}: {change}"


def verdict(tuned: Tuned) -> str:
    """Return one line with the number of choices and the sum of the time that they save."""
    chosen = [pair for pair in tuned.pair if not pair.is_left]
    pairs = f"{len(tuned.pair)} pair{'s' * (len(tuned.pair) != 1)}"
    if not chosen:
        return f"None of {pairs} gets another mechanism."
    alone_us = sum(pair.calls * pair.stock_us for pair in tuned.pair if pair.tried)
    saves = f"{say.duration(sum(pair.saved_us for pair in chosen))} of {say.duration(alone_us)}"
    return f"{len(chosen)} of {pairs} get another mechanism: {saves} less by pairs alone."


def pair_name(pair: TunedPair) -> str:
    """Return a pair's name on a page: operation, size of the full array, computation, and launch order."""
    order = f", {pair.first.replace('_', ' ')}" if pair.first else ""
    return f"{pair.operation} {say.size(pair.bytes_per_rank * pair.ranks)} | {pair.compute}{order}"


def _figures(tuned: Tuned) -> list[tuple[str, str, str]]:
    chosen = sum(not pair.is_left for pair in tuned.pair)
    saved_us = sum(pair.saved_us for pair in tuned.pair)
    found = [
        ("pairs that change", str(chosen), f"of {len(tuned.pair)}"),
        ("less in a step, by their own times", say.milliseconds(saved_us), "ms"),
    ]
    if tuned.step is not None:
        found += [
            ("step before", say.milliseconds(tuned.step.before_us), "ms"),
            ("step after", say.milliseconds(tuned.step.after_us), "ms"),
            ("choices taken back", str(len(tuned.step.falsified)), ""),
        ]
    return [*found, ("tuning took", f"{tuned.seconds:.0f}", "s")]


def summary_tables(tuned: Tuned) -> list[Table]:
    """Return tables of whole steps, the choices, the pairs left to stock with reasons, and what was not measured."""
    chosen = sorted((pair for pair in tuned.pair if not pair.is_left), key=lambda pair: -pair.saved_us)
    found = [] if tuned.step is None else [_steps(tuned.step)]
    if chosen:
        found.append(_choices(chosen))
    if stay := [f"{pair_name(pair)}: {pair.why}" for pair in tuned.pair if pair.is_left]:
        more = [f"and {len(stay) - MOST} more, which the file has"] * (len(stay) > MOST)
        found.append(Table(title="Left as they are", notes=[*stay[:MOST], *more]))
    return [*found, Table(title="Notes", notes=_notes(tuned))]


def _steps(step: StepTuning) -> Table:
    longest = max((each.us + each.sigma_us for each in step.variants), default=0.0)

    def bar(each: StepVariant) -> LengthBar:
        return _bar(each.us, each.sigma_us, longest, "unchanged" if each is step.variants[0] else "case")

    return Table(
        title="Whole steps",
        unit="interleaved with each other; the light end of a bar is ± one standard error",
        columns=(
            Column("steps", of=lambda each: each.name),
            Column("", of=bar, is_bar=True, optional=True),
            Column("ms", say.milliseconds, lambda each: each.us),
            Column("±", say.milliseconds, lambda each: each.sigma_us),
            Column("rounds", say.count, lambda each: each.runs),
        ),
        rows=step.variants,
        notes=[f"taken back: {sentence}" for sentence in step.falsified] or ["No choice was taken back."],
        most=MOST,
    )


def _choices(chosen: Sequence[TunedPair]) -> Table:
    return Table(
        title="Chosen",
        columns=(
            Column("pair", of=pair_name),
            Column("calls", say.count, lambda pair: pair.calls),
            Column("mechanism", of=lambda pair: pair.mechanism),
            Column("ms", say.milliseconds, lambda pair: pair.us),
            Column("±", say.milliseconds, lambda pair: pair.sigma_us, optional=True),
            Column("stock ms", say.milliseconds, lambda pair: pair.stock_us),
            Column("less", say.tenth_percent, lambda pair: 1 - pair.us / pair.stock_us if pair.stock_us else None),
            Column("next best", of=_next_best, optional=True),
        ),
        rows=chosen,
        most=MOST,
    )


def _next_best(pair: TunedPair) -> str:
    return f"{pair.next_best} {say.milliseconds(pair.next_best_us)}" if pair.next_best else ""


def _notes(tuned: Tuned) -> list[str]:
    """Return notes: what was not measured, and for each mechanism with marked measurements the reason."""
    reasons: dict[str, str] = {}
    for pair in tuned.pair:
        for tried in pair.tried:
            if tried.marked is not None:
                reasons.setdefault(tried.mechanism, f"{pair_name(pair)}: {tried.marked}")
    steps = ["Whole steps were not measured: nothing confirms that what pairs save alone, a step saves."]
    untried = [f"{pair_name(pair)}: the file does not say what was tried" for pair in tuned.pair if not pair.tried]
    return [
        *(steps if tuned.step is None else []),
        *(f"{mechanism} was never chosen where it is marked; {reason}" for mechanism, reason in reasons.items()),
        *untried[:MOST],
        *tuned.notes,
    ]


def pair_tables(pairs: Sequence[TunedPair]) -> tuple[Table, ...]:
    """Return a table for each of the first `MAX_PAIRS` pairs of compute and collective, largest saving first.

    Each table has all mechanisms tried, the fastest first and marked ones last; if none was tried, the choice and
    stock.
    """
    ordered = sorted(enumerate(pairs, 1), key=lambda one: (one[1].is_left, -one[1].saved_us))
    return tuple(_pair(number, pair, len(pairs) > OPEN_PAIRS) for number, pair in ordered[:MAX_PAIRS])


def _pair(number: int, pair: TunedPair, folded: bool) -> Table:
    tried = sorted(pair.tried, key=lambda each: (each.marked is not None, each.us))
    if not tried:
        after = [] if pair.is_left else [(pair.mechanism, pair.us, pair.sigma_us)]
        times = [*after, (pair.stock, pair.stock_us, pair.stock_sigma_us)]
        tried = [Tried(mechanism=name, us=us, sigma_us=sigma_us, runs=1) for name, us, sigma_us in times]
    longest = max(each.us + each.sigma_us for each in tried)

    def look(each: Tried) -> str:
        return "case" if each.mechanism == pair.mechanism else "unchanged"

    why = "Left as it is"
    if not pair.is_left:
        change = say.change(pair.us / pair.stock_us - 1 if pair.stock_us else None)
        calls = f"{pair.calls} call{'s' * (pair.calls != 1)}"
        why = f"{change}, {say.duration(pair.saved_us)} less in a step of {calls}"
    return Table(
        title=f"{number}. {pair.operation}",
        unit=f"{say.size(pair.bytes_per_rank)} from each of {pair.ranks} ranks, beside {pair.compute}",
        columns=(
            Column("mechanism", of=lambda each: each.mechanism),
            Column("", of=lambda each: _bar(each.us, each.sigma_us, longest, look(each)), is_bar=True),
            Column("µs", say.decimal, lambda each: each.us),
            Column("± µs", say.decimal, lambda each: each.sigma_us),
            Column("to stock", say.change, lambda each: each.us / pair.stock_us - 1 if pair.stock_us else ""),
            Column("to the choice", say.change, lambda each: each.us / pair.us - 1 if pair.us else ""),
            Column("predicted, µs", say.decimal, lambda each: "" if each.predicted_us is None else each.predicted_us),
            Column("runs", say.count, lambda each: each.runs if pair.tried else ""),
            Column("marked: not believed", of=lambda each: each.marked or ""),
        ),
        rows=tried,
        tone=lambda each: "marked" if each.marked else "strong" if each.mechanism == pair.mechanism else "",
        notes=[f"{why}: {pair.why}", f"{facts(pair)}."],
        folded=folded,
    )


def _bar(us: float, sigma_us: float, longest: float, look: str) -> LengthBar:
    """Return a bar for a time; its lighter end spans ± one sigma around the time."""
    least, most = max(us - sigma_us, 0.0) / (longest or 1.0), (us + sigma_us) / (longest or 1.0)
    return LengthBar([BarPart(look=look, share=least), BarPart(look=f"{look} sigma", share=most - least)])


def facts(pair: TunedPair) -> str:
    """Return further facts on a pair: modules, launch order, compute and collective alone, the next best mechanism."""
    known = {
        "in": " ".join(pair.where),
        "launched": ORDERS[pair.first] if pair.first else "in any order",
        "compute alone": pair.compute_us and say.duration(pair.compute_us),
        "communication alone, by the fastest mechanism": pair.comm_us and say.duration(pair.comm_us),
        "next best": pair.next_best,
    }
    text = "; ".join(f"{name} {value}" for name, value in known.items() if value)
    return text[0].upper() + text[1:]
