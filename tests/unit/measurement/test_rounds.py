"""From trials to rows: interleaved rounds, late trials, times of all ranks, and the ratios of a row, by hand."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.measurement.gpu_usage import Observed
from counterpoint.measurement.rounds import play_rounds, row, time_of, timing, why_late
from counterpoint.measurement.trial import Trial
from counterpoint.pair.together import overlap, pair_class
from counterpoint.records.measurement import Row, Scenario

TIMES = st.floats(min_value=1.0, max_value=1e6)


@pytest.mark.parametrize(
    ("compute_us", "comm_us", "both_us", "order", "head_us", "hidden"),
    [
        (1410.336, 359.584, 1732.224, "together", 0.0, 0.10483),  # rows measured on 8 x H200, 2026-11-20
        (1410.336, 359.584, 1632.416, "comm_first", 100.0, 0.66050),
        (1410.336, 359.584, 1716.672, "compute_first", 100.0, 0.33345),
    ],
)
def test_hidden_of_measured_rows(
    compute_us: float, comm_us: float, both_us: float, order: str, head_us: float, hidden: float
) -> None:
    """The formula gives what was published for these times."""
    found = overlap(compute_us=compute_us, comm_us=comm_us, both_us=both_us, order=order, head_us=head_us)  # type: ignore[arg-type]
    assert found.hidden == pytest.approx(hidden, abs=1e-5)


@given(TIMES, TIMES)
def test_perfect_overlap_hides_everything(compute_us: float, comm_us: float) -> None:
    """T = max(T_g, T_c) is hidden = 1 and all of the ideal speed-up."""
    both = max(compute_us, comm_us)
    found = overlap(compute_us=compute_us, comm_us=comm_us, both_us=both, order="together", head_us=0.0)
    assert [found.hidden, found.ideal_fraction] == pytest.approx([1.0, 1.0])


@given(TIMES, TIMES, st.floats(min_value=0.5, max_value=3.0))
def test_ideal_fraction_is_conccls(compute_us: float, comm_us: float, slower: float) -> None:
    """hidden * ideal / T equals (serial / T - 1) / (serial / ideal - 1)."""
    both = slower * max(compute_us, comm_us)
    found = overlap(compute_us=compute_us, comm_us=comm_us, both_us=both, order="together", head_us=0.0)
    expected = (found.serial_us / both - 1) / (found.serial_us / found.ideal_us - 1)
    assert found.ideal_fraction == pytest.approx(expected, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize(
    ("compute_us", "comm_us", "expected"),
    [(116, 100, "G-long"), (114, 100, "GC-equal"), (100, 114, "GC-equal"), (100, 116, "C-long")],
)
def test_class_border_is_15_percent(compute_us: float, comm_us: float, expected: str) -> None:
    """More than 15 % longer on one side."""
    assert pair_class(compute_us, comm_us) == expected


def test_timing_is_of_the_slowest_rank_in_all_and_in_each_round() -> None:
    """Median, percentiles and number of the rank with the largest median, not the largest outlier."""
    found = timing([[1.0, 2.0, 99.0], [3.0, 4.0, 5.0]])
    assert (found.us, found.rank, found.per_rank_us) == (4.0, 1, (2.0, 4.0))
    assert [found.p10_us, found.p90_us] == pytest.approx([3.2, 4.8])
    # of another rank in the last one; a round that does not count has none
    found = timing([[1.0, 2.0, 99.0], [3.0, 4.0, 5.0]], [True, False, True])
    assert (found.rounds_us, found.runs) == ((3.0, None, 99.0), 2)


class TwoRanks:
    """Stands for a session whose other rank saw the same, but late where `late` says so."""

    def __init__(self, late: set[int]) -> None:
        self.late = late

    def gather(self, mine: Any) -> list[Any]:
        if isinstance(mine, bool):
            return [mine, mine]
        other = {
            key: [Trial(compute_end=trial.compute_end, late=index in self.late) for index, trial in enumerate(trials)]
            for key, trials in mine.items()
        }
        return [mine, other]


def play(late: set[int], rounds: int, until_s: float = math.inf) -> tuple[Any, list[str]]:
    """Samples of cases a and b, and the order in which trials ran."""
    ran: list[str] = []

    def trial(key: str) -> Trial:
        ran.append(key)
        return Trial(compute_end=float(len(ran)))

    cases = {key: (lambda key=key: trial(key)) for key in "abcd"}
    return play_rounds(TwoRanks(late), cases, rounds=rounds, dropped=2, seed=1, until_s=until_s), ran  # type: ignore[arg-type]


def test_every_round_runs_every_case_once_in_an_order_of_its_own() -> None:
    _, ran = play(set(), 6)
    rounds = [tuple(ran[start : start + 4]) for start in range(0, 24, 4)]
    assert all(sorted(one) == list("abcd") for one in rounds)
    assert len(set(rounds)) > 1


@pytest.mark.parametrize(("until_s", "rounds"), [(0.0, 12), (math.inf, 30)])
def test_rounds_end_with_the_time_for_them(until_s: float, rounds: int) -> None:
    """But twelve are always played."""
    _, ran = play(set(), 30, until_s)
    assert len(ran) == 4 * rounds


def test_first_rounds_are_dropped() -> None:
    """Two of six; the trials of the first two rounds were numbers 1 to 8."""
    samples, _ = play(set(), 6)
    assert [len(rank) for rank in samples["a"]] == [4, 4]
    assert min(trial.compute_end for trial in samples["a"][0]) > 8


def test_a_late_trial_counts_on_no_rank() -> None:
    """The other rank was late in round 1: the time has four of five rounds, and says which one is missing.

    Among enough others it does not count, and nothing is said.
    """
    samples, _ = play({1}, 7)
    time = time_of(samples["a"], lambda trial: trial.compute_end)
    assert (time.runs, [us is None for us in time.rounds_us]) == (4, [False, True, False, False, False])
    assert why_late(*samples.values()) is None


def test_too_few_good_trials_are_said() -> None:
    """All count, so that a suite of hours goes on; the text says what to do."""
    samples, _ = play({0, 1}, 6)
    assert time_of(samples["a"], lambda trial: trial.compute_end).runs == 4
    assert why_late(samples["a"]) == (
        "the host queued too slowly in 2 of 4 rounds; free its cores or measure larger operations"
    )


SCENARIO = Scenario(name="s", workload="gemm 1x1x1", collective="all_gather", mechanisms=("slow", "fast"))
COMPUTE = Trial(compute_start=0.0, compute_end=100.0)
TRIALS = {
    ("", "compute_alone"): COMPUTE,
    ("slow", "compute_alone"): COMPUTE,
    ("slow", "comm_alone"): Trial(comm_start=5.0, comm_end=85.0),
    ("fast", "comm_alone"): Trial(comm_start=0.0, comm_end=50.0),
    ("slow", "serial"): Trial(compute_start=0.0, compute_end=100.0, comm_start=100.0, comm_end=180.0),
    ("slow", "comm_first"): Trial(compute_start=20.0, compute_end=145.0, comm_start=0.0, comm_end=100.0),
}
LATE = Trial(compute_start=0.0, compute_end=1.0, comm_start=0.0, comm_end=1.0, late=True)


def made(late: tuple[str, str] | None = None, marked: str | None = None) -> Row:
    """The row of `slow`, comm first, on two ranks that saw the same; `late` names a case whose last was late."""
    samples = {key: [[trial, trial, LATE if key == late else trial]] * 2 for key, trial in TRIALS.items()}
    return row(
        SCENARIO, mechanism="slow", order="comm_first", size_bytes=1 << 20, flops=10**9, peak_tflops=None,
        samples=samples, best=("fast", 50.0), observed=Observed(marked=marked), device=None,
    )  # fmt: skip


def test_hidden_counts_from_the_fastest_mechanism_and_what_a_side_kept_from_its_own() -> None:
    """Serial is 100 + 50 + 20; 145 together; the shorter side is 50."""
    assert [made().head_start_us, made().together.us, made().hidden] == pytest.approx([20.0, 145.0, 0.5])
    # 100 of 125 µs, 80 of 100 µs
    assert [made().compute_kept, made().comm_kept] == pytest.approx([0.8, 0.8])


@pytest.mark.parametrize("case", [("", "compute_alone"), ("fast", "comm_alone"), ("slow", "comm_first")])
def test_a_row_of_late_trials_is_marked(case: tuple[str, str]) -> None:
    """Whichever of the times behind `hidden` they spoil, and beside another reason."""
    assert str(made(case).marked).startswith("the host queued too slowly in 1 of 3 rounds")
    assert str(made(case, "no effect").marked).startswith("no effect; the host queued")
