"""A search: fixed axes, results for several numbers of GPUs, and the job of the fastest way."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from counterpoint.commands.plan import _Looking
from counterpoint.errors import Misconfigured
from counterpoint.plan.job.job import job_toml, parse_job
from counterpoint.plan.search.search import chosen_job, search, search_each
from counterpoint.plan.search.space import read_fixed
from counterpoint.plan.step.step import predict_step
from counterpoint.rendering.search_csv import search_csv

TABLES: dict[str, Any] = {
    "model": {"name": "llama3-8b"},
    "training": {"sequence": 4096, "global_batch": 32},
    "cluster": {"gpu": "H100", "network": "h100-ndr-400", "gpus": 8},
}


def test_a_job_that_is_not_divided_is_divided_over_its_cluster() -> None:
    """Eight GPUs; the job of the fastest way is predicted as the search predicted it, also when it is read again."""
    job = parse_job(TABLES)
    found = search(job, best=1)
    chosen = chosen_job(job, found)
    assert (found.gpus, chosen.parallel.world_size) == (8, 8)
    assert predict_step(chosen).step_us == found.choices[0].step_us
    assert parse_job(tomllib.loads(job_toml(chosen))) == chosen


def test_fixed_axes_have_their_values() -> None:
    """One, several, or a list; tp = 16 and zero_bubble are tried where they are asked for."""
    job = parse_job(TABLES)
    fixed = read_fixed(["parallel.pp=2,4", "micro_batch=1", "recompute=full"])
    for choice in search(job, fixed=fixed).choices:
        settings = choice.settings
        assert settings["parallel.pp"] in (2, 4)
        assert (settings["training.micro_batch"], settings["training.recompute"]) == (1, "full")
    uneven = search(job, fixed=read_fixed(["stage_layers=[15, 17]", "pp=2", "virtual=1"])).choices
    assert {choice.settings["parallel.stage_layers"] for choice in uneven} == {(15, 17)}
    bubble = search(job, fixed=read_fixed(["schedule=zero_bubble", "pp=2"])).choices
    assert {choice.settings["parallel.schedule"] for choice in bubble} == {"zero_bubble"}
    wide = search(job, gpus=16, fixed=read_fixed(["tp=16"])).choices
    assert {choice.settings["parallel.tp"] for choice in wide} == {16}


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["tp"], "give AXIS=VALUE"),
        (["tp=2", "tp=4"], "comes twice"),
        (["colour=2"], "colour is no axis of a search: give one of dp, tp"),
        (["training.tp=2"], "training.tp is no axis"),
        (["tp=0"], r"parallel\.tp = 0"),
        (["zero=4"], r"parallel\.zero = 4"),
        (["stage_layers=flat"], "give equal, ends, balanced"),
        (["pp=3"], "no way to divide the job over 8 GPUs"),
    ],
)
def test_values_that_cannot_be_fixed_are_refused(texts: list[str], said: str) -> None:
    with pytest.raises(Misconfigured, match=said):
        search(parse_job(TABLES), fixed=read_fixed(texts))


def test_each_number_of_gpus_has_its_result() -> None:
    found = search_each(parse_job(TABLES), [1, 8, 16], best=2)
    assert [(each.gpus, len(each.choices)) for each in found] == [(16, 2), (8, 2), (1, 0)]
    assert found[2].why_not is not None
    assert "fits" in found[2].why_not
    lines = search_csv(found).splitlines()
    assert lines[0].startswith("gpus,parallel.dp,parallel.tp")
    assert [line.split(",")[0] for line in lines[1:]] == ["16", "16", "8", "8"]


def test_of_equally_fast_ways_the_one_of_less_memory_is_first() -> None:
    """zero 1 and 2 of one micro-batch take equally long."""
    job = parse_job(TABLES | {"cluster": {"gpu": "H200", "network": "h200-ndr-400", "gpus": 8}})
    found = search(job, fixed=read_fixed(["zero=1,2", "recompute=full", "tp=1", "pp=1"])).choices
    taken = [(each.step_us or 0.0, each.memory_gib or 0.0) for each in found]
    assert taken == sorted(taken)
    assert len({step_us for step_us, _ in taken}) < len(taken)


def test_what_is_no_axis_stays_as_it_is() -> None:
    """Tensor parallelism in pieces, wherever there is tensor parallelism."""
    tables = TABLES | {"parallel": {"tp": 2, "dp": 4, "pieces_tp": True, "bucket_bytes": 1 << 28}}
    job = parse_job(tables)
    found = search(job, best=1, fixed=read_fixed(["tp=2", "pp=1", "cp=1"]))
    chosen = chosen_job(job, found)
    assert (chosen.parallel.pieces_tp, chosen.parallel.bucket_bytes) == (True, 1 << 28)
    assert not chosen_job(job, search(job, best=1, fixed=read_fixed(["tp=1"]))).parallel.pieces_tp


def test_the_schedule_of_the_job_is_tried() -> None:
    """zero_bubble is no choice of its own, but that of a job that has it."""
    tables = TABLES | {"parallel": {"dp": 4, "pp": 2, "schedule": "zero_bubble"}}
    fixed = read_fixed(["pp=2", "tp=1", "micro_batch=1", "zero=1"])
    found = search(parse_job(tables), best=50, fixed=fixed)
    assert "zero_bubble" in {choice.settings["parallel.schedule"] for choice in found.choices}


def test_only_ways_that_are_sure_enough_to_fit_are_listed() -> None:
    """None that is less sure, and none that a search of all ways lists is missed; memory is that of the whole GPU."""
    asked = parse_job(TABLES | {"training": {"sequence": 8192, "global_batch": 64}})
    fixed = {"tp": (1, 2), "cp": (1,), "micro_batch": (1,)}
    every = search(asked, best=10_000, fixed=fixed).choices
    sure = search(asked, best=3, fixed=fixed, min_fits=0.9).choices
    steps = [way.step_us for way in every if way.step_us and (way.fits_probability or 0) >= 0.9]
    assert 0 < len(steps) < len(every)
    assert all((way.fits_probability or 0) >= 0.9 - 1e-9 for way in sure)
    assert (sure[0].step_us or 0) <= min(steps)
    assert (every[0].step_us or 0) <= (sure[0].step_us or 0)
    with pytest.raises(Misconfigured, match="--min-fits 0: give a probability"):
        search(asked, min_fits=0.0)


def test_an_interrupted_search_gives_what_it_has() -> None:
    """The fastest so far, marked; nothing before the first way was predicted."""
    found, most = search(parse_job(TABLES)), []

    def interrupt(done: int, total: int, fastest_us: float | None) -> None:
        most.append(fastest_us)
        if fastest_us is not None:
            raise KeyboardInterrupt

    early = search(parse_job(TABLES), progress=interrupt)
    assert (found.complete, early.complete) == (True, False)
    assert early.choices[0].step_us == most[-1]
    assert (found.choices[0].step_us or 0) <= (early.choices[0].step_us or 0)

    def at_once(done: int, total: int, fastest_us: float | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search(parse_job(TABLES), progress=at_once)


def test_a_command_writes_what_it_finds(tmp_path: Path) -> None:
    """The winner is a job that is read again, and the table has a row for each way."""
    job, table, winner = parse_job(TABLES), tmp_path / "ways.csv", tmp_path / "winner.toml"
    asked = _Looking(fix=("tp=8",), gpus="8", top=1, csv=table, winner=winner, min_fits=None, objective=None)
    found = asked.results(job, None)
    assert parse_job(tomllib.loads(winner.read_text())) == chosen_job(job, found[0])
    assert table.read_text() == search_csv(found)
