"""Samples of real runs, played again: the step comes out as measured, and what-ifs order as they must."""

from functools import cache
from pathlib import Path

import pytest

from counterpoint.diagnosis.analysis.replay import replay
from counterpoint.diagnosis.reading.digest import Engine, digest_all
from counterpoint.diagnosis.reading.traced_job import TracedJob, assemble
from counterpoint.records.diagnosis import Replay
from counterpoint.trace.source import Limits, find_traces

SAMPLES = Path(__file__).parents[3] / "samples"


def step_us(played: Replay | None, name: str) -> float:
    assert played is not None
    return {w.name: w.step_us for w in played.what_if}[name]


def replayed_us(played: Replay | None) -> float:
    assert played is not None
    return played.replayed_us


@cache
def sample(name: str) -> TracedJob:
    with find_traces([str(SAMPLES / name)], Limits()) as files:
        return assemble(digest_all(files, Limits(), Engine(workers=2)))


@pytest.mark.parametrize("name", ["fsdp-healthy", "fsdp-host-stall", "tail-effect"])
def test_samples_are_reproduced_within_one_per_cent(name: str) -> None:
    """Without waits that the graph does not explain."""
    played = replay(sample(name))
    assert played is not None
    assert abs(played.error) < 0.01


@pytest.mark.parametrize("name", ["fsdp-healthy", "tail-effect"])
def test_faster_communication_never_makes_a_sample_slower(name: str) -> None:
    played = replay(sample(name))
    twice, free = step_us(played, "communication twice as fast"), step_us(played, "communication free")
    assert free < twice < replayed_us(played)


def test_without_its_stall_the_stalled_sample_is_as_fast_as_the_healthy_one() -> None:
    """Rank 5 was stalled for 30 ms in one step; rank 0 shows how long its host would have taken."""
    healed = step_us(replay(sample("fsdp-host-stall"), typical={5: 0}), "no straggler")
    assert healed == pytest.approx(replayed_us(replay(sample("fsdp-healthy"))), rel=0.03)
