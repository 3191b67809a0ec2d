"""What `tune` prints: choices first, then what stays and why; names are never read as markup."""

from __future__ import annotations

import io

from msgspec.structs import replace
from rich.console import Console

from counterpoint.records.tuning import LEAVE, Tuned
from counterpoint.rendering.tuning_terminal import render_tuned, verdict
from tests.support.example_tuned import example_tuned


def printed(tuned: Tuned) -> str:
    console = Console(file=io.StringIO(), width=160)
    render_tuned(tuned, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_verdict_counts_choices_and_what_they_save() -> None:
    """12 calls of 67 µs and one of 180; the pair without times adds nothing to what it was."""
    assert verdict(example_tuned()) == "2 of 3 pairs get another mechanism: 0.98 ms of 20.00 ms less by pairs alone."


def test_without_a_choice_it_says_so() -> None:
    stay = tuple(replace(pair, mechanism=LEAVE) for pair in example_tuned().pair)
    assert verdict(replace(example_tuned(), pair=stay)) == "None of 3 pairs gets another mechanism."


def test_choices_come_with_times_and_others_with_the_reason() -> None:
    """And what was marked is named once, with why."""
    text = printed(example_tuned())
    row = next(line for line in text.splitlines() if "compute first" in line)
    assert row.split()[-7:] == ["zero_sm", "1.60", "0.00", "1.67", "4.0%", "nccl+max_ctas=8", "1.64"]
    assert "· all_reduce 64.0 KiB | gemm 1024x1024x1024: nothing is faster by 2 sigma" in text
    assert "· nccl+max_ctas=8 was never chosen where it is marked; all_gather 128.0 MiB" in text
    assert "· one pair of the trace has no shapes" in text


def test_names_are_text() -> None:
    """A file that somebody else wrote can neither style the terminal nor send it control characters."""
    pair = replace(example_tuned().pair[1], operation="[red]all\x1b[31m", why="[bold]\x07why")
    text = printed(replace(example_tuned(), pair=(pair,)))
    assert "[red]all\\x1b[31m" in text
    assert "[bold]\\x07why" in text
