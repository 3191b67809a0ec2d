"""Tune an unchanged training script: record steps, choose mechanisms, confirm them by whole steps. No torch.

If a script calls `counterpoint.overlap`, one run of it times all variants. Other scripts, DDP models (whose hook cannot
be removed) and choices that set environment variables need a run for each variant: stock, tuned, tuned, stock.

Choices are confirmed by steps in turns, round by round:

    stock, tuned, tuned without the choice that promises most, without the second, ...      run in turns, round by round

    d_r = step by `tuned` - step by the other, of round r
    slower                                   median(d) > 2 · sigma
    sigma = sqrt(pi / 2) · s / sqrt(n)       standard error of the median of n rounds whose standard deviation is s

Steps are compared within a round, so that a GPU clock that drifts over rounds cancels. A choice without which steps are
faster is taken back; if no single choice is to blame but `tuned` is slower than stock, all choices are taken back. The
remaining choices are timed again. Pairs with the same call, beside one matmul in forward and another in backward, are
one choice.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median, stdev
from tempfile import mkdtemp

from msgspec.structs import replace

from counterpoint.errors import Misconfigured
from counterpoint.processes import Progress, run_folder
from counterpoint.records.tuning import LEAVE, StepTuning, StepVariant, Tuned, as_sentence
from counterpoint.tuned.file import read_tuned, tuned_toml
from counterpoint.tuning.api import pairs_of, tune
from counterpoint.tuning.decide import SIGMAS
from counterpoint.tuning.exporters import variables_of
from counterpoint.tuning.pairs import depends
from counterpoint.tuning.script_launch import (
    TIMEOUT_S,
    RunCommand,
    ScriptResult,
    ScriptTask,
    ScriptVariant,
    launch_script,
    parse_command,
)

TUNED_VARIABLE = "COUNTERPOINT_TUNED"  # of parallel/follow_tuning.py: the file that overlap and the backend follow
_OFF = "off"
RECORDED = "recorded"  # folder of the traces
_APART_RUNS = 3  # processes per variant, at least: processes differ more than steps of one process
_BLOCKS_APART = 3  # blocks of steps in each of these processes
_WHY_APART = {
    "never": "the script never calls counterpoint.overlap: choices reached it by its environment alone",
    "fixed": "DistributedDataParallel keeps its hook for good",
    "switched": "some choices are variables of the environment",
}
STOCK, TUNED = "stock", "tuned"
LEFT_OUT = 4  # choices that are each left out once: those with the largest predicted saving
TRIES = 3  # at most: each run leaves out the choices that the one before falsified
_NEVER = f"{TRIES} runs of the script have confirmed no choices: this one is left, too"

Choice = tuple[int, ...]
"""Holds the indices of a tuning's pairs that have the same call."""
StepTimes = Mapping[str, Sequence[float]]
"""Maps the name of a variant to the µs of a step in each round."""
Compare = Callable[[Sequence[ScriptVariant]], StepTimes]
"""Runs the script's steps by several variants alternately, and returns the times."""


