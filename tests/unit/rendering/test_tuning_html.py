"""The page of `counterpoint tune --html`: what is shown where, and that nothing on it is interpreted."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

import pytest
from msgspec.structs import replace

from counterpoint.records.tuning import LEAVE, Tuned, TunedPair
from counterpoint.rendering.tuning_html import MAX_PAIRS, facts, headline, shown_pairs, variant_bars, write_tuning_page
from counterpoint.rendering.tuning_terminal import verdict
from tests.support.example_tuned import example_tuned, hostile_tuned, tuned_pair


def page(folder: Path, tuned: Tuned) -> str:
    """The text of the page, with tags."""
    write_tuning_page(folder / "tuning.html", tuned)
    return unescape((folder / "tuning.html").read_text("utf-8"))


def tuned(*pairs: TunedPair) -> Tuned:
    """A tuning that no step confirmed."""
    return replace(example_tuned(), step=None, notes=(), pair=pairs)


def test_the_headline_is_what_whole_steps_gained() -> None:
    assert headline(example_tuned()) == "A step takes 138.90 ms instead of 150.10 ms: -7.5%"


def test_without_steps_the_headline_is_that_of_the_terminal() -> None:
    """Times of pairs are no times of steps, and that leaving all as it is can be right, it says too."""
    found = tuned(tuned_pair("zero_sm", calls=20), tuned_pair(LEAVE))
    assert headline(found) == verdict(found)


def test_pairs_that_save_most_in_a_step_come_first() -> None:
    """Calls count, and what is left comes last; numbers are those of the file."""
    pairs = tuned_pair(LEAVE), tuned_pair("zero_sm", us=10.0), tuned_pair("nccl+max_ctas=8", calls=30)
    assert [(one.number, one.pair.saved_us) for one in shown_pairs(pairs)] == [(3, 300.0), (2, 90.0), (1, 0.0)]


def test_a_bar_ends_in_two_standard_errors() -> None:
    """The longest time and its error fill the width; what is left has one bar."""
    (one,) = shown_pairs((tuned_pair("zero_sm", us=50.0, stock_us=99.0),))
    assert [(bar.name, round(bar.width, 6), round(bar.sigma_width, 6)) for bar in one.bars] == [
        ("nccl", 98.0, 2.0), ("zero_sm", 49.0, 2.0)
    ]  # fmt: skip
    assert len(shown_pairs((tuned_pair(LEAVE),))[0].bars) == 1


def test_an_error_larger_than_the_time_stays_on_the_page() -> None:
    (one,) = shown_pairs((tuned_pair(LEAVE, stock_us=1.0, stock_sigma_us=3.0),))
    assert (one.bars[0].width, one.bars[0].sigma_width) == (0.0, 100.0)


def test_times_of_zero_have_bars_of_zero(tmp_path: Path) -> None:
    """A file that a person wrote may have them; nothing divides by them."""
    zero = tuned_pair("zero_sm", us=0.0, stock_us=0.0, sigma_us=0.0, stock_sigma_us=0.0)
    assert {bar.width for bar in shown_pairs((zero,))[0].bars} == {0.0}
    assert "zero_sm" in page(tmp_path, tuned(zero))


def test_every_variant_of_the_step_has_a_bar() -> None:
    step = example_tuned().step
    assert step is not None
    assert [bar.name for bar in variant_bars(step)] == ["stock", "tuned"]


def test_what_was_tried_is_shown_fastest_first_and_marked_ones_last() -> None:
    """A marked time is not believed, however short."""
    assert [each.mechanism for each in shown_pairs(example_tuned().pair)[0].tried] == [
        "zero_sm", "nccl", "nccl+max_ctas=8"
    ]  # fmt: skip


def test_what_lost_is_shown_with_how_much(tmp_path: Path) -> None:
    """Stock took 4.2 % more than the choice."""
    text = page(tmp_path, example_tuned())
    row = re.search(r'<tr><th scope="row" class="text">nccl</th>.*?</tr>', text)
    assert row is not None
    assert re.findall(r"<td[^>]*>(.*?)</td>", row[0]) == ["1,667.0", "4.0", "+0.0%", "+4.2%", "", "10", ""]


def test_falsified_choices_and_what_was_not_measured_are_shown(tmp_path: Path) -> None:
    text = page(tmp_path, example_tuned())
    assert "<li>all_reduce of 65536 bytes by zero_sm: 0.4 % slower</li>" in text
    assert "<li>Pair 1 by nccl+max_ctas=8 does not count: 8 CTAs without it</li>" in text
    assert "<li>one pair of the trace has no shapes</li>" in text


def test_a_page_without_steps_says_that_nothing_confirms_it(tmp_path: Path) -> None:
    text = page(tmp_path, tuned(tuned_pair("zero_sm")))
    assert "nothing confirms that what pairs save alone, a step saves" in text
    assert 'id="steps"' not in text


def test_facts_hold_what_the_file_knows() -> None:
    assert facts(shown_pairs(example_tuned().pair)[0]) == (
        "In layers.*; launched compute first; compute alone 1.50 ms; "
        "communication alone, by the fastest mechanism 0.35 ms; next best nccl+max_ctas=8"
    )
    assert facts(shown_pairs((tuned_pair(LEAVE),))[0]) == "Launched in any order"


def test_a_page_of_many_pairs_ends(tmp_path: Path) -> None:
    """And says where the others are."""
    text = page(tmp_path, tuned(*[tuned_pair("zero_sm")] * (MAX_PAIRS + 1)))
    assert text.count('<article class="pair"') == MAX_PAIRS
    assert f"The first {MAX_PAIRS} of {MAX_PAIRS + 1} pairs; the file holds all." in text


def test_a_hostile_name_ends_no_script(tmp_path: Path) -> None:
    """The two scripts are ours; the name appears, escaped, and no attribute holds it."""
    write_tuning_page(tmp_path / "hostile.html", hostile_tuned())
    text = (tmp_path / "hostile.html").read_text("utf-8")
    assert (len(re.findall(r"<script[ >]", text)), "alert(1)" in text, "\x1b" in text) == (2, True, False)
    assert not re.search(r'="[^"]*pwned', text)


@pytest.mark.parametrize("shown", [example_tuned(), hostile_tuned()], ids=["usual", "hostile"])
def test_the_page_is_small_and_names_no_other_host(tmp_path: Path, shown: Tuned) -> None:
    """Nothing is drawn by a script, so the plotting library stays out."""
    text = page(tmp_path, shown)
    assert len(text) < 60_000
    assert not re.search(r"https?://", text)
