"""What `tune` prints and draws: choices first, then what stays and why; nothing of a file is interpreted."""

import io
from html import unescape
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.console import Console

from counterpoint.records.tuning import LEAVE, Tuned, TunedPair
from counterpoint.rendering.table import LengthBar, Table
from counterpoint.rendering.tuning_tables import (
    MAX_PAIRS,
    headline,
    pair_tables,
    render_tuned,
    verdict,
    write_tuning_page,
)
from tests.support.example_tuned import example_tuned, hostile_tuned, tuned_pair


def printed(tuned: Tuned) -> str:
    console = Console(file=io.StringIO(), width=160)
    render_tuned(tuned, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def page(folder: Path, tuned: Tuned) -> str:
    write_tuning_page(folder / "tuning.html", tuned)
    return unescape((folder / "tuning.html").read_text("utf-8"))


def tuned(*pairs: TunedPair) -> Tuned:
    """A tuning that no step confirmed."""
    return replace(example_tuned(), step=None, notes=(), pair=pairs)


def bars(table: Table) -> list[list[float]]:
    cells = [row.cells[1] for row in table.filled()]
    return [[round(part.share, 6) for part in cell.parts] for cell in cells if isinstance(cell, LengthBar)]


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        (
            example_tuned().pair,  # 12 calls of 67 µs and one of 180; the pair without times adds nothing to the sum
            "2 of 3 pairs get another mechanism: 0.98 ms of 20.00 ms less by pairs alone.",
        ),
        ((tuned_pair(LEAVE),) * 3, "None of 3 pairs gets another mechanism."),
    ],
)
def test_the_verdict_counts_choices_and_what_they_save(pairs: tuple[TunedPair, ...], said: str) -> None:
    """It is the headline where no step was measured: times of pairs are no times of steps."""
    found = tuned(*pairs)
    assert (verdict(found), headline(found)) == (said, said)


def test_the_headline_is_what_whole_steps_gained() -> None:
    assert headline(example_tuned()) == "A step takes 138.90 ms instead of 150.10 ms: -7.5%"


@pytest.mark.parametrize(
    "line",
    [
        "A step takes 138.90 ms instead of 150.10 ms: -7.5%",
        "tuned ██████████████████████ 138.90 0.18 10",
        "· taken back: all_reduce of 65536 bytes by zero_sm: 0.4 % slower",
        "all_gather 128.0 MiB | gemm 8192x8192x8192, compute first 12 zero_sm 1.60 0.00 1.67 4.0% nccl+max_ctas=8 1.64",
        "· all_reduce 64.0 KiB | gemm 1024x1024x1024: nothing is faster by 2 sigma",
        "· nccl+max_ctas=8 was never chosen where it is marked; all_gather 128.0 MiB | gemm 8192x8192x8192, compute "
        "first: 8 CTAs without it",
        "· one pair of the trace has no shapes",
    ],
)
def test_lines_of_a_terminal(line: str) -> None:
    assert line in [" ".join(each.split()) for each in printed(example_tuned()).splitlines()]


def test_pairs_that_save_most_in_a_step_come_first() -> None:
    """Calls count, and what is left comes last; numbers are those of the file."""
    pairs = tuned_pair(LEAVE), tuned_pair("zero_sm", us=10.0), tuned_pair("nccl+max_ctas=8", calls=30)
    assert [table.title[:2] for table in pair_tables(pairs)] == ["3.", "2.", "1."]


@pytest.mark.parametrize(
    ("pair", "shares"),
    [
        (tuned_pair("zero_sm", us=50.0, stock_us=99.0), [[0.49, 0.02], [0.98, 0.02]]),
        (tuned_pair(LEAVE, stock_us=1.0, stock_sigma_us=3.0), [[0.0, 1.0]]),
        (tuned_pair("zero_sm", us=0.0, stock_us=0.0, sigma_us=0.0, stock_sigma_us=0.0), [[0.0, 0.0]] * 2),
    ],
    ids=["the longest with its error fills the width", "an error larger than the time", "times of zero"],
)
def test_a_bar_ends_in_two_standard_errors(pair: TunedPair, shares: list[list[float]]) -> None:
    assert bars(pair_tables((pair,))[0]) == shares


def test_what_was_tried_is_shown_fastest_first_and_marked_ones_last(tmp_path: Path) -> None:
    """A marked time is not believed, however short; what lost is shown with how much: stock took 4.2 % more."""
    first = pair_tables(example_tuned().pair)[0]
    assert [row.cells[0] for row in first.filled()] == ["zero_sm", "nccl", "nccl+max_ctas=8"]
    assert first.lines()[1] == ["nccl", "", "1,667.0", "4.0", "+0.0%", "+4.2%", "", "10", ""]
    assert first.filled()[2].tone == "marked"
    assert first.notes[1] == (
        "In layers.*; launched compute first; compute alone 1.50 ms; "
        "communication alone, by the fastest mechanism 0.35 ms; next best nccl+max_ctas=8."
    )
    assert pair_tables((tuned_pair(LEAVE),))[0].notes[1] == "Launched in any order."
    assert "8 CTAs without it" in page(tmp_path, example_tuned())


def test_a_page_says_what_nothing_confirms_and_where_more_pairs_are(tmp_path: Path) -> None:
    text = page(tmp_path, tuned(tuned_pair("zero_sm")))
    assert "nothing confirms that what pairs save alone, a step saves" in text
    assert "Whole steps</h2>" not in text
    # and says where the others are; each can be unfolded
    text = page(tmp_path, tuned(*[tuned_pair("zero_sm")] * (MAX_PAIRS + 1)))
    assert text.count("<details>") == MAX_PAIRS
    assert f"The first {MAX_PAIRS} of {MAX_PAIRS + 1} pairs; the file holds all." in text


def test_names_are_text(tmp_path: Path) -> None:
    """A file that somebody else wrote neither styles the terminal, nor is left out of the page."""
    pair = replace(example_tuned().pair[1], operation="[red]all\x1b[31m", why="[bold]\x07why")
    text = printed(replace(example_tuned(), pair=(pair,)))
    assert ("[red]all\\x1b[31m" in text, "[bold]\\x07why" in text) == (True, True)
    assert "alert(1)" in page(tmp_path, hostile_tuned())
