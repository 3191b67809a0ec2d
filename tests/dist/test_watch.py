"""`counterpoint.watch` beside trainings of four gloo ranks."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from counterpoint.records.watch import WatchedStep
from tests.dist import watch_programs as programs
from tests.support.ranks import Ranks


def test_a_planted_stall_stands_in_the_log(four_ranks: Ranks, tmp_path: Path) -> None:
    """Rank 0 says within the window who is late and by how much; the exporters say the same, and nothing is left."""
    logged, left = zip(*four_ranks.run(programs.planted_stall, str(tmp_path)), strict=True)
    assert (logged[1:], left) == (([], [], []), ([], [], [], []))
    found = re.fullmatch(r"step 10: \d+ ms, \d+ % hidden, rank 3 late (\d+) ms: .+", *logged[0])
    assert found is not None, logged[0]
    assert int(found[1]) > 0.5e3 * programs.STALL_S
    (record,) = [
        msgspec.json.decode(line, type=WatchedStep) for line in (tmp_path / "watch.jsonl").read_bytes().splitlines()
    ]
    assert (record.line, record.step, record.ranks, record.late_rank) == (logged[0][0], 10, (0, 1, 2, 3), 3)
    gauges = dict(line.rsplit(" ", 1) for line in (tmp_path / "job.prom").read_text().splitlines() if line[0] != "#")
    assert float(gauges["counterpoint_step_seconds"]) == pytest.approx(record.step_us / 1e6)
    assert any(key.startswith('counterpoint_late_seconds{rank="3",cause=') for key in gauges)


def test_a_given_folder_is_left_empty(four_ranks: Ranks, tmp_path: Path) -> None:
    """Ranks of several hosts meet there."""
    answers = four_ranks.run(programs.shared_folder, str(tmp_path), False)
    assert [re.match(r"step 10: \d", line) is not None for line in answers[0][0]] == [True]
    assert {tuple(left) for _, left in answers} == {()}


def test_a_rehearsal_is_watched_under_a_mark(four_ranks: Ranks, tmp_path: Path) -> None:
    """Its ranks share a GPU, whose index LOCAL_RANK is: who is on which host is known all the same; times are not."""
    first, *others = four_ranks.run(programs.shared_folder, str(tmp_path), True)
    assert [line.partition(",")[0].rstrip("0123456789 ms") for line in first[0]] == [
        "step 10 (rehearsed: times do not hold):"
    ]
    assert [lines for lines, _ in others] == [[], [], []]


@pytest.mark.parametrize("step", [4, 9, 10, 11], ids=["between", "recording", "recorded", "diagnosing"])
def test_an_exception_passes(four_ranks: Ranks, tmp_path: Path, step: int) -> None:
    """The training's own failure comes through, wherever the watch is, and leaves no process and no file."""
    for logged, left in four_ranks.run(programs.exception, str(tmp_path), step):
        assert (logged[-1], left) == ("planted", [])
        assert not any("not diagnosed" in line for line in logged)


def test_one_diagnosis_at_a_time(four_ranks: Ranks) -> None:
    """While one is under way the next round is given up in so many words; the end of the watch ends it."""
    first, *others = four_ranks.run(programs.busy)
    assert first == ["step 17: not diagnosed: the diagnosis before is still under way"]
    assert others == [[], [], []]


def test_a_failed_diagnosis_is_one_warning(four_ranks: Ranks) -> None:
    """The training goes on."""
    assert four_ranks.run(programs.broken) == [["step 10: not diagnosed: out of luck"], [], [], []]


@pytest.mark.parametrize(
    ("first", "last", "why"),
    [
        (5, 8, "step 7: not diagnosed: another profiler is in use"),
        (8, 12, "step 8: not diagnosed: another profiler was started"),
    ],
    ids=["before", "during"],
)
def test_another_profiler_comes_first(four_ranks: Ranks, first: int, last: int, why: str) -> None:
    """The training's own profiler sees what it asked for; that rank's round is given up, the others' is not."""
    answers = four_ranks.run(programs.another_profiler, first, last)
    assert answers[1][0] == [why]
    assert answers[1][1] > 0
    assert re.match(r"step 10 \(3 of 4 ranks\): ", *answers[0][0])


def test_one_rank_alone_does_not_hold_up_the_others(two_ranks: Ranks) -> None:
    """A watch on rank 0 only is a mistake that costs no collective."""
    logged = two_ranks.run(programs.only_one_rank)
    assert logged[1] == []
    assert re.match(r"step 10 \(1 of 2 ranks\): ", *logged[0])


def test_steps_are_counted_once(two_ranks: Ranks) -> None:
    """Of two optimizers one counts; who calls `step` is counted by that alone."""
    assert two_ranks.run(programs.own_counts) == [[5, 5, 5], [5, 5, 5]]
