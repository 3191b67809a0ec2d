"""The terminal summary: order, numbers, folding, and inert names."""

import io

import msgspec
import pytest
from rich.console import Console

from counterpoint.records.diagnosis import Diagnosis, Idle, IdleCause, TimelineLane
from counterpoint.rendering.diagnosis_terminal import render
from tests.support import example_diagnosis as example
from tests.support.job_builder import diagnosed, op, rank


def printed(diagnosis: Diagnosis, *, width: int = 80, colour: bool = False, verbose: bool = True) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=colour, color_system="256" if colour else None)
    render(diagnosis, console, verbose=verbose)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("verbose", [False, True])
def test_it_ends_with_the_verdict_and_what_to_do(training: Diagnosis, verbose: bool) -> None:
    last = printed(training, verbose=verbose).splitlines()
    at = last.index(training.verdict)
    assert last[at + 2].startswith("What to do")
    assert at > next(i for i, line in enumerate(last) if line.startswith("Where the time goes"))


@pytest.mark.parametrize(
    "table", ["Idle ", "Collectives", "Ranks that make others wait", "Kernels slowed", "What it is worth"]
)
def test_long_tables_are_for_the_verbose(training: Diagnosis, table: str) -> None:
    cause = IdleCause(category="launch", us=900.0, count=3.0, longest_us=400.0, operations=(), functions=())
    idle = Idle(
        idle_us=900.0, explained_us=900.0, causes=(cause,), launches=None, launch_interval_us=None, kernel_us=None
    )
    diagnosis = msgspec.structs.replace(training, idle=idle)

    def headings(verbose: bool) -> list[str]:
        return [line for line in printed(diagnosis, verbose=verbose).splitlines() if line.startswith(table)]

    assert headings(verbose=True)
    assert not headings(verbose=False)


def test_in_short_three_remedies_are_named_and_the_findings_of_others_counted(training: Diagnosis) -> None:
    first, change = training.findings[0], msgspec.structs.replace
    many = change(training, findings=tuple(change(first, advice=f"Do {n}") for n in range(5)))
    short = printed(many, verbose=False)
    assert "\n3. " in short
    assert "\n4. " not in short
    assert "--verbose: 2 more findings" in short


def test_findings_with_one_remedy_are_one_card(training: Diagnosis) -> None:
    """The remedy stands once, with the first of its findings; the costs and titles of the others follow."""
    change = msgspec.structs.replace
    first, second, third = (change(f, remedy=r) for f, r in zip(training.findings, ("a", None, "a"), strict=True))
    text = printed(change(training, findings=(first, second, third)), verbose=False)
    cards = text[text.index("1. ") :].split("\n2. ")
    assert f"also 1.90 ms  {third.title}" in cards[0]
    assert third.advice not in text
    assert second.title in cards[1]


def test_in_short_advice_ends_after_its_first_sentence_and_reasons_after_two_lines(training: Diagnosis) -> None:
    long = msgspec.structs.replace(training.findings[0], advice="Do this (1.5 x). Because.", evidence="seen " * 60)
    text = printed(msgspec.structs.replace(training, findings=(long,)), verbose=False)
    assert "→ Do this (1.5 x)\n   seen" in text  # the remedy comes first
    assert [line[-6:] for line in text.splitlines() if line.startswith("   seen")] == ["n seen", "seen …"]


def test_steps_of_a_few_us_and_the_error_of_the_replay_are_said(training: Diagnosis) -> None:
    totals = msgspec.structs.replace(training.totals, duration_us=0.042 * len(training.steps))
    assert " of 0.042 µs" in printed(msgspec.structs.replace(training, totals=totals))
    wanted = "The unchanged replay takes 91.30 ms where 90.60 ms were measured: an error of +0.8%."
    assert wanted in printed(training, width=120)


@pytest.mark.parametrize(
    "line",
    [
        "   5 ██████████▓▓▓▓▓▓▓▓▒▒▒···    68.9  1.1      9.8    0.4 10.4    73%",  # a step's ms
        "mean ██████████▓▓▓▓▓▓▓▓▒▒▒░░·    68.9  6.8      9.8    0.4  4.7    65%",
        "█ compute alone  ▓ compute + communication  ▒ transfer  ░ wait  = copies  · idle",
        "unchanged                   ████████████████████████ 91.30    1.00×",
        "communication free          ███████████████████      71.20    1.28×",  # over the unchanged replay
        "2. 4.20 ms  GEMMs need a second wave beside NCCL",
        "   → Give the GEMM 108 SMs: cublasSetSmCountTarget(handle, 108), or NCCL 8 CTAs:",
    ],
)
def test_lines_at_80_columns(training: Diagnosis, line: str) -> None:
    assert line in [each.rstrip() for each in printed(training).splitlines()]


def test_it_fits_80_columns_without_escape_sequences(training: Diagnosis) -> None:
    """All but the verdict; no line ends in a space below a finding; bars of equal durations have equal lengths."""
    text = printed(training)
    assert max(len(line) for line in text.splitlines() if line != training.verdict) <= 80
    assert "\x1b" not in text
    assert not [line for line in text.split("What to do")[1].splitlines() if line.endswith(" ")]
    assert {len(line.split()[1]) for line in text.splitlines() if "█▓" in line} == {24}


@pytest.mark.parametrize("colour", [False, True])
def test_a_hostile_name_is_text(hostile: tuple[Diagnosis, list[TimelineLane]], colour: bool) -> None:
    """Its control characters do not reach the terminal, and its markup is printed as it is."""
    text = printed(hostile[0], width=300, colour=colour)
    assert ("\x1b[31m\"quoted'" in text, "[bold]" in text) == (False, True)


def test_more_ranks_than_fit_are_folded_to_the_worst(training: Diagnosis) -> None:
    busy = [msgspec.structs.replace(example.account(rank), compute_us=250_000.0) for rank in range(1, 40)]
    lazy = msgspec.structs.replace(example.account(40), compute_us=100_000.0)
    text = printed(msgspec.structs.replace(training, per_rank=(*busy, lazy)))
    assert "16 of 40 ranks" in text
    assert "\n  40 █" in text


def test_collectives_are_ranked_by_exposed_time(training: Diagnosis) -> None:
    worst = max(training.collectives, key=lambda c: c.exposed_us)
    lines = printed(training).splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith("collective "))
    assert lines[header + 1].startswith(f"{worst.op} #{worst.index} ")


def test_missing_ranks_are_said_once_and_a_diagnosis_without_communication_renders(empty: Diagnosis) -> None:
    text = printed(diagnosed(rank(op("matmul", 0, 100)), world_size=8), width=400)
    assert text.lower().count("no trace") == 1
    assert "no steps found, 1.00 ms in all" in printed(empty)
