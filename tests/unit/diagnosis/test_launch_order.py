"""Collectives that found every SM taken: each proof, and the cases in which nothing may be said."""

from typing import Any

import pytest

from counterpoint.diagnosis.analysis import kernels
from counterpoint.diagnosis.analysis.kernels import Blocked, find_blocked
from tests.support.job_builder import Host, Op, Rank, comm, host, job, op, rank

GATHER_US = 300.0


def blocked(*parts: Op | Host) -> tuple[Blocked, ...]:
    return find_blocked(job(rank(*parts)))


def holder(start: float = 10, end: float = 1010, **more: Any) -> Op:
    """A persistent matmul: 132 blocks, one a SM."""
    return op("nvjet", start, end, **more)


def gather(start: float, launch: float, **more: Any) -> Op:
    return comm("all_gather", start, start + GATHER_US, launch=launch, **more)


SOME_WAIT = host("cudaStreamWaitEvent", -5, -4)  # so that the trace has a host side to judge by


@pytest.mark.parametrize(
    ("parts", "proof"),
    [
        pytest.param((holder(launch=50.0, start=60), gather(1012, 20)), "launched before that kernel", id="before"),
        pytest.param((holder(launch=0.0), gather(1012, 20), SOME_WAIT), "no stream wait", id="no-wait"),
        pytest.param((holder(launch=0.0), gather(990, 20)), "last blocks left", id="enters-with-the-last-blocks"),
        pytest.param(
            (holder(launch=0.0), op("next", 1320, 1400, launch=15.0), host("cudaStreamWaitEvent", 16, 17),
             gather(1012, 20)),
            "a later kernel of that stream was queued", id="waits-for-what-is-queued",
        ),
    ],
)  # fmt: skip
def test_proof(parts: tuple[Op | Host, ...], proof: str) -> None:
    """A collective that starts as the kernel ends, and what shows that it did not depend on it."""
    assert [proof in b.proof for b in blocked(*parts)] == [True]


def test_collectives_looked_at_in_turn_are_told_as_those_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two collectives, each behind a kernel, and one that starts beside a kernel: one pair at a time, the same."""
    parts: list[Op | Host] = [SOME_WAIT]
    for at in (0.0, 5000.0):
        parts += [holder(at + 10, at + 1010, launch=at), gather(at + 1012, at + 20)]
    parts += [holder(10_010, 11_010, launch=10_000.0), gather(10_300, 10_020)]
    at_once = blocked(*parts)
    assert [b.row for b in at_once] == [0, 1]
    monkeypatch.setattr(kernels, "_PAIRS", 1)
    assert blocked(*parts) == at_once


def test_time_lost_is_from_ready_to_start() -> None:
    """Launched at 20 in a call of 5 µs, begun at 1012."""
    assert blocked(holder(launch=0.0), gather(1012, 20), SOME_WAIT)[0].lost_us == pytest.approx(1012 - 25)


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param((holder(launch=0.0), host("cudaStreamWaitEvent", 10, 11), gather(1012, 20)), id="dependency"),
        pytest.param((holder(launch=0.0), gather(1012, 1000), SOME_WAIT), id="launched-late"),
        pytest.param((holder(launch=0.0, grid=(60, 1, 1)), gather(1012, 20), SOME_WAIT), id="SMs-were-free"),
        pytest.param((holder(launch=0.0), gather(1300, 20), SOME_WAIT), id="begins-much-later"),
        pytest.param((holder(launch=0.0), gather(30, 20), SOME_WAIT), id="begins-at-once"),
        pytest.param((holder(launch=0.0), gather(1012, 20, stream=7), SOME_WAIT), id="same-stream"),
        pytest.param((holder(10, 30, launch=0.0), gather(32, 20), SOME_WAIT), id="short-kernel"),
        pytest.param((holder(launch=0.0), gather(1012, float("nan")), SOME_WAIT), id="launch-unknown"),
    ],
)
def test_no_proof_no_finding(parts: tuple[Op | Host, ...]) -> None:
    """A true dependency, or no reason to suspect the kernel."""
    assert blocked(*parts) == ()


def test_side_by_side_elsewhere_is_a_proof() -> None:
    """The same gather ran beside the same kernel on the other rank: it does not depend on it."""

    def one(start: float) -> Rank:
        return rank(holder(launch=0.0), host("cudaStreamWaitEvent", 10, 11), gather(start, 20))

    found = find_blocked(job(one(1012), one(100)))
    assert [(b.column, b.proof) for b in found] == [(0, "the same collective starts beside the same kernel elsewhere")]