def tune_script(
    command: str,
    *,
    device: str | None = None,
    profile: str | Path | None = None,
    budget_s: float = 120.0,
    rounds: int = 40,
    timeout_s: float = TIMEOUT_S,
    progress: Progress | None = None,
) -> Tuned:
    """Return the mechanism chosen for each pair in a script's steps, with the choices that timed whole steps confirm.

    The script runs two times or more, unchanged, until each time enough of its optimizer's steps are done: by
    `command`, as "torchrun --nproc-per-node 2 train.py", on `device` (None: whichever it uses). `budget_s` holds for
    measuring pairs, and again for timing whole steps, which takes five rounds at least; `timeout_s` is the longest
    time in which no pair is measured and no step of the script ends. All else is as for `tune`.

    Raises:
        Misconfigured: no script is found in the command, or the script makes too few steps or has no pairs.
    """
    began = time.monotonic()
    run, tell = parse_command(command), progress or (lambda done, total, what: None)
    with run_folder("counterpoint-tune-") as folder:
        tell(0, 3, "recording steps of the script")
        recorded = record_script(run, folder, timeout_s=timeout_s)
        if device is not None and recorded.device != device:
            raise Misconfigured(f"--device {device}, but the script runs on {recorded.device}; leave that out")
        pairs, notes = pairs_of(folder / RECORDED)
        tuned = tune(
            pairs, device=recorded.device, profile=profile, budget_s=budget_s, rounds=rounds, timeout_s=timeout_s,
            progress=progress,
        )  # fmt: skip
        tell(2, 3, "comparing whole steps")
        steps = ScriptComparison(
            run, folder, recorded, sets_variables=bool(variables_of(tuned)), budget_s=budget_s, timeout_s=timeout_s
        )
        tuned = confirm(tuned, steps.compare, folder=folder, most_left_out=steps.most_left_out)
        seconds = round(time.monotonic() - began, 1)
        return replace(tuned, seconds=seconds, notes=(*notes, *tuned.notes, *steps.notes)[:256])


def record_script(command: RunCommand, folder: Path, *, timeout_s: float = TIMEOUT_S) -> ScriptResult:
    """Record steps of a script with torch's collectives into `folder / RECORDED`; raise as `launch_script` does."""
    return launch_script(command, _task(folder, RECORDED), variables={TUNED_VARIABLE: _OFF}, timeout_s=timeout_s)


