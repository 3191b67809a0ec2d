"""How sure a prediction is: effects of sources, similar rows, "validated", memory, the data file."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any

import msgspec
import numpy as np
import pytest
from plan_coverage import COLUMNS, Ran, left_out, line, memory_need
from plan_published import encode_rows

from counterpoint.errors import Misconfigured
from counterpoint.plan.answer import answer, curve
from counterpoint.plan.confidence import (
    FEATURES,
    FILE,
    LEAST_SEEN,
    LIKE_IT,
    MOST_OF_SOURCE,
    CalibrationRow,
    MeasuredErrors,
    MemoryNeed,
    conformal_quantile,
    job_features,
    measured_errors,
    read_rows,
    source_weights,
    step_interval,
)
from counterpoint.plan.job.cluster import find_gpu
from counterpoint.plan.job.job import Job, parse_job
from counterpoint.plan.step.step import predict_step

TABLES: dict[str, dict[str, Any]] = {
    "model": {"layers": 16, "hidden": 4096, "heads": 32, "vocab": 32000},
    "training": {"sequence": 4096, "global_batch": 256},
    "parallel": {"dp": 64, "tp": 2, "zero": 1},
    "cluster": {"gpu": "H100", "network": "h100-ndr-400"},
}


LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
PROFILE = Path(__file__).parents[3] / "src" / "counterpoint" / "machine" / "profiles" / "h200.json"


def job(**changes: Any) -> Job:
    """A job of 128 ranks; `training={"recompute": "full"}` changes a field."""
    return parse_job({name: {**TABLES.get(name, {}), **changes.get(name, {})} for name in {**TABLES, **changes}})


@cache
def like_it() -> dict[str, str]:
    """The features of `job()`."""
    return job_features(job())


def rows(
    errors: Sequence[float], source: str = "one", features: dict[str, str] | None = None, series: str = "a"
) -> list[CalibrationRow]:
    """Rows of one source that are like `job()`."""
    like = features or like_it()
    return [
        CalibrationRow(source=source, name=f"{source} {number}", series=series, features=like, error=error, seen=True)
        for number, error in enumerate(errors)
    ]


def test_quantiles_are_order_statistics_and_the_brute_force_ones() -> None:
    """The ceil(q · (n + 1))-th smallest error, for every n and many q; infinite if there are not so many."""
    random = np.random.default_rng(1)
    for n, level in itertools.product(range(1, 40), (0.1, 0.5, 0.8, 0.9, 0.95)):
        errors = random.normal(size=n)
        rank = math.ceil(round(level * (n + 1), 9))
        expected = sorted(errors)[rank - 1] if rank <= n else math.inf
        assert conformal_quantile(errors, np.ones(n), level) == expected
    # the smallest error up to which the rows weigh enough
    random = np.random.default_rng(2)
    for _ in range(300):
        errors, weights = random.integers(0, 9, size=12).astype(float), random.uniform(0.05, 1.0, size=12)
        level = float(random.uniform(0.05, 0.99))
        needed = level * (weights.sum() + 1.0)
        enough = [each for each in sorted(errors) if weights[errors <= each].sum() >= needed]
        assert conformal_quantile(errors, weights, level) == (enough[0] if enough else math.inf)


def of_sources(effects: Sequence[float], within: float, seed: int, count: int = 6) -> list[CalibrationRow]:
    """Rows of sources with these effects, each row with an error of its own on top."""
    random = np.random.default_rng(seed)
    return [
        row
        for place, effect in enumerate(effects)
        for row in rows([float(e) for e in effect + random.normal(0.0, within, count)], f"source {place}")
    ]


@pytest.mark.parametrize(("between", "within"), [(0.12, 0.04), (0.2, 0.05), (0.05, 0.1), (0.08, 0.08)])
def test_intervals_cover_steps_of_sources_that_nobody_has_seen(between: float, within: float) -> None:
    """80 % of new sources' steps, neither less nor many more, whether sources differ or the steps in them."""
    random, inside = np.random.default_rng(3), []
    for seed in range(400):
        effects = random.normal(0.0, between, size=13)
        found = MeasuredErrors(of_sources([*effects[:-1]], within, seed)).interval(like_it(), 1.0)
        measured = math.exp(effects[-1] + random.normal(0.0, within))
        inside.append(found.low_us <= measured <= found.high_us)
    assert 0.76 <= fmean(inside) <= 0.9


