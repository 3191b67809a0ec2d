"""An observed step: the verdict, its causes, and what-ifs that are shifted by it."""

from __future__ import annotations

import math
from typing import Any

import pytest
from msgspec.structs import replace

from counterpoint.errors import Misconfigured
from counterpoint.plan.answer import answer
from counterpoint.plan.confidence import job_features, measured_errors
from counterpoint.plan.job.job import Job, parse_job
from counterpoint.plan.observed import FASTER, SLOWER, Anchor, read_duration
from counterpoint.plan.search.search import search
from counterpoint.plan.step.step import predict_step

TABLES: dict[str, dict[str, Any]] = {
    "model": {"name": "llama3-70b"},
    "training": {"sequence": 8192, "global_batch": 64, "recompute": "full"},
    "parallel": {"dp": 8, "tp": 8, "zero": 3},
    "cluster": {"gpu": "H100", "network": "h100-ndr-400"},
}


def job(**changes: dict[str, Any]) -> Job:
    return parse_job({name: {**TABLES.get(name, {}), **changes.get(name, {})} for name in {**TABLES, **changes}})


@pytest.mark.parametrize(("text", "us"), [("9.2s", 9.2e6), (" 850 ms", 85e4), ("3us", 3.0), ("2min", 120e6)])
def test_a_duration_has_a_unit(text: str, us: float) -> None:
    assert read_duration(text) == pytest.approx(us)


@pytest.mark.parametrize(
    "text", ["", "9.2", "9.2 h", "-1s", "0s", "nan s", "1e3s", "1s 2s", "9" * 40 + "s", "\x1b[2Js"]
)
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(Misconfigured, match=r"as in 9\.2s or 850ms") as raised:
        read_duration(text)
    assert str(raised.value).isprintable()


@pytest.mark.parametrize("factor", [0.7, 0.95, 1.0, 1.3, 3.0])
def test_the_verdict_is_of_the_usual_step(factor: float) -> None:
    """Of such runs as many are slower as the distribution of errors says; all causes point the way of the step."""
    likely = measured_errors().likely(job_features(job())).errors
    found = Anchor.of(job(), factor * predict_step(job()).step_us).verdict()
    assert found.usual_us == pytest.approx(found.predicted_us * math.exp(likely.mean))
    assert found.faster_than == pytest.approx(1 - likely.cdf(math.log(factor)))
    assert all((cause.us > 0) == (found.step_us > found.usual_us) for cause in found.causes)
    assert [abs(cause.us) for cause in found.causes] == sorted((abs(cause.us) for cause in found.causes), reverse=True)
    assert found.causes


def test_a_cause_is_the_predicted_change_of_the_job() -> None:
    slow = {cause.name: cause.us for cause in Anchor.of(job(), 1e9).verdict().causes}
    serial = predict_step(replace(job(), mechanism="serial")).step_us - predict_step(job()).step_us
    assert slow["no collective overlaps"] == pytest.approx(serial)
    assert "everything is recomputed" not in slow
    assert "tokens go to few of the experts" not in slow


@pytest.mark.parametrize("name", [name for name, _, _ in (*SLOWER, *FASTER)])
def test_every_cause_shows_in_some_job(name: str) -> None:
    """None that no job can have."""
    jobs = [
        job(training={"recompute": "none", "micro_batch": 2}),
        job(training={"recompute": "full", "fused_kernels": False, "flash_version": 1}, parallel={"overlap_dp": False}),
        job(model={"experts": {"count": 8, "per_token": 2, "width": 4096}}, parallel={"ep": 8, "overlap_tp": False}),
        parse_job(
            TABLES
            | {"model": {"layers": 40, "hidden": 512, "heads": 8, "vocab": 1000}}
            | {"training": {"sequence": 256, "global_batch": 64, "fused_kernels": False}}
            | {"parallel": {"dp": 8}}
        ),
    ]  # fmt: skip
    seen = {cause.name for one in jobs for us in (1.0, 1e12) for cause in Anchor.of(one, us).verdict().causes}
    assert name in seen


def test_all_times_are_shifted() -> None:
    """Of the job itself to what was observed; of others by the same factor, with the interval of ratios."""
    plain, anchor = answer(job(), detailed=True), Anchor.of(job(), 2 * predict_step(job()).step_us)
    shifted = answer(job(), detailed=True, anchor=anchor)
    assert shifted.step_us == anchor.observed_us == pytest.approx(2 * plain.step_us)
    assert shifted.interval is not None
    assert shifted.interval.low_us == shifted.interval.high_us == shifted.step_us
    assert sum(part.us for part in shifted.parts) == pytest.approx(shifted.step_us)
    assert [bar.end_us for bar in shifted.timeline] == pytest.approx([2 * bar.end_us for bar in plain.timeline])
    assert shifted.memory == plain.memory
    assert shifted.mfu == pytest.approx((plain.mfu or 0) / 2)
    ratio = measured_errors().comparisons
    assert ratio is not None
    for ours, theirs in zip(shifted.sensitivities, plain.sensitivities, strict=True):
        assert ours.step_us == pytest.approx(2 * (theirs.step_us or 0))
        assert ours.high_us == pytest.approx((ours.step_us or 0) * ratio.factor)
    assert shifted.observed == anchor.verdict()
    assert plain.observed is None


def test_what_ifs_and_a_search_are_narrowed() -> None:
    """Narrower than without the observed step; the search finds the same ways."""
    anchor = Anchor.of(job(), 1.5 * predict_step(job()).step_us)
    other = job(training={"recompute": "none"})
    plain, shifted = answer(other).interval, answer(other, anchor=anchor).interval
    assert plain is not None
    assert shifted is not None
    assert shifted.high_us / shifted.low_us < plain.high_us / plain.low_us
    fixed = {"tp": (8,), "pp": (1,)}
    alone, anchored = (search(job(), best=2, fixed=fixed, anchor=each).choices for each in (None, anchor))
    assert [way.settings for way in anchored] == [way.settings for way in alone]
    assert [way.too_close for way in anchored] == [way.too_close for way in alone]
    assert anchored[0].step_us == pytest.approx(1.5 * (alone[0].step_us or 0))
