"""Confirm choices by whole steps of a training script, and take back those that make its steps slower. No torch.

    stock, tuned, tuned without the choice that promises most, without the second, ...      run in turns, round by round

    d_r = step by `tuned` - step by the other, of round r
    slower                                   median(d) > 2 · sigma
    sigma = sqrt(pi / 2) · s / sqrt(n)       standard error of the median of n rounds whose standard deviation is s

Steps of one round are compared, so that clocks that drift over rounds do not count. A choice without which the steps
are faster is taken back; if none is to blame and `tuned` is slower than stock, all are. What remains is confirmed anew.
Pairs whose communication is the same call, beside one matmul in forward and another in backward, are one choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median, stdev
from tempfile import mkdtemp

from msgspec.structs import replace

from counterpoint.records.tuning import LEAVE, StepTuning, StepVariant, Tuned, as_sentence
from counterpoint.tuned.file import tuned_toml
from counterpoint.tuning.parts import depends
from counterpoint.tuning.rounds import SIGMAS
from counterpoint.tuning.script.launch import ScriptVariant

STOCK, TUNED = "stock", "tuned"
LEFT_OUT = 4  # choices without which steps are run, too: those that promise most
TRIES = 3  # runs of the script, each without what the one before has falsified
_NEVER = f"{TRIES} runs of the script have confirmed no choices: this one is left, too"

Choice = tuple[int, ...]
"""Indices of the pairs of a tuning that have one call."""
StepTimes = Mapping[str, Sequence[float]]
"""µs of a step by the name of a variant, one for each round."""
Compare = Callable[[Sequence[ScriptVariant]], StepTimes]
"""Runs the script's steps by variants in turns."""


def sigma_of_median(values: Sequence[float]) -> float:
    """Return the standard error of the median of two values or more."""
    return math.sqrt(math.pi / 2 / len(values)) * stdev(values)