def test_many_rows_of_one_source_do_not_make_it_sure() -> None:
    """Two sources that are off by 20 % in each direction: 500 rows of one of them narrow nothing."""
    few, many = (
        MeasuredErrors(rows([0.2] * count, "one") + rows([-0.2] * 9, "two")).interval(like_it(), 1.0)
        for count in (9, 500)
    )
    assert many.low_us < 0.8
    assert many.high_us - many.low_us > 0.95 * (few.high_us - few.low_us)
    assert sum(source_weights(["one"] * 500 + ["two"] * 3)) == pytest.approx(MOST_OF_SOURCE + 3)


def test_old_slow_runs_do_not_make_an_interval_one_sided() -> None:
    """Its ends are as far from its middle, in the logarithm, be the sources slow or not."""
    found = MeasuredErrors(of_sources([0.1, 0.25, 0.2, 0.3, 0.0], 0.02, 1)).interval(like_it(), 1.0)
    assert found.high_us / found.usual_us == pytest.approx(found.usual_us / found.low_us)
    assert 1.0 < found.usual_us < math.exp(0.2)


def test_one_source_bounds_no_interval() -> None:
    """Be its rows as many as they may: others could be off otherwise."""
    with pytest.raises(Misconfigured, match=r"500 measured steps bound no interval: .* of two sources or more"):
        MeasuredErrors(rows([0.1] * 500)).interval(like_it(), 1.0)


@pytest.mark.parametrize("feature", ["generation", "experts", "precision", "kernels", "software"])
def test_similar_sources_count_more(feature: str) -> None:
    """What is usual moves to the source that is alike, and less is sure without one."""
    other = {**like_it(), "software": "one", feature: "other"}
    known = MeasuredErrors(rows([0.15] * 9, "alike", {**like_it(), "software": "one"}) + rows([-0.15] * 9, "b", other))
    found = known.likely({**like_it(), "software": "one"})
    assert [*found.sources] == ["alike", "b"]
    assert found.errors.mean > 0.0
    unlike = known.likely({**dict.fromkeys(FEATURES, "nobody's"), "year": "unknown"})
    assert unlike.errors.stdev > found.errors.stdev
    assert sum(weight for weight, _ in unlike.sources.values()) < sum(weight for weight, _ in found.sources.values())


def test_software_that_is_not_named_is_like_any() -> None:
    """And a year counts by its distance."""
    old, new = ({**like_it(), "software": "one", "year": year} for year in ("2021", "2026"))
    known = MeasuredErrors(rows([0.2] * 5, "old", old) + rows([-0.2] * 5, "new", new))
    usual = [known.likely({**new, "year": year}).errors.mean for year in ("2021", "2023", "unknown", "2026")]
    assert usual == sorted(usual, reverse=True)
    weights = known.likely(like_it()).sources
    assert weights["old"][0] == weights["new"][0]


def test_the_prediction_is_within_its_interval() -> None:
    """Also where every row was much slower; that end is then the prediction."""
    found = MeasuredErrors([row for name in "abcdefgh" for row in rows([0.3] * 60, name)])
    interval = found.interval(like_it(), 100.0)
    assert interval.low_us == 100.0 < interval.usual_us < interval.high_us


