"""Steps of a script by variants in turns, without a script: when each is switched on, and what is timed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import counterpoint
from counterpoint.errors import Misconfigured
from counterpoint.monitoring.optimizer_steps import OptimizerSteps
from counterpoint.tuning import script_steps
from counterpoint.tuning.script_launch import RESULT, ScriptResult, ScriptTask, ScriptVariant
from counterpoint.tuning.script_steps import ScriptFinished, ScriptSteps, SwitchedOverlap

STOCK, TUNED = ScriptVariant(name="stock", file=None), ScriptVariant(name="tuned", file="a.toml")


class Handle:
    """What `overlap` returned; notes when it is taken back."""

    def __init__(self, log: list[str], options: dict[str, Any]) -> None:
        self.log = log
        log.append(f"on {options['tuned']}")

    def restore(self) -> None:
        self.log.append("off")

    def report(self) -> SimpleNamespace:
        return SimpleNamespace(tuned="a.toml: 2 of 3 choices followed")


@pytest.fixture(name="log")
def log_fixture(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls of an `overlap` that does nothing."""
    log: list[str] = []
    monkeypatch.setattr("counterpoint.parallel.overlap.overlap", lambda model, **options: Handle(log, options))
    return log


def task(folder: Path, *variants: ScriptVariant, **more: Any) -> ScriptTask:
    sizes = {"warmup_steps": 1, "dropped_steps": 1, "block_steps": 2, "rounds": 2, "min_rounds": 2} | more
    return ScriptTask(folder=str(folder), variants=variants, **sizes)


def run(steps: ScriptSteps, log: list[str]) -> list[str]:
    """Make steps until the task is done; return what was switched on or off after each."""
    try:
        for _ in range(100):
            log.append(f"step {steps.count + 1}")
            steps.advance()
    except ScriptFinished:
        return log
    raise AssertionError("the task is not done after 100 steps")


def test_variants_take_turns(tmp_path: Path, log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock, tuned, tuned, stock; the first step after a switch does not count, and the end is as it began."""
    clock = iter(range(0, 8000, 1000))
    monkeypatch.setattr(script_steps, "_now", lambda: next(clock) / 1e6)
    steps = ScriptSteps(task(tmp_path, STOCK, TUNED), 0)
    with steps.intercepted():
        handle = counterpoint.overlap(nn.Linear(1, 1))
        assert "torch's collectives" in str(handle.report())
        switched = [line for line in run(steps, log) if not line.startswith("step")]
    assert switched == ["on a.toml", "off"]
    assert log.index("on a.toml") == log.index("step 4") + 1  # 1 of warm-up, 1 dropped, 2 timed
    assert log.index("off") == log.index("step 10") + 1  # the second round begins with tuned
    assert steps.count == steps.task.needed_steps == 13
    result = msgspec.json.decode((tmp_path / RESULT).read_bytes(), type=ScriptResult)
    assert (result.overlap, result.blocks_us) == ("switched", ((500.0, 500.0), (500.0, 500.0)))
    assert result.followed == {"tuned": "2 of 3 choices followed"}


def test_the_budget_ends_it_after_the_least_rounds(tmp_path: Path, log: list[str]) -> None:
    """Of ten rounds two are needed, and no second is left."""
    steps = ScriptSteps(task(tmp_path, STOCK, TUNED, rounds=10, budget_s=0.0), 0)
    run(steps, log)
    assert steps.count == steps.task.needed_steps


def test_a_script_without_overlap_says_so(tmp_path: Path, log: list[str]) -> None:
    """Its one variant is timed all the same."""
    run(ScriptSteps(task(tmp_path, STOCK), 0), log)
    result = msgspec.json.decode((tmp_path / RESULT).read_bytes(), type=ScriptResult)
    assert (result.overlap, len(result.blocks_us[0])) == ("never", 2)


def test_one_variant_is_on_from_the_call(tmp_path: Path, log: list[str]) -> None:
    """As DDP needs it, which takes a hook only before its first step."""
    steps = ScriptSteps(task(tmp_path, TUNED), 0)
    with steps.intercepted():
        counterpoint.overlap(nn.Linear(1, 1))
    assert log == ["on a.toml"]


def test_overlap_is_put_back(tmp_path: Path) -> None:
    from counterpoint.parallel import overlap as module

    before = module.overlap
    with ScriptSteps(task(tmp_path, STOCK), 0).intercepted():
        assert counterpoint.overlap is module.overlap is not before
    assert counterpoint.overlap is module.overlap is before


def test_an_overlap_that_the_script_took_back_cannot_be_switched(log: list[str]) -> None:
    """It would compare torch with torch."""
    switched = SwitchedOverlap(lambda model, **options: Handle(log, options), nn.Linear(1, 1), {})
    with switched:
        switched.use(TUNED)
    assert log == ["on a.toml", "off"]
    with pytest.raises(Misconfigured, match="leave that out"):
        switched.use(TUNED)


def test_the_first_optimizer_counts() -> None:
    """Of two that step once a step each, one; a third thread's do not count."""
    counted = []
    first, second = (torch.optim.SGD([nn.Parameter(torch.zeros(1))]) for _ in range(2))
    steps = OptimizerSteps(lambda: counted.append(1))
    for _ in range(3):
        first.step()
        second.step()
    steps.remove()
    first.step()
    assert len(counted) == 3
