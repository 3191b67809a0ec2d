"""What is made of the reports of the ranks: what was the same, what differed, and how it is said."""

import io
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from rich.console import Console

from counterpoint.records.rehearsal import SCHEMA, RankReport, Rehearsal
from counterpoint.rehearsal import api
from counterpoint.rendering.rehearsal_terminal import render_rehearsal
from tests.support.example_tuned import HOSTILE


@dataclass
class Left:
    """What a rank left: the same on all ranks unless a test says otherwise."""

    steps: int = 3
    peak_bytes: int = 0
    calls: dict[str, int] = field(default_factory=lambda: {"0": 9})
    members: dict[str, tuple[int, ...]] = field(default_factory=lambda: {"0": (0, 1, 2, 3)})
    reports: dict[str, str] = field(default_factory=dict)


def rehearsal(*ranks: Left | None, gpus: tuple[str, ...] = (), hosts: int = 1) -> Rehearsal:
    """The answer when these ranks left that; None: one left nothing."""
    reports = [
        RankReport(
            rank=rank, steps=left.steps, peak_bytes=left.peak_bytes, reports=left.reports, calls=left.calls,
            members=left.members,
        )
        for rank, left in enumerate(ranks)
        if left is not None
    ]  # fmt: skip
    return api._rehearsal("torchrun --nproc-per-node 4 train.py", len(ranks), hosts, gpus, reports)


def printed(found: Rehearsal) -> str:
    out = io.StringIO()
    render_rehearsal(found, Console(file=out, soft_wrap=True))
    return out.getvalue()


def test_equal_ranks_are_told_once() -> None:
    """One report of all, no difference; the verdict says what a rehearsal cannot show."""
    found = rehearsal(*[Left(reports={"overlap(Llama)": "all_gather  zero_sm  12"})] * 4)
    assert [(report.ranks, report.text) for report in found.reports] == [((0, 1, 2, 3), "all_gather  zero_sm  12")]
    assert (found.differences, found.missing_ranks, found.steps) == ((), (), 3)
    said = "all ranks came to their end: values and order hold, times do not: 4 ranks shared the cores of this machine."
    assert found.verdict == said
    assert printed(found).splitlines() == [
        said, "4 ranks on CPUs, 3 optimizer steps", "Different between ranks: nothing.", "",
        "overlap(Llama) on ranks 0-3:", "all_gather  zero_sm  12",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("last", "said"),
    [
        (Left(steps=2), "optimizer steps: 3 on ranks 0-2 and 2 on rank 3"),
        (Left(calls={"0": 8}), "calls of torch's group 0, ranks 0-3: 9 on ranks 0-2 and 8 on rank 3"),
        (Left(reports={"overlap(Llama)": "gathers 3"}), "overlap(Llama): 2 different reports"),
    ],
)
def test_what_differs_is_a_sentence(last: Left, said: str) -> None:
    found = rehearsal(Left(), Left(), Left(), last)
    assert found.differences == (said,)
    assert f"Different between ranks: {said}\n" in printed(found)


def test_groups_of_one_name_are_told_apart_by_their_ranks() -> None:
    """As stages of a pipeline, each of which has a group of its own: what these call may differ."""
    first, second = {"members": {"dp": (0, 1)}}, {"members": {"dp": (2, 3)}}
    kept: list[dict[str, Any]] = [first, first, second, second]
    ranks = [Left(calls={"dp": calls}, **members) for calls, members in zip((5, 5, 7, 7), kept, strict=True)]
    assert rehearsal(*ranks).differences == ()
    ranks[3].calls["dp"] = 6
    assert rehearsal(*ranks).differences == ("calls of torch's group dp, ranks 2-3: 7 on rank 2 and 6 on rank 3",)


def test_reports_of_some_ranks_are_told_with_those_that_lack_them() -> None:
    found = rehearsal(Left(reports={"overlap(Llama)": "gathers 3"}), Left())
    assert [(report.ranks, report.text) for report in found.reports] == [((0,), "gathers 3"), ((1,), "")]
    assert "overlap(Llama) on rank 1:\nno report\n" in printed(found)


def test_ranks_that_left_nothing_are_named() -> None:
    found = rehearsal(Left(), None, Left(), None)
    assert (found.missing_ranks, found.verdict[:27]) == ((1, 3), "2 of 4 ranks left no report")
    text = printed(found)
    assert "Nothing is known of ranks 1, 3: the script ended itself" in text
    assert "Different between other ranks: nothing." in text


def test_nothing_is_claimed_of_a_script_that_left_nothing() -> None:
    text = printed(rehearsal(None, None))
    assert len(text.splitlines()) == 2
    assert "Nothing is known of ranks 0-1" in text


def test_a_script_without_counterpoint_is_told_so() -> None:
    assert "counterpoint replaced nothing" in printed(rehearsal(Left(), Left()))


def test_gpus_hosts_and_memory_are_told() -> None:
    """The memory of the rank that needed most."""
    ranks = [Left(peak_bytes=bytes_) for bytes_ in (1 << 30, 5 << 29)]
    found = rehearsal(*ranks, gpus=("NVIDIA H200",), hosts=2)
    assert (found.device, found.peak_bytes) == ("cuda", 5 << 29)
    assert "2 ranks shared 1 GPU." in found.verdict
    said = (
        "2 ranks counted as 2 hosts on 1 × NVIDIA H200, 3 optimizer steps, at most 2.5 GiB reserved by torch on a rank"
    )
    assert said in printed(found)


def test_the_answer_is_read_as_it_is_written() -> None:
    found = rehearsal(Left(reports={"a": "b"}), None)
    written = msgspec.json.encode(found)
    assert msgspec.json.decode(written)["schema"] == SCHEMA == "counterpoint.rehearsal/1"
    assert msgspec.json.decode(written, type=Rehearsal) == found


def test_hostile_names_do_nothing_to_the_terminal() -> None:
    """Names of models and groups, and reports, are text: no control characters, no markup."""
    text = printed(rehearsal(Left(reports={f"{HOSTILE}[bold]": f"{HOSTILE}[red]"}, calls={HOSTILE: 3},
                                  members={HOSTILE: (0, 1)}), Left()))  # fmt: skip
    assert not {"\x1b", "\r", "\u2028"} & set(text)
    assert "[bold]" in text
    assert "[red]" in text