def test_other_ranks_widen_the_interval_by_the_slowest() -> None:
    """Where rows have as many ranks, that is in their errors already."""
    like = like_it()
    same, other = (
        MeasuredErrors(rows([0.1] * 9, "one", features) + rows([0.1] * 9, "two", features))
        for features in (like, {**like, "ranks": "1"})
    )
    found = [each.interval(like, 100.0, 3.0) for each in (same, other)]
    assert [each.slowest_us for each in found] == [0.0, 3.0]
    assert found[1].high_us - found[0].high_us == pytest.approx(3.0)
    assert found[1].low_us == found[0].low_us


def test_few_seen_rows_validate_nothing() -> None:
    """Rows alike in every feature do not validate where intervals of other sources held too few of them."""
    known = [msgspec.structs.replace(row, seen=place % 2 == 0) for place, row in enumerate(rows([0.1] * 8))]
    found = MeasuredErrors([*known, *rows([0.1], "far", {**like_it(), "GPU": "A100", "generation": "Ampere"})])
    assert found.likely(like_it()).seen < LEAST_SEEN
    assert found.validated(like_it()).startswith("not validated: of unseen sources 5")
    assert found.interval(like_it(), 1.0).seen == found.likely(like_it()).seen


def test_ways_to_experts_are_features() -> None:
    base: dict[str, Any] = {"model": {"experts": {"count": 8, "per_token": 2, "width": 4096}}}
    divided, gathered, halves, alone = (
        job_features(job(**base, parallel=parallel))["collectives"]
        for parallel in (
            {"ep": 2},
            {"ep": 2, "expert_exchange": "gather"},
            {"ep": 2, "overlap_ep": True},
            {"expert_exchange": "gather"},
        )
    )
    said = (f"{divided}, experts by gather", f"{divided}, experts of two halves", divided)
    assert (gathered, halves, alone) == said


@pytest.mark.parametrize(
    ("feature", "changes"),
    [
        ("GPU", {"cluster": {"gpu": "H200", "network": "h100-ndr-400"}}),
        ("generation", {"cluster": {"gpu": "A100", "network": "a100-hdr-200"}}),
        ("ranks", {"parallel": {"dp": 512}, "training": {"global_batch": 512}}),
        ("network", {"cluster": {"gpu": "H100", "network": "nvlink-h100"}, "parallel": {"dp": 4}}),
        ("tokens", {"training": {"micro_batch": 2}}),
        ("precision", {"training": {"precision": "fp8"}}),
        ("recomputation", {"training": {"recompute": "full"}}),
        ("sharding", {"parallel": {"zero": 3}}),
        ("experts", {"model": {"experts": {"count": 8, "per_token": 2, "width": 4096}}}),
        ("axes", {"parallel": {"tp": 1, "dp": 128}}),
        ("kernels", {"training": {"fused_kernels": False}}),
        ("kernels", {"training": {"flash_attention": False}}),
        ("kernels", {"training": {"flash_version": 2}}),
        ("kernels", {"training": {"fused_norms": False}}),
        ("kernels", {"training": {"cuda_graphs": True}}),
        ("kernels", {"training": {"precision": "fp8", "fp8_scaling": "mxfp8"}}),
        ("kernels", {"training": {"precision": "fp8", "fp8_attention": True}}),
        ("collectives", {"overlap": {"mechanism": "zero_sm"}}),
        ("collectives", {"overlap": {"tp": "zero_sm"}}),
        ("collectives", {"parallel": {"overlap_tp": False}}),
        ("collectives", {"parallel": {"pieces_tp": True}}),
        ("software", {"software": {"name": "Megatron"}}),
        ("year", {"software": {"version": "25.07"}}),
        ("other", {"training": {"local_steps": 4}}),
        ("other", {"training": {"asynchronous": True}}),
        ("other", {"compression": {"method": "powersgd"}, "parallel": {"zero": 0}}),
        ("other", {"ranks": {"slow": 1.5}}),
        ("other", {"ranks": {"jitter": 0.1}}),
        ("other", {"model": {"window": 1024}}),
        ("other", {"model": {"mtp": 1}}),
        ("other", {"model": {"mla": LATENT}}),
        ("other", {"cluster": {"gpu": {**msgspec.to_builtins(find_gpu("H100")), "power_watts": 500.0}}}),
        ("other", {"cluster": {"gpu": {**msgspec.to_builtins(find_gpu("H100")), "clock_ghz": 1.2}}}),
        ("other", {"cluster": {"gpu": {**msgspec.to_builtins(find_gpu("H100")), "memory_gb_per_s": 2400.0}}}),
        ("other", {"cluster": {"gpu": {**msgspec.to_builtins(find_gpu("H100")), "machine": str(PROFILE)}}}),
    ],
)
def test_validated_looks_at_every_feature(feature: str, changes: dict[str, Any]) -> None:
    known = MeasuredErrors(
        rows([0.1] * LIKE_IT) + rows([0.1], "far", dict.fromkeys(FEATURES, "else") | {"year": "2020"})
    )
    assert known.validated(job_features(job())).startswith(
        "validated: mean 9.5%, worst 9.5% on 3 measured steps of one"
    )
    base, other = job_features(job()), job_features(job(**changes))
    assert other[feature] != base[feature]
    said = known.validated(other)
    assert said.startswith("not validated: ")
    assert f"{feature}: {other[feature]}, not {base[feature]}" in said


