"""Tune a training script as it is: record steps, choose for their pairs, confirm by whole steps. No torch.

A script that calls `counterpoint.overlap` runs all variants in one process. Any other, a model of DDP, whose hook stays
for good, and choices that are variables of the environment run one variant in a process: stock, tuned, tuned, stock.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from msgspec.structs import replace

from counterpoint.errors import Misconfigured
from counterpoint.processes import Progress, run_folder
from counterpoint.records.tuning import Tuned
from counterpoint.tuned.file import read_tuned
from counterpoint.tuning.api import pairs_of, tune
from counterpoint.tuning.exporters import variables_of
from counterpoint.tuning.script.confirm import LEFT_OUT, TUNED, StepTimes, confirm
from counterpoint.tuning.script.launch import (
    TIMEOUT_S,
    RunCommand,
    ScriptResult,
    ScriptTask,
    ScriptVariant,
    launch_script,
    parse_command,
)

TUNED_VARIABLE = "COUNTERPOINT_TUNED"  # of parallel/tuned.py: the file that overlap and the backend follow
_OFF = "off"
RECORDED = "recorded"  # folder of the traces
_APART_RUNS = 3  # of each variant, at least: processes differ by more than steps of one do
_BLOCKS_APART = 3  # of steps in each of these
_WHY_APART = {
    "never": "the script never calls counterpoint.overlap: choices reached it by its environment alone",
    "fixed": "DistributedDataParallel keeps its hook for good",
    "switched": "some choices are variables of the environment",
}


def tune_script(
    command: str,
    *,
    device: str | None = None,
    profile: str | Path | None = None,
    budget_s: float = 120.0,
    rounds: int = 12,
    timeout_s: float = TIMEOUT_S,
    progress: Progress | None = None,
) -> Tuned:
    """Choose a mechanism for each pair of a training script's steps, and keep what its whole steps confirm.

    The script runs two times or more, unchanged, until each time enough of its optimizer's steps are done.

    Args:
        command: what starts it: "torchrun --nproc-per-node 2 train.py".
        device: cuda or cpu, on which it is known to run; None: whichever it does.
        profile: as of `tune`.
        budget_s: seconds for pairs, and as many for whole steps, which need five rounds at least.
        rounds: of pairs.
        timeout_s: longest time without a finished pair, or step of the script.
        progress: called as (done, in all, what runs now).

    Returns:
        The choices, with `step`.

    Raises:
        Misconfigured: the command cannot be taken apart, the script makes too few steps, or has no pairs.
        Unsupported: nothing can be measured here.
        PeerTimeout: ranks died or hung; names them, and their log.
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
    """Record steps of a script by torch's collectives into `folder / RECORDED`; raises as `launch_script`."""
    return launch_script(command, _task(folder, RECORDED), variables={TUNED_VARIABLE: _OFF}, timeout_s=timeout_s)


class ScriptComparison:
    """Runs a script's steps by variants, in one process or one for each.

    Args:
        command: that starts the script.
        folder: for files of the runs.
        recorded: what a run before has found out about the script.
        sets_variables: some choices are variables of the environment, which a process cannot change.
        budget_s: seconds for all rounds of a comparison, of which there are five at least; three in processes apart.
        timeout_s: longest time without a step.
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
        """Return how steps were compared, and how many choices they followed."""
        apart = (f"steps were compared in processes apart: {self._why_apart}",) * (self.is_apart and self._runs > 0)
        return (*apart, f"whole steps: {self._followed}") if self._followed else apart

    def compare(self, variants: Sequence[ScriptVariant]) -> StepTimes:
        """Return µs of a step by each variant, one for each round."""
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
    """Return the variables by which a process is this variant."""
    if variant.file is None:
        return {TUNED_VARIABLE: _OFF}
    return {TUNED_VARIABLE: variant.file, **variables_of(read_tuned(variant.file))}


def _task(folder: Path, name: str, **asked: object) -> ScriptTask:
    """Return a task with a new folder of its own."""
    (folder / name).mkdir()
    return replace(ScriptTask(folder=str(folder / name)), **asked)
