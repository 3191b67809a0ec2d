"""From trials to a row: which times it is made of, and when it must not be believed."""

from __future__ import annotations

import pytest

from counterpoint.measurement.gpu_usage import Observed
from counterpoint.measurement.rows import row
from counterpoint.measurement.trial import Trial
from counterpoint.records.measurement import Row, Scenario

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
        SCENARIO,
        mechanism="slow",
        order="comm_first",
        size_bytes=1 << 20,
        flops=10**9,
        peak_tflops=None,
        samples=samples,
        best=("fast", 50.0),
        observed=Observed(marked=marked),
        device=None,
    )


def test_hidden_counts_from_the_fastest_mechanism_and_the_head_start() -> None:
    """Serial is 100 + 50 + 20; 145 together; the shorter side is 50."""
    assert [made().head_start_us, made().together.us, made().hidden] == pytest.approx([20.0, 145.0, 0.5])


def test_what_each_side_kept_is_of_its_own_mechanism() -> None:
    """100 of 125 µs, 80 of 100 µs."""
    assert [made().compute_kept, made().comm_kept] == pytest.approx([0.8, 0.8])


@pytest.mark.parametrize("case", [("", "compute_alone"), ("fast", "comm_alone"), ("slow", "comm_first")])
def test_a_row_of_late_trials_is_marked(case: tuple[str, str]) -> None:
    """Whichever of the times behind `hidden` they spoil."""
    assert str(made(case).marked).startswith("the host queued too slowly in 1 of 3 rounds")


def test_both_reasons_are_said() -> None:
    """What the profiler saw, and what the host missed."""
    assert str(made(("slow", "comm_first"), "no effect").marked).startswith("no effect; the host queued")
