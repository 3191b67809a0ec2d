"""Published step times: the errors that the documentation claims, and what may be said of other jobs."""

from __future__ import annotations

from statistics import fmean

import msgspec
import pytest
from plan_coverage import COLUMNS as COVERAGE_COLUMNS
from plan_coverage import coverage
from plan_published import OWN, calibration, error_of

from counterpoint.plan.confidence import FILE, job_features, read_rows
from tests.golden.library import published

pytestmark = pytest.mark.xdist_group("published")  # with the record of these steps: they are computed once


@pytest.fixture(scope="module")
def errors() -> dict[str, float]:
    """Of the step's time, by group and row."""
    return {f"{row.group}: {row.name}": error_of(row, step) for row, step in published()}


def of(errors: dict[str, float], *groups: str) -> list[float]:
    return [abs(error) for name, error in errors.items() if name.split(": ")[0] in groups]


@pytest.mark.parametrize(
    ("group", "count", "mean", "worst"),
    [
        ("megatron-2022", 8, 0.04, 0.07),
        ("dgxc-llama3-8b", 30, 0.025, 0.04),
        ("dgxc-llama3-70b", 36, 0.055, 0.12),
        ("mosaicml-a100-40gb", 78, 0.045, 0.26),
        ("megatron-2021-weak", 10, 0.02, 0.05),
        ("megatron-2021-strong", 6, 0.025, 0.045),  # nothing was fitted to this group and those below
        ("mosaicml-a100", 7, 0.025, 0.12),
        ("llama3-405b", 3, 0.055, 0.11),
        ("H200 FSDP2", 12, 0.12, 0.22),  # not at their power limit, as most are: docs/results/planner.md
        ("4 x H200 FSDP2", 16, 0.03, 0.095),
        ("2 x H200 FSDP2", 16, 0.025, 0.065),
        ("H200 FSDP2, whole steps", 3, 0.075, 0.085),
    ],
)
def test_published_steps_come_out(errors: dict[str, float], group: str, count: int, mean: float, worst: float) -> None:
    """Mean and worst error of each group."""
    found = of(errors, group)
    assert (len(found), fmean(found) <= mean, max(found) <= worst) == (count, True, True)


def test_the_intervals_are_calibrated_on_these_rows() -> None:
    """The package's file has every row that nothing was fitted to, with its features and its error as of today."""
    now, kept = calibration(published()), read_rows(FILE)
    assert [row.name for row in kept.rows] == [
        f"{row.group}: {row.name}" for row, _ in published() if not (row.fitted or row.chosen_with)
    ]
    assert [(row.source, row.series, row.features) for row in kept.rows] == [
        (row.source, row.series, row.features) for row in now.rows
    ]
    assert [row.error for row in kept.rows] == pytest.approx([row.error for row in now.rows], abs=1e-3)
    assert [row.slowest for row in kept.rows] == pytest.approx([row.slowest for row in now.rows], abs=1e-3)
    assert kept.memory == now.memory


def test_intervals_cover_rows_of_sources_that_they_were_not_calibrated_on() -> None:
    """80 % of public rows, give or take ten in a hundred."""
    *_, public = coverage(read_rows(FILE).rows, OWN)
    assert 70 <= int(public[COVERAGE_COLUMNS.index("covered")].rstrip("%")) <= 92


@pytest.mark.parametrize("group", ["2 x H200 FSDP2", "4 x H200 FSDP2"])
def test_what_sharding_adds_comes_out(group: str) -> None:
    """8B: copies (bound - floor) within 3 ms, communication that stock shows (stock - bound) within 5 ms."""
    rows = [(row, step) for row, step in published() if row.group == group and "8B, " in row.name]
    steps, off = {row.name: (row.read(row.job, step), row.published) for row, step in rows}, {}
    for tokens in (2048, 4096, 8192):
        for more, less in (("bound", "floor"), ("stock", "bound")):
            big, small = (steps[f"8B, {tokens} tokens, {kind}"] for kind in (more, less))
            off[tokens, more] = abs((big[0] - small[0]) - (big[1] - small[1]))
    allowed = {"bound": 3.0, "stock": 5.0}
    assert [key for key, ms in off.items() if ms > allowed[key[1]]] == []


@pytest.mark.parametrize("mechanism", ["nccl_capped", "ideal"])
def test_what_was_not_measured_says_so(mechanism: str) -> None:
    """A job that differs in one respect from rows names it."""
    job = next(row.job for row, _ in published() if row.group == "H200 FSDP2")
    known = read_rows(FILE)
    assert known.validated(job_features(job)).startswith("validated: mean ")
    said = known.validated(job_features(msgspec.structs.replace(job, mechanism=mechanism)))
    assert said.startswith(f"not validated: collectives: {mechanism}, not nccl; closest: ")