class ScriptComparison:
    """Times a script's steps by each variant, all variants in one run of the script or each in its own run.

    `recorded` is the result of an earlier run of the script, which recorded steps; with `sets_variables` some choices
    are variables of the environment, which a process cannot change. `budget_s` is for all rounds of a comparison:
    five rounds at least, or three if each variant has its own run.
    """

    def __init__(
        self,
        command: RunCommand,
        folder: Path,
        recorded: ScriptResult,
        *,
        sets_variables: bool,
        budget_s: float,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._command, self._folder = command, folder
        self._budget_s, self._timeout_s = budget_s, timeout_s
        self._runs, self._followed = 0, ""
        self.is_apart = recorded.overlap != "switched" or sets_variables
        self._why_apart = _WHY_APART[recorded.overlap]
        self.most_left_out = 0 if self.is_apart else LEFT_OUT

    @property
    def notes(self) -> tuple[str, ...]:
        """Return notes on how steps were compared, and how many choices the steps followed."""
        apart = (f"steps were compared in processes apart: {self._why_apart}",) * (self.is_apart and self._runs > 0)
        return (*apart, f"whole steps: {self._followed}") if self._followed else apart

    def compare(self, variants: Sequence[ScriptVariant]) -> StepTimes:
        """Return the µs of a step by each variant, one value per round."""
        return self._apart(variants) if self.is_apart else self._in_turns(variants)

    def _in_turns(self, variants: Sequence[ScriptVariant]) -> StepTimes:
        task = _task(self._folder, self._name(), variants=tuple(variants), budget_s=self._budget_s)
        result = self._run(task, {TUNED_VARIABLE: _OFF})
        return {variant.name: times for variant, times in zip(variants, result.blocks_us, strict=True)}

    def _apart(self, variants: Sequence[ScriptVariant]) -> StepTimes:
        found: dict[str, list[float]] = {variant.name: [] for variant in variants}
        begun, number = time.monotonic(), 0
        while number < _APART_RUNS or (time.monotonic() - begun) * (number + 1) / number <= self._budget_s:
            for variant in variants if number % 2 == 0 else reversed(variants):
                task = _task(
                    self._folder, self._name(), variants=(variant,), rounds=_BLOCKS_APART, min_rounds=_BLOCKS_APART
                )
                result = self._run(task, _variables(variant))
                found[variant.name].append(median(result.blocks_us[0]))
            number += 1
        return found

    def _run(self, task: ScriptTask, variables: dict[str, str]) -> ScriptResult:
        result = launch_script(self._command, task, variables=variables, timeout_s=self._timeout_s)
        self._followed = result.followed.get(TUNED, self._followed)
        return result

    def _name(self) -> str:
        self._runs += 1
        return f"steps{self._runs}"


def _variables(variant: ScriptVariant) -> dict[str, str]:
    """Return the environment variables that make a process run this variant."""
    if variant.file is None:
        return {TUNED_VARIABLE: _OFF}
    return {TUNED_VARIABLE: variant.file, **variables_of(read_tuned(variant.file))}


def _task(folder: Path, name: str, **asked: object) -> ScriptTask:
    """Return a `ScriptTask` with the fields `asked` and a new folder."""
    (folder / name).mkdir()
    return replace(ScriptTask(folder=str(folder / name)), **asked)


def sigma_of_median(values: Sequence[float]) -> float:
    """Return the standard error of the median of two or more values."""
    return math.sqrt(math.pi / 2 / len(values)) * stdev(values)


def difference(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Return the median difference in µs of two variants' steps, paired by round, and its standard error."""
    apart = [one - other for one, other in zip(first, second, strict=True)]
    return median(apart), sigma_of_median(apart)


def choices(tuned: Tuned) -> list[Choice]:
    """Group the indices of a tuning's pairs with the same call into choices, largest predicted saving first."""
    found: dict[tuple[object, ...], list[int]] = {}
    for index, pair in enumerate(tuned.pair):
        call = (pair.operation, pair.bytes_per_rank, pair.ranks, pair.dtype)
        found.setdefault(call + (pair.compute,) * depends(pair), []).append(index)
    return sorted(map(tuple, found.values()), key=lambda choice: -sum(tuned.pair[index].saved_us for index in choice))


def chosen(tuned: Tuned) -> list[Choice]:
    """Return the choices that replace torch's collective for at least one pair, in the order of `choices`."""
    return [choice for choice in choices(tuned) if any(not tuned.pair[index].is_left for index in choice)]


def name_of(tuned: Tuned, choice: Choice) -> str:
    """Return a choice in words that distinguish it from the other choices of a step."""
    pair = tuned.pair[choice[0]]
    return f"{pair.operation} of {pair.bytes_per_rank} bytes a rank" + f" with {pair.compute}" * depends(pair)


def falsified(tuned: Tuned, times: StepTimes, without: Mapping[Choice, str]) -> dict[Choice, str]:
    """Return the choices that whole steps show to be slower, each with a sentence that gives the figures.

    `times` are of `stock`, `tuned` and the variants that `without` names by the choice that they leave to torch.
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
    """Return `tuned` with the choices in `why` left to torch, each with its reason."""
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
    """Return the tuning with the choices that whole steps confirm, and with `step`; run nothing without choices.

    `compare` runs the script's steps, and the last round's results are those of `step`; `folder` gets the files that
    the variants follow. Of `most_left_out` choices steps without each are run, too: 0 where a variant costs much.
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
    """Return the step's times by torch (`stock`) and by the variant `after`, and the rows of all variants."""
    return StepTuning(
        before_us=median(times[STOCK]),
        after_us=median(times[after]),
        sigma_us=difference(times[STOCK], times[after])[1],
        variants=tuple(rows[:256]),
        falsified=tuple(said[:256]),
    )


def _without(tuned: Tuned, most: int) -> dict[Choice, str]:
    """Return, for each choice, the name of the variant without it; without the only choice it is `stock`."""
    first, *others = chosen(tuned)
    if not others:
        return {first: STOCK}
    return {choice: f"{TUNED} without {name_of(tuned, choice)}" for choice in (first, *others)[:most]}


def _variants(tuned: Tuned, without: Mapping[Choice, str], folder: Path) -> list[ScriptVariant]:
    """Return variants with no choice, all choices, and all but one; write their files to a new folder."""
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
