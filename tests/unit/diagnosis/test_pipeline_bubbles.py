"""Waiting between the stages of a pipeline is a finding where it is sure to be that."""

import pytest

from counterpoint.trace.timeline import CollectiveInfo
from tests.support.job_builder import Rank, comm, diagnosed, op, rank


def stage(compute_us: float, desc: str = "PIPELINE_MODEL_PARALLEL_GROUP", stall_us: float = 0.0) -> Rank:
    """Record a stage that pauses, computes, and then exchanges activations until the slower stage has them, 4 times."""
    parts = []
    for number in range(4):
        until, at = 1100.0 * (number + 1), 1100.0 * number + stall_us
        info = CollectiveInfo(
            op="send_recv", group="5", group_desc=desc, group_size=2, seq=number, in_nelems=64, out_nelems=64
        )
        parts.append(op("matmul", at, at + compute_us, launch=at))
        parts.append(comm("send_recv", at + compute_us, until, launch=at, info=info))
    return rank(*parts, steps=((0.0, 4400.0),))


def test_a_stage_whose_host_stalls_is_no_bubble() -> None:
    """It computes as long as its neighbour: more microbatches would not help."""
    d = diagnosed(stage(400.0), stage(400.0, stall_us=600.0))
    assert not [f for f in d.findings if f.kind == "pipeline_bubble"]
    assert d.findings[0].kind == "host_stall"


def test_one_stage_alone_says_what_is_not_known() -> None:
    """Its sends and receives may wait or move bytes."""
    d = diagnosed(stage(400.0), world_size=2)
    assert not [f for f in d.findings if f.kind == "pipeline_bubble"]
    (finding,) = [f for f in d.findings if f.kind == "exposed_comm"]
    assert "bubbles: that takes the neighbouring stages" in finding.evidence


def test_a_stage_that_waits_for_its_neighbour_is_a_bubble() -> None:
    """The faster stage waits 600 µs four times, the mean of both is half of that."""
    (finding,) = [f for f in diagnosed(stage(400.0), stage(1000.0)).findings if f.kind == "pipeline_bubble"]
    assert finding.cost_us == pytest.approx(1200.0)
    assert "rank 0 waits longest, 2.40 ms" in finding.evidence


@pytest.mark.parametrize(
    "stages", [[stage(1000.0), stage(1000.0)], [stage(400.0, "default_pg"), stage(1000.0, "default_pg")]]
)
def test_balanced_stages_and_other_groups_are_not(stages: list[Rank]) -> None:
    """Nobody waits in the one, and nothing says that the other is a pipeline."""
    assert not [f for f in diagnosed(*stages).findings if f.kind == "pipeline_bubble"]
