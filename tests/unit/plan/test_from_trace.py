"""A measured step elsewhere: the same machine gives the same step, a larger one what the collectives' model adds."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import msgspec
import pytest

import counterpoint
from counterpoint.errors import Misconfigured
from counterpoint.plan.from_trace import MeasuredStep, measured_step, predict_on
from counterpoint.plan.job.cluster import Cluster, find_gpu
from counterpoint.plan.network.estimate import estimate
from counterpoint.plan.network.group import Group
from counterpoint.plan.network.network import levels, network_of
from counterpoint.records.diagnosis import Diagnosis

SAMPLE = Path(__file__).parents[3] / "samples" / "fsdp-healthy"


@pytest.fixture(scope="module")
def diagnosis() -> Diagnosis:
    return counterpoint.diagnose(str(SAMPLE)).diagnosis


@pytest.fixture(scope="module")
def step(diagnosis: Diagnosis) -> MeasuredStep:
    return measured_step(diagnosis)


def cluster(gpus: int, gbit: float = 400.0) -> Cluster:
    made = levels("h200-ndr-400", gpus)
    changed = [
        msgspec.structs.replace(level, gb_per_s=gbit / 8) if level.kind == "network" else level for level in made
    ]
    return Cluster(gpu=find_gpu("H200"), levels=tuple(changed))


def test_parts_of_a_measured_step_add_up_to_it(step: MeasuredStep) -> None:
    """8 x H200, FSDP2."""
    assert step.compute_us + step.exposed_us + step.waits_us + step.rest_us == pytest.approx(step.step_us)


def test_the_collectives_of_a_step_are_those_of_the_trace(step: MeasuredStep) -> None:
    """16 all_gathers of a layer, 8 reduce_scatters, as the sample's layers and passes have them."""
    calls = {(each.operation, each.num_bytes): each.calls for each in step.collectives}
    assert (calls["all_gather", 436224000], calls["reduce_scatter", 872448000]) == (16, 8)


def test_the_same_machine_gives_the_same_step(step: MeasuredStep) -> None:
    there = predict_on(step, cluster(8), cluster(8), ranks=8)
    assert there.step_us == pytest.approx(step.step_us)
    assert sum(part.us for part in there.parts) == pytest.approx(there.step_us)


def test_more_nodes_cost_what_the_model_adds_to_each_collective(step: MeasuredStep) -> None:
    """Transfers by the ratio of its two estimates."""
    there = predict_on(step, cluster(8), cluster(32), ranks=32)
    whole = 0.0
    for each in step.collectives:
        before = estimate(each.operation, each.num_bytes, Group(ranks=8), network_of(cluster(8))).us
        after = estimate(each.operation, each.num_bytes, Group(ranks=32), network_of(cluster(32))).us
        whole += each.transfer_us * after / before
    assert sum(part.us for part in there.comm) == pytest.approx(whole)
    same = msgspec.structs.replace(step, lists_us=0.0)
    assert predict_on(same, cluster(8), cluster(32), ranks=32).step_us > step.step_us


def test_what_goes_over_shards_shrinks_with_them(step: MeasuredStep) -> None:
    """Optimizer, clipping and casts of the sample, 4.9 ms of a step: a quarter of that on four times the ranks, four
    times as much on two; replicas that add up whole gradients change nothing."""
    assert step.lists_us == pytest.approx(4900, abs=50)
    compute = {
        ranks: predict_on(step, cluster(8), cluster(max(8, ranks)), ranks=ranks).parts[0].us for ranks in (2, 8, 32)
    }
    assert compute[32] == pytest.approx(step.compute_us - 0.75 * step.lists_us)
    assert compute[2] == pytest.approx(step.compute_us + 3 * step.lists_us)
    assert compute[8] == pytest.approx(step.compute_us)
    replicas = tuple(msgspec.structs.replace(each, operation="all_reduce") for each in step.collectives)
    whole = msgspec.structs.replace(step, collectives=replicas)
    assert predict_on(whole, cluster(8), cluster(32), ranks=32).parts[0].us == pytest.approx(step.compute_us)


def test_recordings_of_one_job_predict_each_other(step: MeasuredStep) -> None:
    """2, 4 and 8 H200, two machines: each of the six predictions within 1.5 % of what was measured there."""
    fewer = (counterpoint.diagnose(str(SAMPLE.parent / f"fsdp-{ranks}-ranks")).diagnosis for ranks in (2, 4))
    for measured, there in permutations([*map(measured_step, fewer), step], 2):
        found = predict_on(measured, cluster(8), cluster(8), ranks=there.ranks)
        assert found.step_us == pytest.approx(there.step_us, rel=0.015)


def test_a_slower_network_never_makes_it_faster(step: MeasuredStep) -> None:
    steps = [predict_on(step, cluster(8), cluster(64, gbit), ranks=64).step_us for gbit in (100, 200, 400, 800)]
    assert steps == sorted(steps, reverse=True)


def test_a_slow_rank_holds_up_its_compute(step: MeasuredStep) -> None:
    there = predict_on(step, cluster(8), cluster(8), ranks=8, slow=1.5)
    assert there.parts[0].us == pytest.approx(1.5 * step.compute_us)


def test_ranks_that_groups_cannot_grow_to(step: MeasuredStep) -> None:
    inner = msgspec.structs.replace(step.collectives[0], group=Group(ranks=2, stride=4))
    divided = msgspec.structs.replace(step, collectives=(inner,))
    with pytest.raises(Misconfigured, match="9 ranks from a trace of 8: its groups of 2 cannot grow so"):
        predict_on(divided, cluster(8), cluster(16), ranks=9)


def test_groups_inside_stay_as_they_are(step: MeasuredStep) -> None:
    inside = msgspec.structs.replace(step.collectives[0], group=Group(ranks=4, stride=1))
    replicas = msgspec.structs.replace(step.collectives[0], operation="reduce_scatter", group=Group(ranks=2, stride=4))
    both = msgspec.structs.replace(step, collectives=(inside, replicas))
    there = {part.name: part.us for part in predict_on(both, cluster(8), cluster(64), ranks=64).comm}
    assert there["all_gather"] == pytest.approx(inside.transfer_us)
    assert there["reduce_scatter"] > replicas.transfer_us


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"missing_ranks": (3,)}, "the traces of ranks 3 are missing"),
        ({"steps": ()}, "no steps were found"),
        ({"collectives": ()}, "no collective with a known size"),
    ],
)
def test_a_trace_that_says_too_little(diagnosis: Diagnosis, change: dict[str, object], said: str) -> None:
    with pytest.raises(Misconfigured, match=said):
        measured_step(msgspec.structs.replace(diagnosis, **change))
