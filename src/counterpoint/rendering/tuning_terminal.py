"""Print on a terminal what `tune` chose for each pair, what it saves, and why other pairs are left as they are."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from counterpoint.records.tuning import StepTuning, Tuned, TunedPair
from counterpoint.rendering import formatting as say

COLUMNS = ("pair", "calls", "mechanism", "ms", "±", "stock ms", "less", "next best")
LEFT = {"pair", "mechanism", "next best"}
MOST = 40  # pairs of a kind; the file has all


def verdict(tuned: Tuned) -> str:
    """Return one line that counts the choices and sums up what they save."""
    chosen = [pair for pair in tuned.pair if not pair.is_left]
    saved_us = sum(pair.saved_us for pair in chosen)
    alone_us = sum(pair.calls * pair.stock_us for pair in tuned.pair if pair.tried)
    if not chosen:
        return f"None of {_pairs(len(tuned.pair))} gets another mechanism."
    saves = f"{say.duration(saved_us)} of {say.duration(alone_us)}"
    return f"{len(chosen)} of {_pairs(len(tuned.pair))} get another mechanism: {saves} less by pairs alone."


def render_tuned(tuned: Tuned, console: Console) -> None:
    """Print the choices, the most useful first, then the pairs that stay and why, then the notes."""
    where = tuned.made
    console.print(say.text(verdict(tuned), "bold"), soft_wrap=True)
    machine = f"{where.world_size} × {where.gpu or where.device}"
    versions = [f"torch {where.torch}", *([f"NCCL {where.nccl}"] if where.nccl else [])]
    console.print(say.text(" · ".join([machine, *versions, f"{tuned.seconds:.0f} s"]), say.QUIET), soft_wrap=True)
    if tuned.step is not None:
        _render_step(tuned.step, console)
    ordered = sorted((pair for pair in tuned.pair if not pair.is_left), key=lambda pair: -pair.saved_us)
    if ordered:
        say.heading(console, "Chosen")
        say.print_table(console, COLUMNS, map(_cells, ordered[:MOST]), left=LEFT)
        _more(console, len(ordered))
    if stay := [pair for pair in tuned.pair if pair.is_left]:
        say.heading(console, "Left as they are")
        for pair in stay[:MOST]:
            console.print(say.text(f"· {pair_name(pair)}: {pair.why}"), soft_wrap=True)
        _more(console, len(stay))
    if notes := (*_marked(tuned.pair), *tuned.notes):
        say.heading(console, "Notes")
        for note in notes:
            console.print(say.text(f"· {note}"), soft_wrap=True)


def _render_step(step: StepTuning, console: Console) -> None:
    """Print what whole steps took by each variant, and which choices were taken back."""
    say.heading(console, "Whole steps")
    rows = [
        (each.name, say.milliseconds(each.us), say.milliseconds(each.sigma_us), str(each.runs))
        for each in step.variants[:MOST]
    ]
    say.print_table(console, ("steps", "ms", "±", "rounds"), rows, left={"steps"})
    _more(console, len(step.variants))
    for sentence in step.falsified[:MOST]:
        console.print(say.text(f"· taken back: {sentence}"), soft_wrap=True)


def pair_name(pair: TunedPair) -> str:
    """Return how a page calls a pair: operation, size of the full array, what runs beside it, and the order."""
    order = f", {pair.first.replace('_', ' ')}" if pair.first else ""
    return f"{pair.operation} {say.size(pair.bytes_per_rank * pair.ranks)} | {pair.compute}{order}"


def _cells(pair: TunedPair) -> Sequence[str]:
    less = say.percent(1 - pair.us / pair.stock_us if pair.stock_us else None, digits=1)
    next_best = f"{pair.next_best} {say.milliseconds(pair.next_best_us)}" if pair.next_best else ""
    times = (say.milliseconds(pair.us), say.milliseconds(pair.sigma_us), say.milliseconds(pair.stock_us))
    return (pair_name(pair), str(pair.calls), pair.mechanism, *times, less, next_best)


def _marked(pairs: Sequence[TunedPair]) -> list[str]:
    """Return a sentence for each mechanism that was tried and must not be believed, with the first reason."""
    reasons: dict[str, str] = {}
    for pair in pairs:
        for tried in pair.tried:
            if tried.marked is not None:
                reasons.setdefault(tried.mechanism, f"{pair_name(pair)}: {tried.marked}")
    return [f"{mechanism} was never chosen where it is marked; {reason}" for mechanism, reason in reasons.items()]


def _more(console: Console, count: int) -> None:
    if count > MOST:
        console.print(say.text(f"… and {count - MOST} more, which the file has", say.QUIET))


def _pairs(count: int) -> str:
    return f"{count} pair{'s' * (count != 1)}"
