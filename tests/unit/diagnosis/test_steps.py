"""Where steps begin and end: by ProfilerStep, by repetition, or not at all."""

from __future__ import annotations

import pytest

from counterpoint.diagnosis.steps import StepWindows, find_steps
from tests.support.job_builder import Op, Rank, comm, op, rank, timeline


def found(r: Rank) -> StepWindows:
    return find_steps(timeline(r))


def windows(r: Rank) -> list[tuple[float, float]]:
    steps = found(r)
    return list(zip(steps.start.tolist(), steps.end.tolist(), strict=True))


def test_gpu_that_runs_past_the_host_ends_the_step() -> None:
    """Host 0-50 and 50-100; the GPU works for them until 90 and 130: windows follow one another."""
    r = rank(op("a", 20, 90, launch=10.0), op("b", 90, 130, launch=60.0), steps=((0.0, 50.0), (50.0, 100.0)))
    assert windows(r) == [(0.0, 90.0), (90.0, 130.0)]


def test_host_that_outlasts_the_gpu_ends_the_step() -> None:
    """Nothing runs after 30, the host returns at 50."""
    assert windows(rank(op("a", 20, 30, launch=10.0), steps=((0.0, 50.0),))) == [(0.0, 50.0)]


def layered(steps: int, layers: int, *, warm_up: int = 0, pause: float = 50.0) -> Rank:
    """Steps of equal layers (two kernels and a collective each), an optimizer at the end, and a pause between steps."""
    ops: list[Op] = [op("warm_up", 10.0 * i, 10.0 * i + 5) for i in range(warm_up)]
    at = 10.0 * warm_up
    for _ in range(steps):
        for _ in range(layers):
            ops += [op("matmul", at, at + 40), op("add", at + 40, at + 50), comm("all_reduce", at + 30, at + 60)]
            at += 60
        ops.append(op("adam", at, at + 30))
        at += 30 + pause
    return rank(*ops, steps=())


@pytest.mark.parametrize(("steps", "layers"), [(2, 4), (3, 2), (5, 8), (12, 3)])
def test_repeated_layers_are_not_steps(steps: int, layers: int) -> None:
    """A step is what holds the optimizer too."""
    assert (found(layered(steps, layers)).found_by, len(windows(layered(steps, layers)))) == ("repetition", steps)


def test_repeated_steps_follow_one_another() -> None:
    """Three steps of 4 x 60 + 30 µs, 50 µs apart: each ends with its own last kernel."""
    assert windows(layered(3, 4)) == [(0.0, 270.0), (270.0, 590.0), (590.0, 910.0)]


def test_steps_begin_after_a_warm_up() -> None:
    """Two operations before the first step leave as many whole steps."""
    assert len(windows(layered(4, 24, warm_up=2))) == 4


def test_work_that_does_not_repeat_is_one_step() -> None:
    """Ten different kernels."""
    r = rank(*[op(f"kernel_{i}", 10.0 * i, 10.0 * i + 8) for i in range(10)], steps=())
    assert (found(r).found_by, windows(r)) == ("whole", [(0.0, 98.0)])


def test_layers_alone_are_not_cut_into_steps_without_all_kinds() -> None:
    """One step of many layers and one optimizer: nothing repeats as a whole."""
    assert len(windows(layered(1, 8))) == 1
