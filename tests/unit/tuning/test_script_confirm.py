"""What whole steps confirm and falsify, on a planted script whose variants have known times."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from counterpoint.records.tuning import LEAVE, Tuned
from counterpoint.tuned.file import read_tuned
from counterpoint.tuning.script import Choice, chosen, confirm, difference, falsified, name_of
from counterpoint.tuning.script_launch import ScriptVariant
from tests.support.example_tuned import example_tuned

ROUNDS = 7


def tuned() -> Tuned:
    """Two choices, an all_gather by copies and a matmul in pieces, and one pair that is left."""
    return replace(example_tuned(), step=None, notes=())


class PlantedScript:
    """A script whose steps take 1 ms, and more or less by each choice that is on; clocks drift by 20 % over rounds."""

    def __init__(self, costs_us: Mapping[str, float]) -> None:
        self.costs_us = costs_us  # by operation
        self.runs: list[list[str]] = []

    def compare(self, variants: Sequence[ScriptVariant]) -> dict[str, list[float]]:
        """Times of each variant, by the choices in its file."""
        self.runs.append([variant.name for variant in variants])
        noise = random.Random(len(self.runs))
        times = {}
        for variant in variants:
            pairs = read_tuned(variant.file).pair if variant.file else ()
            us = 1000.0 + sum(self.costs_us[pair.operation] for pair in pairs if pair.mechanism != LEAVE)
            times[variant.name] = [us * (1 + 0.2 * r / ROUNDS) + noise.gauss(0, 1) for r in range(ROUNDS)]
        return times


def test_choices_that_help_are_confirmed(tmp_path: Path) -> None:
    """One run: stock, all, and all but one each; nothing is taken back."""
    script = PlantedScript({"all_gather": -100.0, "all_gather_matmul": -50.0})
    found = confirm(tuned(), script.compare, folder=tmp_path)
    assert found.pair == tuned().pair
    assert found.step is not None
    assert found.step.falsified == ()
    assert found.step.after_us == pytest.approx(found.step.before_us * 0.85, rel=0.01)
    assert [[name.split(" of")[0] for name in run] for run in script.runs] == [
        ["stock", "tuned", "tuned without all_gather", "tuned without all_gather_matmul"]
    ]


def test_a_choice_that_makes_steps_slower_is_taken_back_and_the_rest_confirmed_anew(tmp_path: Path) -> None:
    """Faster by itself, slower in the step: left to torch, with the figures; the other one stays."""
    script = PlantedScript({"all_gather": 80.0, "all_gather_matmul": -50.0})
    found = confirm(tuned(), script.compare, folder=tmp_path)
    assert [pair.mechanism for pair in found.pair] == [LEAVE, LEAVE, "cuts"]
    assert found.pair[0].us == found.pair[0].stock_us
    assert "whole steps: all_gather of" in found.pair[0].why
    assert found.step is not None
    assert len(found.step.falsified) == 1
    assert "ms slower (2 sigma are" in found.step.falsified[0]
    assert found.step.after_us == pytest.approx(found.step.before_us * 0.95, rel=0.01)
    assert script.runs[1] == ["stock", "tuned"]
    assert [row.name for row in found.step.variants][-2:] == ["stock, run 2", "tuned, run 2"]


def test_when_nothing_is_left_steps_are_those_of_stock(tmp_path: Path) -> None:
    """Both choices are slower: no further run, after is before."""
    script = PlantedScript({"all_gather": 80.0, "all_gather_matmul": 60.0})
    found = confirm(tuned(), script.compare, folder=tmp_path)
    assert (chosen(found), len(script.runs)) == ([], 1)
    assert found.step is not None
    assert found.step.after_us == found.step.before_us


def test_without_a_choice_nothing_is_run(tmp_path: Path) -> None:
    script = PlantedScript({})
    left = tuple(replace(pair, mechanism=LEAVE) for pair in tuned().pair)
    found = confirm(replace(tuned(), pair=left), script.compare, folder=tmp_path)
    assert (found.step, script.runs) == (None, [])
    assert "nothing to confirm" in found.notes[0]


def test_all_are_taken_back_if_none_is_to_blame() -> None:
    """Together they are slower than stock, apart each one seems to help: two that only harm together."""
    names: dict[Choice, str] = {(0,): "without 0", (2,): "without 2"}
    times = {
        "stock": [100.0, 101.0, 99.0],
        "tuned": [110.0, 111.0, 109.0],
        "without 0": [112.0, 113.0, 111.0],
        "without 2": [111.0, 112.0, 110.0],
    }
    found = falsified(tuned(), times, names)
    assert sorted(found) == [(0,), (2,)]
    assert all("no single choice is to blame" in why for why in found.values())


def test_the_only_choice_is_compared_with_stock(tmp_path: Path) -> None:
    """Without it steps are those of stock: two variants say it, and it is named."""
    script = PlantedScript({"all_gather": 80.0})
    found = confirm(replace(tuned(), pair=tuned().pair[:1]), script.compare, folder=tmp_path)
    assert script.runs == [["stock", "tuned"]]
    assert found.step is not None
    assert "than a step without it" in found.step.falsified[0]
    assert "train without counterpoint.overlap" in found.notes[0]


def test_what_is_never_confirmed_is_left(tmp_path: Path) -> None:
    """Each run blames another one of five choices: after three all are left."""
    first = tuned().pair[0]
    pairs = tuple(replace(first, bytes_per_rank=1 << 20 + i) for i in range(5))
    blamed = iter(range(5))

    def compare(variants: Sequence[ScriptVariant]) -> dict[str, list[float]]:
        times = {variant.name: [100.0, 101.0, 99.0] for variant in variants}
        left_out = [name for name in times if "without" in name]
        times[left_out[next(blamed) % len(left_out)]] = [80.0, 81.0, 79.0]
        return times

    found = confirm(replace(tuned(), pair=pairs), compare, folder=tmp_path)
    assert chosen(found) == []
    assert found.step is not None
    assert sum("have confirmed no choices" in why for why in found.step.falsified) == 2


def test_what_is_within_two_sigma_is_kept() -> None:
    """A variant that is slower by less than the noise is no proof."""
    times = {"stock": [100.0, 90.0, 112.0], "tuned": [101.0, 99.0, 103.0], "w": [100.0, 101.0, 99.0]}
    assert falsified(tuned(), times, {(0,): "w"}) == {}


def test_rounds_are_compared_not_medians() -> None:
    """A drift over rounds, ten times the difference, does not hide it."""
    slow = [100.0 + 10 * r for r in range(9)]
    us, sigma = difference([each + 2 for each in slow], slow)
    assert (us, sigma) == (2.0, 0.0)


def test_one_call_beside_two_matmuls_is_one_choice() -> None:
    """The same all_gather in forward and backward is left out as a whole; a matmul is told by its shape."""
    gather, _, matmul = tuned().pair
    pairs = (gather, replace(gather, compute="gemm 1x1x1"), matmul, replace(matmul, compute="gemm 2x2x2"))
    both = replace(tuned(), pair=pairs)
    assert chosen(both) == [(0, 1), (2,), (3,)]
    assert len({name_of(both, choice) for choice in chosen(both)}) == 3