def test_the_closest_have_the_same_gpu_where_any_have() -> None:
    like = like_it()
    other_gpu, far = {**like, "GPU": "A100"}, {**like, "ranks": "1", "experts": "experts"}
    known = MeasuredErrors(rows([0.1] * 3, "one", other_gpu) + rows([0.2] * 3, "two", far))
    assert known.validated(like).startswith(
        "not validated: ranks: 65 to 512, not 1; experts: dense, not experts; closest: 3 measured steps of two: "
    )


def test_too_few_rows_validate_nothing() -> None:
    """Two, though alike in all features; both precisions of two bytes are alike."""
    known = MeasuredErrors(rows([0.1] * (LIKE_IT - 1)) + rows([0.1], "far", {**like_it(), "GPU": "else"}))
    said = [known.validated(job_features(job(training={"precision": each}))) for each in ("bf16", "fp16")]
    assert said == ["not validated: only 2 measured steps of one like it: mean 9.5%, worst 9.5%"] * 2


@pytest.mark.parametrize(("dp", "band"), [(4, "1 to 8"), (5, "9 to 64"), (256, "65 to 512"), (4096, "4,097 and more")])
def test_a_number_of_ranks_is_in_one_band(dp: int, band: str) -> None:
    """Its limits belong to the lower band."""
    found = job_features(job(parallel={"dp": dp}, training={"global_batch": dp}))["ranks"]
    assert found == {"1 to 8": "2 to 8"}.get(band, band)


def test_ratios_lose_what_one_source_shares_and_need_enough_pairs() -> None:
    """Sources that are 30 % off in each direction, and 1 % from row to row."""
    wobble = [0.0, 0.01, 0.005, 0.002]
    known = MeasuredErrors(
        rows([0.3 + each for each in wobble], "one") + rows([-0.3 + each for each in wobble], "two")
        + rows([0.9], "one", series="another")
    )  # fmt: skip
    assert known.comparisons is not None
    assert (known.comparisons.pairs, known.comparisons.sources) == (12, 2)
    assert 1.0 < known.comparisons.factor <= math.exp(0.011)
    assert MeasuredErrors(rows([0.1, 0.2], "one")).comparisons is None
    assert MeasuredErrors(rows([0.1], "one") + rows([0.2], "two")).comparisons is None


def ran_or_not(count: int, need: NormalDist, source: str, seed: int) -> list[Ran]:
    needed = np.random.default_rng(seed).normal(need.mean, need.stdev, count)
    room = np.linspace(-1.0, 1.0, count)
    return [Ran(source=source, room=float(room[i]), ran=bool(needed[i] <= room[i])) for i in range(count)]


