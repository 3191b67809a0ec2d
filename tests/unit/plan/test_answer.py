"""What is printed of a prediction: parts that add up, curves, sensitivities, and why."""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec
import pytest

from counterpoint.errors import Misconfigured, NoSuchValue
from counterpoint.plan.answer import PARTS, answer, curve, sensitivities
from counterpoint.plan.explain import QUESTIONS, explain
from counterpoint.plan.job.changes import swept
from counterpoint.plan.job.job import parse_job, read_tables
from counterpoint.plan.search.search import search
from counterpoint.records.prediction import Prediction

EXAMPLES = sorted((Path(__file__).parents[3] / "examples" / "plan").glob("*.toml"))
TABLES = tomllib.loads("""
model = { name = "llama3-8b" }
training = { sequence = 4096, global_batch = 64 }
parallel = { dp = 4, tp = 2, pp = 2, zero = 1 }
cluster = { gpu = "H100", network = "h100-ndr-400" }
""")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_fit_and_their_parts_add_up(path: Path) -> None:
    """To the step; every part says what it means."""
    found = answer(parse_job(read_tables(path)))
    assert found.fits
    assert sum(part.us for part in found.parts) == pytest.approx(found.step_us)
    assert all(part.means for part in found.parts)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_a_step_is_between_ideal_and_serial(path: Path) -> None:
    """Overlap neither creates time nor loses more than all of it."""
    found = answer(parse_job(read_tables(path)))
    assert found.ideal_us <= found.step_us <= found.serial_us * (1 + 1e-9)


@pytest.mark.parametrize(("dp", "zero", "said"), [(2, 3, True), (2, 2, False), (4, 3, False)])
def test_zero_3_that_takes_more_memory_than_zero_2_is_said(dp: int, zero: int, said: bool) -> None:
    """Two layers in a stage: shards of two ranks save less than the gathered layers take, those of four more."""
    found = answer(parse_job(TABLES | {"parallel": {"dp": dp, "pp": 16, "zero": zero}}))
    assert any("more than zero 2 would" in note for note in found.notes) == said


def test_there_are_examples() -> None:
    """One node, 64 GPUs, 16,384, and experts."""
    assert len(EXAMPLES) == 4


def test_a_prediction_survives_json() -> None:
    written = msgspec.json.encode(answer(parse_job(TABLES), detailed=True))
    assert msgspec.json.encode(msgspec.json.decode(written, type=Prediction)) == written


def test_a_detailed_answer_has_all_that_is_drawn() -> None:
    """A bar for forward and backward of every micro-batch and stage, both curves, sensitivities."""
    found = answer(parse_job(TABLES), detailed=True)
    assert found.micro_batches == 16
    assert len(found.timeline) == 2 * 2 * 8  # the first 8 of them
    assert [each.name for each in found.curves] == ["nodes", "weak_nodes"]
    assert found.sensitivities


def test_sensitivities_never_make_it_worse() -> None:
    job = parse_job(TABLES)
    steps = [each.step_us or 0.0 for each in sensitivities(job)]
    assert steps == sorted(steps)
    assert steps[-1] <= answer(job).step_us


def test_a_curve_keeps_the_reason_of_a_value_that_cannot_be() -> None:
    points = curve("parallel.tp", swept(TABLES, {}, "parallel.tp", ["1", "3", "2"])).points
    assert [point.step_us is not None for point in points] == [True, False, True]
    assert points[1].why_not is not None
    assert "parallel.tp · pp · cp = 6 does not divide GPUs" in points[1].why_not


@pytest.mark.parametrize(("field", "value"), [("parallel.zero", "4"), ("nodes", "many"), ("parallel.colour", "1")])
def test_a_curve_over_what_can_never_be_is_an_error(field: str, value: str) -> None:
    """A slip of the pen is no point of a curve."""
    with pytest.raises(NoSuchValue, match=f"{field}.*(give|allowed are)"):
        swept(TABLES, {}, field, ["1", value])


def test_a_curve_of_nothing_is_an_error() -> None:
    with pytest.raises(Misconfigured, match=r"no value can be: parallel\.tp · pp · cp = 6 does not divide GPUs"):
        curve("parallel.tp", swept(TABLES, {}, "parallel.tp", ["3", "5"]))


