"""Results of a search ranked by step, cost and goodput, their Pareto front, and what keeps a choice from the first."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.console import Console

from counterpoint.errors import Misconfigured
from counterpoint.plan.answer import answer
from counterpoint.plan.job.job import parse_job, read_tables
from counterpoint.plan.search.rank import check_objective, ranked
from counterpoint.plan.search.search import search_each
from counterpoint.records.prediction import Objective, PartChange, PlanOutcome, RunLoss, SearchResult, TrainingRun
from counterpoint.rendering.plan_tables import tables
from counterpoint.rendering.print_table import print_table
from tests.support.example_prediction import usual

EXAMPLES = Path(__file__).parents[3] / "examples" / "plan"


def choice(gpus: int, gib: float, goodput: float = 1.0, **parts: float) -> PlanOutcome:
    lost = RunLoss(name="lost work", days=10.0 * (1.0 - goodput), means="")
    run = TrainingRun(
        steps=1, tokens=1.0, days=10.0, gpu_hours=1.0, goodput=goodput, failures=0.0, checkpoint_seconds=0.0,
        losses=(lost,),
    )  # fmt: skip
    return PlanOutcome(gpus=gpus, step_us=sum(parts.values()), memory_gib=gib, parts=parts, run=run)


def result(*choices: PlanOutcome) -> SearchResult:
    return SearchResult(gpus=choices[0].gpus or 0, choices=choices)


@pytest.mark.parametrize(
    ("objective", "order"),
    [
        ("step", [32, 16, 8]),  # 60, 65, 110 µs
        ("cost", [8, 16, 32]),  # 8 · 110 / 0.99 = 889, 16 · 65 / 0.9 = 1156, 32 · 60 / 0.5 = 3840 GPU-µs
        ("goodput", [16, 8, 32]),  # 65 / 0.9 = 72, 110 / 0.99 = 111, 60 / 0.5 = 120 µs
    ],
)
def test_the_objective_ranks_the_numbers_of_gpus(objective: Objective, order: list[int]) -> None:
    """What failures lose counts in cost and goodput; a number without a way comes last."""
    each = (
        SearchResult(gpus=4, why_not="nothing fits"),
        result(choice(8, 40.0, 0.99, matmul=110.0)),
        result(choice(16, 40.0, 0.9, matmul=65.0)),
        result(choice(32, 40.0, 0.5, matmul=60.0)),
    )
    found = ranked(each, objective)
    assert [each.gpus for each in found] == [*order, 4]
    assert {each.objective for each in found[:3]} == {objective}


def test_the_front_has_what_no_other_choice_beats() -> None:
    """Of one number of GPUs those with less memory than all faster ones, and fewer GPUs whatever they take."""
    sixteen = result(
        choice(16, 70.0, matmul=60.0),
        choice(16, 70.0, matmul=61.0),  # as much memory, slower
        choice(16, 50.0, matmul=62.0),
        choice(16, 60.0, matmul=63.0),  # more memory, slower
    )
    eight = result(choice(8, 79.0, matmul=120.0))
    found = ranked([sixteen, eight], "step")
    assert [each.on_front for each in found[0].choices] == [True, False, True, False]
    assert found[1].choices[0].on_front
    faster = result(choice(8, 49.0, matmul=60.0))  # beats all of them
    every = [choice for each in ranked([sixteen, faster], "step") for choice in each.choices]
    assert [(choice.gpus, choice.on_front) for choice in every] == [*[(16, False)] * 4, (8, True)]


def test_the_part_that_exceeds_the_first_by_most_is_named() -> None:
    """In a fraction of the whole first: 12 of 100 µs; a part that the first lacks counts whole, a gain never."""
    first = choice(8, 40.0, matmul=80.0, bubble=20.0)
    found = ranked([result(first, choice(8, 40.0, matmul=84.0, bubble=8.0, recompute=12.0))], "step")
    assert [each.more for each in found[0].choices] == [None, PartChange(name="recompute", change=0.12)]


def test_what_failures_lose_can_keep_a_choice_from_the_first() -> None:
    """First 100 µs a step, of two such GPUs; the other loses half of its 80 µs, so 160 µs: 80 of 100 are lost work."""
    found = ranked([result(choice(8, 40.0, matmul=100.0)), result(choice(16, 40.0, 0.5, matmul=80.0))], "goodput")
    more = found[1].choices[0].more
    assert more is not None
    assert more.name == "lost work"
    assert more.change == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("objective", "cost", "shown"),
    [
        ("cost", None, "GPU-h per 10⁹ tokens | 4.4"),  # 8 GPUs · 10⁹ / (0.5 · 10⁶ · 3600)
        ("cost", 2.0, "cost per 10⁹ tokens | 8.9"),  # at 2 for the one GPU-hour of the run
        ("goodput", 2.0, "useful tokens/s | 500,000"),
    ],
)
def test_the_table_shows_what_it_ranks_by(objective: Objective, cost: float | None, shown: str) -> None:
    """8 GPUs that train 10⁶ tokens/s, of which half are lost."""
    way = choice(8, 40.0, 0.5, matmul=100.0)
    assert way.run is not None
    way = replace(way, tokens_per_s=1e6, settings={"parallel.dp": 8}, run=replace(way.run, cost=cost))
    found = ranked([result(way), SearchResult(gpus=4, why_not="nothing fits")], objective)
    table = next(each for each in tables(replace(usual(), search=None, searches=found)) if "ranked by" in each.unit)
    name, _, figure = shown.partition(" | ")
    place = [column.name.replace("\n", " ") for column in table.columns].index(name)
    assert table.lines()[0][place] == figure
    assert "4 GPUs: nothing fits" in table.notes


@pytest.mark.parametrize(
    ("objective", "counts", "said"),
    [
        ("fast", [8, 16], "give one of step, cost, goodput"),
        ("cost", [None], "give more by --gpus"),
        ("cost", [8, 8], "give more by --gpus"),
        ("goodput", [8, 16], "nothing fails; give run.tokens"),
    ],
)
def test_an_objective_that_cannot_take_effect_is_refused(objective: str, counts: list[int | None], said: str) -> None:
    job = parse_job(read_tables(EXAMPLES / "llama3-8b-one-node.toml"))
    with pytest.raises(Misconfigured, match=said):
        check_objective(objective, job, counts)


@pytest.mark.parametrize("counts", [[None], [64, 128]])
def test_a_search_is_readable_in_80_columns(counts: list[int | None]) -> None:
    """No line is longer, each number is whole, and the parts of every way add up to its step."""
    job = parse_job(read_tables(EXAMPLES / "llama3-70b-64-gpus.toml"))
    found = search_each(job, counts, best=4, fixed={"tp": (2, 4), "micro_batch": (1,), "zero": (1,)})
    for way in (way for each in found for way in each.choices):
        assert sum(way.parts.values()) == pytest.approx(way.step_us)
    asked = {"search": found[0]} if len(found) == 1 else {"searches": found}
    table = next(each for each in tables(replace(answer(job), **asked)) if each.title.startswith("The fastest"))
    out = io.StringIO()
    print_table(table, Console(file=out, width=80))
    assert max(map(len, out.getvalue().splitlines())) <= 80
    shown = found[0].choices if len(found) == 1 else [each.choices[0] for each in found]
    for way in shown:
        assert f" {(way.step_us or 0.0) / 1e3:,.1f} " in out.getvalue()
