"""Waiting for ranks without a trace is suspected from what is usual, and else said to be unknown."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from counterpoint.records.diagnosis import Diagnosis, Finding
from counterpoint.trace.timeline import CollectiveInfo
from tests.support.job_builder import Op, Rank, comm, diagnosed, op, rank

USUAL_US = 500.0
WORLD = 8


def info(op_name: str = "all_gather", nelems: int | None = 1 << 26, **more: Any) -> CollectiveInfo:
    """Describe a collective of all eight ranks."""
    return CollectiveInfo(
        op=op_name, group="0", group_size=WORLD, in_nelems=nelems, out_nelems=nelems, dtype="Float", **more
    )


def gathers(durations: Sequence[float], *, about: CollectiveInfo | None = None) -> Rank:
    """Record a rank that computes 100 µs before each all-gather."""
    parts: list[Op] = []
    at = 0.0
    for number, us in enumerate(durations):
        begin, launch = at + 100.0, 0.1 * number
        parts += [op("matmul", at, begin, launch=launch)]
        parts += [comm("all_gather", begin, at := begin + us, info=about or info(), launch=launch)]
    return rank(*parts, steps=((0.0, at),))


def reductions(usual_nelems: int, last_us: float, last_nelems: int) -> Rank:
    """Record six all-reduces of 500 µs that are launched 100 µs before they begin, and a last one."""
    parts: list[Op] = []
    for number in range(7):
        at, last = 2000.0 * number, number == 6
        us, nelems = (last_us, last_nelems) if last else (500, usual_nelems)
        parts += [op("matmul", at, at + 100)]
        parts += [comm("all_reduce", at + 100, at + 100 + us, info=info("all_reduce", nelems), launch=at)]
    return rank(*parts, steps=((0.0, 12_100.0 + last_us),))


recorded = partial(diagnosed, world_size=WORLD)


def found(d: Diagnosis, kind: str) -> Finding | None:
    return next((f for f in d.findings if f.kind == kind), None)


def one_slow(slow_us: float, count: int = 32) -> list[float]:
    """Return durations of which one stands out from a few percent of jitter."""
    usual = itertools.cycle([USUAL_US, 1.02 * USUAL_US, 0.99 * USUAL_US, 1.05 * USUAL_US])
    return [slow_us if i == 5 else next(usual) for i in range(count)]


def test_one_slow_collective_among_many_is_waiting_for_a_rank_without_a_trace() -> None:
    """It is as large as the others: nothing but a late rank makes it take so long."""
    suspected = found(recorded(gathers(one_slow(20_000.0))), "suspected_wait")
    assert suspected is not None
    assert suspected.cost_us == pytest.approx(20_000.0 - 1.05 * USUAL_US, rel=0.02)
    assert "waiting for a rank that was not recorded" in suspected.title
    assert "all_gather #5" in suspected.evidence


def test_suspected_waiting_in_a_recording_without_steps_is_of_the_recording() -> None:
    """Nobody knows how many steps it is."""
    d = recorded(replace(gathers(one_slow(20_000.0)), steps=()))
    suspected = found(d, "suspected_wait")
    assert suspected is not None
    assert not d.has_steps
    assert "ms of communication in the recording is waiting" in suspected.title
    assert "a step" not in suspected.title + suspected.evidence


def test_a_healthy_rank_alone_is_not_accused_and_its_waiting_is_unknown() -> None:
    """What all collectives of a size take is no proof of anything."""
    d = recorded(gathers(one_slow(USUAL_US)))
    exposed = found(d, "exposed_comm")
    assert found(d, "suspected_wait") is None
    assert exposed is not None
    assert "how much of it is waiting is unknown" in exposed.evidence
    assert "0%" not in exposed.evidence
    assert "links" not in exposed.advice
    assert (d.totals.wait_us, d.totals.transfer_us, d.totals.exposed_wait_us) == (None, None, None)
    assert d.collectives[0].wait_us == {"0": None}


@pytest.mark.parametrize(
    "alone",
    [
        gathers(one_slow(1.9 * USUAL_US)),  # a collective that shares links or SMs takes up to twice as long
        gathers(one_slow(6 * USUAL_US), about=info(nelems=None)),  # other sizes may hide behind one name
        reductions(1 << 20, 5000, 10 << 20),  # ten times the bytes may take ten times as long
    ],
    ids=["contention", "no size", "larger"],
)
def test_what_may_take_longer_is_no_waiting(alone: Rank) -> None:
    assert found(recorded(alone), "suspected_wait") is None


def test_a_small_collective_that_takes_longer_than_large_ones_waits() -> None:
    """The one all-reduce of a few bytes in a step is where ranks meet."""
    suspected = found(recorded(reductions(1 << 26, 8000, 1)), "suspected_wait")
    assert suspected is not None
    assert 6000.0 < suspected.cost_us <= 8000.0
    assert "all_reduce #6" in suspected.evidence


def test_the_late_rank_may_be_missing_among_several() -> None:
    """All that are there wait for it together."""
    d = recorded(*[gathers(one_slow(20_000.0))] * 3)
    assert found(d, "suspected_wait") is not None
    assert d.stragglers == ()


def test_with_all_ranks_waiting_is_told_and_nothing_is_suspected() -> None:
    """Who is late is known then; or, if all came at once, that it was the transfer."""
    d = recorded(*[gathers(one_slow(20_000.0))] * WORLD)
    exposed = found(d, "exposed_comm")
    assert found(d, "suspected_wait") is None
    assert exposed is not None
    assert "0% of the time in collectives is waiting" in exposed.evidence


@pytest.mark.parametrize(("count", "said"), [(1, "as_measured"), (3, "partly_joined"), (WORLD, "joined")])
def test_the_replay_says_whether_waits_in_collectives_are_joined(count: int, said: str) -> None:
    """A reader must know what a replay rests on."""
    replay = recorded(*(gathers(one_slow(USUAL_US)) for _ in range(count))).replay
    assert replay is not None
    assert (replay.waits, replay.collective_waits) == ("explained", said)


def test_faster_communication_does_not_end_suspected_waiting() -> None:
    """Only the usual time of a collective is what links could shorten."""
    replay = recorded(gathers(one_slow(20_000.0))).replay
    assert replay is not None
    what_if = {case.name: case.step_us for case in replay.what_if}
    assert what_if["communication free"] >= 19_000.0
    assert what_if["no suspected waiting for ranks not recorded"] < replay.replayed_us - 19_000.0


def test_a_suspected_wait_costs_what_the_replay_saves_without_it() -> None:
    """Compute hides 3 of 7 ms of the wait, but three collectives queue up behind it: without it, 7 ms less."""
    parts: list[Op] = [op("matmul", 0, 5000, launch=0.0)]
    begins = [(1000, 1000), (2000, 1000), (3000, 8000), (11_000, 1000), (12_000, 1000)]
    parts += [comm("all_reduce", at, at + us, info=info("all_reduce"), launch=10.0) for at, us in begins]
    d = recorded(rank(*parts, steps=((0.0, 13_000.0),)))
    suspected = found(d, "suspected_wait")
    assert suspected is not None
    assert d.replay is not None
    without = next(w.step_us for w in d.replay.what_if if w.name == "no suspected waiting for ranks not recorded")
    assert without == pytest.approx(6000, rel=0.01)
    assert suspected.cost_us == pytest.approx(d.replay.replayed_us - without)
    assert "At least 7.00 ms" in suspected.title


def test_without_sizes_calls_of_one_kernel_are_compared() -> None:
    """A call that takes 40 times as long is not explained by its size; few calls say nothing."""
    unsized = info("all_reduce", None)
    waits = found(recorded(gathers(one_slow(40 * USUAL_US), about=unsized)), "suspected_wait")
    assert waits is not None
    assert waits.cost_us == pytest.approx(39 * USUAL_US, rel=0.01)
    assert "sizes are unknown" in waits.evidence
    assert waits.title.startswith("Probably 19.48 ms")
    assert found(recorded(gathers(one_slow(40 * USUAL_US, count=7), about=unsized)), "suspected_wait") is None