@pytest.mark.parametrize("word", sorted(QUESTIONS))
def test_every_number_can_be_asked_why(word: str) -> None:
    lines = explain(parse_job(TABLES), word)
    assert any("=" in line for line in lines)
    assert len(" ".join(lines)) > 60


def test_every_part_is_a_question() -> None:
    assert set(PARTS) <= set(QUESTIONS)


def test_an_unknown_question_is_answered_with_the_known_ones() -> None:
    with pytest.raises(Misconfigured, match="--explain colour: nothing has that name; give one of step, exposed_comm"):
        explain(parse_job(TABLES), "colour")


def test_a_job_that_fits_nowhere_is_an_error() -> None:
    large = TABLES | {
        "model": {"name": "llama3-405b"},
        "parallel": {"dp": 2},
        "training": {"sequence": 4096, "global_batch": 8},
    }
    with pytest.raises(
        Misconfigured, match=r"ways to divide the job over 2 GPUs fits: the smallest takes at least [\d.]+ of 80 GiB"
    ):
        search(parse_job(large))


def test_averaging_less_often_costs_less_and_says_what_is_not_known() -> None:
    """Local SGD: a quarter of the exchanges."""
    whole = TABLES | {"parallel": {"dp": 8, "tp": 2}}
    every, fourth = (
        answer(parse_job(whole | {"training": {"sequence": 4096, "global_batch": 64, "local_steps": n}}))
        for n in (2, 8)
    )
    sent = [next(part.us for part in found.comm if part.name == "gradients") for found in (every, fourth)]
    assert sent[0] == pytest.approx(4 * sent[1])
    assert any("convergence is not modelled" in note for note in fourth.notes)
    assert "local_steps" in fourth.validated


def test_asynchronous_replicas_wait_for_nobody() -> None:
    """A rank that is twice as slow costs its own replica: half a step of one in eight, not of all."""
    whole = TABLES | {"parallel": {"dp": 8, "tp": 2}, "ranks": {"slow": 2.0, "jitter": 0.0}}
    together, apart = (
        answer(parse_job(whole | {"training": {"sequence": 4096, "global_batch": 64, "asynchronous": on}}))
        for on in (False, True)
    )
    lost = [next(part.us for part in found.parts if part.name == "stragglers") for found in (together, apart)]
    assert lost[1] / lost[0] == pytest.approx(1 / (1 - 0.5 / 8) - 1)
    assert apart.exposed_comm_us < together.exposed_comm_us
    assert any("convergence is not modelled" in note for note in apart.notes)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"training": {"sequence": 4096, "global_batch": 64, "asynchronous": True}}, "asynchronous = true with"),
        ({"training": {"sequence": 4096, "global_batch": 64, "local_steps": 4}}, "training.local_steps = 4 with"),
        ({"compression": {"method": "topk"}}, "parallel.zero = 1 with compression"),
    ],
)
def test_what_needs_whole_replicas_is_refused_with_shards(changed: dict[str, object], said: str) -> None:
    """Zero 1 keeps a part of the optimizer on each rank."""
    with pytest.raises(Misconfigured, match=said):
        answer(parse_job(TABLES | changed))


def test_exposed_communication_is_explained_down_to_a_collective() -> None:
    text = "\n".join(explain(parse_job(TABLES), "gradients"))
    assert "reduce_scatter of" in text
    assert "of the array /" in text
    assert "reduce_scatter of" in text
    assert "of the array /" in text


@pytest.mark.parametrize(("gpu", "assumed"), [("H200", 0), ("H100", 1), ("B200", 1), ("GB300", 1), ("MI300X", 1)])
def test_a_plan_says_once_what_was_not_measured_on_its_gpu(gpu: str, assumed: int) -> None:
    tables = TABLES | {"cluster": {"gpu": gpu, "network": "h100-ndr-400"}}
    said = f"not measured on {gpu}, assumed: mechanisms"  # B200 has an efficiency of its own
    found = answer(parse_job(tables))
    assert len([note for note in found.notes if said in note]) == assumed
    assert found.validated.startswith("not validated")
