"""What `tune` would choose on pairs that GPUs measured by every mechanism: 4 x H200, results/*.json.gz."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest
import tune_noise
import tune_pairs

RESULTS = Path(__file__).parents[3] / "results"
HELD_OUT = "budget-pairs-4xh200"


@pytest.fixture(name="cases", scope="module")
def cases_fixture() -> list[tune_pairs.Case]:
    return list(tune_pairs.stored_cases(RESULTS / f"{HELD_OUT}.json"))


def test_nine_of_ten_held_out_choices_are_the_best_or_within_two_per_cent(cases: list[tune_pairs.Case]) -> None:
    """Over 11 mechanisms, of which 4 are seen; the mean regret is below 2 %."""
    regrets = [case.regret(case.picked) for case in cases]
    assert len(cases) == 72
    assert fmean(regret <= 0.02 for regret in regrets) >= 0.9
    assert fmean(regrets) <= 0.02


def test_the_choice_beats_every_single_mechanism(cases: list[tune_pairs.Case]) -> None:
    """Mean regret, against the best that one mechanism for all pairs has."""
    names = {name for case in cases for name in case.times}
    single = min(fmean(case.regret(name) for case in cases) for name in names)
    assert fmean(case.regret(case.picked) for case in cases) < single / 2


def test_no_choice_is_slower_than_stock(cases: list[tune_pairs.Case]) -> None:
    assert max(case.against_stock for case in cases) <= 0.0


def test_the_published_table_is_what_the_code_gives(cases: list[tune_pairs.Case]) -> None:
    """The lines of the held-out file, value by value."""
    published = json.loads((RESULTS / "tune-stored-pairs.json").read_text())["rows"]
    mine = [list(line) for line in tune_pairs.table_of(cases)[:-1]]
    assert [row for row in published if row[0].startswith(HELD_OUT)] == mine


def test_the_published_draws_are_those_that_the_code_makes() -> None:
    """One noisy measurement decides, its truth judges: the lines of the smallest file, value by value."""
    published = json.loads((RESULTS / "tune-noise.json").read_text())
    pairs = list(tune_noise.noisy_pairs(RESULTS / "forum-4xh200.json"))
    found = tune_noise.judged_pairs(pairs, 200, published["seed"])
    mine = [list(line) for line in tune_noise.lines_of("forum-4xh200", len(pairs), 200, found)]
    assert [row for row in published["rows"] if row[0] == "forum-4xh200"] == mine


def test_a_noisy_measurement_is_enough() -> None:
    """Of the held-out file: nine of ten draws within 2 %, and none 2 sigma slower than stock."""
    pairs = list(tune_noise.noisy_pairs(RESULTS / f"{HELD_OUT}.json"))
    for judged in tune_noise.judged_pairs(pairs, 5, 0).values():
        assert fmean(each.regret <= 0.02 for each in judged) >= 0.9
        assert fmean(each.regret for each in judged) <= 0.02
        assert not any(each.much_slower for each in judged)