def test_the_need_of_memory_is_found_again() -> None:
    """2,000 configurations that need 10 % more than predicted, give or take 20 %; 50 that all ran count for nothing."""
    ran = [Ran(source="all ran", room=-0.5, ran=True)] * 50
    found = memory_need([*ran_or_not(2000, NormalDist(0.1, 0.2), "both", 5), *ran])
    assert found is not None
    assert found.mean == pytest.approx(0.1, abs=0.04)
    assert found.deviation == pytest.approx(0.2, abs=0.04)
    assert (found.rows, found.sources) == (2000, ("both",))
    assert memory_need(ran) is None


def test_the_probability_of_fitting_says_where_it_is_from() -> None:
    """It falls with what is predicted; without configurations that had too little the spread is assumed, and said."""
    need = MemoryNeed(mean=0.1, deviation=0.2, rows=200, sources=("a paper",))
    assumed, known = MeasuredErrors(rows([0.1])), MeasuredErrors(rows([0.1]), need)
    assert assumed.memory_source == "a predicted memory 15% off (1 deviation), assumed"
    assert known.memory_source == (
        "200 configurations of a paper that ran or had too little: they needed 11% more than predicted, "
        "with a deviation of 20%"
    )
    for each in (assumed, known):
        probabilities = [each.fits(predicted, 80.0) for predicted in (1.0, 40.0, 70.0, 80.0, 100.0, 400.0)]
        assert sorted(probabilities, reverse=True) == probabilities
        assert probabilities[0] > 0.99
        assert probabilities[-1] < 0.01
    assert assumed.fits(80.0, 80.0) == 0.5
    assert known.fits(80.0, 80.0 * math.exp(0.1)) == pytest.approx(0.5)


ROW: dict[str, Any] = {
    "source": "s", "name": "n", "series": "m", "features": 0, "error": 0.1,
}  # fmt: skip


def test_rows_go_to_a_file_and_back(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    known = MeasuredErrors(rows([0.1, -0.2]), MemoryNeed(mean=0.1, deviation=0.2, rows=9, sources=("m",)))
    path.write_bytes(encode_rows(known, "a test"))
    again = read_rows(path)
    assert (again.rows, again.memory) == (known.rows, known.memory)
    assert sum('"source"' in text for text in path.read_text().splitlines()) == 2


def test_the_rows_of_the_package_bound_an_interval_of_any_job() -> None:
    known = read_rows(FILE)
    unlike = known.interval({**dict.fromkeys(FEATURES, "nobody's"), "year": "unknown"}, 100.0)
    assert unlike.rows == len(known.rows)
    assert unlike.low_us < 85.0 < 120.0 < unlike.high_us < math.inf


def test_a_source_is_predicted_without_its_own_rows() -> None:
    """Two sources around 0 and one that is far off: none of its rows is covered, all others are."""
    around = [0.001 * (each - 4) for each in range(9)]
    found = left_out(rows(around, "one") + rows(around, "two") + rows([0.5] * 9, "three"), lambda row: row.source)
    places = {(each.row.source, each.place) for each in found}
    assert places == {("one", 0), ("two", 0), ("three", 1)}
    counted = dict(zip(COLUMNS, line("", found), strict=True))
    assert [counted[name] for name in ("rows", "sources", "covered", "above", "below")] == ["27", "3", "67%", "9", "0"]


def test_a_prediction_says_how_sure_it_is() -> None:
    """Of the step, of every point of a curve, and of memory; a search of 10^5 ways asks for none of it."""
    found = answer(job())
    assert found.interval is not None
    assert found.interval.low_us <= found.step_us <= found.interval.high_us
    assert found.interval == step_interval(job(), predict_step(job()))
    assert found.fits_probability is not None
    assert 0 <= found.fits_probability <= 1
    assert (found.comparisons, found.fits_source) == (measured_errors().comparisons, measured_errors().memory_source)
    (point,) = curve("parallel.zero", [("1", job())]).points
    assert (point.low_us, point.high_us) == (found.interval.low_us, found.interval.high_us)
    assert point.fits_probability == found.fits_probability