def difference(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Return by how much the first variant takes longer than the second, round by round, and the standard error."""
    apart = [one - other for one, other in zip(first, second, strict=True)]
    return median(apart), sigma_of_median(apart)


def choices(tuned: Tuned) -> list[Choice]:
    """Return all choices, those that promise to save most of a step first."""
    found: dict[tuple[object, ...], list[int]] = {}
    for index, pair in enumerate(tuned.pair):
        call = (pair.operation, pair.bytes_per_rank, pair.ranks, pair.dtype)
        found.setdefault(call + (pair.compute,) * depends(pair), []).append(index)
    return sorted(map(tuple, found.values()), key=lambda choice: -sum(tuned.pair[index].saved_us for index in choice))


def chosen(tuned: Tuned) -> list[Choice]:
    """Return the choices of which some pair is not left to torch, in the same order."""
    return [choice for choice in choices(tuned) if any(not tuned.pair[index].is_left for index in choice)]


def name_of(tuned: Tuned, choice: Choice) -> str:
    """Return a choice in words that tell it from the others of a step."""
    pair = tuned.pair[choice[0]]
    return f"{pair.operation} of {pair.bytes_per_rank} bytes a rank" + f" with {pair.compute}" * depends(pair)


def falsified(tuned: Tuned, times: StepTimes, without: Mapping[Choice, str]) -> dict[Choice, str]:
    """Return the choices that whole steps show to be slower, each with a sentence that has the figures.

    Args:
        tuned: the choices of the variant `tuned`.
        times: of `stock`, `tuned` and the variants of `without`.
        without: by choice, the name of the variant in which it is left to torch.
    """
    found = {}
    for choice, name in without.items():
        slower_us, sigma_us = difference(times[TUNED], times[name])
        if slower_us > SIGMAS * sigma_us:
            found[choice] = f"{_said(tuned, choice)}: {_figures(slower_us, sigma_us)} than a step without it"
    slower_us, sigma_us = difference(times[TUNED], times[STOCK])
    if not found and slower_us > SIGMAS * sigma_us:
        why = f"{_figures(slower_us, sigma_us)} than stock, and no single choice is to blame"
        found = {choice: f"{_said(tuned, choice)}: a step by all choices is {why}" for choice in chosen(tuned)}
    return found


def take_back(tuned: Tuned, why: Mapping[Choice, str]) -> Tuned:
    """Return the tuning with these choices left to torch, and why."""
    pairs = list(tuned.pair)
    for index, sentence in ((index, sentence) for choice, sentence in why.items() for index in choice):
        pair = pairs[index]
        if pair.is_left:
            continue
        pairs[index] = replace(
            pair,
            mechanism=LEAVE,
            us=pair.stock_us,
            sigma_us=pair.stock_sigma_us,
            why=as_sentence(f"whole steps: {sentence}"),
        )
    return replace(tuned, pair=tuple(pairs))


def confirm(tuned: Tuned, compare: Compare, *, folder: Path, most_left_out: int = LEFT_OUT) -> Tuned:
    """Return the choices that whole steps confirm, with `step`; without any choice nothing is run.

    Args:
        tuned: what was chosen for the pairs of the script.
        compare: runs the script's steps; the last round's results are those of `step`.
        folder: for the files that the variants follow.
        most_left_out: choices without which steps are run, too; 0 where a variant costs much.
    """
    rows: list[StepVariant] = []
    said: list[str] = []
    step: StepTuning | None = None
    for attempt in range(1, TRIES + 1):
        if not chosen(tuned):
            break
        without = _without(tuned, most_left_out)
        times = compare(_variants(tuned, without, folder))
        rows += [_row(name if attempt == 1 else f"{name}, run {attempt}", times[name]) for name in times]
        found = falsified(tuned, times, without)
        if found and attempt == TRIES:
            found = dict.fromkeys(chosen(tuned), _NEVER) | found
        tuned = take_back(tuned, found)
        said += [found[choice] for choice in sorted(found)]
        step = _step(times, TUNED if chosen(tuned) else STOCK, rows, said)
        if not found:
            break
    if step is None:
        return replace(tuned, notes=(*tuned.notes, "all pairs stay with torch: there was nothing to confirm by steps"))
    if not chosen(tuned):
        tuned = replace(tuned, notes=(*tuned.notes, "no choice is left: train without counterpoint.overlap"))
    return replace(tuned, step=step)


def _step(times: StepTimes, after: str, rows: Sequence[StepVariant], said: Sequence[str]) -> StepTuning:
    """Return what steps took by stock and by the variant `after`, with all variants so far."""
    return StepTuning(
        before_us=median(times[STOCK]),
        after_us=median(times[after]),
        sigma_us=difference(times[STOCK], times[after])[1],
        variants=tuple(rows[:256]),
        falsified=tuple(said[:256]),
    )


def _without(tuned: Tuned, most: int) -> dict[Choice, str]:
    """Return the variants that leave out one choice each; without the only one there is, steps are those of stock."""
    first, *others = chosen(tuned)
    if not others:
        return {first: STOCK}
    return {choice: f"{TUNED} without {name_of(tuned, choice)}" for choice in (first, *others)[:most]}


def _variants(tuned: Tuned, without: Mapping[Choice, str], folder: Path) -> list[ScriptVariant]:
    """Return stock, all choices, and all but one; their files are written to a new folder."""
    files = Path(mkdtemp(prefix="choices-", dir=folder))
    sets = {TUNED: tuned} | {name: take_back(tuned, {choice: "left out"}) for choice, name in without.items()}
    sets.pop(STOCK, None)
    made = [ScriptVariant(name=STOCK, file=None)]
    for number, (name, kept) in enumerate(sets.items()):
        path = files / f"{number}.toml"
        path.write_text(tuned_toml(kept))
        made.append(ScriptVariant(name=name, file=str(path)))
    return made


def _row(name: str, times_us: Sequence[float]) -> StepVariant:
    return StepVariant(name=name[:200], us=median(times_us), sigma_us=sigma_of_median(times_us), runs=len(times_us))


def _said(tuned: Tuned, choice: Choice) -> str:
    mechanisms = dict.fromkeys(tuned.pair[index].mechanism for index in choice if not tuned.pair[index].is_left)
    return f"{name_of(tuned, choice)} by {' and '.join(mechanisms)}"


def _figures(slower_us: float, sigma_us: float) -> str:
    return f"{slower_us / 1e3:.3f} ms slower (2 sigma are {SIGMAS * sigma_us / 1e3:.3f})"
