"""Interleaved rounds: order, dropping, and what happens to trials that came late."""

from __future__ import annotations

from typing import Any

from counterpoint.measurement.rows import play_rounds, time_of, why_late
from counterpoint.measurement.trial import Trial


class TwoRanks:
    """Stands for a session whose other rank saw the same, but late where `late` says so."""

    def __init__(self, late: set[int]) -> None:
        self.late = late

    def gather(self, mine: dict[str, list[Trial]]) -> list[dict[str, list[Trial]]]:
        other = {
            key: [Trial(compute_end=trial.compute_end, late=index in self.late) for index, trial in enumerate(trials)]
            for key, trials in mine.items()
        }
        return [mine, other]


def play(late: set[int], rounds: int) -> tuple[Any, list[str]]:
    """Samples of cases a and b, and the order in which trials ran."""
    ran: list[str] = []

    def trial(key: str) -> Trial:
        ran.append(key)
        return Trial(compute_end=float(len(ran)))

    cases = {key: (lambda key=key: trial(key)) for key in "abcd"}
    return play_rounds(TwoRanks(late), cases, rounds=rounds, dropped=2, seed=1), ran  # type: ignore[arg-type]


def test_every_round_runs_every_case_once() -> None:
    """Interleaved, not one case after the other."""
    _, ran = play(set(), 6)
    assert all(sorted(ran[start : start + 4]) == list("abcd") for start in range(0, 24, 4))


def test_rounds_differ_in_order() -> None:
    """No case always follows the same one."""
    _, ran = play(set(), 6)
    assert len({tuple(ran[start : start + 4]) for start in range(0, 24, 4)}) > 1


def test_first_rounds_are_dropped() -> None:
    """Two of six; the trials of the first two rounds were numbers 1 to 8."""
    samples, _ = play(set(), 6)
    assert [len(rank) for rank in samples["a"]] == [4, 4]
    assert min(trial.compute_end for trial in samples["a"][0]) > 8


def test_a_late_trial_counts_on_no_rank() -> None:
    """The other rank was late in round 1: the time has four of five rounds, and says which one is missing."""
    samples, _ = play({1}, 7)
    time = time_of(samples["a"], lambda trial: trial.compute_end)
    assert (time.runs, [us is None for us in time.rounds_us]) == (4, [False, True, False, False, False])


def test_samples_without_late_trials_may_be_believed() -> None:
    """One late trial among enough others does not count, and nothing is said."""
    samples, _ = play({1}, 7)
    assert why_late(*samples.values()) is None


def test_too_few_good_trials_are_said() -> None:
    """All count, so that a suite of hours goes on; the text says what to do."""
    samples, _ = play({0, 1}, 6)
    assert time_of(samples["a"], lambda trial: trial.compute_end).runs == 4
    assert why_late(samples["a"]) == (
        "the host queued too slowly in 2 of 4 rounds; free its cores or measure larger operations"
    )
